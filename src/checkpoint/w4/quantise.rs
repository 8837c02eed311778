//! Weights to 4-bit codes and back, a group of weights that share a scale at a time.

use half::f16;
use thiserror::Error;

use crate::checkpoint::quant::QuantError;
use crate::checkpoint::rows::{Encoding, Rows};

/// The largest code.
const MOST: f32 = 15.0;
/// The least range of a group that is told from a constant one.
const LEAST_RANGE: f32 = 1e-8;

/// What the codes of a group mean: weight = (code - zero) * scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group {
    /// The step between two codes, rounded from the f32 that the codes were made with.
    pub scale: f16,
    /// The code of zero, a whole number from 0 to 15.
    pub zero: f16,
}

/// Why weights cannot be quantised.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum QuantiseError {
    /// NaN or an infinity.
    #[error("weight {index} of the group is {value}, which no code can stand for")]
    NotFinite {
        /// Its place in the group.
        index: usize,
        /// What it is.
        value: f32,
    },
    /// The step does not fit the type that is stored.
    #[error("the group's weights reach from {least} to {most}, and their step does not fit f16")]
    Range {
        /// The smallest weight.
        least: f32,
        /// The largest.
        most: f32,
    },
}

/// Writes the codes of a group's weights, one a byte, as `dg-w4a16-v1` makes them.
///
/// All arithmetic is in f32 and rounds half to even; the codes are those for the scale before it is rounded to f16. The
/// format has no offset of its own: a group whose weights all lie on one side of zero, far from it, is clipped, and
/// weights that are all equal become zero.
///
/// # Errors
/// Weights that are not finite, or too far apart for an f16 scale.
pub fn quantise_group(weights: &[f32], codes: &mut [u8]) -> Result<Group, QuantiseError> {
    if let Some(index) = not_finite(weights) {
        return Err(QuantiseError::NotFinite { index, value: weights[index] });
    }
    let (least, most) = extremes(weights);
    let scale = (most - least).max(LEAST_RANGE) / MOST;
    let stored = f16::from_f32(scale);
    if !stored.is_finite() {
        return Err(QuantiseError::Range { least, most });
    }
    // Adding zero makes one of the two zeros of it.
    let zero = (-least / scale).round_ties_even().clamp(0.0, MOST) + 0.0;
    for (code, &weight) in codes.iter_mut().zip(weights) {
        *code = rounded((weight / scale + zero).clamp(0.0, MOST), 0);
    }
    Ok(Group { scale: stored, zero: f16::from_f32(zero) })
}

/// The first of the values that is NaN or infinite.
pub fn not_finite(values: &[f32]) -> Option<usize> {
    // All are looked at, since that is faster than to stop at the first one.
    let any = values.iter().fold(false, |any, value| any | !value.is_finite());
    if any { values.iter().position(|value| !value.is_finite()) } else { None }
}

/// The least and the largest of finite values; infinities the other way round where there are none.
pub fn extremes(values: &[f32]) -> (f32, f32) {
    const AT_ONCE: usize = 8;
    let (mut least, mut most) = ([f32::INFINITY; AT_ONCE], [f32::NEG_INFINITY; AT_ONCE]);
    for values in values.chunks(AT_ONCE) {
        for ((least, most), &value) in least.iter_mut().zip(&mut most).zip(values) {
            *least = if value < *least { value } else { *least };
            *most = if value > *most { value } else { *most };
        }
    }
    (least.into_iter().fold(f32::INFINITY, f32::min), most.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

/// `value + zero` rounded half to even, where that is from 0 to 255 and `zero` is even: from 2^23 on, the bits of an f32 count
/// whole numbers.
pub fn rounded(value: f32, zero: u8) -> u8 {
    (value + (8_388_608.0 + f32::from(zero))).to_bits() as u8
}

/// Writes two codes a byte, the first in the lower nibble.
pub fn pack_codes(codes: &[u8], out: &mut [u8]) {
    for (byte, pair) in out.iter_mut().zip(codes.chunks_exact(2)) {
        *byte = pair[0] & 15 | pair[1] << 4;
    }
}

/// Writes the weights of row `row` of [`Encoding::W4`] rows, or of plain ones, in f32: the reference for everything that
/// computes with them.
///
/// # Errors
/// A row that is not there, a length that is not the row's.
pub fn dequantise_row(rows: &Rows, row: usize, out: &mut [f32]) -> Result<(), QuantError> {
    use crate::checkpoint::quant::{GgmlType, dequantize};
    let wrong =
        || QuantError::PartBlock { ty: GgmlType::F16, bytes: rows.bytes.as_ref().len(), values: out.len() };
    let part = rows.part(row, 1).filter(|_| out.len() == rows.columns).ok_or_else(wrong)?;
    match &part.encoding {
        &Encoding::Ggml(ty) | &Encoding::ToW4 { from: ty, .. } | &Encoding::ToQ8(ty) => {
            dequantize(ty, part.bytes.as_ref(), out)
        }
        Encoding::Turned(_) => Err(wrong()),
        Encoding::W4 { scales, zeros, group } => {
            let scales = scales.as_ref().chunks_exact(2).zip(zeros.as_ref().chunks_exact(2));
            let groups = out.chunks_mut(*group).zip(part.bytes.as_ref().chunks(*group / 2));
            for ((out, bytes), (scale, zero)) in groups.zip(scales) {
                let [scale, zero] = [scale, zero].map(|raw| f16::from_le_bytes([raw[0], raw[1]]).to_f32());
                for (pair, byte) in out.chunks_mut(2).zip(bytes) {
                    for (out, code) in pair.iter_mut().zip([byte & 15, byte >> 4]) {
                        *out = (f32::from(code) - zero) * scale;
                    }
                }
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_half_to_even_from_any_zero() {
        for step in -127 * 8..=127 * 8 {
            // Eighths, and what lies just beside them.
            let eighths = step as f32 / 8.0;
            for value in
                [eighths.next_down(), eighths, eighths.next_up()].map(|x: f32| x.clamp(-127.0, 127.0))
            {
                let expected = value.round_ties_even();
                assert_eq!(f32::from(rounded(value, 128)) - 128.0, expected, "{value:e}");
                if value >= 0.0 {
                    assert_eq!(f32::from(rounded(value, 0)), expected, "{value:e}");
                }
            }
        }
    }

    #[test]
    fn extremes_are_found_in_every_place() {
        for length in 1..20 {
            for at in 0..length {
                let mut values = vec![0.5; length];
                values[at] = 2.0;
                assert_eq!(extremes(&values), (if length == 1 { 2.0 } else { 0.5 }, 2.0));
                values[at] = -2.0;
                assert_eq!(extremes(&values), (-2.0, if length == 1 { -2.0 } else { 0.5 }));
                assert_eq!(not_finite(&values), None);
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    values[at] = wrong;
                    assert_eq!(not_finite(&values), Some(at));
                }
            }
        }
    }
}
