//! Rotary embeddings: which pairs of a head turn, and how fast.

use super::families::Family;
use super::reader::Keys;
use crate::checkpoint::gguf::quoted;
use crate::checkpoint::quant::dequantize;
use crate::model::error::ModelError;
use crate::ops::Pairing;

/// Divides the frequencies of layers that see everything: Llama 3's slower low ones, Gemma 4's pairs that stay.
pub const FREQS: &str = "rope_freqs.weight";
/// Divide all frequencies where the context is longer than the model was first trained for.
pub const LONG: &str = "rope_factors_long.weight";
/// Divide all frequencies where it is not.
pub const SHORT: &str = "rope_factors_short.weight";

const KIND: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
const ORIGINAL: &str = "rope.scaling.original_context_length";
/// Says how much steeper scores get with YaRN's factor, in models with latents.
pub(super) const LOG_MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
const STRENGTH: &str = "rope.scaling.attn_factor";

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
    /// How the series is stretched for contexts longer than those of the first training.
    pub scaling: Scaling,
    /// The tensors that divide the frequencies, one value a pair.
    pub divisors: Divisors,
    /// Cosines and sines are multiplied by it.
    pub strength: f32,
}

/// How frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All are divided by the factor.
    Linear {
        /// The factor.
        factor: f32,
    },
    /// Pairs that turn often over the original context stay, those that turn less than once are divided by the factor, and
    /// those between are mixed.
    Yarn {
        /// The factor.
        factor: f32,
        /// Positions of the first training.
        original: usize,
        /// Turns from which on a pair stays.
        fast: f32,
        /// Turns up to which it is divided.
        slow: f32,
    },
}

/// Which tensors of the file divide frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divisors {
    /// None.
    None,
    /// `rope_freqs.weight`, if the file has it.
    Freqs,
    /// `rope_factors_long.weight` in contexts of more than so many positions, else `rope_factors_short.weight`.
    LongOrShort {
        /// Positions of the first training.
        original: usize,
    },
}

impl Divisors {
    /// The tensor for a context of so many positions.
    pub fn tensor(self, context: usize) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Freqs => Some(FREQS),
            Self::LongOrShort { original } => Some(if context > original { LONG } else { SHORT }),
        }
    }
}

impl Rope {
    /// Frequencies of the pairs; `divisors`, if any, has a value for each.
    pub fn frequencies(&self, divisors: Option<&[f32]>) -> Vec<f32> {
        (0..self.pairs)
            .map(|i| {
                let exponent = 2.0 * i as f32 / self.series as f32;
                let divisor = divisors.and_then(|divisors| divisors.get(i)).copied().unwrap_or(1.0);
                let frequency = 1.0 / self.base.powf(exponent);
                match self.scaling {
                    Scaling::None => frequency / divisor,
                    Scaling::Linear { factor } => frequency / (divisor * factor),
                    Scaling::Yarn { factor, .. } => {
                        let divided = self.divided_share(i);
                        (frequency / factor * divided + frequency * (1.0 - divided)) / divisor
                    }
                }
            })
            .collect()
    }

    /// What share of a pair's frequency is divided by YaRN's factor.
    fn divided_share(&self, pair: usize) -> f32 {
        let Scaling::Yarn { original, fast, slow, .. } = self.scaling else { return 0.0 };
        // The pair, as a real number, that makes so many turns over the original context.
        let pair_of = |turns: f32| {
            let (series, base) = (self.series as f64, f64::from(self.base));
            let positions_a_turn = original as f64 / (f64::from(turns) * std::f64::consts::TAU);
            series * positions_a_turn.ln() / (2.0 * base.ln())
        };
        let first = pair_of(fast).floor().max(0.0);
        let last = pair_of(slow).ceil().min(self.series as f64 - 1.0);
        ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0) as f32
    }
}

/// The rotary embedding of layers that see everything, with heads of `head_size` values.
pub(super) fn full(keys: &Keys<'_>, family: &Family, head_size: usize) -> Result<Rope, ModelError> {
    let series = rotated(keys, "rope.dimension_count", head_size)?;
    let (scaling, divisors, strength) = scaling(keys)?;
    let rope = Rope {
        base: base(keys, "rope.freq_base", family.rope_base)?,
        series,
        pairs: series / 2,
        pairing: if family.interleaved { Pairing::Neighbours } else { Pairing::RotatedHalves },
        scaling,
        divisors,
        strength,
    };
    if !family.proportional_rope {
        return Ok(rope);
    }
    if series != head_size {
        return Err(keys.unsupported(format!(
            "{} is {series}; expected the head size {head_size}, since {FREQS} says what turns",
            keys.full("rope.dimension_count")
        )));
    }
    Ok(Rope { pairs: turning(keys, series / 2)?, pairing: Pairing::HeadHalves, ..rope })
}

/// The rotary embedding of layers with a window where it has another base than that of the rest, and is not scaled.
/// `size` names the key that says how many values of their heads turn, if it is another than the rest's.
pub(super) fn sliding(
    keys: &Keys<'_>,
    full: &Rope,
    default_base: f32,
    size: Option<(&str, usize)>,
) -> Result<Rope, ModelError> {
    let series = match size {
        Some((key, head_size)) => rotated(keys, key, head_size)?,
        None => full.series,
    };
    let pairing = match full.pairing {
        Pairing::HeadHalves => Pairing::RotatedHalves,
        pairing => pairing,
    };
    Ok(Rope {
        base: base(keys, "rope.freq_base_swa", Some(default_base))?,
        series,
        pairs: series / 2,
        pairing,
        scaling: Scaling::None,
        divisors: Divisors::None,
        strength: 1.0,
    })
}

/// Values of a head that turn.
fn rotated(keys: &Keys<'_>, key: &str, head_size: usize) -> Result<usize, ModelError> {
    let rotated = keys.optional_count(key)?.unwrap_or(head_size);
    if rotated.is_multiple_of(2) && (1..=head_size).contains(&rotated) {
        return Ok(rotated);
    }
    Err(keys.unsupported(format!(
        "{} is {rotated}; expected an even number up to the head size {head_size}",
        keys.full(key)
    )))
}

fn base(keys: &Keys<'_>, name: &str, default: Option<f32>) -> Result<f32, ModelError> {
    match (keys.optional_number(name, 1.0, f32::MAX)?, default) {
        (Some(base), _) | (None, Some(base)) => Ok(base),
        (None, None) => keys.number(name, 1.0, f32::MAX),
    }
}

/// How many of `pairs` turn at all: [`FREQS`] divides the frequencies of those that stay by something huge.
fn turning(keys: &Keys<'_>, pairs: usize) -> Result<usize, ModelError> {
    /// Angles of no context turn anything at frequencies divided by this.
    const STILL: f32 = 1e20;
    let gguf = keys.gguf();
    let tensor = gguf.require_tensor(FREQS, &[pairs as u64])?;
    let mut divisors = vec![0f32; pairs];
    dequantize(tensor.ty, gguf.bytes(tensor), &mut divisors)?;
    let turning = divisors.iter().rposition(|&divisor| divisor < STILL).map_or(0, |last| last + 1);
    match divisors[..turning].iter().position(|divisor| !(*divisor > 0.0 && *divisor < STILL)) {
        None => Ok(turning),
        Some(at) => Err(keys.unsupported(format!(
            "{FREQS} divides frequency {at} by {}; expected numbers above 0 for the pairs that turn, and more than {STILL} \
             for all after them",
            divisors[at]
        ))),
    }
}

/// How frequencies are stretched, by what they are divided, and what cosines and sines are multiplied by.
fn scaling(keys: &Keys<'_>) -> Result<(Scaling, Divisors, f32), ModelError> {
    let plain = |scaling| Ok((scaling, Divisors::Freqs, 1.0));
    let kind = keys.optional_text(KIND)?;
    let factor = keys.optional_number(FACTOR, 0.0, f32::MAX)?;
    let tensors = [LONG, SHORT].map(|name| keys.gguf().tensor(name).is_some());
    match (kind, factor) {
        (None | Some("longrope"), _) if tensors != [false; 2] => long_or_short(keys),
        (Some("longrope"), _) => Err(keys.unsupported(format!(
            "{} is 'longrope' and the tensors {LONG} and {SHORT} are missing; convert the model again",
            keys.full(KIND)
        ))),
        // Converters write 0 or 1 where nothing is scaled.
        (Some("none"), _) | (None, None | Some(0.0 | 1.0)) => plain(Scaling::None),
        (None | Some("linear"), _) => {
            let factor = keys.number(FACTOR, 1.0, f32::MAX)?;
            if kind.is_none() {
                let (factor_key, kind_key) = (keys.full(FACTOR), keys.full(KIND));
                tracing::info!("{factor_key} is {factor} and {kind_key} is missing: taken as linear");
            }
            plain(Scaling::Linear { factor })
        }
        (Some("yarn"), _) => yarn(keys),
        (Some(other), _) => Err(keys.unsupported(format!(
            "{} is {}; this version knows none, linear, yarn, longrope and {FREQS}",
            keys.full(KIND),
            quoted(other)
        ))),
    }
}

fn yarn(keys: &Keys<'_>) -> Result<(Scaling, Divisors, f32), ModelError> {
    let factor = keys.number(FACTOR, 1.0, 1e6)?;
    let turns = |name: &str, default: f32| -> Result<f32, ModelError> {
        Ok(keys.optional_number(name, 1e-3, 1e6)?.unwrap_or(default))
    };
    // The paper's numbers, which converters leave out.
    let (fast, slow) =
        (turns("rope.scaling.yarn_beta_fast", 32.0)?, turns("rope.scaling.yarn_beta_slow", 1.0)?);
    if fast < slow {
        return Err(keys.unsupported(format!(
            "{} is {fast}, less than {}, which is {slow}",
            keys.full("rope.scaling.yarn_beta_fast"),
            keys.full("rope.scaling.yarn_beta_slow")
        )));
    }
    let scaling = Scaling::Yarn { factor, original: keys.size(ORIGINAL, 1 << 28)?, fast, slow };
    Ok((scaling, Divisors::Freqs, 1.0 + 0.1 * factor.ln()))
}

fn long_or_short(keys: &Keys<'_>) -> Result<(Scaling, Divisors, f32), ModelError> {
    let divisors = Divisors::LongOrShort { original: keys.size(ORIGINAL, 1 << 28)? };
    Ok((Scaling::None, divisors, keys.number(STRENGTH, 1.0, 100.0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: Scaling) -> Rope {
        let (pairing, divisors) = (Pairing::RotatedHalves, Divisors::Freqs);
        Rope { base: 1e6, series: 128, pairs: 64, pairing, scaling, divisors, strength: 1.0 }
    }

    #[test]
    fn yarn_leaves_fast_pairs_and_divides_slow_ones() {
        let plain = rope(Scaling::None).frequencies(None);
        let scaled = rope(Scaling::Yarn { factor: 4.0, original: 32768, fast: 32.0, slow: 1.0 });
        let scaled = scaled.frequencies(None);
        // A pair turns 32768 base^(-i/64) / 2 pi times: 32 times at i = 23.59, once at 39.64.
        for i in 0..64 {
            let share = ((i as f32 - 23.0) / 17.0).clamp(0.0, 1.0);
            let expected = plain[i] * (1.0 - share * 0.75);
            assert!((scaled[i] / expected - 1.0).abs() < 1e-5, "pair {i}: {} and {expected}", scaled[i]);
        }
        assert_eq!(scaled[..24], plain[..24]);
        assert_eq!(scaled[40], plain[40] / 4.0);
    }

    #[test]
    fn linear_factors_and_divisors_divide_together() {
        let plain = rope(Scaling::None).frequencies(None);
        let divisors: Vec<f32> = (0..64).map(|i| if i < 32 { 1.0 } else { 8.0 }).collect();
        let scaled = rope(Scaling::Linear { factor: 2.0 }).frequencies(Some(&divisors));
        assert_eq!(scaled[31], plain[31] / 2.0);
        assert_eq!(scaled[32], plain[32] / 16.0);
    }

    #[test]
    fn long_contexts_have_their_own_divisors() {
        let divisors = Divisors::LongOrShort { original: 4096 };
        assert_eq!(divisors.tensor(4096), Some(SHORT));
        assert_eq!(divisors.tensor(4097), Some(LONG));
    }
}
