//! How a prompt comes into a DiffusionGemma's cache changes no bit of what follows: in one piece or many, over what an
//! earlier request left there or from nothing, around the rings of sliding layers or without them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use axe::decode::diffusion::DenoisingRules;
use axe::decode::{Backend, Denoising, DiffusionBackend, Sampling, Step};
use axe::model::diffusion_gemma::{DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, GenerationConfig};
use axe::ops::CacheKind;
use support::{cache_dir, device, fixture};

/// The miniature's window, canvas and trained context.
const WINDOW: usize = 64;
const CANVAS: usize = 32;
const CONTEXT: usize = 2048;
/// Positions that a sliding layer keeps in a model of passes of 32 rows: window, pass, and what it can be wound back, in
/// tiles of 64.
const RING: usize = (WINDOW - 1 + 32 + 512_usize).next_multiple_of(64);

/// A model whose passes have up to `rows` rows. With 32, prompts of more than 600 tokens go around the rings.
fn open(rows: usize, cache: CacheKind) -> DiffusionGemma {
    let checkpoint = DiffusionCheckpoint::open(&fixture("tiny-diffusiongemma")).unwrap();
    let options =
        DiffusionOptions { rows, cache, cache_dir: Some(cache_dir()), ..DiffusionOptions::new(CONTEXT) };
    DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {}).unwrap()
}

/// Tokens without a pattern, the same for the same seed.
fn tokens(seed: u64, count: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % 1500 + 20
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// All that the model has of a prompt: keys and values of every layer as far as it looks back, and a canvas's logits,
/// without and with a condition.
fn traces(model: &mut DiffusionGemma, end: usize) -> Vec<(String, Vec<u32>)> {
    let mut traces = Vec::new();
    let bits = |values: Vec<f32>| -> Vec<u32> { values.into_iter().map(f32::to_bits).collect() };
    let layers = model.config().layers.clone();
    for (index, layer) in layers.iter().enumerate() {
        let from = if layer.sliding { end.saturating_sub(WINDOW - 1) } else { 0 };
        let (keys, values) = model.cached(index, from, end).unwrap();
        traces.push((format!("keys of layer {index}"), bits(keys)));
        traces.push((format!("values of layer {index}"), bits(values)));
    }
    let canvas = tokens(77, CANVAS);
    let first = model.canvas_logits(&canvas, end, None).unwrap();
    assert!(first.iter().all(|logit| logit.is_finite()));
    let second = model.canvas_logits(&canvas, end, Some(&first)).unwrap();
    assert_ne!(first, second);
    traces.push(("logits".to_owned(), bits(first)));
    traces.push(("conditioned logits".to_owned(), bits(second)));
    traces
}

/// Encodes `prompt` in pieces of these lengths; the last one is repeated.
fn encode(model: &mut DiffusionGemma, prompt: &[u32], pieces: &[usize]) {
    let (mut start, mut pieces) = (0, pieces.iter());
    let mut length = 1;
    while start < prompt.len() {
        length = *pieces.next().unwrap_or(&length);
        let end = prompt.len().min(start + length);
        model.encode(&prompt[start..end], start).unwrap();
        start = end;
    }
}

fn assert_same(what: &str, found: &[(String, Vec<u32>)], expected: &[(String, Vec<u32>)]) {
    assert_eq!(found.len(), expected.len());
    for ((name, found), (_, expected)) in found.iter().zip(expected) {
        assert_eq!(found.len(), expected.len(), "{what}: {name}");
        let unlike = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        assert_eq!(unlike, 0, "{what}: {unlike} of {} {name} differ", found.len());
    }
}

fn pieces_make_no_difference(cache: CacheKind) {
    let mut whole = open(CONTEXT, cache);
    let mut ringed = open(32, cache);
    for length in [1, 63, 64, 65, 230] {
        let prompt = tokens(length as u64, length);
        encode(&mut whole, &prompt, &[length]);
        let expected = traces(&mut whole, length);
        for pieces in [&[length.div_ceil(2)][..], &[1, 2, 3, 5, 7, 11, 13, 64, 17], &[1]] {
            encode(&mut whole, &prompt, pieces);
            assert_same(&format!("{length} in {pieces:?}"), &traces(&mut whole, length), &expected);
        }
        for pieces in [&[32][..], &[5, 32, 1, 31], &[1]] {
            encode(&mut ringed, &prompt, pieces);
            assert_same(&format!("{length} in {pieces:?}, rings"), &traces(&mut ringed, length), &expected);
        }
    }
}

#[test]
fn pieces_of_a_prompt_make_no_difference_in_f16() {
    pieces_make_no_difference(CacheKind::F16);
}

#[test]
fn pieces_of_a_prompt_make_no_difference_in_f32() {
    pieces_make_no_difference(CacheKind::F32);
}

#[test]
fn rings_that_wrapped_three_times_hold_what_counts() {
    let length = 3 * RING + 100;
    let prompt = tokens(5, length);
    for cache in [CacheKind::F16, CacheKind::F32] {
        let mut whole = open(CONTEXT, cache);
        encode(&mut whole, &prompt, &[length]);
        let expected = traces(&mut whole, length);
        let mut ringed = open(32, cache);
        for pieces in [&[32][..], &[31, 7, 32, 1, 29]] {
            encode(&mut ringed, &prompt, pieces);
            assert_same(&format!("{length} in {pieces:?}"), &traces(&mut ringed, length), &expected);
        }
        // One by one across the place where a ring begins anew.
        encode(&mut ringed, &prompt[..3 * RING - 40], &[32]);
        for at in 3 * RING - 40..length {
            ringed.encode(&prompt[at..at + 1], at).unwrap();
        }
        assert_same("one by one", &traces(&mut ringed, length), &expected);

        // A word 1,900 tokens back is no longer in any window, and still counts.
        let mut other = prompt.clone();
        other[10] = (other[10] + 1) % 1500;
        encode(&mut ringed, &other, &[32]);
        let found = traces(&mut ringed, length);
        let differs = |name: &str| {
            let bits = |traces: &[(String, Vec<u32>)]| {
                traces.iter().find(|trace| trace.0 == name).map(|trace| trace.1.clone()).unwrap()
            };
            bits(&found) != bits(&expected)
        };
        assert!(differs("logits"));
        assert!(!differs("keys of layer 0"), "the window is past it");
    }
}

fn backend(rows: usize) -> DiffusionBackend<DiffusionGemma> {
    DiffusionBackend::new(open(rows, CacheKind::F16), GenerationConfig::default(), DenoisingRules::default())
}

fn sampling() -> Sampling {
    let denoising = Denoising { max_steps: Some(3), ..Denoising::default() };
    Sampling { temperature: 1.0, seed: 11, denoising, ..Sampling::default() }
}

/// What a run over two canvases says, bit by bit, its committed tokens, and the prompt tokens it took over.
fn run(backend: &mut DiffusionBackend<DiffusionGemma>, prompt: &[u32]) -> (Vec<u32>, Vec<u32>, usize) {
    let sampling = sampling();
    let mut generation = backend.start(prompt, &sampling).unwrap();
    let (mut said, mut committed) = (Vec::new(), Vec::new());
    while committed.len() < 2 * CANVAS {
        match generation.step().unwrap() {
            Step::Prefill { .. } => {}
            Step::Draft { tokens, entropy } => {
                said.extend(tokens);
                said.extend(entropy.into_iter().map(f32::to_bits));
            }
            Step::Commit(tokens) => committed.extend(tokens),
        }
    }
    let reused = generation.cached_tokens();
    (said, committed, reused)
}

/// The same with nothing to take over.
fn cold(backend: &mut DiffusionBackend<DiffusionGemma>, prompt: &[u32]) -> (Vec<u32>, Vec<u32>) {
    run(backend, &[prompt[0] + 1]);
    let (said, committed, reused) = run(backend, prompt);
    assert_eq!(reused, 0);
    (said, committed)
}

#[test]
fn what_is_left_to_encode_makes_no_difference() {
    let (mut warm, mut fresh) = (backend(64), backend(64));
    let prompt = tokens(1, 300);
    let (expected, committed) = cold(&mut fresh, &prompt);
    for rest in [0, 1, 2, 31, 32, 33, 63, 64, 65, 200, 299] {
        run(&mut warm, &[prompt[0] + 1]);
        run(&mut warm, &prompt[..300 - rest]);
        let (said, _, reused) = run(&mut warm, &prompt);
        assert_eq!(reused, 300 - rest);
        assert!(said == expected, "{rest} left to encode");
    }
    // The conversation goes on: the first canvas was encoded, the second was not yet.
    let longer = [&prompt[..], &committed, &tokens(2, 9)].concat();
    let (expected, _) = cold(&mut fresh, &longer);
    let (said, _, reused) = run(&mut warm, &longer);
    assert_eq!(reused, 300 + CANVAS);
    assert!(said == expected, "after an answer");
    // And begins anew in the midst of the answer.
    let other = [&longer[..310], &tokens(3, 50)].concat();
    let (expected, _) = cold(&mut fresh, &other);
    let (said, _, reused) = run(&mut warm, &other);
    assert_eq!(reused, 310);
    assert!(said == expected, "from the midst of an answer");
}

#[test]
fn what_a_ring_has_lost_is_encoded_again() {
    let (mut warm, mut fresh) = (backend(32), backend(CONTEXT));
    let prompt = tokens(1, 1500);
    // The second canvas is the last that was written.
    let written = 1500 + 2 * CANVAS;
    // The first new row sees WINDOW - 1 before its own.
    let least = written - RING + WINDOW - 1;
    for (common, kept) in
        [(1499, true), (least + 1, true), (least, true), (least - 1, false), (600, false), (3, false)]
    {
        run(&mut warm, &[prompt[0] + 1]);
        run(&mut warm, &prompt);
        let other = [&prompt[..common], &[prompt[common] % 1500 + 1], &tokens(9, 40)].concat();
        let (expected, _) = cold(&mut fresh, &other);
        let (said, _, reused) = run(&mut warm, &other);
        assert_eq!(reused, if kept { common } else { 0 }, "{common} in common");
        assert!(said == expected, "{common} in common");
    }
}

/// Takes this many steps, and leaves.
fn leave(backend: &mut DiffusionBackend<DiffusionGemma>, prompt: &[u32], steps: usize) {
    let sampling = sampling();
    let mut generation = backend.start(prompt, &sampling).unwrap();
    for _ in 0..steps {
        generation.step().unwrap();
    }
}

#[test]
fn a_request_that_was_left_leaves_nothing_wrong_behind() {
    let (mut warm, mut fresh) = (backend(32), backend(32));
    let prompt = tokens(1, 200);
    let (expected, committed) = cold(&mut fresh, &prompt);
    let longer = [&prompt[..], &committed[..CANVAS], &tokens(4, 20)].concat();
    let (expected_longer, _) = cold(&mut fresh, &longer);
    // The steps until the first canvas is committed.
    let sampling = sampling();
    let mut generation = fresh.start(&prompt, &sampling).unwrap();
    let first = 1 + (0..).take_while(|_| !matches!(generation.step().unwrap(), Step::Commit(_))).count();
    drop(generation);
    // That prompt was cached whole, which takes one step; here its 200 tokens take 7.
    let encoded = first + 6;
    for steps in 0..=encoded + 2 {
        run(&mut warm, &[prompt[0] + 1]);
        leave(&mut warm, &prompt, steps);
        let (said, _, reused) = run(&mut warm, &prompt);
        assert_eq!(reused, 200.min(steps * 32), "after {steps} steps");
        assert!(said == expected, "after {steps} steps");
        run(&mut warm, &[prompt[0] + 1]);
        leave(&mut warm, &prompt, steps);
        let (said, _, reused) = run(&mut warm, &longer);
        // The first canvas is encoded with the first step of the second.
        assert_eq!(
            reused,
            if steps > encoded { 200 + CANVAS } else { 200.min(steps * 32) },
            "after {steps} steps"
        );
        assert!(said == expected_longer, "longer after {steps} steps");
    }
}

#[test]
fn a_canvas_takes_the_place_of_what_was_cached_behind_its_start() {
    let (mut warm, mut fresh) = (backend(64), backend(64));
    let prompt = tokens(1, 200);
    let (expected, _) = cold(&mut fresh, &prompt);
    // The shorter prompt is cached whole: nothing is encoded, and a canvas is denoised over what was behind it.
    for steps in [1, 2, 3] {
        run(&mut warm, &[prompt[0] + 1]);
        run(&mut warm, &prompt);
        leave(&mut warm, &prompt[..100], steps);
        let (said, _, reused) = run(&mut warm, &prompt);
        assert!(said == expected, "after {steps} steps");
        assert_eq!(reused, if steps == 1 { 200 } else { 100 });
    }
}

#[test]
fn any_order_of_requests_says_what_each_says_alone() {
    let (mut warm, mut fresh) = (backend(32), backend(CONTEXT));
    let draws = tokens(99, 1000);
    let mut draws = draws.into_iter().map(|draw| draw as usize);
    let mut draw = |below: usize| draws.next().unwrap() % below;
    let mut prompt = tokens(1, 700);
    let mut taken_over = 0;
    for round in 0..25 {
        let common = draw(prompt.len());
        let more = 1 + draw(400);
        prompt.truncate(common.max(1));
        prompt.extend(tokens(round, more));
        prompt.truncate(1900);
        if draw(3) == 0 {
            leave(&mut warm, &prompt, draw(20));
            prompt.truncate(prompt.len() - draw(prompt.len() / 2 + 1));
            prompt.push(30 + draw(100) as u32);
        }
        let (expected, committed) = cold(&mut fresh, &prompt);
        let (said, _, reused) = run(&mut warm, &prompt);
        taken_over += usize::from(reused > 0);
        assert!(said == expected, "round {round}: {} tokens, {reused} of them taken over", prompt.len());
        if draw(2) == 0 && prompt.len() < 1700 {
            prompt.extend(committed);
        }
    }
    assert!(taken_over > 5, "{taken_over} rounds took anything over");
}
