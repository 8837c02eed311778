//! The `ops` room.
