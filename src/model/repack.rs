//! From the rows of checkpoints to the tiles of the kernels.

use std::ops::Range;
use std::path::PathBuf;

use half::{bf16, f16};
use thiserror::Error;

use super::workload::ProductShape;
use crate::checkpoint::quant::{GgmlType, QuantError, Unpacked, dequantize, unpack_block};
use crate::checkpoint::rows::{Encoding, Rows, Span};
use crate::checkpoint::w4::{QuantiseError, pack_codes, quantise_group};
use crate::ops::{Family, Format, Products, ROW_MULTIPLE, Scales, TILE, round_up, xmx_arrange};

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

    /// Fills `out`, zeroed and as long as that many tiles, with the tiles from `first` on, on all processors.
    ///
    /// # Errors
    /// Rows that are not whole blocks, which checked files do not have; weights to be quantised that are no numbers.
    pub fn write(&self, first: usize, out: &mut [u8]) -> Result<(), RepackError> {
        let tile_bytes = self.tile_bytes();
        let tiles = out.len() / tile_bytes;
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(tiles.max(1));
        let each = tiles.div_ceil(threads).max(1);
        let tops = self.tops();
        std::thread::scope(|scope| {
            let workers: Vec<_> = out
                .chunks_mut(each * tile_bytes)
                .enumerate()
                .map(|(part, chunk)| {
                    let tops = &tops;
                    scope.spawn(move || {
                        for (i, tile) in chunk.chunks_exact_mut(tile_bytes).enumerate() {
                            if let Some((rows, first)) = self.source(tops, first + part * each + i) {
                                write_tile(rows, first, tile)?;
                                self.put_in_order(tile)?;
                            }
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
}

impl Blueprint {
    /// Brings a tile into its family's order.
    fn put_in_order(&self, tile: &mut [u8]) -> Result<(), RepackError> {
        if self.family == Family::Vector {
            return Ok(());
        }
        let format = self.packed_format();
        if format == Format::Bf16 {
            let numbers = tile.as_chunks::<2>().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32());
            if let Some(value) = numbers.into_iter().find(|value| value.abs() >= F16_END) {
                return Err(RepackError::TooLarge { matrix: self.name.clone(), value });
            }
        }
        xmx_arrange(format, tile, self.columns());
        Ok(())
    }
}

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

/// The first number that rounds to no f16.
const F16_END: f32 = 65_520.0;

/// Puts up to [`TILE`] rows from `first` on into a zeroed tile.
fn write_tile(part: &Rows, first: usize, out: &mut [u8]) -> Result<(), RepackError> {
    let lanes = part.rows.saturating_sub(first).min(TILE);
    match &part.encoding {
        Encoding::Ggml(ty) => (0..lanes).try_for_each(|lane| ggml_row(part, *ty, first + lane, lane, out)),
        Encoding::W4 { scales, zeros, group } => {
            for lane in 0..lanes {
                let row = first + lane;
                let packed = row_of(part.bytes.as_ref(), row, part.columns / 2);
                let halves = |span: &Span| u16s(row_of(span.as_ref(), row, part.columns / group * 2));
                let (scales, zeros) = (halves(scales), halves(zeros));
                check_groups(part, row, &scales, &zeros)?;
                w4_row(packed, &scales, &zeros, *group, lane, out);
            }
            Ok(())
        }
        Encoding::Turned(ty) => turned_rows(part, *ty, first, lanes, out),
        Encoding::ToQ8(from) => (0..lanes).try_for_each(|lane| q8_row(part, *from, first + lane, lane, out)),
        Encoding::ToW4 { from, group } => {
            for lane in 0..lanes {
                quantised_row(part, *from, *group, first + lane, lane, out)?;
            }
            Ok(())
        }
    }
}

/// Puts rows `first..first + lanes` of a matrix that lies column after column into a tile of plain numbers.
fn turned_rows(
    part: &Rows,
    ty: GgmlType,
    first: usize,
    lanes: usize,
    out: &mut [u8],
) -> Result<(), RepackError> {
    let (block, block_bytes) = (ty.block_values(), ty.block_bytes());
    // The blocks of a column that have these rows.
    let (from, to) = (first / block, (first + lanes).div_ceil(block));
    let mut values = vec![0f32; (to - from) * block];
    let mut rows = vec![0f32; lanes * part.columns];
    for column in 0..part.columns {
        let bytes = row_of(part.bytes.as_ref(), column, part.rows / block * block_bytes);
        dequantize(ty, &bytes[from * block_bytes..to * block_bytes], &mut values)?;
        for lane in 0..lanes {
            rows[lane * part.columns + column] = values[first - from * block + lane];
        }
    }
    for (lane, row) in rows.chunks_exact(part.columns).enumerate() {
        let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
        Format::F32.put_numbers(out, lane, &bytes);
    }
    Ok(())
}

/// Quantises a row of plain numbers to 8 bits on its way into a tile: scale = largest / 127 for each 32 columns, stored as
/// f16, codes rounded half to even with the scale before it is rounded.
fn q8_row(part: &Rows, from: GgmlType, row: usize, lane: usize, out: &mut [u8]) -> Result<(), RepackError> {
    const COLUMNS: usize = 32;
    const MOST: f32 = 127.0;
    let columns = part.columns;
    let mut values = vec![0f32; columns];
    dequantize(from, row_of(part.bytes.as_ref(), row, columns * from.block_bytes()), &mut values)?;
    if let Some(column) = values.iter().position(|value| !value.is_finite()) {
        return Err(RepackError::NotFinite { tensor: part.name.clone(), row, column, value: values[column] });
    }
    for (index, values) in values.chunks(COLUMNS).enumerate() {
        let scale = values.iter().fold(0f32, |most, value| most.max(value.abs())) / MOST;
        let mut codes = [128u8; COLUMNS];
        if scale > 0.0 {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = ((value / scale).round_ties_even().clamp(-MOST, MOST) + 128.0) as u8;
            }
        }
        let stored = f16::from_f32(scale);
        if !stored.is_finite() {
            let most = scale * MOST;
            let error = QuantiseError::Range { least: -most, most };
            return Err(RepackError::Quantise { tensor: part.name.clone(), row, error });
        }
        let scale = stored.to_bits();
        Format::Q8_0.put_codes(out, lane, index * COLUMNS, &codes, Scales { scale, ..Scales::default() });
    }
    Ok(())
}

/// Quantises a row of plain numbers on its way into a tile.
fn quantised_row(
    part: &Rows,
    from: GgmlType,
    group: usize,
    row: usize,
    lane: usize,
    out: &mut [u8],
) -> Result<(), RepackError> {
    let columns = part.columns;
    let mut values = vec![0f32; columns];
    dequantize(from, row_of(part.bytes.as_ref(), row, columns * from.block_bytes()), &mut values)?;
    let (mut codes, mut packed) = (vec![0u8; columns], vec![0u8; columns / 2]);
    let (mut scales, mut zeros) = (Vec::new(), Vec::new());
    for (values, codes) in values.chunks(group).zip(codes.chunks_mut(group)) {
        let found = quantise_group(values, codes).map_err(|error| RepackError::Quantise {
            tensor: part.name.clone(),
            row,
            error,
        })?;
        scales.push(found.scale.to_bits());
        zeros.push(found.zero.to_bits());
    }
    pack_codes(&codes, &mut packed);
    w4_row(&packed, &scales, &zeros, group, lane, out);
    Ok(())
}

/// Row `row` of rows of `length` bytes.
fn row_of(bytes: &[u8], row: usize, length: usize) -> &[u8] {
    &bytes[row * length..][..length]
}

fn ggml_row(part: &Rows, ty: GgmlType, row: usize, lane: usize, out: &mut [u8]) -> Result<(), RepackError> {
    let format = format_of(ty);
    let values = ty.block_values();
    let bytes = row_of(part.bytes.as_ref(), row, part.columns / values * ty.block_bytes());
    if matches!(format, Format::F32 | Format::F16 | Format::Bf16) {
        format.put_numbers(out, lane, bytes);
        return Ok(());
    }
    let mut unpacked = Unpacked::default();
    for (index, block) in bytes.chunks_exact(ty.block_bytes()).enumerate() {
        unpack_block(ty, block, &mut unpacked)?;
        let scale = match ty {
            GgmlType::MXFP4 => u16::from(unpacked.scales[0]),
            _ => unpacked.d,
        };
        let scales = Scales { scale, offset: unpacked.m, scales: &unpacked.scales, offsets: &unpacked.mins };
        format.put_codes(out, lane, index * values, &unpacked.codes[..values], scales);
    }
    Ok(())
}

/// Scales must be numbers from 0 on and zero points whole numbers from 0 to 15. Looked at here, where they are read
/// anyway: starts that find the tiles made read neither.
fn check_groups(part: &Rows, row: usize, scales: &[u16], zeros: &[u16]) -> Result<(), RepackError> {
    let number = |bits: u16| f16::from_bits(bits).to_f32();
    let sound = |scale: f32, zero: f32| {
        scale.is_finite() && scale >= 0.0 && (0.0..=15.0).contains(&zero) && zero.fract() == 0.0
    };
    for (group, (&scale, &zero)) in scales.iter().zip(zeros).enumerate() {
        let (scale, zero) = (number(scale), number(zero));
        if !sound(scale, zero) {
            return Err(RepackError::Group {
                path: part.bytes.file().path().to_owned(),
                tensor: part.name.clone(),
                row,
                group,
                scale,
                zero,
            });
        }
    }
    Ok(())
}

/// Puts one row of `dg-w4a16-v1` codes, two a byte, with the bits of its f16 scales and zero points into a tile.
fn w4_row(packed: &[u8], scales: &[u16], zeros: &[u16], group: usize, lane: usize, out: &mut [u8]) {
    /// Columns of a block of the kernels' layout; both groups of a file are multiples of it.
    const COLUMNS: usize = 64;
    for (index, bytes) in packed.chunks(COLUMNS / 2).enumerate() {
        let first = index * COLUMNS;
        let at = first / group;
        let scales = Scales { scale: scales[at], offset: zeros[at], ..Scales::default() };
        Format::W4.put_nibbles(out, lane, first, bytes, scales);
    }
}

fn u16s(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::checkpoint::mapping::Mapping;
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
