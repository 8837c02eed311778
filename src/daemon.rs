//! The `daemon` room.
