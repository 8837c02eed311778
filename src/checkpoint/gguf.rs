//! GGUF v2 and v3 files: metadata and tensors, every length and offset checked.
