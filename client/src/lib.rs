//! Types of the admin protocol spoken over the Unix socket of `axed`.
