//! The operator's face over a real socket: an admin server on a temporary path, over the real engine with a
//! scripted backend, and `axectl` as a real process.

mod axectl;
mod logs;
mod permissions;
mod robustness;
mod routes;
mod support;
