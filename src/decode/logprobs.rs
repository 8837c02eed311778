//! Log-probabilities of tokens: the model's own distribution, at temperature 1, before biases, penalties, constraints and
//! filters.

/// What the model gave a token, and what it would have liked best instead.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: u32,
    /// The natural logarithm of its probability.
    pub logprob: f64,
    /// The most probable tokens of its place with their log-probabilities, best first; of equals the lower id.
    pub top: Vec<(u32, f64)>,
}

/// Logits this far below the largest add nothing to the sum that a double could hold.
const NEGLIGIBLE: f32 = -60.0;

impl TokenLogprobs {
    /// Of a token in a row of logits, all of them finite, with the `most` most probable ones.
    pub(super) fn of(logits: &[f32], token: u32, most: usize) -> Self {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits
            .iter()
            .map(|logit| logit - largest)
            .filter(|below| *below > NEGLIGIBLE)
            .map(|below| f64::from(below).exp())
            .sum();
        let whole = f64::from(largest) + sum.ln();
        let logprob = |logit: f32| f64::from(logit) - whole;
        let chosen = logits.get(token as usize).copied().map_or(f64::NEG_INFINITY, logprob);
        let top = best(logits, most).into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
        Self { token, logprob: chosen, top }
    }
}

/// The `most` largest logits, of equals those with lower ids.
fn best(logits: &[f32], most: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(most + 1);
    if most == 0 {
        return best;
    }
    let mut least = f32::NEG_INFINITY;
    for (token, &logit) in (0..).zip(logits) {
        if best.len() == most && logit <= least {
            continue;
        }
        // Behind its equals, which came earlier.
        let place = best.partition_point(|&(_, other)| other >= logit);
        best.insert(place, (token, logit));
        best.truncate(most);
        least = best.last().map_or(f32::NEG_INFINITY, |&(_, logit)| logit);
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_of_all_tokens_add_up_to_one() {
        let logits: Vec<f32> = (0..500u32).map(|i| ((i * 7919) % 613) as f32 * 0.05 - 9.0).collect();
        let told = TokenLogprobs::of(&logits, 17, 500);
        let sum: f64 = told.top.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{sum}");
        assert!(told.top.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0)));
        let own = told.top.iter().find(|(token, _)| *token == 17).unwrap();
        assert_eq!(own.1, told.logprob);
        let few = TokenLogprobs::of(&logits, 17, 5);
        assert_eq!(few.top, told.top[..5]);
        assert_eq!((few.logprob, TokenLogprobs::of(&logits, 17, 0).top.len()), (told.logprob, 0));
    }

    #[test]
    fn far_off_logits_do_no_harm() {
        let told = TokenLogprobs::of(&[3e38, -3e38, 0.0], 1, 2);
        assert_eq!(told.top[0], (0, 0.0));
        assert!(told.logprob < -1e38);
        assert_eq!(
            TokenLogprobs::of(&[2.0; 4], 3, 4).top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            [0, 1, 2, 3]
        );
    }
}
