//! The `model` room.

mod vocabulary;

pub use vocabulary::vocabulary;
