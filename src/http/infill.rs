//! Texts with a gap: how each kind of model is asked for what stands between two texts.

use super::error::ApiError;
use crate::engine::{Model, ModelKind};
use crate::text::{Fim, Specials};

/// What a model reads to fill a gap.
pub(super) struct Gapped {
    /// The prompt.
    pub(super) prompt: Vec<u32>,
    /// What stands behind the gap on a canvas; empty where the prompt says it.
    pub(super) suffix: Vec<u32>,
}

/// The gap between `before` (a begin-of-text token, if there is one, at its start) and `suffix`.
///
/// A canvas has the suffix behind the gap, as far as it goes. A causal model is told of both in the tokens that it was
/// trained with for that.
///
/// # Errors
/// A causal model without such tokens.
pub(super) fn gapped(model: &Model, before: Vec<u32>, suffix: &str) -> Result<Gapped, ApiError> {
    let suffix = model.tokenizer.encode(suffix, Specials::Parse);
    match (model.kind, model.tokenizer.fim()) {
        (ModelKind::BlockDiffusion { canvas, .. }, _) => {
            Ok(Gapped { prompt: before, suffix: on_canvas(canvas, suffix) })
        }
        (ModelKind::Causal, Some(fim)) => Ok(told_in_tokens(fim, model.tokenizer.bos(), &before, &suffix)),
        (ModelKind::Causal, None) => Err(ApiError::unsupported(
            "suffix",
            "this model cannot fill a gap: it reads from left to right, and its file names no tokens for the text before \
             and behind one (tokenizer.ggml.fim_pre_token_id, …fim_suf_token_id, …fim_mid_token_id)",
        )),
    }
}

/// What of a suffix can be seen on a canvas: a gap has one row at least.
pub(super) fn on_canvas(canvas: usize, mut suffix: Vec<u32>) -> Vec<u32> {
    suffix.truncate(canvas.saturating_sub(1));
    suffix
}

/// Prefix and suffix, and the token behind which the model writes what stands between them.
pub(super) fn told_in_tokens(fim: Fim, bos: Option<u32>, before: &[u32], suffix: &[u32]) -> Gapped {
    let (begin, before) = before.split_at(usize::from(bos.is_some() && before.first().copied() == bos));
    let prompt = [begin, &[fim.prefix], before, &[fim.suffix], suffix, &[fim.middle]].concat();
    Gapped { prompt, suffix: Vec::new() }
}
