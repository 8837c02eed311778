//! The tensor types of GGUF files: their sizes, their block layouts, their exact values in f32.

pub mod codebook;
mod dequantize;
mod types;
mod unpack;

pub use dequantize::dequantize;
pub use types::{GgmlType, Supported, UnknownType};
pub use unpack::{Unpacked, unpack_block};

use thiserror::Error;

/// Why bytes could not be read as values of a type.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum QuantError {
    /// The number of values is not a whole number of blocks.
    #[error("{}: {values} values are not whole blocks of {} values ({bytes} bytes given)", ty.name(), ty.block_values())]
    PartBlock {
        /// The type that was read.
        ty: GgmlType,
        /// How many bytes were given.
        bytes: usize,
        /// How many values were asked for.
        values: usize,
    },
    /// The byte length does not fit the number of values.
    #[error(
        "{}: {values} values need {needed} bytes in whole blocks of {} values, found {bytes} bytes",
        ty.name(),
        ty.block_values()
    )]
    Length {
        /// The type that was read.
        ty: GgmlType,
        /// How many bytes were given.
        bytes: usize,
        /// How many values were asked for.
        values: usize,
        /// How many bytes those values take.
        needed: u64,
    },
    /// A single block has another length.
    #[error("{}: a block is {} bytes, found {bytes}", ty.name(), ty.block_bytes())]
    BlockLength {
        /// The type that was read.
        ty: GgmlType,
        /// How many bytes were given.
        bytes: usize,
    },
    /// F32, F16 and BF16 hold plain numbers: there are no codes and scales to take apart.
    #[error("{} holds plain numbers and has no quantised blocks to unpack; dequantise it instead", ty.name())]
    NotQuantised {
        /// The type that was asked for.
        ty: GgmlType,
    },
}
