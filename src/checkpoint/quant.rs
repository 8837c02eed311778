//! The block formats of quantised tensors and their exact dequantisation to f32.
