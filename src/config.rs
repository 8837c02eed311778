//! The `config` room.
