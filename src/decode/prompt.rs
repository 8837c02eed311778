//! What every backend asks of a prompt before it begins.

use super::BackendError;
use crate::model::ModelError;

/// Refuses a prompt that has no tokens, leaves no room in a context of that many positions, or has ids past the
/// vocabulary.
///
/// # Errors
/// Which of these it is.
pub(super) fn check_prompt(prompt: &[u32], context: usize, vocabulary: usize) -> Result<(), BackendError> {
    if prompt.is_empty() {
        return Err("the prompt has no tokens".into());
    }
    if prompt.len() >= context {
        return Err(ModelError::PastContext { position: context, context }.into());
    }
    match prompt.iter().find(|&&id| id as usize >= vocabulary) {
        Some(&id) => Err(ModelError::UnknownToken { id, vocabulary }.into()),
        None => Ok(()),
    }
}

/// How many tokens of the prompt, from its start, the cache holds.
pub(super) fn common_prefix(cached: &[u32], prompt: &[u32]) -> usize {
    cached.iter().zip(prompt).take_while(|(a, b)| a == b).count()
}
