//! Damaged weights behind wrong guesses: what is refused must not spoil what is kept, on real kernels.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod block_support;
#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;
#[path = "support/edited_gguf.rs"]
mod edited_gguf;
mod support;

use std::path::Path;

use axe::decode::{Backend, BlockOptions, CausalBackend, Sampling, Step, Wanted};
use axe::ops::CacheKind;
use block_support::{fixed, generate, most};
use edited_gguf::Edited;
use support::{fixture, open_model};

/// Tokens of a reply.
const TOKENS: usize = 60;

fn backend(path: &Path, options: BlockOptions) -> CausalBackend {
    CausalBackend::new(open_model(path, 256, 64, CacheKind::F16), options)
}

/// The first guesses of each pass that were wrong.
fn wrong_guesses(backend: &mut CausalBackend, prompt: &[u32], sampling: &Sampling) -> Vec<u32> {
    let mut generation = backend.start(prompt, sampling).unwrap();
    generation.want(Wanted { drafts: true, ..most(TOKENS) });
    let (mut wrong, mut shown, mut tokens) = (Vec::new(), Vec::new(), 0);
    while tokens < TOKENS {
        match generation.step().unwrap() {
            Step::Draft { tokens, .. } => shown = tokens,
            Step::Commit(new) => {
                tokens += new.len();
                wrong.extend(shown.get(new.len() - 1));
                shown.clear();
            }
            Step::Prefill { .. } => {}
        }
    }
    wrong
}

#[test]
fn embeddings_that_are_no_numbers_behind_wrong_guesses_change_nothing() {
    let clean = Edited::of(&fixture("causal-families/llama.gguf"));
    let (_dir, path) = clean.save();
    let mut poisoned = 0;
    for seed in 0..4u64 {
        let temperature = 0.7 * (seed % 2) as f32;
        let sampling = Sampling { temperature, seed, ..Sampling::default() };
        let prompt: Vec<u32> = (0..24).map(|i| 3 + (i * i * 7 + i * 3 + seed as u32 * 11) % 40).collect();
        let expected = generate(&mut backend(&path, fixed(1)), &prompt, &sampling, &most(TOKENS)).tokens;
        let wrong = wrong_guesses(&mut backend(&path, fixed(8)), &prompt, &sampling);
        let harmless = |token: &&u32| !prompt.contains(token) && !expected.contains(token);
        let Some(&token) = wrong.iter().find(harmless) else { continue };
        let mut embeddings = clean.get("token_embd.weight").clone();
        let width = embeddings.shape[0] as usize;
        embeddings.values[token as usize * width..][..width].fill(f32::NAN);
        let damaged = clean.clone().tensor("token_embd.weight", &embeddings.shape, embeddings.values);
        let (_dir, path) = damaged.save();
        for options in [fixed(1), fixed(2), fixed(8), fixed(16)] {
            let mut backend = backend(&path, options);
            let told = generate(&mut backend, &prompt, &sampling, &most(TOKENS));
            assert_eq!(told.tokens, expected, "seed {seed}, {options:?}, token {token}");
            // What the cache holds of it now is as good as ever.
            let again = generate(&mut backend, &prompt, &sampling, &most(TOKENS));
            assert_eq!(again.tokens, expected, "again: seed {seed}, {options:?}, token {token}");
        }
        let mut guesser = backend(&path, fixed(8));
        poisoned += usize::from(wrong_guesses(&mut guesser, &prompt, &sampling).contains(&token));
        // A reply that needs the token itself ends with an error, at every width.
        for options in [fixed(1), fixed(8)] {
            let mut backend = backend(&path, options);
            let mut generation = backend.start(&[prompt.as_slice(), &[token]].concat(), &sampling).unwrap();
            let failed = (0..4).find_map(|_| generation.step().err());
            assert!(failed.is_some_and(|error| error.to_string().contains("NaN")), "{options:?}");
        }
    }
    assert!(poisoned > 0, "no damaged row was ever evaluated");
}
