//! What the metadata says about attention: heads, their sizes, and which layers see a window.

use super::families::{Family, Scores, SoftCaps, Windows};
use super::reader::Keys;
use crate::checkpoint::gguf::Value;
use crate::model::error::ModelError;
use crate::ops::MOST_HEAD_SIZE;

/// Most heads of a layer.
const MOST_HEADS: usize = 4096;

/// Heads by layer, or one number for all.
const KV: &str = "attention.head_count_kv";

/// Heads of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadCounts {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

/// Query and key-value heads of each layer.
pub(super) fn heads(keys: &Keys<'_>, layers: usize) -> Result<Vec<HeadCounts>, ModelError> {
    let heads = keys.sizes("attention.head_count", layers, MOST_HEADS)?;
    let kv_heads = keys.optional_sizes(KV, layers, MOST_HEADS)?.unwrap_or_else(|| heads.clone());
    heads
        .into_iter()
        .zip(kv_heads)
        .map(|(heads, kv_heads)| {
            if heads.is_multiple_of(kv_heads) {
                return Ok(HeadCounts { heads, kv_heads });
            }
            Err(keys.unsupported(format!(
                "{heads} query heads cannot share {kv_heads} key-value heads evenly ({})",
                keys.full(KV)
            )))
        })
        .collect()
}

/// Values of a head, the same for keys and values, in layers that see everything and in those that see a window.
pub(super) fn head_sizes(
    keys: &Keys<'_>,
    family: &Family,
    hidden: usize,
    heads: usize,
) -> Result<(usize, usize), ModelError> {
    const KEYS: &str = "attention.key_length";
    const SLIDING_KEYS: &str = "attention.key_length_swa";
    let size = match keys.optional_size(KEYS, MOST_HEAD_SIZE)? {
        Some(size) => size,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.unsupported(format!(
                "{} is missing and {hidden} values do not divide into {heads} heads",
                keys.full(KEYS)
            )));
        }
    };
    check_size(keys, size, "attention.value_length")?;
    if !matches!(family.windows, Windows::Listed { .. }) {
        return Ok((size, size));
    }
    let sliding = keys.size(SLIDING_KEYS, MOST_HEAD_SIZE)?;
    check_size(keys, sliding, "attention.value_length_swa")?;
    Ok((size, sliding))
}

/// Heads must have a size that kernels can take, and values that of keys.
fn check_size(keys: &Keys<'_>, size: usize, values: &str) -> Result<(), ModelError> {
    if !size.is_multiple_of(16) || size > MOST_HEAD_SIZE {
        return Err(keys.unsupported(format!(
            "a head size of {size}; multiples of 16 up to {MOST_HEAD_SIZE} are supported"
        )));
    }
    match keys.optional_count(values)? {
        Some(value_size) if value_size != size => Err(keys.unsupported(format!(
            "{} is {value_size}, keys have {size} values; equal sizes are supported",
            keys.full(values)
        ))),
        _ => Ok(()),
    }
}

/// The window of each layer; none where it sees everything.
pub(super) fn windows(
    keys: &Keys<'_>,
    family: &Family,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    const LONGEST: usize = 1 << 24;
    let slides = match family.windows {
        Windows::Nowhere => return Ok(vec![None; layers]),
        Windows::Everywhere => vec![!matches!(keys.optional_count(WINDOW)?, None | Some(0)); layers],
        Windows::Alternating { full_every, .. } => {
            let every = |n: usize| (1..=layers).map(|number| n == 0 || !number.is_multiple_of(n)).collect();
            match keys.get(PATTERN) {
                Some(Value::Array(_)) => keys.flags(PATTERN, layers)?,
                Some(_) => every(keys.optional_count(PATTERN)?.unwrap_or(full_every)),
                None => every(full_every),
            }
        }
        Windows::Listed { .. } => keys.flags(PATTERN, layers)?,
    };
    let needed = slides.contains(&true) || family.windows != Windows::Everywhere;
    let window = if needed { Some(keys.size(WINDOW, LONGEST)?) } else { None };
    Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
}

/// What the scores of a model are multiplied by.
pub(super) fn scale(family: &Family, layers: usize, hidden: usize, heads: usize, head_size: usize) -> f32 {
    let size = match family.scores {
        Scores::Plain => return 1.0,
        Scores::ByWidthAt { layers: number } if number == layers => hidden / heads,
        Scores::ByWidthAt { .. } | Scores::ByHead => head_size,
    };
    1.0 / (size as f32).sqrt()
}

/// The soft caps of scores and of logits; 0: none.
pub(super) fn soft_caps(keys: &Keys<'_>, family: &Family) -> Result<(f32, f32), ModelError> {
    let cap = |name: &str| keys.number(name, 1e-3, 1e6);
    Ok(match family.soft_caps {
        SoftCaps::None => (0.0, 0.0),
        SoftCaps::Logits => (0.0, cap("final_logit_softcapping")?),
        SoftCaps::LogitsAndScores => (cap("attn_logit_softcapping")?, cap("final_logit_softcapping")?),
    })
}

/// For each layer, the earlier one whose keys and values it looks at; none where it has its own. Of the last layers that
/// have none, each takes those of the last layer before them that sees as much.
pub(super) fn shared(
    keys: &Keys<'_>,
    family: &Family,
    windows: &[Option<usize>],
) -> Result<Vec<Option<usize>>, ModelError> {
    const SHARED: &str = "attention.shared_kv_layers";
    let layers = windows.len();
    let shared = if family.shared_caches { keys.optional_count(SHARED)?.unwrap_or(0) } else { 0 };
    let own = layers.saturating_sub(shared);
    (0..layers)
        .map(|layer| {
            if layer < own {
                return Ok(None);
            }
            match windows[..own].iter().rposition(|window| *window == windows[layer]) {
                Some(from) => Ok(Some(from)),
                None => Err(keys.unsupported(format!(
                    "{} is {shared}; of the {own} layers before them none sees as much as layer {layer}",
                    keys.full(SHARED)
                ))),
            }
        })
        .collect()
}

/// Layers that share a cache must have as many key-value heads as the layer whose cache it is.
pub(super) fn check_shared(
    keys: &Keys<'_>,
    heads: &[HeadCounts],
    shared: &[Option<usize>],
) -> Result<(), ModelError> {
    for (layer, from) in shared.iter().enumerate().filter_map(|(layer, from)| Some((layer, (*from)?))) {
        let (own, theirs) = (heads[layer].kv_heads, heads[from].kv_heads);
        if own != theirs {
            return Err(keys.unsupported(format!(
                "{} is {own} for layer {layer}, which looks at the keys and values of layer {from}, and {theirs} for that",
                keys.full(KV)
            )));
        }
    }
    Ok(())
}
