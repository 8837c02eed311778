//! Rotary embeddings: which pairs of a head turn, and how fast.

use super::families::Family;
use super::reader::Keys;
use crate::model::error::ModelError;
use crate::ops::Pairing;

/// Rotary embedding of a layer: what its table of angles depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub base: f32,
    /// Values of a head over which the series goes: the frequency of pair i is base^(-2i / series).
    pub series: usize,
    /// Pairs that turn, from the first on.
    pub pairs: usize,
    /// Which values are a pair.
    pub pairing: Pairing,
    /// Positions are divided by it.
    pub linear_factor: f32,
    /// The tensor `rope_freqs.weight` divides the frequencies, if the file has it.
    pub divided: bool,
}

impl Rope {
    /// Frequencies of the pairs; `divisors`, if any, has one value for each.
    pub fn frequencies(&self, divisors: Option<&[f32]>) -> Vec<f32> {
        (0..self.pairs)
            .map(|i| {
                let exponent = 2.0 * i as f32 / self.series as f32;
                let divisor = divisors.and_then(|divisors| divisors.get(i)).copied().unwrap_or(1.0);
                1.0 / self.base.powf(exponent) / (divisor * self.linear_factor)
            })
            .collect()
    }
}

/// The rotary embedding of layers that see everything, with heads of `head_size` values.
pub(super) fn full(keys: &Keys<'_>, family: &Family, head_size: usize) -> Result<Rope, ModelError> {
    const COUNT: &str = "rope.dimension_count";
    let rotated = keys.optional_count(COUNT)?.unwrap_or(head_size);
    if rotated % 2 != 0 || rotated > head_size {
        return Err(keys.unsupported(format!(
            "{} is {rotated}; expected an even number up to the head size {head_size}",
            keys.full(COUNT)
        )));
    }
    Ok(Rope {
        base: base(keys, "rope.freq_base", family.rope_base)?,
        series: rotated,
        pairs: rotated / 2,
        pairing: if family.interleaved { Pairing::Neighbours } else { Pairing::RotatedHalves },
        linear_factor: linear_factor(keys)?,
        divided: true,
    })
}

/// The rotary embedding of layers with a window, in models where it is another than that of the rest.
pub(super) fn sliding(keys: &Keys<'_>, full: &Rope) -> Result<Rope, ModelError> {
    let base = base(keys, "rope.freq_base_swa", Some(10_000.0))?;
    Ok(Rope { base, linear_factor: 1.0, divided: false, ..*full })
}

fn base(keys: &Keys<'_>, name: &str, default: Option<f32>) -> Result<f32, ModelError> {
    match (keys.optional_number(name, 1.0, f32::MAX)?, default) {
        (Some(base), _) | (None, Some(base)) => Ok(base),
        (None, None) => keys.number(name, 1.0, f32::MAX),
    }
}

fn linear_factor(keys: &Keys<'_>) -> Result<f32, ModelError> {
    const KIND: &str = "rope.scaling.type";
    const FACTOR: &str = "rope.scaling.factor";
    let factor = keys.optional_number(FACTOR, 0.0, f32::MAX)?;
    match (keys.optional_text(KIND)?, factor) {
        // Converters write 0 or 1 where nothing is scaled.
        (Some("none"), _) | (None, None | Some(0.0 | 1.0)) => Ok(1.0),
        (kind @ (None | Some("linear")), _) => {
            let factor = keys.number(FACTOR, 1.0, f32::MAX)?;
            if kind.is_none() {
                let (factor_key, kind_key) = (keys.full(FACTOR), keys.full(KIND));
                tracing::info!("{factor_key} is {factor} and {kind_key} is missing: taken as linear");
            }
            Ok(factor)
        }
        (Some(other), _) => Err(keys.unsupported(format!(
            "{} is '{other}'; this version knows none, linear and rope_freqs.weight",
            keys.full(KIND)
        ))),
    }
}
