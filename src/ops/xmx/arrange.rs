//! Repacked weights in the order in which the matrix engine takes them: the tiles of [`Format`], with the codes inside each
//! word moved. `cl/xmx/weights.h` says what stands where.

use half::{bf16, f16};

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
        if bits == 16 {
            for pair in codes.chunks_exact_mut(4 * TILE) {
                interleave(pair, format);
            }
            continue;
        }
        if !matches!(bits, 4 | 8) {
            for group in codes.chunks_exact_mut(group_bytes) {
                move_planes(format, bits, group);
            }
            continue;
        }
        for word in codes.as_chunks_mut::<4>().0 {
            let moved = match bits {
                4 => move_nibbles(u32::from_le_bytes(*word)),
                _ => u32::from_le_bytes([word[0], word[2], word[1], word[3]]),
            };
            *word = moved.to_le_bytes();
        }
    }
    Some(if format == Format::Bf16 { Format::F16 } else { format })
}

/// Even columns to the lower half of the word, odd ones to the upper.
fn move_nibbles(word: u32) -> u32 {
    (0..8)
        .map(|column| (word >> (4 * column) & 15) << (4 * (column / 2) + 16 * (column % 2)))
        .fold(0, |all, one| all | one)
}

/// The codes of a group, cut into planes of four bits, two and one.
fn move_planes(format: Format, bits: usize, group: &mut [u8]) {
    let mut rows = [[0u8; 32]; TILE];
    for (lane, codes) in rows.iter_mut().enumerate() {
        *codes = format.group_codes(|word| {
            let at = (word * TILE + lane) * 4;
            u32::from_le_bytes([group[at], group[at + 1], group[at + 2], group[at + 3]])
        });
    }
    // Bits of a plane, and the first of them in the code.
    let planes: &[(usize, usize)] = match bits {
        2 => &[(2, 0)],
        3 => &[(2, 0), (1, 2)],
        5 => &[(4, 0), (1, 4)],
        _ => &[(4, 0), (2, 4)],
    };
    for (lane, codes) in rows.iter().enumerate() {
        let mut word = 0;
        for &(bits, first) in planes {
            for run in codes.chunks_exact(32 / bits) {
                let moved = run.iter().enumerate().fold(0, |all, (column, &code)| {
                    let part = u32::from(code) >> first & ((1 << bits) - 1);
                    all | part << (bits * (column / 2) + 16 * (column % 2))
                });
                group[(word * TILE + lane) * 4..][..4].copy_from_slice(&moved.to_le_bytes());
                word += 1;
            }
        }
    }
}

/// Two columns of 16 rows become 16 pairs.
fn interleave(pair: &mut [u8], format: Format) {
    let mut numbers = [[0u8; 2]; 2 * TILE];
    for (number, bytes) in numbers.iter_mut().zip(pair.as_chunks::<2>().0) {
        *number = match format {
            Format::Bf16 => f16::from_f32(bf16::from_le_bytes(*bytes).to_f32()).to_le_bytes(),
            _ => *bytes,
        };
    }
    for (at, bytes) in pair.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *bytes = numbers[at % 2 * TILE + at / 2];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_keep_their_values_and_take_the_places_that_the_kernels_mask() {
        let moved = move_nibbles(0x7654_3210);
        for column in 0..8 {
            let at = 4 * (column / 2) + 16 * (column % 2);
            assert_eq!(moved >> at & 15, column);
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
    fn numbers_of_bf16_are_exact_in_f16_down_to_two_to_the_minus_17() {
        for exponent in -17..15 {
            let number = bf16::from_f32((1.0 + 127.0 / 128.0) * 2f32.powi(exponent));
            let mut pair = [number.to_le_bytes(); 2 * TILE].concat();
            interleave(&mut pair, Format::Bf16);
            assert_eq!(f16::from_le_bytes([pair[0], pair[1]]).to_f32(), number.to_f32(), "2^{exponent}");
        }
    }
}
