//! `axectl bench`

use axectl::protocol::Bench;

use super::{Sheet, lines_of, table};
use crate::units::{known, plain};

/// What was measured, and on what.
pub fn bench(bench: &Bench) -> String {
    let mut rounds = table(["ROUND", "PROMPT", "PREFILL", "REPLY", "PASSES", "DECODE"], 0..6);
    for (number, round) in bench.rounds.iter().enumerate() {
        rounds.add_row([
            (number + 1).to_string(),
            round.prompt_tokens.to_string(),
            format!("{:.1} t/s", round.prompt_tokens as f64 / round.prefill_s.max(1e-9)),
            round.completion_tokens.to_string(),
            round.passes.to_string(),
            format!("{:.1} t/s", round.tokens_per_s),
        ]);
    }
    let mut sheet = Sheet::new();
    sheet.line("Prefill", format!("{:.1} t/s (median)", bench.prefill_tokens_per_s));
    sheet.line("Decode", format!("{:.1} t/s (median)", bench.decode_tokens_per_s));
    sheet.line(
        "Model",
        known(bench.model.as_ref(), |model| {
            format!("{}, {}", plain(&model.name), plain(&model.quantisation))
        }),
    );
    sheet.line(
        "Device",
        known(bench.device.as_ref(), |device| {
            format!("{}, {}, driver {}", plain(&device.name), plain(&device.platform), plain(&device.driver))
        }),
    );
    sheet.line("Build", format!("axed {} ({})", plain(&bench.version.version), plain(&bench.version.build)));
    format!("{}\n\n{}", lines_of(&rounds), sheet.finish(&bench.warnings))
}
