//! Gaps between two texts, on a model that answers from a hash: what is pinned stays, what counts, bounds, reuse.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod denoise_support;

use axe::decode::diffusion::{DenoisingRules, noise};
use axe::decode::{Backend, DiffusionBackend, Generation, Sampling, Step, Texts, Wanted};
use axe::model::diffusion_gemma::GenerationConfig;
use denoise_support::{Call, Fault, Toy, denoised};

const PROMPT: [u32; 10] = [2, 5, 9, 14, 20, 27, 35, 44, 54, 65];
const SUFFIX: [u32; 3] = [70, 71, 72];
const EOS: [u32; 2] = [1, 7];
const CANVAS: usize = 16;
/// Tokens of the prompt's end that a canvas of 16 begins with.
const HELD: usize = 4;

fn toy() -> Toy {
    Toy { canvas: CANVAS, ..Toy::default() }
}

fn backend(model: Toy) -> DiffusionBackend<Toy> {
    let config = GenerationConfig { eos: EOS.to_vec(), pad: Some(0), ..GenerationConfig::default() };
    DiffusionBackend::new(model, config, DenoisingRules::default())
}

fn sampling(seed: u64) -> Sampling {
    Sampling { temperature: 1.0, seed, ..Sampling::default() }
}

/// All steps until the generation is complete.
fn finish(generation: &mut dyn Generation) -> Vec<Step> {
    let mut seen = Vec::new();
    while !generation.complete() {
        seen.push(generation.step().unwrap());
    }
    seen
}

fn fill(backend: &mut DiffusionBackend<Toy>, texts: Texts<'_>, seed: u64, most: usize) -> Vec<Step> {
    let mut generation = backend.infill(texts, &sampling(seed)).unwrap();
    generation.want(Wanted { most, ..Wanted::default() });
    finish(&mut *generation)
}

fn texts(plain: usize, suffix: &[u32]) -> Texts<'_> {
    Texts { prompt: &PROMPT, plain, suffix }
}

fn commit(steps: &[Step]) -> Vec<u32> {
    match steps.last() {
        Some(Step::Commit(tokens)) => tokens.clone(),
        other => panic!("the last step is {other:?}"),
    }
}

#[test]
fn what_is_pinned_stands_on_every_canvas_and_the_gap_between() {
    for (plain, held) in [(0, 0), (3, 3), (10, HELD)] {
        let toy = toy();
        let calls = toy.calls.clone();
        let steps = fill(&mut backend(toy), texts(plain, &SUFFIX), 7, 5);
        let encoded: Vec<u32> = calls
            .borrow()
            .iter()
            .filter_map(|call| match call {
                Call::Encode { tokens, .. } => Some(tokens.clone()),
                Call::Denoise { .. } => None,
            })
            .flatten()
            .collect();
        assert_eq!(encoded, PROMPT[..10 - held]);
        let drafts: Vec<usize> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Draft { tokens, entropy } => {
                    assert_eq!(tokens.len(), entropy.len());
                    Some(tokens.len())
                }
                _ => None,
            })
            .collect();
        let calls = denoised(&calls.borrow());
        assert_eq!(calls.len(), drafts.len());
        for ((start, canvas, step), gap) in calls.iter().zip(&drafts) {
            assert_eq!(*start, 10 - held);
            assert!((1..=5).contains(gap), "a gap of {gap}");
            assert_eq!(canvas[..held], PROMPT[10 - held..]);
            assert_eq!(canvas[held + gap..held + gap + 3], SUFFIX);
            assert!(canvas[held + gap + 3..].iter().all(|&token| token == EOS[0]), "{canvas:?}");
            if step.first {
                let noise: Vec<u32> = (held..held + gap).map(|row| noise::initial(7, 0, row, 97)).collect();
                assert_eq!(canvas[held..held + gap], noise, "a gap begins as noise");
            }
        }
        assert_eq!(Some(&commit(&steps).len()), drafts.last());
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_whatever_came_before_and_however_the_prompt_is_cut() {
    let cold = |seed| fill(&mut backend(toy()), texts(10, &SUFFIX), seed, 6);
    let said = |steps: &[Step]| -> Vec<Step> {
        steps.iter().filter(|step| !matches!(step, Step::Prefill { .. })).cloned().collect()
    };
    let first = cold(7);
    assert_eq!(cold(7), first);
    assert_ne!(said(&cold(8)), said(&first));
    let mut narrow = backend(Toy { rows: 2, ..toy() });
    for _ in 0..3 {
        assert_eq!(said(&fill(&mut narrow, texts(10, &SUFFIX), 7, 6)), said(&first));
        // Another gap, and a text that goes on, leave nothing behind.
        fill(&mut narrow, texts(0, &[50; 40]), 3, 6);
        let mut other = narrow.start(&PROMPT, &sampling(1)).unwrap();
        (0..8).for_each(|_| drop(other.step().unwrap()));
    }
}

#[test]
fn a_prompt_that_is_known_is_not_encoded_again() {
    let mut backend = backend(toy());
    fill(&mut backend, texts(10, &SUFFIX), 7, 6);
    let mut again = backend.infill(texts(10, &[80]), &sampling(7)).unwrap();
    again.step().unwrap();
    assert_eq!(again.cached_tokens(), 10 - HELD);
}

#[test]
fn a_gap_is_bounded_by_what_is_wanted_by_the_canvas_and_by_the_context() {
    let longest = |context: usize, suffix: usize, most: usize| {
        let toy = Toy { context, ..toy() };
        let steps = fill(&mut backend(toy), texts(10, &vec![70; suffix]), 7, most);
        let draft = |step: &Step| match step {
            Step::Draft { tokens, .. } => tokens.len(),
            _ => 0,
        };
        steps.iter().map(draft).max().unwrap()
    };
    for most in [1, 2, 5] {
        assert_eq!(longest(64, 3, most), most);
    }
    assert_eq!(longest(64, 3, usize::MAX), CANVAS - HELD - 3);
    assert_eq!(longest(64, 100, usize::MAX), CANVAS - HELD - CANVAS / 4);
    assert_eq!(longest(12, 3, usize::MAX), 2, "prompt and gap fit the context");
    assert_eq!(longest(11, 3, usize::MAX), 1);
}

#[test]
fn a_gap_ends_where_an_end_was_drawn() {
    // The toy draws its tokens from what was encoded: some prompt has an end or padding inside the gap.
    let mut ended = 0;
    for first in 10..60 {
        let prompt = [2, first, first + 1];
        let texts = Texts { prompt: &prompt, plain: 0, suffix: &SUFFIX };
        let tokens = commit(&fill(&mut backend(toy()), texts, 1, 12));
        let ends = |id: &u32| EOS.contains(id) || *id == 0;
        let place = tokens.iter().position(ends);
        assert!(place.is_none_or(|place| place + 1 == tokens.len()), "{tokens:?}");
        ended += usize::from(place.is_some());
    }
    assert!(ended > 0, "no gap of this test ends early");
}

#[test]
fn nothing_comes_behind_a_filled_gap() {
    let mut backend = backend(toy());
    let mut generation = backend.infill(texts(10, &SUFFIX), &sampling(7)).unwrap();
    assert!(!generation.complete());
    finish(&mut *generation);
    assert!(generation.step().unwrap_err().to_string().contains("gap is filled"));
    let stats = generation.denoising().unwrap();
    assert_eq!(stats.canvases, 1);
    assert_eq!(stats.accepted.len(), stats.steps);
}

#[test]
fn what_cannot_be_filled_is_refused_and_failures_end_it() {
    let mut backend = backend(toy());
    let refused = |backend: &mut DiffusionBackend<Toy>, texts: Texts<'_>| {
        backend.infill(texts, &sampling(1)).err().unwrap().to_string()
    };
    assert!(refused(&mut backend, texts(10, &[5, 97])).contains("97"));
    assert!(refused(&mut backend, Texts { prompt: &[], plain: 0, suffix: &SUFFIX }).contains("no tokens"));
    let long = vec![5; 64];
    assert!(refused(&mut backend, Texts { prompt: &long, plain: 64, suffix: &SUFFIX }).contains("64"));
    // One token of text: it is encoded, since a canvas stands behind something.
    commit(&fill(&mut backend, Texts { prompt: &[5], plain: 1, suffix: &SUFFIX }, 1, 3));
    for fault in [Fault::Fails, Fault::NotFinite, Fault::RowMissing, Fault::UnknownToken] {
        let toy = toy();
        *toy.fault.borrow_mut() = Some(fault);
        let mut backend = self::backend(toy);
        let mut generation = backend.infill(texts(0, &SUFFIX), &sampling(7)).unwrap();
        generation.step().unwrap();
        assert!(generation.step().is_err(), "{fault:?}");
        assert!(generation.step().is_err());
        drop(generation);
        commit(&fill(&mut backend, texts(10, &SUFFIX), 7, 3));
    }
}
