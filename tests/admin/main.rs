//! The operator's face over a real socket: an admin server on a temporary path, over the real engine with a
//! scripted backend, and `axectl` as a real process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod axectl;
mod logs;
mod machines;
mod permissions;
mod profile;
mod robustness;
mod routes;
mod support;
