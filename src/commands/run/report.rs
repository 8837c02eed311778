//! What an answer took: lines for people, an object for programs.

use std::io::{self, Write};

use axe::engine::{FinishReason, Model, Stats, Usage};
use serde_json::{Value, json};

/// A whole answer.
pub(super) struct Answer {
    /// What the model said.
    pub(super) text: String,
    /// What it thought, where it has a thinking channel.
    pub(super) reasoning: String,
    /// Every token, end token and thoughts included.
    pub(super) tokens: Vec<u32>,
    pub(super) reason: FinishReason,
    pub(super) usage: Usage,
    pub(super) stats: Stats,
}

impl Answer {
    /// Whether it was stopped from outside.
    pub(super) fn cancelled(&self) -> bool {
        matches!(self.reason, FinishReason::Cancelled(_))
    }

    fn reason(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop | FinishReason::ToolCalls => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled(_) => "cancelled",
            FinishReason::Error(_) => "error",
        }
    }
}

/// The answer as one object.
pub(super) fn json(model: &Model, answer: &Answer, seed: u64, load_s: f64) -> Value {
    let mut object = json!({
        "model": model.name,
        "kind": model.kind.name(),
        "device": model.device,
        "context_length": model.context_length,
        "text": answer.text,
    });
    if !answer.reasoning.is_empty() {
        object["reasoning"] = answer.reasoning.clone().into();
    }
    object["tokens"] = answer.tokens.clone().into();
    object["finish_reason"] = answer.reason().into();
    object["seed"] = seed.into();
    object["load_s"] = load_s.into();
    object["usage"] = json!(answer.usage);
    object["stats"] = json!(answer.stats);
    object
}

/// What it took, on standard error. An answer that came out is no failure because this cannot be told.
pub(super) fn tell(answer: &Answer, seed: u64) {
    let _told = lines(answer, seed, &mut io::stderr());
}

/// What it took, in a few lines.
fn lines(answer: &Answer, seed: u64, out: &mut impl Write) -> io::Result<()> {
    let Answer { usage, stats, .. } = answer;
    let encoded = usage.prompt_tokens - usage.cached_tokens;
    write!(out, "prompt    {encoded} tokens in {:.2} s", stats.prefill_s)?;
    if stats.prefill_s > 0.0 {
        write!(out, ", {:.1} t/s", encoded as f64 / stats.prefill_s)?;
    }
    if usage.cached_tokens > 0 {
        write!(out, "; {} more were in the cache", usage.cached_tokens)?;
    }
    writeln!(out)?;
    write!(out, "answer    {} tokens", usage.completion_tokens)?;
    if usage.reasoning_tokens > 0 {
        write!(out, " ({} of them thoughts)", usage.reasoning_tokens)?;
    }
    // One token has no rate.
    if stats.tokens_per_s > 0.0 {
        write!(out, ", {:.1} t/s", stats.tokens_per_s)?;
    }
    writeln!(
        out,
        ", {} passes, {:.2} tokens a pass; ended: {}",
        stats.passes,
        stats.tokens_per_pass,
        answer.reason()
    )?;
    if let Some(denoising) = &stats.denoising {
        let steps: Vec<String> = stats.canvas_steps.iter().map(usize::to_string).collect();
        write!(out, "denoised  {} steps, {} canvases", denoising.steps, denoising.canvases)?;
        if !steps.is_empty() {
            write!(out, " ({})", steps.join(", "))?;
        }
        writeln!(out)?;
    }
    let guesses = stats.blocks.iter().flat_map(|blocks| &blocks.proposers).filter(|made| made.offered > 0);
    let guesses: Vec<String> =
        guesses.map(|made| format!("{} {} of {}", made.name, made.accepted, made.offered)).collect();
    if !guesses.is_empty() {
        writeln!(out, "guesses   {}", guesses.join(", "))?;
    }
    writeln!(out, "seed      {seed}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axe::decode::{BlockStats, DenoisingStats, ProposerStats};

    #[test]
    fn lines_tell_what_there_is_to_tell() {
        let mut answer = Answer {
            text: "Paris".to_owned(),
            reasoning: String::new(),
            tokens: vec![1, 2],
            reason: FinishReason::Stop,
            usage: Usage { prompt_tokens: 30, completion_tokens: 2, cached_tokens: 10, reasoning_tokens: 0 },
            stats: Stats { prefill_s: 0.5, passes: 2, tokens_per_pass: 1.0, ..Stats::default() },
        };
        let told = |answer: &Answer| {
            let mut out = Vec::new();
            lines(answer, 7, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            told(&answer),
            "prompt    20 tokens in 0.50 s, 40.0 t/s; 10 more were in the cache\n\
             answer    2 tokens, 2 passes, 1.00 tokens a pass; ended: stop\n\
             seed      7\n"
        );
        answer.stats.tokens_per_s = 12.34;
        assert!(told(&answer).contains("answer    2 tokens, 12.3 t/s, 2 passes"), "{}", told(&answer));
        let made = |name, offered, accepted| ProposerStats { name, offered, accepted };
        let proposers = vec![made("lookup", 9, 7), made("recycled", 0, 0), made("fixed point", 4, 1)];
        answer.stats.blocks = Some(BlockStats { proposers, ..BlockStats::default() });
        assert!(told(&answer).contains("guesses   lookup 7 of 9, fixed point 1 of 4\n"), "{}", told(&answer));
        let denoising = DenoisingStats { steps: 9, canvases: 2, accepted: Vec::new() };
        answer.stats = Stats { denoising: Some(denoising), canvas_steps: vec![4, 5], ..answer.stats };
        assert!(told(&answer).contains("denoised  9 steps, 2 canvases (4, 5)\n"), "{}", told(&answer));
    }
}
