//! What a generation takes over from the one before changes nothing but its time; seeds mean the same every time;
//! memory stays as it is.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::path::{Path, PathBuf};

use axe::checkpoint::gguf::Gguf;
use axe::decode::{Backend, CausalBackend, Sampling, Step};
use axe::model::Logits;
use axe::ops::CacheKind;
use support::{fixture, open_model, real_model};

const CONTEXT: usize = 256;
/// Prompt tokens in a pass: prompts of these tests take several.
const CHUNK: usize = 24;

fn backend(path: &Path) -> CausalBackend {
    CausalBackend::new(open_model(path, CONTEXT, CHUNK, CacheKind::F16))
}

/// Both families, and a real model; all know the ids below 512.
fn models() -> [PathBuf; 3] {
    [
        fixture("causal-families/llama.gguf"),
        fixture("causal-families/gemma3.gguf"),
        real_model("smollm2-135m-instruct-q4_1.gguf"),
    ]
}

fn text(seed: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| 3 + (i * 197 + i * i * 31 + seed * 77) % 500).collect()
}

/// Tokens of a generation, and how many prompt tokens were taken over.
fn generate(
    backend: &mut CausalBackend,
    prompt: &[u32],
    sampling: &Sampling,
    count: usize,
) -> (Vec<u32>, usize) {
    let mut generation = backend.start(prompt, sampling).unwrap();
    let (mut tokens, mut last) = (Vec::new(), 0);
    while tokens.len() < count {
        match generation.step().unwrap() {
            Step::Prefill { done, total } => {
                assert!(
                    done > last && done <= total && total == prompt.len(),
                    "{done} of {total} after {last}"
                );
                assert!(tokens.is_empty());
                last = done;
            }
            Step::Commit(new) => tokens.extend(new),
            Step::Draft { .. } => panic!("a causal model has no drafts"),
        }
    }
    (tokens, generation.cached_tokens())
}

/// A sampling under which the last bit of a logit can decide.
fn warm(seed: u64) -> Sampling {
    Sampling { temperature: 1.5, seed, ..Sampling::default() }
}

#[test]
fn reuse_of_a_prefix_gives_the_tokens_of_a_cold_run() {
    for path in models() {
        let mut reused = backend(&path);
        let before = text(1, 90);
        let mut diverging = before.clone();
        diverging[45] += 1;
        let longer: Vec<u32> = before.iter().chain(&text(2, 31)).copied().collect();
        // Prompt, and tokens of it that the cache must already hold after `before` and its reply.
        let cases: [(&str, Vec<u32>, usize); 8] = [
            ("the same again", before.clone(), 89),
            ("one token left", before[..89].iter().copied().chain([7]).collect(), 89),
            ("several left", longer.clone(), 90),
            ("shorter", before[..50].to_vec(), 49),
            ("one token", before[..1].to_vec(), 0),
            ("diverging in the middle", diverging, 45),
            ("nothing in common", text(9, 70), 0),
            ("as long as a chunk after it", before.iter().chain(&text(3, CHUNK)).copied().collect(), 90),
        ];
        for (what, prompt, least) in cases {
            let mut cold = backend(&path);
            for sampling in [Sampling::default(), warm(5)] {
                let (expected, none) = generate(&mut cold, &prompt, &sampling, 12);
                assert_eq!(none, 0, "nothing can be taken over");
                generate(&mut cold, &[2], &sampling, 1); // no prompt of the tests starts like this
                generate(&mut reused, &before, &warm(3), 9);
                let (found, cached) = generate(&mut reused, &prompt, &sampling, 12);
                assert!(
                    cached >= least && cached < prompt.len(),
                    "{what}: {cached} tokens of the cache used"
                );
                assert_eq!(found, expected, "{} after a prefix: {what}", path.display());
            }
        }
        // The next turn of a conversation: prompt, reply and more.
        let (reply, _) = generate(&mut reused, &before, &Sampling::default(), 8);
        let turn: Vec<u32> = before.iter().chain(&reply).chain(&text(4, 20)).copied().collect();
        let (found, cached) = generate(&mut reused, &turn, &Sampling::default(), 8);
        // The last token of a reply is chosen, but nothing has run on it.
        assert!(cached >= before.len() + reply.len() - 1, "{cached} of {} and a reply", before.len());
        assert_eq!(found, generate(&mut backend(&path), &turn, &Sampling::default(), 8).0);
    }
}

#[test]
fn a_generation_dropped_in_its_prompt_leaves_a_cache_that_can_be_trusted() {
    for path in models() {
        let mut used = backend(&path);
        let prompt = text(6, 80);
        let expected = generate(&mut backend(&path), &prompt, &Sampling::default(), 6).0;
        for steps in 0..4 {
            generate(&mut used, &text(7, 60), &Sampling::default(), 3);
            let mut generation = used.start(&prompt, &Sampling::default()).unwrap();
            for _ in 0..steps {
                assert!(matches!(generation.step().unwrap(), Step::Prefill { .. }));
            }
            drop(generation);
            let (found, cached) = generate(&mut used, &prompt, &Sampling::default(), 6);
            assert_eq!(found, expected, "{} after {steps} chunks", path.display());
            assert_eq!(cached, steps * CHUNK, "chunks that have run are not run again");
        }
    }
}

#[test]
fn refused_prompts_leave_the_cache_alone() {
    let path = fixture("causal-families/llama.gguf");
    let mut used = backend(&path);
    let prompt = text(1, 40);
    let (expected, _) = generate(&mut used, &prompt, &Sampling::default(), 5);
    let refused = |used: &mut CausalBackend, prompt: &[u32]| match used.start(prompt, &Sampling::default()) {
        Ok(_) => panic!("{} tokens are taken", prompt.len()),
        Err(error) => error.to_string(),
    };
    assert!(refused(&mut used, &[]).contains("no tokens"));
    assert!(refused(&mut used, &text(1, CONTEXT)).contains("256"));
    assert!(refused(&mut used, &[1, 512]).contains("512"));
    let (found, cached) = generate(&mut used, &prompt, &Sampling::default(), 5);
    assert_eq!((found, cached), (expected, 39));
}

#[test]
fn rows_without_a_token_are_neither_taken_nor_generated() {
    let path = fixture("causal-families/llama.gguf");
    let (prompt, sampling) = (text(1, 40).iter().map(|id| id % 100).collect::<Vec<_>>(), warm(1));
    let all = generate(&mut backend(&path), &prompt, &sampling, 30).0;
    assert!(all.iter().any(|&id| id >= 100));
    let mut few = backend(&path).with_vocabulary(100);
    let found = generate(&mut few, &prompt, &sampling, 30).0;
    assert!(found.iter().all(|&id| id < 100), "{found:?}");
    let error = few.start(&[1, 100], &sampling).err().map(|error| error.to_string()).unwrap();
    assert!(error.contains("100"), "{error}");
}

/// A copy of a model whose last norm is not a number, in a folder that lives as long as the first part.
fn broken(path: &Path) -> (tempfile::TempDir, PathBuf) {
    let gguf = Gguf::open(path).unwrap();
    let norm = gguf.tensor("output_norm.weight").unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    let at = norm.range().start;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("model.gguf");
    std::fs::write(&copy, bytes).unwrap();
    (dir, copy)
}

#[test]
fn nothing_is_taken_over_from_a_generation_that_failed() {
    let (_dir, path) = broken(&fixture("causal-families/llama.gguf"));
    let mut backend = backend(&path);
    for _ in 0..2 {
        let mut generation = backend.start(&text(1, 10), &Sampling::default()).unwrap();
        assert_eq!(generation.cached_tokens(), 0);
        assert!(matches!(generation.step().unwrap(), Step::Prefill { done: 10, total: 10 }));
        let error = generation.step().unwrap_err().to_string();
        assert!(error.contains("NaN"), "{error}");
    }
}

#[test]
fn the_context_can_be_filled_to_its_last_position_and_not_past_it() {
    for path in &models()[..2] {
        let mut backend = backend(path);
        let prompt = text(8, CONTEXT - 1);
        let mut generation = backend.start(&prompt, &Sampling::default()).unwrap();
        let mut tokens = 0;
        let error = loop {
            match generation.step() {
                Ok(Step::Commit(new)) => tokens += new.len(),
                Ok(_) => {}
                Err(error) => break error.to_string(),
            }
            assert!(tokens <= 2, "tokens past the context");
        };
        // One after the prompt, one after that: the latter has no position to be run at.
        assert_eq!(tokens, 2);
        assert!(error.contains("context of 256"), "{error}");
        drop(generation);
        generate(&mut backend, &text(1, 10), &Sampling::default(), 3);
    }
}

#[test]
fn a_prompt_gives_the_same_logits_however_it_is_cut() {
    for path in models() {
        let prompt = text(5, 61);
        let mut model = open_model(&path, 64, 64, CacheKind::F16);
        let mut last = |cuts: &[usize]| -> Vec<u32> {
            let mut start = 0;
            for &end in cuts {
                let logits = if end == prompt.len() { Logits::Last } else { Logits::None };
                model.forward(&prompt[start..end], start, logits).unwrap();
                start = end;
            }
            // Another token on top shows that the cache is the same, too.
            let mut bits = model
                .with_logits(0, |logits| logits.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
                .unwrap();
            model.forward(&[11], start, Logits::Last).unwrap();
            model.with_logits(0, |logits| bits.extend(logits.iter().map(|v| v.to_bits()))).unwrap();
            bits
        };
        let whole = last(&[61]);
        for cuts in [&[30, 61][..], &[60, 61], &[1, 61], &[16, 17, 33, 61], &[2, 3, 40, 59, 61]] {
            assert!(last(cuts) == whole, "{}: cut at {cuts:?}", path.display());
        }
    }
}

#[test]
fn a_seed_gives_the_same_tokens_every_time_and_after_a_reload() {
    for path in models() {
        let prompt = text(3, 30);
        let mut first = backend(&path);
        let (expected, _) = generate(&mut first, &prompt, &warm(42), 20);
        for run in 0..10 {
            assert_eq!(generate(&mut first, &prompt, &warm(42), 20).0, expected, "run {run}");
        }
        assert_ne!(generate(&mut first, &prompt, &warm(43), 20).0, expected);
        drop(first);
        assert_eq!(generate(&mut backend(&path), &prompt, &warm(42), 20).0, expected, "after a reload");
    }
}

#[test]
fn many_short_generations_allocate_nothing() {
    let mut backend = backend(&fixture("causal-families/gemma3.gguf"));
    generate(&mut backend, &text(0, 50), &warm(0), 5);
    let before = backend.memory();
    assert!(before.weights > 0 && before.kv_cache > 0 && before.scratch > 0);
    for i in 0..200 {
        generate(&mut backend, &text(i, 1 + i as usize % 60), &warm(u64::from(i)), 4);
        assert_eq!(backend.memory(), before, "after {i} generations");
    }
}
