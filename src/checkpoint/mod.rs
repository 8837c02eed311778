//! What is on disk, as typed views over a memory map. This room knows nobody else.

pub mod diffusion_gemma;
pub mod directory;
pub mod gguf;
pub mod identity;
pub mod kind;
pub mod mapping;
pub mod quant;
pub mod rows;
pub mod safetensors;
pub mod w4;
