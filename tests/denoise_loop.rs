//! The loop over canvases, on a model that answers from a hash: order of steps, reuse, edges, failures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod denoise_support;

use axe::decode::diffusion::{DenoisingRules, noise};
use axe::decode::{Backend, Denoising, DenoisingStats, DiffusionBackend, Generation, Sampling, Step};
use axe::model::diffusion_gemma::GenerationConfig;
use denoise_support::{Call, Fault, Toy, denoised};

const PROMPT: [u32; 10] = [2, 5, 9, 14, 20, 27, 35, 44, 54, 65];
const EOS: [u32; 2] = [1, 7];

fn config() -> GenerationConfig {
    GenerationConfig { eos: EOS.to_vec(), pad: Some(0), ..GenerationConfig::default() }
}

fn backend(model: Toy) -> DiffusionBackend<Toy> {
    DiffusionBackend::new(model, config(), DenoisingRules::default())
}

fn sampling(seed: u64) -> Sampling {
    Sampling { temperature: 1.0, seed, ..Sampling::default() }
}

/// Steps until so many canvases are committed, and the statistics then.
fn steps(generation: &mut dyn Generation, canvases: usize) -> (Vec<Step>, DenoisingStats) {
    let mut seen = Vec::new();
    let mut commits = 0;
    while commits < canvases {
        let step = generation.step().unwrap();
        commits += usize::from(matches!(step, Step::Commit(_)));
        seen.push(step);
    }
    let stats = generation.denoising().unwrap();
    (seen, stats)
}

fn run(backend: &mut DiffusionBackend<Toy>, prompt: &[u32], seed: u64, canvases: usize) -> Vec<Step> {
    steps(&mut *backend.start(prompt, &sampling(seed)).unwrap(), canvases).0
}

/// Drafts and commits only.
fn said(steps: &[Step]) -> Vec<Step> {
    steps.iter().filter(|step| !matches!(step, Step::Prefill { .. })).cloned().collect()
}

fn commits(steps: &[Step]) -> Vec<Vec<u32>> {
    let commit = |step: &Step| match step {
        Step::Commit(tokens) => Some(tokens.clone()),
        _ => None,
    };
    steps.iter().filter_map(commit).collect()
}

fn encoded(calls: &[Call]) -> Vec<(usize, usize)> {
    let encode = |call: &Call| match call {
        Call::Encode { start, tokens } => Some((*start, tokens.len())),
        Call::Denoise { .. } => None,
    };
    calls.iter().filter_map(encode).collect()
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_seed_another_run() {
    let cold = |seed| run(&mut backend(Toy::default()), &PROMPT, seed, 3);
    let first = cold(7);
    for _ in 0..10 {
        assert_eq!(cold(7), first);
    }
    assert_ne!(cold(8), first);
    assert_ne!(cold(7 + (1 << 40)), first);
}

#[test]
fn a_generation_does_not_depend_on_the_ones_before_it() {
    let mut warm = backend(Toy::default());
    let first = run(&mut warm, &PROMPT, 7, 3);
    for (prompt, seed) in [(&PROMPT[..4], 1), (&[3, 3, 3][..], 2), (&PROMPT[..], 3)] {
        run(&mut warm, prompt, seed, 2);
    }
    assert_eq!(said(&run(&mut warm, &PROMPT, 7, 3)), said(&first));
}

#[test]
fn every_denoising_step_is_a_draft_and_the_last_draft_is_committed() {
    let model = Toy::default();
    let calls = model.calls.clone();
    let mut backend = backend(model);
    let mut generation = backend.start(&PROMPT, &sampling(3)).unwrap();
    let (seen, stats) = steps(&mut *generation, 3);
    drop(generation);
    assert_eq!(seen[0], Step::Prefill { done: 10, total: 10 });
    let mut last = None;
    let (mut drafts, mut canvases) = (0, 0);
    for step in &seen[1..] {
        match step {
            Step::Draft { tokens, entropy } => {
                assert_eq!((tokens.len(), entropy.len()), (8, 8));
                drafts += 1;
                last = Some(tokens.clone());
            }
            Step::Commit(tokens) => {
                assert_eq!(last.take().as_ref(), Some(tokens), "a commit follows its own draft");
                canvases += 1;
            }
            Step::Prefill { .. } => panic!("{step:?}"),
        }
    }
    let calls = denoised(&calls.borrow());
    assert_eq!((drafts, canvases), (calls.len(), 3));
    assert_eq!((stats.steps, stats.canvases, stats.accepted.len()), (drafts, 3, drafts));
    assert!(stats.accepted.iter().all(|&accepted| (1..=8).contains(&accepted)));
    assert!(drafts >= 6, "a stable canvas takes two steps at least");
}

#[test]
fn each_step_is_told_its_place_and_temperature_and_starts_from_what_was_kept_or_noise() {
    let model = Toy { restless: true, ..Toy::default() };
    let calls = model.calls.clone();
    let sampling = Sampling {
        denoising: Denoising { max_steps: Some(4), ..Denoising::default() },
        temperature: 0.5,
        ..sampling(11)
    };
    let mut backend = backend(model);
    let mut generation = backend.start(&PROMPT, &sampling).unwrap();
    let (seen, stats) = steps(&mut *generation, 2);
    let calls = denoised(&calls.borrow());
    assert_eq!(calls.len(), 8);
    // Half as hot as the checkpoint says, four steps.
    let temperatures: Vec<f32> = calls.iter().map(|(_, _, step)| step.temperature).collect();
    for (found, wanted) in temperatures.iter().zip([0.4, 0.35, 0.3, 0.25, 0.4, 0.35, 0.3, 0.25f32]) {
        assert!((found - wanted).abs() < 1e-6, "{temperatures:?}");
    }
    for (index, (start, canvas, step)) in calls.iter().enumerate() {
        let (of, nth) = (index / 4, index % 4);
        assert_eq!((*start, step.canvas, step.step), (10 + 8 * of, of as u32, nth as u32));
        assert_eq!((step.first, step.greedy, step.seed), (nth == 0, false, 11));
        let noisy: Vec<u32> = (0..8)
            .map(|row| match nth {
                0 => noise::initial(11, of as u32, row, 97),
                _ => noise::renoise(11, of as u32, nth as u32 - 1, row, 97),
            })
            .collect();
        let kept = canvas.iter().zip(&noisy).filter(|(a, b)| a != b).count();
        if nth == 0 {
            assert_eq!(kept, 0);
        } else {
            // An accepted token may happen to be the one that noise would have put there.
            assert!(kept <= stats.accepted[index - 1] as usize);
        }
    }
    assert_eq!(commits(&seen).len(), 2);
}

#[test]
fn temperature_zero_draws_nothing_and_keeps_the_schedule() {
    let model = Toy::default();
    let calls = model.calls.clone();
    let mut backend = backend(model);
    let sampling = Sampling { temperature: 0.0, ..sampling(5) };
    steps(&mut *backend.start(&PROMPT, &sampling).unwrap(), 1);
    let calls = denoised(&calls.borrow());
    assert!(calls.iter().all(|(_, _, step)| step.greedy));
    assert_eq!(calls[0].2.temperature, 0.8);
}

#[test]
fn a_prompt_may_be_cut_into_passes_of_any_width() {
    let whole = run(&mut backend(Toy::default()), &PROMPT, 7, 2);
    for rows in [1, 3, 7, 10] {
        let model = Toy { rows, ..Toy::default() };
        let calls = model.calls.clone();
        let seen = run(&mut backend(model), &PROMPT, 7, 2);
        assert_eq!(said(&seen), said(&whole), "{rows} rows");
        let prefill: Vec<usize> = seen
            .iter()
            .filter_map(|step| match step {
                Step::Prefill { done, total: 10 } => Some(*done),
                _ => None,
            })
            .collect();
        let wanted: Vec<usize> = (1..=10usize.div_ceil(rows)).map(|pass| 10.min(pass * rows)).collect();
        assert_eq!(prefill, wanted);
        assert!(encoded(&calls.borrow()).iter().all(|&(_, count)| count <= rows));
    }
}

#[test]
fn a_second_turn_encodes_only_what_is_new_and_says_what_a_cold_run_says() {
    // The prompt, what was encoded of the reply (one canvas of two), and any remainder.
    for remainder in [0, 1, 5] {
        let model = Toy::default();
        let calls = model.calls.clone();
        let mut warm = backend(model);
        let reply = commits(&run(&mut warm, &PROMPT, 7, 2));
        let mut next = PROMPT.to_vec();
        next.extend_from_slice(&reply[0]);
        next.extend((0..remainder).map(|id| 90 - id));
        calls.borrow_mut().clear();
        let mut generation = warm.start(&next, &sampling(8)).unwrap();
        let (seen, _) = steps(&mut *generation, 2);
        assert_eq!(generation.cached_tokens(), 18);
        drop(generation);
        assert_eq!(seen[0], Step::Prefill { done: next.len(), total: next.len() });
        let new = (remainder > 0).then_some((18, remainder as usize));
        let wanted: Vec<_> = new.into_iter().chain([(next.len(), 8)]).collect();
        assert_eq!(encoded(&calls.borrow()), wanted, "remainder {remainder}");
        assert_eq!(said(&seen), said(&run(&mut backend(Toy::default()), &next, 8, 2)));
    }
}

#[test]
fn a_canvas_that_was_not_encoded_never_counts_as_cached() {
    let model = Toy::default();
    let calls = model.calls.clone();
    let mut warm = backend(model);
    let reply = commits(&run(&mut warm, &PROMPT, 7, 1));
    let mut next = PROMPT.to_vec();
    next.extend_from_slice(&reply[0]);
    calls.borrow_mut().clear();
    let seen = run(&mut warm, &next, 7, 1);
    assert_eq!(encoded(&calls.borrow()), [(10, 8)]);
    assert_eq!(said(&seen), said(&run(&mut backend(Toy::default()), &next, 7, 1)));
}

#[test]
fn a_shorter_prompt_leaves_nothing_behind_its_canvas() {
    let mut warm = backend(Toy::default());
    run(&mut warm, &PROMPT, 7, 1);
    // Its canvas overwrites positions 4 to 11, of which the long prompt has 4 to 9.
    let short = run(&mut warm, &PROMPT[..4], 7, 1);
    assert_eq!(said(&short), said(&run(&mut backend(Toy::default()), &PROMPT[..4], 7, 1)));
    let mut generation = warm.start(&PROMPT, &sampling(7)).unwrap();
    let (seen, _) = steps(&mut *generation, 1);
    assert_eq!(generation.cached_tokens(), 4);
    assert_eq!(said(&seen), said(&run(&mut backend(Toy::default()), &PROMPT, 7, 1)));
}

#[test]
fn what_the_ring_has_lost_is_encoded_again() {
    let model = Toy { ring: 12, ..Toy::default() };
    let calls = model.calls.clone();
    let mut warm = backend(model);
    run(&mut warm, &PROMPT, 7, 3);
    calls.borrow_mut().clear();
    let mut generation = warm.start(&PROMPT, &sampling(7)).unwrap();
    let (seen, _) = steps(&mut *generation, 1);
    assert_eq!(generation.cached_tokens(), 0);
    drop(generation);
    assert_eq!(encoded(&calls.borrow()), [(0, 10)]);
    assert_eq!(said(&seen), said(&run(&mut backend(Toy::default()), &PROMPT, 7, 1)));
}

#[test]
fn the_last_canvas_may_reach_past_the_context_and_none_begins_there() {
    let model = Toy { context: 20, ..Toy::default() };
    let mut backend = backend(model);
    let mut generation = backend.start(&PROMPT, &sampling(7)).unwrap();
    let (seen, _) = steps(&mut *generation, 2);
    assert_eq!(commits(&seen).concat().len(), 16);
    let error = generation.step().unwrap_err().to_string();
    assert!(error.contains("position 26 is past the context of 20"), "{error}");
}

#[test]
fn prompts_that_do_not_fit_are_refused_before_anything_runs() {
    let model = Toy { context: 10, ..Toy::default() };
    let calls = model.calls.clone();
    let mut backend = backend(model).with_vocabulary(60);
    let mut refused = |prompt: &[u32], sampling: &Sampling| {
        backend.start(prompt, sampling).err().expect("refused").to_string()
    };
    assert!(refused(&[], &sampling(1)).contains("no tokens"));
    assert!(refused(&PROMPT, &sampling(1)).contains("past the context of 10"));
    assert!(refused(&PROMPT[5..], &sampling(1)).contains("token id 65 is outside the vocabulary of 60"));
    let wish = Sampling {
        denoising: Denoising { max_steps: Some(0), ..Denoising::default() },
        ..Sampling::default()
    };
    assert!(refused(&PROMPT[..4], &wish).contains("max_denoising_steps is 0"));
    assert!(calls.borrow().is_empty());
}

#[test]
fn bad_answers_end_the_generation_and_are_forgotten() {
    let cases = [
        (Fault::Fails, "a pass of 1 rows"),
        (Fault::NotFinite, "the entropy at position 13 is NaN"),
        (Fault::RowMissing, "answered 7 rows of a canvas of 8"),
        (Fault::UnknownToken, "token id 97 is outside the vocabulary of 97"),
    ];
    for (fault, words) in cases {
        let model = Toy::default();
        let (calls, faults) = (model.calls.clone(), model.fault.clone());
        let mut backend = backend(model);
        let cold = run(&mut backend, &PROMPT, 7, 1);
        let mut generation = backend.start(&PROMPT, &sampling(7)).unwrap();
        assert!(matches!(generation.step(), Ok(Step::Prefill { .. })));
        *faults.borrow_mut() = Some(fault);
        let error = generation.step().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        let after = generation.step().unwrap_err().to_string();
        assert!(after.contains("ended with an error"), "{after}");
        drop(generation);
        calls.borrow_mut().clear();
        assert_eq!(run(&mut backend, &PROMPT, 7, 1), cold);
        assert_eq!(encoded(&calls.borrow()), [(0, 10)], "nothing is reused after {fault:?}");
    }
}

#[test]
fn ends_are_barred_in_the_first_canvas_only_and_only_if_wished() {
    for bar in [true, false] {
        let model = Toy::default();
        let calls = model.calls.clone();
        let options = DenoisingRules { bar_immediate_end: bar };
        let mut backend = DiffusionBackend::new(model, config(), options);
        run(&mut backend, &PROMPT, 7, 2);
        let calls = denoised(&calls.borrow());
        assert!(calls.iter().any(|(_, _, step)| step.canvas == 1));
        for (_, _, step) in calls {
            let wanted: &[u32] = if bar && step.canvas == 0 { &EOS } else { &[] };
            assert_eq!(step.barred, wanted, "canvas {} step {}", step.canvas, step.step);
        }
    }
}

#[test]
fn statistics_of_endless_denoising_stay_small() {
    let mut backend = backend(Toy { restless: true, ..Toy::default() });
    let sampling =
        Sampling { denoising: Denoising { max_steps: Some(5000), ..Denoising::default() }, ..sampling(7) };
    let mut generation = backend.start(&PROMPT, &sampling).unwrap();
    let (_, stats) = steps(&mut *generation, 1);
    assert_eq!((stats.steps, stats.canvases, stats.accepted.len()), (5000, 1, 4096));
}

#[test]
fn many_generations_give_what_the_first_gave() {
    let model = Toy::default();
    let calls = model.calls.clone();
    let mut backend = backend(model);
    let first = run(&mut backend, &PROMPT, 7, 2);
    for _ in 0..200 {
        calls.borrow_mut().clear();
        let seen = run(&mut backend, &PROMPT, 7, 2);
        assert_eq!(said(&seen), said(&first));
        // Only what the canvas before committed; the prompt is cached whole.
        assert_eq!(encoded(&calls.borrow()), [(10, 8)]);
    }
}
