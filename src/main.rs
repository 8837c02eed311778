//! `axed`: command line to configuration to daemon.
fn main() {}
