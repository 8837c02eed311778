//! A short measurement through the daemon's own queue, on prompts that say nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axectl::protocol::{Bench, BenchRequest, Round};
use axum::http::StatusCode;

use super::routes::{Failure, failure};
use super::{Board, Reloading};
use crate::decode::Sampling;
use crate::engine::{Event, FinishReason, Model, Request, Stop, SubmitError};

/// Most rounds of one call: the slot is everybody's.
const MOST_ROUNDS: usize = 20;

/// A round that waited so long for the slot, in seconds, shared the machine with others.
const WAITED: f64 = 0.05;

/// Runs since the start, which the identifiers of their jobs tell apart.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// Measures, one round after the other; whoever leaves meanwhile ends it. Reloads do not wait for it: it is refused while
/// one is at hand, and ends with an error if the model is changed.
pub(super) async fn run(board: &Board, asked: BenchRequest) -> Result<Bench, Failure> {
    let unavailable = |text: String| failure(StatusCode::SERVICE_UNAVAILABLE, "unavailable", text);
    board.engine().accepting().map_err(|error| unavailable(error.to_string()))?;
    let model = board.engine().model().ok_or_else(|| unavailable("no model is loaded".to_owned()))?;
    check(&asked, &model).map_err(|text| failure(StatusCode::BAD_REQUEST, "bad_request", text))?;
    if matches!(board.reload(), Reloading::Since(_)) {
        let text = "a reload is at hand, which takes its share of the machine; measure when it is over (`axectl status`)";
        return Err(failure(StatusCode::CONFLICT, "reloading", text));
    }
    let run = RUNS.fetch_add(1, Ordering::Relaxed) + 1;
    let began = Instant::now();
    let before = board.status();
    let busy = before.running.is_some() || before.waiting > 0;
    let mut rounds = Vec::with_capacity(asked.rounds);
    for number in 0..=asked.rounds {
        let round = measure(board, &model, &asked, (run, number)).await?;
        // The first wakes clocks and caches.
        if number > 0 {
            rounds.push(round);
        }
    }
    let mut warnings = Vec::new();
    if busy || rounds.iter().any(|round| round.queue_s > WAITED) {
        warnings
            .push("other requests ran or waited meanwhile: measure again when the daemon is idle".to_owned());
    }
    if board.changed_since(began) {
        warnings.push("the configuration was reloaded meanwhile: measure again".to_owned());
    }
    if before.version.build.starts_with("debug") {
        warnings.push("this is a debug build: its host code is slow".to_owned());
    }
    let rates = |rate: fn(&Round) -> f64| median(rounds.iter().map(rate).collect());
    Ok(Bench {
        version: before.version,
        device: before.device,
        model: before.model,
        prefill_tokens_per_s: rates(|round| round.prompt_tokens as f64 / round.prefill_s.max(1e-9)),
        decode_tokens_per_s: rates(|round| round.tokens_per_s),
        rounds,
        warnings,
    })
}

fn check(asked: &BenchRequest, model: &Model) -> Result<(), String> {
    let BenchRequest { prompt_tokens, completion_tokens, rounds } = *asked;
    let context = model.context_length;
    if prompt_tokens == 0
        || completion_tokens < 2
        || prompt_tokens.saturating_add(completion_tokens) > context
    {
        return Err(format!(
            "prompt_tokens {prompt_tokens} and completion_tokens {completion_tokens}: expected at least 1 and at \
             least 2, and together no more than the context's {context} tokens"
        ));
    }
    if !(1..=MOST_ROUNDS).contains(&rounds) {
        return Err(format!("rounds {rounds}: expected 1 to {MOST_ROUNDS}"));
    }
    Ok(())
}

async fn measure(
    board: &Board,
    model: &Arc<Model>,
    asked: &BenchRequest,
    (run, number): (u64, usize),
) -> Result<Round, Failure> {
    let request = Request {
        id: format!("bench-{run}-{number}"),
        prompt: prompt(asked.prompt_tokens, model.tokenizer.vocab_size(), number),
        // Not greedy: models repeat themselves then, which guesses get right more often than any text.
        sampling: Sampling { temperature: 1.0, seed: number as u64, ..Sampling::default() },
        stop: Stop { max_tokens: asked.completion_tokens, ignore_eos: true, ..Stop::default() },
        ..Request::default()
    };
    let failed = |text: String| {
        failure(StatusCode::INTERNAL_SERVER_ERROR, "failed", format!("round {number}: {text}"))
    };
    let refused = |error: SubmitError| match error {
        SubmitError::QueueFull { .. } => failure(StatusCode::SERVICE_UNAVAILABLE, "busy", error.to_string()),
        error => failed(error.to_string()),
    };
    // Token ids are for this model alone.
    let pass = board.engine().enter().await.map_err(refused)?;
    if !board.engine().model().is_some_and(|now| Arc::ptr_eq(&now, model)) {
        let text = format!(
            "before round {number} a reload has put another model in the place of this one; measure again"
        );
        return Err(failure(StatusCode::CONFLICT, "reloaded", text));
    }
    let mut job = board.engine().submit(request).map_err(refused)?;
    drop(pass);
    while let Some(event) = job.events.recv().await {
        let Event::Finish { reason, usage, stats } = event else { continue };
        return match reason {
            FinishReason::Stop | FinishReason::Length => Ok(Round {
                prompt_tokens: usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens),
                prefill_s: stats.prefill_s,
                completion_tokens: usage.completion_tokens,
                passes: stats.passes,
                tokens_per_s: stats.tokens_per_s,
                queue_s: stats.queue_s,
            }),
            FinishReason::Error(error) => Err(failed(error)),
            other => Err(failed(format!("it was ended: {other:?}"))),
        };
    }
    Err(failed("the engine ended".to_owned()))
}

/// Tokens that begin differently in each round, so that nothing of the round before can be used again.
fn prompt(tokens: usize, vocabulary: usize, round: usize) -> Vec<u32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(round as u64 + 1);
    (0..tokens)
        .map(|_| {
            // Constants of Knuth's MMIX generator; the upper bits are the better ones.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from((state >> 33) % vocabulary.max(1) as u64).unwrap_or(0)
        })
        .collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_begin_differently_and_stay_inside_the_vocabulary() {
        let prompts: Vec<_> = (0..5).map(|round| prompt(100, 50_000, round)).collect();
        for (i, one) in prompts.iter().enumerate() {
            assert!(one.iter().all(|&id| id < 50_000));
            assert!(prompts[..i].iter().all(|other| other[0] != one[0]));
        }
        assert_eq!(prompts[1], prompt(100, 50_000, 1));
        assert_eq!(prompt(3, 1, 7), [0, 0, 0]);
    }

    #[test]
    fn the_median_is_the_middle_one() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
