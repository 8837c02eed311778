//! From the rows of GGUF tensors to the tiles of the kernels.

use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::{GgmlType, QuantError, Unpacked, unpack_block};
use crate::ops::{Format, ROW_MULTIPLE, Scales, TILE, round_up};

/// A matrix to be: one tensor, several one below the other, or two whose tiles alternate.
#[derive(Debug, Clone)]
pub struct Blueprint {
    /// What it is called in errors, profiles and the cache file.
    pub name: String,
    /// Tensors of one type and one row length.
    pub tensors: Vec<TensorInfo>,
    /// Tiles of the two tensors alternate (gate and up).
    pub alternating: bool,
}

/// The kernels' format for a tensor type.
pub fn format_of(ty: GgmlType) -> Format {
    match ty {
        GgmlType::F32 => Format::F32,
        GgmlType::F16 => Format::F16,
        GgmlType::BF16 => Format::Bf16,
        GgmlType::Q4_0 => Format::Q4_0,
        GgmlType::Q4_1 => Format::Q4_1,
        GgmlType::Q5_0 => Format::Q5_0,
        GgmlType::Q5_1 => Format::Q5_1,
        GgmlType::Q8_0 => Format::Q8_0,
        GgmlType::Q4K => Format::Q4K,
        GgmlType::Q5K => Format::Q5K,
        GgmlType::Q6K => Format::Q6K,
    }
}

impl Blueprint {
    /// The format of all its tensors.
    pub fn format(&self) -> Format {
        format_of(self.tensors.first().map_or(GgmlType::F32, |tensor| tensor.ty))
    }

    /// Values in a row.
    pub fn columns(&self) -> usize {
        self.tensors.first().map_or(0, |tensor| tensor.row_values() as usize)
    }

    /// Rows, each tensor padded to whole pairs of tiles (or to whole tiles where two alternate).
    pub fn rows(&self) -> usize {
        let step = if self.alternating { TILE } else { ROW_MULTIPLE };
        self.tensors.iter().map(|tensor| round_up(tensor.rows() as usize, step)).sum()
    }

    /// First row of each tensor, where they lie one below the other.
    pub fn starts(&self) -> Vec<usize> {
        let mut at = 0;
        self.tensors
            .iter()
            .map(|tensor| {
                let start = at;
                at += round_up(tensor.rows() as usize, ROW_MULTIPLE);
                start
            })
            .collect()
    }

    /// Bytes of the tiles.
    pub fn bytes(&self) -> usize {
        self.format().matrix_bytes(self.rows(), self.columns())
    }

    /// The tensor and its first row that a tile shows; none for padding.
    fn source(&self, tile: usize) -> Option<(&TensorInfo, usize)> {
        if self.alternating {
            return Some((self.tensors.get(tile % 2)?, tile / 2 * TILE));
        }
        let row = tile * TILE;
        let starts = self.starts();
        let index = starts.iter().rposition(|&start| start <= row)?;
        Some((&self.tensors[index], row - starts[index]))
    }

    /// Tiles it has.
    pub fn tiles(&self) -> usize {
        self.rows() / TILE
    }

    /// Fills `out`, zeroed and as long as that many tiles, with the tiles from `first` on, on all processors.
    ///
    /// # Errors
    /// Never for tensors that the checked file holds; said rather than assumed.
    pub fn write(&self, gguf: &Gguf, first: usize, out: &mut [u8]) -> Result<(), QuantError> {
        let tile_bytes = self.format().tile_bytes(self.columns()).max(1);
        let tiles = out.len() / tile_bytes;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(tiles.max(1));
        let each = tiles.div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let workers: Vec<_> = out
                .chunks_mut(each * tile_bytes)
                .enumerate()
                .map(|(part, chunk)| {
                    scope.spawn(move || {
                        for (i, tile) in chunk.chunks_exact_mut(tile_bytes).enumerate() {
                            self.write_tile(gguf, first + part * each + i, tile)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            workers.into_iter().try_for_each(|worker| match worker.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    fn write_tile(&self, gguf: &Gguf, tile: usize, out: &mut [u8]) -> Result<(), QuantError> {
        let Some((tensor, first)) = self.source(tile) else { return Ok(()) };
        let format = self.format();
        let row_bytes = tensor.row_bytes() as usize;
        let rows = (tensor.rows() as usize).saturating_sub(first).min(TILE);
        let bytes = gguf.bytes(tensor);
        let mut unpacked = Unpacked::default();
        for lane in 0..rows {
            let row = &bytes[(first + lane) * row_bytes..][..row_bytes];
            if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
                format.put_numbers(out, lane, row);
                continue;
            }
            let values = tensor.ty.block_values();
            for (index, block) in row.chunks_exact(tensor.ty.block_bytes()).enumerate() {
                unpack_block(tensor.ty, block, &mut unpacked)?;
                let scales: &[u8] = match format {
                    Format::Q6K => &unpacked.scales,
                    Format::Q4K | Format::Q5K => &unpacked.scales[..8],
                    _ => &[],
                };
                let offsets: &[u8] =
                    if matches!(format, Format::Q4K | Format::Q5K) { &unpacked.mins } else { &[] };
                format.put_codes(
                    out,
                    lane,
                    index * values,
                    &unpacked.codes[..values],
                    Scales { scale: unpacked.d, offset: unpacked.m, scales, offsets },
                );
            }
        }
        Ok(())
    }
}
