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
    if let Some(index) = weights.iter().position(|weight| !weight.is_finite()) {
        return Err(QuantiseError::NotFinite { index, value: weights[index] });
    }
    let least = weights.iter().copied().fold(f32::INFINITY, f32::min);
    let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (most - least).max(LEAST_RANGE) / MOST;
    let stored = f16::from_f32(scale);
    if !stored.is_finite() {
        return Err(QuantiseError::Range { least, most });
    }
    // Adding zero makes one of the two zeros of it.
    let zero = (-least / scale).round_ties_even().clamp(0.0, MOST) + 0.0;
    for (code, &weight) in codes.iter_mut().zip(weights) {
        *code = (weight / scale + zero).round_ties_even().clamp(0.0, MOST) as u8;
    }
    Ok(Group { scale: stored, zero: f16::from_f32(zero) })
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
