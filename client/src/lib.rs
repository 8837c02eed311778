//! The admin protocol of `axed`, and a small client for it.
//!
//! The protocol is HTTP/1.1 with JSON bodies over a Unix socket, so that `curl --unix-socket` speaks it too.
//! [`protocol`] holds the types both sides use, [`client`] sends requests, [`socket`] knows where the socket is. [`sensors`]
//! reads what the kernel shows of card and host: for the daemon of itself, for `axectl doctor` without one.
#![deny(missing_docs)]

pub mod client;
pub mod protocol;
pub mod sensors;
pub mod socket;
