//! What is on disk, as typed views over a memory map. This room knows nobody else.

pub mod gguf;
pub mod mapping;
pub mod quant;
pub mod rows;
