//! Rows of a matrix where they lie in mapped files, whatever the file format, and how their values are encoded.

use std::ops::Range;
use std::sync::Arc;

use super::mapping::Mapping;
use super::quant::GgmlType;

/// A run of bytes of a mapped file.
#[derive(Debug, Clone)]
pub struct Span {
    file: Arc<Mapping>,
    range: Range<usize>,
}

impl Span {
    /// The bytes `range` of `file`; none if they do not lie in it.
    pub fn new(file: Arc<Mapping>, range: Range<usize>) -> Option<Self> {
        (*file).as_ref().get(range.clone())?;
        Some(Self { file, range })
    }

    /// The file.
    pub fn file(&self) -> &Arc<Mapping> {
        &self.file
    }

    /// A part of it; none if it does not lie in it.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start;
        Some(Self { file: Arc::clone(&self.file), range: start + range.start..start + range.end })
    }
}

impl AsRef<[u8]> for Span {
    fn as_ref(&self) -> &[u8] {
        // `new` has looked it up before; the map keeps its length.
        (*self.file).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

/// How the values of [`Rows`] are encoded.
#[derive(Debug, Clone)]
pub enum Encoding {
    /// Blocks of a GGML type; plain numbers of a safetensors file are the types F32, F16 and BF16.
    Ggml(GgmlType),
    /// 4-bit codes of `dg-w4a16-v1`, two a byte, the lower nibble first: weight = (code - zero) * scale.
    W4 {
        /// f16 `[rows][columns / group]`.
        scales: Span,
        /// f16 `[rows][columns / group]`, whole numbers from 0 to 15.
        zeros: Span,
        /// Columns that share a scale: a multiple of 64.
        group: usize,
    },
    /// Plain numbers of that type (F32, F16 or BF16), to be quantised on the way to the device as `dg-w4a16-v1` does it.
    ToW4 {
        /// What the file holds.
        from: GgmlType,
        /// Columns that share a scale: a multiple of 64.
        group: usize,
    },
}

/// Rows of a matrix in a mapped file.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The tensor's name in its file.
    pub name: String,
    /// How `bytes` encode values.
    pub encoding: Encoding,
    /// How many rows there are.
    pub rows: usize,
    /// Values in a row.
    pub columns: usize,
    /// The rows, one after the other; for [`Encoding::W4`] the codes.
    pub bytes: Span,
}
