//! The rows of one tile, from each encoding that checkpoints have. All rows of a tile are written together, column by column: what
//! they are read from lies in few cache lines of many pages, what is written in one run.

use std::ops::Range;

use half::f16;

use super::{RepackError, format_of};
use crate::checkpoint::quant::{GgmlType, Unpacked, dequantize, unpack_block};
use crate::checkpoint::rows::{Encoding, Rows};
use crate::checkpoint::w4::{QuantiseError, extremes, not_finite, pack_codes, quantise_group, rounded};
use crate::ops::{Format, Lanes, Scales, TILE};

/// Writes a tile, all of it, from up to [`TILE`] rows from `first` on.
pub(super) fn write_tile(part: &Rows, first: usize, out: &mut [u8]) -> Result<(), RepackError> {
    let rows = first..part.rows.min(first + TILE).max(first);
    match &part.encoding {
        Encoding::Ggml(ty @ (GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)) => {
            let numbers = lanes(part.bytes.as_ref(), rows, part.columns * ty.block_bytes());
            format_of(*ty).put_number_rows(out, &numbers);
            Ok(())
        }
        Encoding::Ggml(ty) => block_rows(part, *ty, rows, out),
        Encoding::W4 { scales, zeros, group } => {
            let codes = lanes(part.bytes.as_ref(), rows.clone(), part.columns / 2);
            let [scales, zeros] =
                [scales, zeros].map(|span| lanes(span.as_ref(), rows.clone(), part.columns / group * 2));
            check_groups(part, first, &scales, &zeros)?;
            Format::put_w4_rows(out, &codes, [&scales, &zeros], *group);
            Ok(())
        }
        Encoding::Turned(ty) => turned_rows(part, *ty, rows, out),
        Encoding::ToQ8(from) => {
            out.fill(0);
            rows.enumerate().try_for_each(|(lane, row)| q8_row(part, *from, row, lane, out))
        }
        Encoding::ToW4 { from, group } => quantised_rows(part, *from, *group, rows, out),
    }
}

/// Row `row` of rows of `length` bytes.
fn row_of(bytes: &[u8], row: usize, length: usize) -> &[u8] {
    &bytes[row * length..][..length]
}

/// Some rows, at most [`TILE`], of rows of `length` bytes.
fn lanes(bytes: &[u8], rows: Range<usize>, length: usize) -> Lanes<'_> {
    let mut lanes: Lanes<'_> = [&[]; TILE];
    for (lane, row) in lanes.iter_mut().zip(rows) {
        *lane = row_of(bytes, row, length);
    }
    lanes
}

/// Rows of blocks of a quantised type.
fn block_rows(part: &Rows, ty: GgmlType, rows: Range<usize>, out: &mut [u8]) -> Result<(), RepackError> {
    let format = format_of(ty);
    let (values, block_bytes) = (ty.block_values(), ty.block_bytes());
    let blocks = part.columns / values;
    let lanes = lanes(part.bytes.as_ref(), rows.clone(), blocks * block_bytes);
    let mut unpacked = Unpacked::default();
    out.fill(0);
    for index in 0..blocks {
        for (lane, row) in lanes[..rows.len()].iter().enumerate() {
            unpack_block(ty, row_of(row, index, block_bytes), &mut unpacked)?;
            let scale = match ty {
                GgmlType::MXFP4 => u16::from(unpacked.scales[0]),
                _ => unpacked.d,
            };
            let scales =
                Scales { scale, offset: unpacked.m, scales: &unpacked.scales, offsets: &unpacked.mins };
            format.put_codes(out, lane, index * values, &unpacked.codes[..values], scales);
        }
    }
    Ok(())
}

/// Rows of a matrix that lies column after column, as plain numbers.
fn turned_rows(part: &Rows, ty: GgmlType, rows: Range<usize>, out: &mut [u8]) -> Result<(), RepackError> {
    let (block, block_bytes) = (ty.block_values(), ty.block_bytes());
    // The blocks of a column that have these rows.
    let (from, to) = (rows.start / block, rows.end.div_ceil(block));
    let mut values = vec![0f32; (to - from) * block];
    let mut turned = vec![[0u8; 4]; rows.len() * part.columns];
    for column in 0..part.columns {
        let bytes = row_of(part.bytes.as_ref(), column, part.rows / block * block_bytes);
        dequantize(ty, &bytes[from * block_bytes..to * block_bytes], &mut values)?;
        for (lane, value) in values[rows.start - from * block..][..rows.len()].iter().enumerate() {
            turned[lane * part.columns + column] = value.to_le_bytes();
        }
    }
    Format::F32.put_number_rows(out, &lanes(turned.as_flattened(), 0..rows.len(), part.columns * 4));
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
    if let Some(column) = not_finite(&values) {
        return Err(RepackError::NotFinite { tensor: part.name.clone(), row, column, value: values[column] });
    }
    for (index, values) in values.chunks(COLUMNS).enumerate() {
        let (least, most) = extremes(values);
        let scale = most.max(-least).abs() / MOST; // of two zeros, the positive one
        let mut codes = [128u8; COLUMNS];
        if scale > 0.0 {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = rounded((value / scale).clamp(-MOST, MOST), 128);
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

/// Quantises rows of plain numbers as `dg-w4a16-v1` does it.
fn quantised_rows(
    part: &Rows,
    from: GgmlType,
    group: usize,
    rows: Range<usize>,
    out: &mut [u8],
) -> Result<(), RepackError> {
    let (columns, count) = (part.columns, rows.len());
    let mut values = vec![0f32; columns];
    let mut codes = vec![0u8; columns];
    let mut packed = vec![0u8; count * columns / 2];
    let (mut scales, mut zeros) = (Vec::new(), Vec::new());
    for (row, packed) in rows.zip(packed.chunks_exact_mut(columns / 2)) {
        dequantize(from, row_of(part.bytes.as_ref(), row, columns * from.block_bytes()), &mut values)?;
        for (values, codes) in values.chunks(group).zip(codes.chunks_mut(group)) {
            let found = quantise_group(values, codes).map_err(|error| RepackError::Quantise {
                tensor: part.name.clone(),
                row,
                error,
            })?;
            scales.extend(found.scale.to_le_bytes());
            zeros.extend(found.zero.to_le_bytes());
        }
        pack_codes(&codes, packed);
    }
    let [scales, zeros] = [&scales, &zeros].map(|halves| lanes(halves, 0..count, columns / group * 2));
    Format::put_w4_rows(out, &lanes(&packed, 0..count, columns / 2), [&scales, &zeros], group);
    Ok(())
}

/// Scales must be numbers from 0 on and zero points whole numbers from 0 to 15. Looked at here, where they are read
/// anyway: starts that find the tiles made read neither.
fn check_groups(part: &Rows, first: usize, scales: &Lanes<'_>, zeros: &Lanes<'_>) -> Result<(), RepackError> {
    for (lane, (scales, zeros)) in scales.iter().zip(zeros).enumerate() {
        let groups = scales.as_chunks::<2>().0.iter().zip(zeros.as_chunks::<2>().0);
        for (group, (scale, zero)) in groups.enumerate() {
            let [scale, zero] = [scale, zero].map(|bytes| u16::from_le_bytes(*bytes));
            if !(is_scale(scale) && is_zero_point(zero)) {
                return Err(RepackError::Group {
                    path: part.bytes.file().path().to_owned(),
                    tensor: part.name.clone(),
                    row: first + lane,
                    group,
                    scale: f16::from_bits(scale).to_f32(),
                    zero: f16::from_bits(zero).to_f32(),
                });
            }
        }
    }
    Ok(())
}

/// Whether the bits of an f16 are those of a finite number, zero or more.
fn is_scale(bits: u16) -> bool {
    bits < 0x7C00 || bits == 0x8000
}

/// Whether the bits of an f16 are those of a whole number from 0 to 15.
fn is_zero_point(bits: u16) -> bool {
    // From 1 on, 10 bits less the exponent stand for what is below 1.
    let below_one = 25u32.wrapping_sub(u32::from(bits >> 10));
    bits & 0x7FFF == 0 || (0x3C00..=0x4B80).contains(&bits) && bits.trailing_zeros() >= below_one
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::{Arrangement, Blueprint};
    use super::*;
    use crate::checkpoint::mapping::Mapping;
    use crate::checkpoint::rows::Span;
    use crate::checkpoint::w4::dequantise_row;
    use crate::ops::Family;
    use std::sync::Arc;

    /// Rows whose spans lie one behind the other in a file.
    fn stored(parts: &[&[u8]]) -> (tempfile::NamedTempFile, Vec<Span>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), parts.concat()).unwrap();
        let map = Arc::new(Mapping::open(file.path()).unwrap());
        let mut end = 0;
        let spans = parts.iter().map(|part| {
            let start = end;
            end += part.len();
            Span::new(Arc::clone(&map), start..end).unwrap()
        });
        let spans = spans.collect();
        (file, spans)
    }

    /// The tiles of a matrix, whatever was there before.
    fn tiles(rows: &Rows, family: Family) -> Vec<u8> {
        let parts = vec![rows.clone()];
        let blueprint = Blueprint { name: "a".to_owned(), parts, arrangement: Arrangement::Stacked, family };
        let mut written = [0, 0xA5].map(|before| {
            let mut out = vec![before; blueprint.bytes()];
            blueprint.write(0, &mut out).unwrap();
            out
        });
        assert!(written[0] == written[1], "what was there before shows");
        std::mem::take(&mut written[0])
    }

    /// Numbers between -1 and 1 without a pattern.
    fn mixed(at: usize) -> f32 {
        let bits = (at as u32 + 1).wrapping_mul(2_654_435_761);
        ((bits ^ bits >> 15).wrapping_mul(0x2C1B_3C6D) >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Whole tiles, none, and such with a rest; rows of one block, and of several.
    fn shapes() -> impl Iterator<Item = (usize, usize, usize)> {
        let rows = [1, 15, 16, 19, 40];
        rows.into_iter().flat_map(|rows| {
            [(64, 64), (64, 192), (128, 128), (128, 640)].map(|(group, columns)| (rows, group, columns))
        })
    }

    #[test]
    fn w4_rows_have_the_weights_of_their_definition() {
        for (rows, group, columns) in shapes() {
            let codes: Vec<u8> = (0..rows * columns / 2).map(|at| (mixed(at) * 128.0) as i8 as u8).collect();
            let groups = 0..rows * columns / group;
            let scales: Vec<u8> =
                groups.clone().flat_map(|at| f16::from_f32(mixed(at).abs()).to_le_bytes()).collect();
            let zeros: Vec<u8> =
                groups.flat_map(|at| f16::from_f32((at * 7 % 16) as f32).to_le_bytes()).collect();
            let (_file, spans) = stored(&[&codes, &scales, &zeros]);
            let [bytes, scales, zeros] = spans.try_into().unwrap();
            let encoding = Encoding::W4 { scales, zeros, group };
            let part = Rows { name: "w".to_owned(), encoding, rows, columns, bytes };
            let tiles = tiles(&part, Family::Vector);
            let size = Format::W4.tile_bytes(columns);
            let mut expected = vec![0f32; columns];
            for row in 0..tiles.len() / size * TILE {
                expected.fill(0.0);
                if row < rows {
                    dequantise_row(&part, row, &mut expected).unwrap();
                }
                for (column, expected) in expected.iter().enumerate() {
                    let found = Format::W4.weight(&tiles[row / TILE * size..][..size], row % TILE, column);
                    assert_eq!(found, *expected, "{rows} rows of {columns}: row {row}, column {column}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_quantised_as_if_they_had_been_so_in_the_file() {
        for (rows, group, columns) in shapes() {
            let numbers: Vec<f32> = (0..rows * columns).map(mixed).collect();
            let mut codes = vec![0u8; numbers.len()];
            let (mut scales, mut zeros) = (Vec::new(), Vec::new());
            for (numbers, codes) in numbers.chunks(group).zip(codes.chunks_mut(group)) {
                let found = quantise_group(numbers, codes).unwrap();
                scales.extend(found.scale.to_le_bytes());
                zeros.extend(found.zero.to_le_bytes());
            }
            let mut packed = vec![0u8; numbers.len() / 2];
            pack_codes(&codes, &mut packed);
            let plain: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let (_file, spans) = stored(&[&plain, &packed, &scales, &zeros]);
            let [plain, packed, scales, zeros] = spans.try_into().unwrap();
            let rows = |encoding, bytes| Rows { name: "w".to_owned(), encoding, rows, columns, bytes };
            for family in [Family::Vector, Family::Xmx] {
                let later = rows(Encoding::ToW4 { from: GgmlType::F32, group }, plain.clone());
                let (scales, zeros) = (scales.clone(), zeros.clone());
                let before = rows(Encoding::W4 { scales, zeros, group }, packed.clone());
                assert!(tiles(&later, family) == tiles(&before, family), "{family:?}, rows of {columns}");
            }
        }
    }

    #[test]
    fn bits_of_scales_and_zero_points_are_told_from_all_others() {
        for bits in 0..=u16::MAX {
            let number = f16::from_bits(bits).to_f32();
            assert_eq!(is_scale(bits), number.is_finite() && number >= 0.0, "{number}");
            let whole = (0.0..=15.0).contains(&number) && number.fract() == 0.0;
            assert_eq!(is_zero_point(bits), whole, "{number}");
        }
    }
}
