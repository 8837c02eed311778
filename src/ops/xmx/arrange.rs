//! Repacked weights in the order in which the matrix engine takes them: the tiles of [`Format`], with the codes inside each
//! word moved. `cl/xmx/weights.h` says what stands where.

use crate::ops::{Format, TILE};

/// Bits of a code of a format that the family has kernels for; none of others.
pub(super) fn code_bits(format: Format) -> Option<usize> {
    match format {
        Format::Q2K | Format::Tq2 => Some(2),
        Format::Q3K => Some(3),
        Format::W4
        | Format::Q4_0
        | Format::Q4_1
        | Format::Q4K
        | Format::Iq4Nl
        | Format::Iq4Xs
        | Format::Mxfp4 => Some(4),
        Format::Q5_0 | Format::Q5_1 | Format::Q5K => Some(5),
        Format::Q6K => Some(6),
        Format::Q8_0 => Some(8),
        Format::F16 | Format::Bf16 => Some(16),
        Format::F32 => None,
    }
}

/// Whether the family has kernels for a format.
pub fn xmx_takes(format: Format) -> bool {
    code_bits(format).is_some()
}

/// Brings whole tiles, as [`Format`] packs them, into the family's order, in place, and tells the format they have then: BF16
/// becomes F16. `columns` are those of the matrix. Tiles of a format without kernels are left alone, with `None`.
///
/// A number of BF16 has eight bits, so it is exact in f16 from 2^-17 up; a smaller one loses at most 2^-25, and one that f16
/// cannot hold, 65,520 or more, becomes infinite.
pub fn xmx_arrange(format: Format, tiles: &mut [u8], columns: usize) -> Option<Format> {
    let bits = code_bits(format)?;
    let groups = format.block_groups();
    let group_bytes = bits * 4 * TILE;
    let block_bytes = format.tile_bytes(groups * 32);
    debug_assert!(tiles.len().is_multiple_of(format.tile_bytes(columns)), "whole tiles");
    for block in tiles.chunks_exact_mut(block_bytes) {
        let (_, codes) = block.split_at_mut(block_bytes - groups * group_bytes);
        for group in codes.chunks_exact_mut(group_bytes) {
            let words = group.as_chunks_mut::<4>().0.as_chunks_mut::<TILE>().0;
            match bits {
                2 => each(words, halve::<2>),
                3 => cut_triples(words),
                4 => each(words, halve::<4>),
                // The upper bits stand just above the nibbles of their columns: bit by bit, four times eight columns. Twice
                // makes that 32 columns.
                5 => {
                    let (nibbles, ones) = words.split_at_mut(4);
                    each(nibbles, halve::<4>);
                    each(ones, |word| halve::<1>(halve::<1>(halve::<1>(word.rotate_right(4)))));
                }
                // Likewise, twice eight columns in a word; once makes that 16.
                6 => {
                    let (nibbles, pairs) = words.split_at_mut(4);
                    each(nibbles, halve::<4>);
                    each(pairs, |word| halve::<2>(halve::<2>(word.rotate_right(4))));
                }
                8 => each(words, halve::<8>),
                _ => join_columns(format, group),
            }
        }
    }
    Some(if format == Format::Bf16 { Format::F16 } else { format })
}

/// Changes words that 16 rows have of something.
#[inline(always)]
fn each(words: &mut [[[u8; 4]; TILE]], change: impl Fn(u32) -> u32) {
    for word in words.iter_mut().flatten() {
        *word = change(u32::from_le_bytes(*word)).to_le_bytes();
    }
}

/// Takes a word as units of `UNIT` bits, a power of two: even ones go to its lower half, odd ones to the upper.
#[inline(always)]
fn halve<const UNIT: usize>(word: u32) -> u32 {
    // Of each four runs of so many bits, the two in the middle change places: first of single units, then of two, and so on.
    [(1, 0x2222_2222), (2, 0x0C0C_0C0C), (4, 0x00F0_00F0), (8, 0x0000_FF00)]
        .into_iter()
        .filter(|&(bits, _)| bits >= UNIT)
        .fold(word, |word, (bits, mask)| {
            let differ = (word ^ word >> bits) & mask;
            word ^ differ ^ differ << bits
        })
}

/// Codes of three bits, in three words a row, are cut into their lower two and their upper one.
fn cut_triples(words: &mut [[[u8; 4]; TILE]]) {
    let [first, second, third] = words else { return };
    for ((first, second), third) in first.iter_mut().zip(second).zip(third) {
        let rest = u32::from_le_bytes(*third);
        let mut ones = 0;
        for (half, word) in [first, second].into_iter().enumerate() {
            let (ten, five) = (u32::from_le_bytes(*word), rest >> (16 * half) & 0xFFFF);
            // All 16 codes, the first one lowest: ten, five, and the last one, whose bits are above both.
            let codes = u64::from(ten & 0x3FFF_FFFF)
                | u64::from(five & 0x7FFF) << 30
                | u64::from(ten >> 30) << 45
                | u64::from(five >> 15) << 47;
            let mut pairs = 0;
            for column in 0..16 {
                let code = (codes >> (3 * column)) as u32;
                pairs |= (code & 3) << (2 * column);
                ones |= (code >> 2 & 1) << (16 * half + column);
            }
            *word = halve::<2>(pairs).to_le_bytes();
        }
        *third = halve::<1>(ones).to_le_bytes();
    }
}

/// Two and two columns of numbers become pairs.
fn join_columns(format: Format, group: &mut [u8]) {
    for both in group.as_chunks_mut::<{ 4 * TILE }>().0 {
        let (numbers, _) = both.as_chunks::<2>();
        let mut pairs = [[0u8; 4]; TILE];
        let (even, odd) = numbers.split_at(TILE);
        for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
            let [even, odd] = [even, odd].map(|number| {
                let bits = u16::from_le_bytes(*number);
                u32::from(if format == Format::Bf16 { f16_of(bits) } else { bits })
            });
            *pair = (even | odd << 16).to_le_bytes();
        }
        both.copy_from_slice(pairs.as_flattened());
    }
}

/// The bits of the f16 that a number of BF16 rounds to. Without branches, since half of the numbers of a model may go through
/// here at a start.
#[inline(always)]
fn f16_of(bits: u16) -> u16 {
    let (sign, size) = (bits & 0x8000, u32::from(bits & 0x7FFF));
    // Exponents of f16 begin 112 later and have three bits more behind them.
    let exact = (size << 3).wrapping_sub(112 << 10);
    // The steps of its denormals are those of f32 from 0.5 on, whose bits then count them.
    let denormal = (f32::from_bits(size << 16) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let quiet = 0x7E00 | size << 3 & 0x03FF;
    sign | match size {
        ..0x3880 => denormal as u16, // below 2^-14
        0x3880..0x4780 => exact as u16,
        0x4780..=0x7F80 => 0x7C00, // from 2^16 on
        _ => quiet as u16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Scales;
    use half::{bf16, f16};

    /// Where the bits of a code lie, as `cl/xmx/weights.h` says: for each plane its first word, the bits that it has of a code, and
    /// the first of these in the code.
    fn planes(bits: usize) -> &'static [(usize, usize, usize)] {
        match bits {
            2 => &[(0, 2, 0)],
            3 => &[(0, 2, 0), (2, 1, 2)],
            4 => &[(0, 4, 0)],
            5 => &[(0, 4, 0), (4, 1, 4)],
            6 => &[(0, 4, 0), (4, 2, 4)],
            _ => &[(0, 8, 0)],
        }
    }

    #[test]
    fn codes_of_every_format_stand_where_the_kernels_look_for_them() {
        let formats =
            Format::ALL.into_iter().filter(|&format| code_bits(format).is_some_and(|bits| bits < 16));
        for format in formats {
            let bits = code_bits(format).unwrap();
            let columns = 2 * format.block_groups() * 32;
            let block = format.block_codes();
            let code = |lane: usize, column: usize| {
                let mixed = ((lane * 7919 + column * 104_729 + 17) * 2_654_435_761) >> 7;
                (mixed as u32 % format.codes_below()) as u8
            };
            let mut tile = vec![0; format.tile_bytes(columns)];
            for lane in 0..TILE {
                for first in (0..columns).step_by(block) {
                    let codes: Vec<u8> = (first..first + block).map(|column| code(lane, column)).collect();
                    format.put_codes(&mut tile, lane, first, &codes, Scales::default());
                }
            }
            assert_eq!(xmx_arrange(format, &mut tile, columns), Some(format));
            let (group_bytes, groups) = (bits * 4 * TILE, format.block_groups());
            for (at, block) in tile.chunks_exact(tile.len() / 2).enumerate() {
                let codes = &block[block.len() - groups * group_bytes..];
                for column in 0..groups * 32 {
                    let group = &codes[column / 32 * group_bytes..][..group_bytes];
                    for lane in 0..TILE {
                        let found = planes(bits).iter().fold(0, |found, &(word, width, first)| {
                            let (word, within) = (word + column % 32 * width / 32, column % (32 / width));
                            let bytes = &group[(word * TILE + lane) * 4..][..4];
                            let word = u32::from_le_bytes(bytes.try_into().unwrap());
                            let shift = match width {
                                // Bytes 0, 2, 1 and 3.
                                8 => [0, 16, 8, 24][within],
                                _ => width * (within / 2) + 16 * (within % 2),
                            };
                            found | (word >> shift & ((1 << width) - 1)) << first
                        });
                        let expected = code(lane, at * groups * 32 + column);
                        assert_eq!(found, u32::from(expected), "{format:?}, row {lane}, column {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn words_of_16_bits_hold_neighbouring_columns() {
        let mut tile: Vec<u8> =
            (0..32 * TILE as u16).flat_map(|i| f16::from_f32(f32::from(i)).to_le_bytes()).collect();
        assert_eq!(xmx_arrange(Format::F16, &mut tile, 32), Some(Format::F16));
        for column in 0..32 {
            for row in 0..TILE {
                let at = (column / 2 * TILE + row) * 4 + column % 2 * 2;
                let found = f16::from_le_bytes([tile[at], tile[at + 1]]).to_f32();
                assert_eq!(found, (column * TILE + row) as f32);
            }
        }
    }

    #[test]
    fn numbers_of_bf16_round_to_f16_and_are_exact_down_to_two_to_the_minus_17() {
        for bits in 0..=u16::MAX {
            let number = bf16::from_bits(bits).to_f32();
            let (found, rounded) = (f16::from_bits(f16_of(bits)), f16::from_f32(number));
            assert!(found.to_bits() == rounded.to_bits(), "{number:e}: {found:?}, not {rounded:?}");
            let size = number.abs();
            assert!(!(2f32.powi(-17)..65_520.0).contains(&size) || found.to_f32() == number, "{number:e}");
        }
    }
}
