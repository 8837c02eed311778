//! What the metadata says about multi-head latent attention: keys and values of all heads are made out of one latent.

use super::reader::Keys;
use super::rope::{self, Scaling};
use crate::model::error::ModelError;
use crate::ops::MOST_HEAD_SIZE;

/// Heads over one latent. A query head has `plain` values, which meet keys made out of the latent, and `turns` values that
/// turn and meet a key that all heads share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentConfig {
    /// Values of the latent of keys and values.
    pub size: usize,
    /// Values of a query head that turn.
    pub turns: usize,
    /// Its other values.
    pub plain: usize,
    /// Values of a value head.
    pub value: usize,
    /// Values of the latent that queries are made out of; none: they are made out of the stream.
    pub query: Option<usize>,
}

impl LatentConfig {
    /// Values of a query head as its matrix makes it.
    pub fn query_head(&self) -> usize {
        self.plain + self.turns
    }
}

/// Sizes of the heads.
pub(super) fn read(keys: &Keys<'_>) -> Result<LatentConfig, ModelError> {
    const LATENT: &str = "attention.kv_lora_rank";
    let size = keys.size(LATENT, MOST_HEAD_SIZE)?;
    let turns = keys.size("rope.dimension_count", MOST_HEAD_SIZE)?;
    // Newer files say of the heads that attention sees one key of latent and turning values, and give the heads' own
    // sizes under other names.
    let of_head = |name: &str, newer: &str| -> Result<usize, ModelError> {
        let plain = keys.size(name, MOST_HEAD_SIZE)?;
        Ok(keys.optional_size(newer, MOST_HEAD_SIZE)?.unwrap_or(plain))
    };
    let key = of_head("attention.key_length", "attention.key_length_mla")?;
    let value = of_head("attention.value_length", "attention.value_length_mla")?;
    let config = LatentConfig {
        size,
        turns,
        plain: key.saturating_sub(turns),
        value,
        query: keys.optional_size("attention.q_lora_rank", 1 << 14)?,
    };
    if size + turns > MOST_HEAD_SIZE {
        return Err(keys.unsupported(format!(
            "{} is {size}, and {turns} values turn; {MOST_HEAD_SIZE} together are supported",
            keys.full(LATENT)
        )));
    }
    let sizes = [size, turns, config.plain, value];
    if sizes.iter().all(|size| *size > 0 && size.is_multiple_of(16)) {
        return Ok(config);
    }
    Err(keys.unsupported(format!(
        "{} is {size}, and heads have keys of {key} values, of which {turns} turn, and values of {value}; what turns, what does \
         not, latents and values must be multiples of 16",
        keys.full(LATENT)
    )))
}

/// What scores are multiplied by: longer contexts by YaRN make them steeper.
pub(super) fn scale(keys: &Keys<'_>, latent: &LatentConfig, scaling: Scaling) -> Result<f32, ModelError> {
    let steeper = match scaling {
        Scaling::Yarn { factor, .. } => {
            1.0 + keys.optional_number(rope::LOG_MULTIPLIER, 0.0, 10.0)?.unwrap_or(0.0) * factor.ln()
        }
        _ => 1.0,
    };
    Ok(steeper * steeper / (latent.query_head() as f32).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_head_is_what_turns_and_what_does_not() {
        let latent = LatentConfig { size: 512, turns: 64, plain: 128, value: 128, query: None };
        assert_eq!(latent.query_head(), 192);
    }
}
