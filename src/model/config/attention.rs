//! What the metadata says about attention: heads, their sizes, and which layers see a window.

use super::families::{Family, Windows};
use super::reader::Keys;
use crate::checkpoint::gguf::Value;
use crate::model::error::ModelError;

/// Most heads of a layer, and most values of a head.
const MOST: usize = 4096;

/// Heads of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HeadCounts {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
}

/// Query and key-value heads of each layer.
pub(super) fn heads(keys: &Keys<'_>, layers: usize) -> Result<Vec<HeadCounts>, ModelError> {
    const KV: &str = "attention.head_count_kv";
    let heads = keys.sizes("attention.head_count", layers, MOST)?;
    let kv_heads = keys.optional_sizes(KV, layers, MOST)?.unwrap_or_else(|| heads.clone());
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

/// Values of a head, the same for keys and values.
pub(super) fn head_size(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    const KEYS: &str = "attention.key_length";
    const VALUES: &str = "attention.value_length";
    let size = match keys.optional_size(KEYS, MOST)? {
        Some(size) => size,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.unsupported(format!(
                "{} is missing and {hidden} values do not divide into {heads} heads",
                keys.full(KEYS)
            )));
        }
    };
    if !size.is_multiple_of(16) {
        return Err(keys.unsupported(format!("a head size of {size}; multiples of 16 are supported")));
    }
    match keys.optional_count(VALUES)? {
        Some(value_size) if value_size != size => Err(keys.unsupported(format!(
            "{} is {value_size}, keys have {size} values; equal sizes are supported",
            keys.full(VALUES)
        ))),
        _ => Ok(size),
    }
}

/// The window of each layer; none where it sees everything.
pub(super) fn windows(
    keys: &Keys<'_>,
    family: &Family,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    const WINDOW: &str = "attention.sliding_window";
    const LONGEST: usize = 1 << 24;
    match family.windows {
        Windows::Everywhere => {
            let window = match keys.optional_count(WINDOW)? {
                None | Some(0) => None,
                Some(_) => Some(keys.size(WINDOW, LONGEST)?),
            };
            Ok(vec![window; layers])
        }
        Windows::Alternating { full_every } => {
            let window = keys.size(WINDOW, LONGEST)?;
            let slides = alternation(keys, layers, full_every)?;
            Ok(slides.into_iter().map(|slides| slides.then_some(window)).collect())
        }
    }
}

/// Which layers of a model that alternates see a window. The file may say every how many one sees everything (0: none
/// does), or of each layer whether it slides.
fn alternation(keys: &Keys<'_>, layers: usize, default: usize) -> Result<Vec<bool>, ModelError> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let every = match keys.get(PATTERN) {
        Some(Value::Array(_)) => return keys.flags(PATTERN, layers),
        Some(_) => keys.optional_count(PATTERN)?.unwrap_or(default),
        None => default,
    };
    Ok((1..=layers).map(|number| every == 0 || !number.is_multiple_of(every)).collect())
}
