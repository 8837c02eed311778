//! `axectl`: the operator's client of `axed`.
fn main() {}
