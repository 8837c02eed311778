//! The `admin` room.
