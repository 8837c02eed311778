//! Tables of angles: cosine and sine of each position and pair, for each rotary embedding of a model.

use super::finder::Finder;
use crate::device::{Buffer, Device, Purpose};
use crate::model::config::{CausalConfig, Divisors, FREQS, LONG, Rope, SHORT};
use crate::model::error::ModelError;

/// For each rotary embedding, by what its frequencies are divided in a context of so many positions.
///
/// # Errors
/// Tensors that are missing, of another shape, or with divisors that are no numbers above 0.
pub(super) fn divisors(
    finder: &mut Finder<'_>,
    config: &CausalConfig,
    context: usize,
) -> Result<Vec<Option<Vec<f32>>>, ModelError> {
    let of = |rope: &Rope| match rope.divisors {
        Divisors::Freqs if finder.has(FREQS) => Ok(Some(read(finder, FREQS, rope)?)),
        Divisors::None | Divisors::Freqs => Ok(None),
        Divisors::LongOrShort { original } => {
            let (long, short) = (read(finder, LONG, rope)?, read(finder, SHORT, rope)?);
            Ok(Some(if context > original { long } else { short }))
        }
    };
    config.ropes.iter().map(of).collect()
}

/// A tensor's divisors of the pairs that turn.
fn read(finder: &mut Finder<'_>, name: &str, rope: &Rope) -> Result<Vec<f32>, ModelError> {
    let mut values = finder.values(name, rope.series / 2)?;
    values.truncate(rope.pairs);
    match values.iter().position(|value| !(value.is_finite() && *value > 0.0)) {
        None => Ok(values),
        Some(at) => Err(finder.unsupported(format!(
            "{name} divides frequency {at} by {}; expected a number above 0",
            values[at]
        ))),
    }
}

/// Cosine and sine of every position's angles, `[position][pair][2]`. Angles are products in f32 of position and
/// frequency, as in the reference implementations.
///
/// # Errors
/// No memory.
pub(super) fn angles(
    device: &Device,
    rope: &Rope,
    divisors: Option<&[f32]>,
    positions: usize,
) -> Result<Buffer, ModelError> {
    let frequencies = rope.frequencies(divisors);
    let strength = f64::from(rope.strength);
    let table: Vec<f32> = (0..positions)
        .flat_map(|position| {
            frequencies.iter().flat_map(move |frequency| {
                let angle = f64::from(position as f32 * frequency);
                [(angle.cos() * strength) as f32, (angle.sin() * strength) as f32]
            })
        })
        .collect();
    let buffer = device.alloc(Purpose::Scratch, table.len().max(1) * 4)?;
    device.write(&buffer, 0, bytemuck::cast_slice(&table))?;
    Ok(buffer)
}

/// Bytes of the tables of all rotary embeddings.
pub(super) fn angle_bytes(config: &CausalConfig, positions: usize) -> usize {
    config.ropes.iter().map(|rope| (positions * rope.pairs * 8).max(4)).sum()
}
