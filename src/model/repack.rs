//! From the rows of checkpoints to the tiles of the kernels.

mod tile;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use thiserror::Error;

use super::workload::ProductShape;
use crate::checkpoint::quant::{GgmlType, QuantError};
use crate::checkpoint::rows::{Encoding, Rows};
use crate::checkpoint::w4::QuantiseError;
use crate::ops::{Family, Format, Products, ROW_MULTIPLE, TILE, round_up, xmx_arrange};
use tile::write_tile;

/// A matrix to be: parts of one format (see [`format_in_tiles`]) and one row length.
#[derive(Debug, Clone)]
pub struct Blueprint {
    /// What it is called in errors, profiles and the cache file.
    pub name: String,
    /// Where its rows lie.
    pub parts: Vec<Rows>,
    /// How the parts lie in the matrix.
    pub arrangement: Arrangement,
    /// Whose products its tiles are for.
    pub family: Family,
}

/// Why rows could not become tiles.
#[derive(Debug, Error)]
pub enum RepackError {
    /// Bytes that are not whole blocks of their type.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// A weight that is no number.
    #[error(
        "tensor {tensor}: the weight in row {row}, column {column} is {value}, which no code can stand for; the file is \
         damaged: copy it again from its source"
    )]
    NotFinite {
        /// Its name in the file.
        tensor: String,
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
        /// What the file holds.
        value: f32,
    },
    /// A scale or zero point that `dg-w4a16-v1` does not have.
    #[error(
        "{}: tensor {tensor}, row {row}, group {group}: scale {scale} and zero point {zero}; expected a finite scale that is \
         not negative, and a whole number from 0 to 15; copy the file again from its source",
        path.display()
    )]
    Group {
        /// The file.
        path: PathBuf,
        /// The codes' name in it.
        tensor: String,
        /// The row among those of an expert's projection.
        row: usize,
        /// The group of the row.
        group: usize,
        /// Its scale.
        scale: f32,
        /// Its zero point.
        zero: f32,
    },
    /// A weight that the matrix engine has no number for.
    #[error(
        "{matrix}: a weight is {value}, and kernels of the xmx family multiply numbers below 65520; set device.kernels = \
         \"vector\""
    )]
    TooLarge {
        /// The matrix.
        matrix: String,
        /// The weight.
        value: f32,
    },
    /// Weights that cannot be quantised.
    #[error("tensor {tensor}, row {row}: {error}; the file is damaged: copy it again from its source")]
    Quantise {
        /// Its name in the file.
        tensor: String,
        /// The row in what is quantised together.
        row: usize,
        /// What is wrong.
        error: QuantiseError,
    },
}

/// How the parts of a matrix lie in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrangement {
    /// One below the other, each padded to whole pairs of tiles.
    Stacked,
    /// Two and two (gate and up, as many rows each): the tiles of both alternate. Such pairs lie one below the other.
    Paired,
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
        GgmlType::Q2K => Format::Q2K,
        GgmlType::Q3K => Format::Q3K,
        GgmlType::Q4K => Format::Q4K,
        GgmlType::Q5K => Format::Q5K,
        GgmlType::Q6K => Format::Q6K,
        GgmlType::IQ4_NL => Format::Iq4Nl,
        GgmlType::IQ4_XS => Format::Iq4Xs,
        GgmlType::TQ1_0 | GgmlType::TQ2_0 => Format::Tq2,
        GgmlType::MXFP4 => Format::Mxfp4,
    }
}

/// The kernels' format for rows of this encoding: what they are once they are tiles.
pub fn format_in_tiles(encoding: &Encoding) -> Format {
    match encoding {
        Encoding::Ggml(ty) => format_of(*ty),
        Encoding::W4 { .. } | Encoding::ToW4 { .. } => Format::W4,
        Encoding::ToQ8(_) => Format::Q8_0,
        Encoding::Turned(_) => Format::F32,
    }
}

impl Blueprint {
    /// The format of its tiles: that of all its parts, but for the `xmx` family F16 instead of BF16.
    pub fn format(&self) -> Format {
        match (self.family, self.packed_format()) {
            (Family::Xmx, Format::Bf16) => Format::F16,
            (_, format) => format,
        }
    }

    /// The format of all its parts.
    fn packed_format(&self) -> Format {
        self.parts.first().map_or(Format::F32, |part| format_in_tiles(&part.encoding))
    }

    /// Makes it one for the products that `products` has for its format.
    pub fn made_for(&mut self, products: Products) {
        self.family = products.family(self.packed_format());
    }

    /// Its shape, as one product.
    pub(super) fn shape(&self) -> ProductShape {
        ProductShape { format: self.format(), outputs: self.rows(), columns: self.columns() }
    }

    /// The shape of each of the `count` experts that it holds.
    pub(super) fn shape_of_each(&self, count: usize) -> ProductShape {
        ProductShape { outputs: self.rows() / count.max(1), ..self.shape() }
    }

    /// Values in a row.
    pub fn columns(&self) -> usize {
        self.parts.first().map_or(0, |part| part.columns)
    }

    /// Rows, padding included.
    pub fn rows(&self) -> usize {
        self.tops().last().copied().unwrap_or(0)
    }

    /// The row after the last of each part (or pair of parts), padding included.
    fn tops(&self) -> Vec<usize> {
        let mut top = 0;
        let mut next = |rows: usize, step| {
            top += round_up(rows, step);
            top
        };
        match self.arrangement {
            Arrangement::Stacked => self.parts.iter().map(|part| next(part.rows, ROW_MULTIPLE)).collect(),
            Arrangement::Paired => {
                self.parts.chunks_exact(2).map(|pair| next(2 * round_up(pair[0].rows, TILE), TILE)).collect()
            }
        }
    }

    /// Bytes of the tiles.
    pub fn bytes(&self) -> usize {
        self.format().matrix_bytes(self.rows(), self.columns())
    }

    /// Tiles it has.
    pub fn tiles(&self) -> usize {
        self.rows() / TILE
    }

    /// Bytes of one of them.
    pub fn tile_bytes(&self) -> usize {
        self.format().tile_bytes(self.columns()).max(1)
    }

    /// Lets go of what has been read of the files that its parts lie in.
    pub fn release(&self) {
        let mut last = None;
        for file in self.parts.iter().map(|part| part.bytes.file()) {
            if last.replace(file.path()) != Some(file.path()) {
                file.release();
            }
        }
    }

    /// Has the system read what so many tiles from `first` on are made of, without waiting for it.
    pub fn prefetch(&self, first: usize, tiles: usize) {
        let tops = self.tops();
        // Parts whose tiles alternate are two at a time.
        let mut open: Vec<(&Rows, Range<usize>)> = Vec::new();
        for (rows, row) in (first..first + tiles).filter_map(|tile| self.source(&tops, tile)) {
            let next = row..(row + TILE).min(rows.rows);
            match open.iter_mut().find(|(other, _)| std::ptr::eq(*other, rows)) {
                Some((_, run)) => run.end = run.end.max(next.end),
                None => {
                    if open.len() == 2 {
                        let (rows, run) = open.remove(0);
                        rows.prefetch(run);
                    }
                    open.push((rows, next));
                }
            }
        }
        open.into_iter().for_each(|(rows, run)| rows.prefetch(run));
    }

    /// The part and its first row that a tile shows; none for padding. `tops` are [`Self::tops`].
    fn source(&self, tops: &[usize], tile: usize) -> Option<(&Rows, usize)> {
        let row = tile * TILE;
        let index = tops.partition_point(|&top| top <= row);
        let start = if index == 0 { 0 } else { tops[index - 1] };
        match self.arrangement {
            Arrangement::Stacked => Some((self.parts.get(index)?, row - start)),
            Arrangement::Paired => {
                let within = (row - start) / TILE;
                Some((self.parts.get(2 * index + within % 2)?, within / 2 * TILE))
            }
        }
    }

    /// Fills `out`, as long as that many tiles, with the tiles from `first` on, on all processors.
    ///
    /// # Errors
    /// Rows that are not whole blocks, which checked files do not have; weights to be quantised that are no numbers. Of
    /// several, the first.
    pub fn write(&self, first: usize, out: &mut [u8]) -> Result<(), RepackError> {
        let tile_bytes = self.tile_bytes();
        let tops = self.tops();
        // Processors that have to wait for the disk leave more to the others.
        let at_once = (AT_ONCE / tile_bytes).max(1);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(out.len().div_ceil(at_once * tile_bytes));
        let chunks = Mutex::new(out.chunks_mut(at_once * tile_bytes).enumerate());
        let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
        let make = |index: usize, chunk: &mut [u8]| -> Result<(), RepackError> {
            for (i, tile) in chunk.chunks_exact_mut(tile_bytes).enumerate() {
                match self.source(&tops, first + index * at_once + i) {
                    Some((rows, row)) => {
                        write_tile(rows, row, tile)?;
                        self.put_in_order(tile)?;
                    }
                    None => tile.fill(0),
                }
            }
            Ok(())
        };
        // Chunks are dealt in order, so whoever has the first bad one has got it before any later one fails.
        let work = || -> Result<(), (usize, RepackError)> {
            while let Some((index, chunk)) = next() {
                make(index, chunk).map_err(|error| (index, error))?;
            }
            Ok(())
        };
        let failed = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let ends = workers.into_iter().filter_map(|worker| match worker.join() {
                Ok(result) => result.err(),
                Err(panic) => std::panic::resume_unwind(panic),
            });
            ends.min_by_key(|(index, _)| *index)
        });
        failed.map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Bytes that a processor makes before it asks for more; a tile at least.
const AT_ONCE: usize = 256 << 10;

impl Blueprint {
    /// Brings a tile into its family's order.
    fn put_in_order(&self, tile: &mut [u8]) -> Result<(), RepackError> {
        if self.family == Family::Vector {
            return Ok(());
        }
        let format = self.packed_format();
        if format == Format::Bf16 {
            let numbers = || tile.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
            let too_large = |bits: u16| (F16_END..=INFINITY).contains(&(bits & 0x7FFF));
            // All are looked at, since that is faster than to stop at the first one.
            if numbers().fold(false, |any, bits| any | too_large(bits))
                && let Some(bits) = numbers().find(|&bits| too_large(bits))
            {
                let value = bf16::from_bits(bits).to_f32();
                return Err(RepackError::TooLarge { matrix: self.name.clone(), value });
            }
        }
        xmx_arrange(format, tile, self.columns());
        Ok(())
    }
}

/// The bits of the first number of BF16 that rounds to no f16, 65536.
const F16_END: u16 = 0x4780;
/// And those of infinity; NaN, behind it, stays NaN.
const INFINITY: u16 = 0x7F80;

/// Makes two matrices ones of the `vector` family unless both are of one: the first leaves its rows packed for the second.
pub(super) fn of_one_family(blueprints: &mut [Blueprint], both: [usize; 2]) {
    let mut families = both.iter().filter_map(|&matrix| Some(blueprints.get(matrix)?.family));
    if families.next() != families.next() {
        for matrix in both {
            if let Some(blueprint) = blueprints.get_mut(matrix) {
                blueprint.family = Family::Vector;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::checkpoint::mapping::Mapping;
    use crate::checkpoint::quant::dequantize;
    use crate::checkpoint::rows::Span;
    use half::f16;
    use std::sync::Arc;

    /// A row of 64 columns whose one group has this scale and zero point.
    fn blueprint(scale: f32, zero: f32) -> (tempfile::NamedTempFile, Blueprint) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = vec![0x5au8; 32];
        bytes.extend([scale, zero].into_iter().flat_map(|value| f16::from_f32(value).to_le_bytes()));
        std::fs::write(file.path(), bytes).unwrap();
        let map = Arc::new(Mapping::open(file.path()).unwrap());
        let span = |range| Span::new(Arc::clone(&map), range).unwrap();
        let encoding = Encoding::W4 { scales: span(32..34), zeros: span(34..36), group: 64 };
        let rows = Rows { name: "gu_q".to_owned(), encoding, rows: 1, columns: 64, bytes: span(0..32) };
        (
            file,
            Blueprint {
                name: "a".to_owned(),
                parts: vec![rows],
                arrangement: Arrangement::Stacked,
                family: Family::Vector,
            },
        )
    }

    #[test]
    fn a_matrix_that_lies_column_after_column_is_turned() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (columns, rows) = (3, 20);
        let value = |row: usize, column: usize| (100 * row + column) as f32;
        let numbers = (0..columns).flat_map(|column| (0..rows).map(move |row| value(row, column)));
        std::fs::write(file.path(), numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
        let map = Arc::new(Mapping::open(file.path()).unwrap());
        let bytes = Span::new(map, 0..columns * rows * 4).unwrap();
        let lying = Rows {
            name: "kv_b".to_owned(),
            encoding: Encoding::Ggml(GgmlType::F32),
            rows: columns,
            columns: rows,
            bytes,
        };
        let parts = vec![lying.turned().unwrap()];
        let blueprint = Blueprint {
            name: "k_b".to_owned(),
            parts,
            arrangement: Arrangement::Stacked,
            family: Family::Vector,
        };
        assert_eq!((blueprint.format(), blueprint.rows()), (Format::F32, ROW_MULTIPLE));
        let mut out = vec![0; blueprint.bytes()];
        blueprint.write(0, &mut out).unwrap();
        let size = Format::F32.tile_bytes(columns);
        for row in 0..rows {
            for column in 0..columns {
                let tile = &out[row / TILE * size..][..size];
                assert_eq!(Format::F32.weight(tile, row % TILE, column), value(row, column));
            }
        }
    }

    #[test]
    fn tiles_hold_the_very_values_of_the_file() {
        const BLOCKS: usize = 5; // in a row: whole blocks of tiles, and a rest
        const ROWS: usize = 19; // a tile, and a rest
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quant-types/blocks.safetensors");
        let fixture = std::fs::read(path).unwrap();
        let fixture = safetensors::SafeTensors::deserialize(&fixture).unwrap();
        for ty in GgmlType::ALL {
            let columns = if ty.is_quantised() { BLOCKS * ty.block_values() } else { 45 };
            let bytes = &fixture.tensor(&format!("{ty}.bytes")).unwrap().data()
                [..ROWS * columns / ty.block_values() * ty.block_bytes()];
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), bytes).unwrap();
            let map = Arc::new(Mapping::open(file.path()).unwrap());
            let rows = Rows {
                name: "w".to_owned(),
                encoding: Encoding::Ggml(ty),
                rows: ROWS,
                columns,
                bytes: Span::new(map, 0..bytes.len()).unwrap(),
            };
            let blueprint = Blueprint {
                name: "w".to_owned(),
                parts: vec![rows],
                arrangement: Arrangement::Stacked,
                family: Family::Vector,
            };
            let mut tiles = vec![0; blueprint.bytes()];
            blueprint.write(0, &mut tiles).unwrap();

            let mut values = vec![0f32; ROWS * columns];
            dequantize(ty, bytes, &mut values).unwrap();
            let format = blueprint.format();
            for (i, &value) in values.iter().enumerate() {
                let (row, column) = (i / columns, i % columns);
                let tile = &tiles[row / TILE * format.tile_bytes(columns)..][..format.tile_bytes(columns)];
                let found = format.weight(tile, row % TILE, column);
                assert!(
                    found.to_bits() == value.to_bits() || found.is_nan() && value.is_nan(),
                    "{ty}: {found:e} in row {row}, column {column}, where the file has {value:e}"
                );
            }
        }
    }

    #[test]
    fn scales_and_zero_points_of_no_such_format_are_refused_by_place() {
        let repack = |scale, zero| {
            let (_file, blueprint) = blueprint(scale, zero);
            let mut out = vec![0; blueprint.bytes()];
            blueprint.write(0, &mut out)
        };
        for (scale, zero) in [(0.0, 0.0), (0.5, 15.0), (1e-4, 7.0)] {
            repack(scale, zero).unwrap();
        }
        for (scale, zero) in
            [(f32::NAN, 7.0), (f32::INFINITY, 7.0), (-0.5, 7.0), (0.5, 7.5), (0.5, 16.0), (0.5, -1.0)]
        {
            let error = repack(scale, zero).unwrap_err().to_string();
            assert!(error.contains("gu_q") && error.contains("row 0, group 0"), "{error}");
        }
    }
}
