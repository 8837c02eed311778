//! The loop over blocks on a scripted model: the same tokens at every width, and every way a block can end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod block_support;

use axe::decode::block::{Costs, Measured};
use axe::decode::{Backend, BlockOptions, BlockSize, CausalBackend, Sampling, Step, Wanted};
use axe::model::Logits;
use block_support::{Fault, Hashed, Told, auto, fixed, generate, most};

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (seed * 31 + i * i * 7 + i * seed) % 60).collect()
}

/// A prompt that says the same over and over.
fn refrain(times: usize) -> Vec<u32> {
    [11, 25, 3, 42, 8, 17, 30].repeat(times)
}

fn cold(options: BlockOptions, prompt: &[u32], sampling: &Sampling, wanted: &Wanted) -> Told {
    generate(&mut CausalBackend::new(Hashed::default(), options), prompt, sampling, wanted)
}

fn samplings() -> Vec<Sampling> {
    let neutral = Sampling::default();
    vec![
        neutral.clone(),
        Sampling { temperature: 0.8, seed: 1, ..neutral.clone() },
        Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, seed: 2, ..neutral.clone() },
        Sampling { repetition_penalty: 1.3, ..neutral.clone() },
        Sampling { presence_penalty: 0.7, frequency_penalty: 0.2, ..neutral.clone() },
        Sampling { presence_penalty: -0.7, ..neutral.clone() },
        Sampling { temperature: 1.2, repetition_penalty: 1.1, frequency_penalty: 0.3, seed: 3, ..neutral },
    ]
}

#[test]
fn every_width_gives_the_tokens_of_one_a_pass() {
    let mut widest = 0;
    let mut passes = [0; 2];
    for seed in 0..12 {
        for (place, sampling) in samplings().into_iter().enumerate() {
            let (prompt, wanted) = (prompt(seed, 5 + seed * 9), most(60));
            let alone = cold(fixed(1), &prompt, &sampling, &wanted);
            assert_eq!((alone.stats.passes, alone.stats.evaluated, alone.stats.committed), (60, 60, 60));
            assert!(alone.stats.proposers.is_empty());
            for options in
                [fixed(2), fixed(4), fixed(8), fixed(16), auto(), BlockOptions { pool: true, ..auto() }]
            {
                let told = cold(options, &prompt, &sampling, &wanted);
                assert_eq!(told.tokens, alone.tokens, "prompt {seed}, {options:?}, {sampling:?}");
                let accepted: usize = told.stats.proposers.iter().map(|p| p.accepted).sum();
                let offered: usize = told.stats.proposers.iter().map(|p| p.offered).sum();
                assert_eq!(told.stats.committed, 60);
                assert_eq!(told.stats.passes + accepted, 60, "{:?}", told.stats);
                assert_eq!(told.stats.passes + offered, told.stats.evaluated, "{:?}", told.stats);
                widest = widest.max(told.stats.evaluated);
                if place == 0 {
                    passes[usize::from(options.size == BlockSize::Auto)] += told.stats.passes;
                }
            }
        }
    }
    // Otherwise there was nothing to compare.
    assert!(widest > 200, "{widest}");
    assert!(passes[0] < 12 * 4 * 54 && passes[1] < 12 * 2 * 57, "{passes:?}");
}

#[test]
fn a_warm_model_with_all_its_experience_gives_the_same_tokens() {
    for options in [fixed(8), BlockOptions { pool: true, ..fixed(16) }, BlockOptions { pool: true, ..auto() }]
    {
        let mut warm = CausalBackend::new(Hashed::default(), options);
        for round in 0..3 {
            for seed in 0..10 {
                let sampling = samplings()[seed as usize % 7].clone();
                let told = generate(&mut warm, &prompt(seed, 40), &sampling, &most(30));
                let expected = cold(fixed(1), &prompt(seed, 40), &sampling, &most(30));
                assert_eq!(told.tokens, expected.tokens, "round {round}, prompt {seed}, {options:?}");
            }
        }
    }
}

#[test]
fn the_next_prompt_takes_over_what_was_committed_and_nothing_else() {
    for options in [fixed(1), fixed(4), fixed(16), auto()] {
        let mut warm = CausalBackend::new(Hashed::default(), options);
        for seed in 0..8 {
            let first = generate(&mut warm, &prompt(seed, 30), &Sampling::default(), &most(25));
            let text = [prompt(seed, 30), first.tokens].concat();
            for (what, keep, more) in [
                ("all", text.len(), 5),
                ("most", text.len() - 7, 9),
                ("the prompt", 30, 3),
                ("half of it", 15, 20),
            ] {
                let next = [&text[..keep], &prompt(seed + 50, more)].concat();
                let told = generate(&mut warm, &next, &Sampling::default(), &most(20));
                let expected = cold(fixed(1), &next, &Sampling::default(), &most(20));
                assert_eq!(told.tokens, expected.tokens, "{what} of {seed}, {options:?}");
                // The last token was chosen, but has not run.
                assert!(told.cached >= keep.min(text.len() - 1), "{what}: {} of {keep}", told.cached);
                generate(&mut warm, &prompt(seed, 30), &Sampling::default(), &most(25));
            }
        }
    }
}

#[test]
fn what_repeats_takes_few_passes_and_is_looked_up() {
    // A model that always says the same after the same two tokens.
    let model = || Hashed { habit: 1.0, vocabulary: 12, ..Hashed::default() };
    let mut fixed = CausalBackend::new(model(), fixed(8));
    let told = generate(&mut fixed, &[1, 2, 3], &Sampling::default(), &most(200));
    assert!(told.stats.passes < 60, "{:?}", told.stats);
    let mut auto = CausalBackend::new(model(), auto()).with_costs(costs(0.1));
    let told = generate(&mut auto, &[1, 2, 3], &Sampling::default(), &most(200));
    assert!(told.stats.passes < 80, "{:?}", told.stats);
    assert!(told.stats.evaluated < 250, "rows were mostly right: {:?}", told.stats);
    let lookup = told.stats.proposers.iter().find(|proposer| proposer.name == "lookup").unwrap();
    assert!(lookup.accepted > 30 && lookup.offered < lookup.accepted * 5 / 4, "{:?}", told.stats);
}

/// Costs where each row more is so much of a pass of one row.
fn costs(more: f64) -> Costs {
    Costs::given(std::array::from_fn(|row| 1.0 + more * row as f64))
}

#[test]
fn where_nothing_can_be_guessed_next_to_nothing_is_lost() {
    for more in [0.1, 0.2, 0.5] {
        for temperature in [0.0, 1.0, 2.0] {
            let model = Hashed { habit: 0.0, ..Hashed::default() };
            let mut backend = CausalBackend::new(model, auto()).with_costs(costs(more));
            let sampling = Sampling { temperature, seed: 4, ..Sampling::default() };
            let stats = generate(&mut backend, &prompt(3, 50), &sampling, &most(300)).stats;
            let cost = stats.passes as f64 + more * (stats.evaluated - stats.passes) as f64;
            assert!(cost <= 1.03 * 300.0, "{cost} at {more} a row: {stats:?}");
        }
    }
}

#[test]
fn rows_that_cost_too_much_are_not_evaluated_and_cheap_ones_are() {
    let evaluated = |more: f64| {
        let model = Hashed { habit: 1.0, vocabulary: 12, ..Hashed::default() };
        let mut backend = CausalBackend::new(model, auto()).with_costs(costs(more));
        let told = generate(&mut backend, &[1, 2, 3], &Sampling::default(), &most(200));
        let again = generate(&mut backend, &[1, 2, 3], &Sampling::default(), &most(200));
        assert_eq!(told.tokens, again.tokens);
        (told.stats.evaluated, told.stats.passes)
    };
    assert_eq!(evaluated(1.0), (200, 200), "a row more is a pass more");
    let (rows, passes) = evaluated(0.1);
    assert!(rows > 200 && passes < 60, "{rows} rows in {passes} passes");
}

/// What it takes to measure a model, and that costs follow from it.
#[test]
fn a_model_is_measured_at_all_its_widths() {
    for (logit_rows, context) in [(16, 400), (7, 400), (1, 400), (16, 6), (16, 2)] {
        let mut model = Hashed { logit_rows, context, ..Hashed::default() };
        let measured = Measured::new("any", &mut model).unwrap();
        let widest =
            model.calls.borrow().iter().filter(|c| c.logits != Logits::None).map(|c| c.tokens.len()).max();
        assert_eq!(widest, Some(logit_rows.min(context / 2).min(if logit_rows == 7 { 6 } else { 16 })));
        let costs = Costs::new(&measured, |_| 1.0);
        assert!((1..=16).all(|width| costs.of(width) > 0.0), "{costs:?}");
    }
    let mut failing = Hashed { fault: Some(Fault::Pass(5)), ..Hashed::default() };
    assert!(Measured::new("any", &mut failing).is_err());
}

/// Times that were taken at a bad moment would say for ever that no guess pays: none would be evaluated, hence none timed.
#[test]
fn times_that_hold_no_longer_are_taken_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Hashed::default();
    Measured::once(folder.path(), "any", &mut model).unwrap();
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let kept = r#"{"key":"any","passes":[[1,0.001],[2,1.0],[4,1.0],[16,1.0]]}"#;
    std::fs::write(&file, kept).unwrap();
    assert!(Measured::kept(folder.path(), "any").is_some(), "the test's own file is well-formed");
    let costs = Costs::new(&Measured::once(folder.path(), "any", &mut model).unwrap(), |_| 1.0);
    assert!(costs.of(4) < 100.0 * costs.of(1), "{costs:?}");
    assert_ne!(std::fs::read_to_string(&file).unwrap(), kept);
}

#[test]
fn no_row_is_evaluated_that_cannot_be_committed() {
    for wanted in [1, 2, 3, 7, 8, 9, 31] {
        for options in [fixed(8), fixed(16), auto()] {
            let model = Hashed { habit: 1.0, vocabulary: 12, ..Hashed::default() };
            let calls = model.calls.clone();
            let mut backend = CausalBackend::new(model, options);
            // Tokens 0 to 11 only.
            let prompt: Vec<u32> = refrain(6).into_iter().map(|token| token % 12).collect();
            let told = generate(&mut backend, &prompt, &Sampling::default(), &most(wanted));
            assert_eq!(told.tokens.len(), wanted, "no token more than wanted");
            for call in calls.borrow().iter().filter(|call| call.start >= prompt.len()) {
                let committed = call.start + 1 - prompt.len();
                assert!(call.tokens.len() <= wanted - committed, "{call:?} with {committed} of {wanted}");
                assert_eq!(call.logits, if call.tokens.len() == 1 { Logits::Last } else { Logits::All });
            }
        }
    }
}

#[test]
fn nothing_is_committed_behind_an_end_and_no_end_is_evaluated() {
    let mut ended = 0;
    for seed in 0..20 {
        let text = cold(fixed(1), &prompt(seed, 20), &Sampling::default(), &most(60)).tokens;
        for at in [0, 1, 5, 20, 40] {
            let end = text[at];
            let first = text.iter().position(|&token| token == end).unwrap();
            for options in [fixed(1), fixed(4), fixed(16), auto()] {
                let model = Hashed::default();
                let calls = model.calls.clone();
                let wanted = Wanted { ends: vec![59, end], ..most(60) };
                let told = generate(
                    &mut CausalBackend::new(model, options),
                    &prompt(seed, 20),
                    &Sampling::default(),
                    &wanted,
                );
                let ends = text.iter().position(|token| [59, end].contains(token)).unwrap().min(first);
                assert_eq!(told.tokens, text[..=ends], "{options:?}");
                assert_eq!(told.stats.committed, ends + 1, "{options:?}");
                let calls = calls.borrow();
                let mut passes = calls.iter().filter(|call| call.start >= 20);
                assert!(passes.all(|call| call.tokens.iter().all(|token| !wanted.ends.contains(token))));
                ended += usize::from(ends > 3);
            }
        }
    }
    assert!(ended > 50);
}

#[test]
fn the_context_can_be_filled_to_its_last_position_at_every_width() {
    for options in [fixed(1), fixed(4), fixed(8), fixed(16), auto()] {
        for length in [100, 393, 398, 399] {
            let model = Hashed { habit: 1.0, vocabulary: 60, ..Hashed::default() };
            let mut backend = CausalBackend::new(model, options);
            let prompt = refrain(58)[..length].to_vec();
            let mut generation = backend.start(&prompt, &Sampling::default()).unwrap();
            let mut tokens = 0;
            let error = loop {
                match generation.step() {
                    Ok(Step::Commit(new)) => tokens += new.len(),
                    Ok(_) => {}
                    Err(error) => break error.to_string(),
                }
            };
            // The last position's choice has none to be run at.
            assert_eq!(tokens, 400 - length + 1, "{options:?} after {length}");
            assert!(error.contains("context of 400"), "{error}");
            assert!(generation.step().is_err(), "what has failed stays so");
        }
    }
}

#[test]
fn nothing_is_taken_over_from_a_pass_that_failed() {
    let expected = cold(fixed(1), &prompt(5, 40), &Sampling::default(), &most(30));
    for options in [fixed(1), fixed(4), fixed(16), auto()] {
        for pass in [1, 2, 3, 4, 9, 12] {
            let model = Hashed { fault: Some(Fault::Pass(pass)), ..Hashed::default() };
            let calls = model.calls.clone();
            let mut backend = CausalBackend::new(model, options);
            let mut generation = backend.start(&prompt(5, 40), &Sampling::default()).unwrap();
            let mut before = Vec::new();
            let failed = loop {
                match generation.step() {
                    Ok(Step::Commit(tokens)) => before.extend(tokens),
                    Ok(_) => {}
                    Err(_) => break calls.borrow().len(),
                }
            };
            assert_eq!(failed, pass);
            assert!(expected.tokens.starts_with(&before[..before.len().min(30)]));
            assert!(generation.step().is_err());
            drop(generation);
            let told = generate(&mut backend, &prompt(5, 40), &Sampling::default(), &most(30));
            assert_eq!((told.tokens, told.cached), (expected.tokens.clone(), 0), "{options:?}, pass {pass}");
        }
    }
}

#[test]
fn numbers_that_are_none_end_it_where_they_are_committed_and_only_there() {
    let plain = cold(fixed(1), &prompt(2, 30), &Sampling::default(), &most(40));
    let (mut spared, mut cut) = (0, 0);
    for position in 29..60usize {
        let right = plain.tokens.get(position.wrapping_sub(30)).copied();
        for options in [fixed(1), fixed(4), fixed(16), auto()] {
            // The right token at this position gives sound numbers: rows behind wrong guesses are nobody's business.
            let fault = Fault::NotANumber { position, but: right };
            let model = Hashed { fault: right.map(|_| fault), ..Hashed::default() };
            let mut backend = CausalBackend::new(model, options);
            let told = generate(&mut backend, &prompt(2, 30), &Sampling::default(), &most(40));
            assert_eq!(told.tokens, plain.tokens, "{options:?}, position {position}");
            spared += told.stats.evaluated - told.stats.committed;

            let model =
                Hashed { fault: Some(Fault::NotANumber { position, but: None }), ..Hashed::default() };
            let calls = model.calls.clone();
            let mut backend = CausalBackend::new(model, options);
            let mut generation = backend.start(&prompt(2, 30), &Sampling::default()).unwrap();
            let mut tokens = Vec::new();
            let error = loop {
                match generation.step() {
                    Ok(Step::Commit(new)) => tokens.extend(new),
                    Ok(_) => {}
                    Err(error) => break error.to_string(),
                }
            };
            assert!(
                error.contains("NaN") && error.contains(&format!("position {}", position + 1)),
                "{error}"
            );
            // All that was chosen before is committed, as one row a pass would.
            assert_eq!(tokens, plain.tokens[..position - 29], "{options:?}, position {position}");
            // Where the row was part of the pass before, behind right guesses, that one ended early.
            if let [.., before, last] = calls.borrow().as_slice()
                && position > 29
            {
                assert_eq!(last.start, position);
                cut += usize::from(before.tokens.get(position - before.start) == Some(&last.tokens[0]));
            }
        }
    }
    assert!(spared > 100, "{spared} rows were refused");
    assert!(cut > 5, "{cut} passes ended before such a row");
}

#[test]
fn drafts_are_shown_to_those_who_want_them_and_change_nothing() {
    for options in [fixed(1), fixed(4), auto()] {
        let silent = cold(options, &refrain(5), &Sampling::default(), &most(50));
        let told = cold(options, &refrain(5), &Sampling::default(), &Wanted { drafts: true, ..most(50) });
        assert_eq!(silent.drafts, 0);
        assert_eq!(told.tokens, silent.tokens);
        if options == fixed(4) {
            assert!(told.drafts > 5 && told.drafts < told.stats.passes, "{told:?}");
        }
        if options == fixed(1) {
            assert_eq!(told.drafts, 0);
        }
    }
}

#[test]
fn a_generation_that_is_dropped_leaves_what_it_committed() {
    let expected = cold(fixed(1), &prompt(9, 45), &Sampling::default(), &most(20));
    for options in [fixed(4), fixed(16), auto()] {
        for steps in 0..12 {
            for drafts in [false, true] {
                let mut backend = CausalBackend::new(Hashed::default(), options);
                let mut generation = backend.start(&prompt(9, 45), &Sampling::default()).unwrap();
                generation.want(Wanted { drafts, ..Wanted::default() });
                (0..steps).for_each(|_| drop(generation.step().unwrap()));
                drop(generation);
                let told = generate(&mut backend, &prompt(9, 45), &Sampling::default(), &most(20));
                assert_eq!(told.tokens, expected.tokens, "{options:?}, {steps} steps");
                assert_eq!(told.cached, [0, 32][usize::from(steps > 0)].max(44 * usize::from(steps > 1)));
            }
        }
    }
}

#[test]
fn a_model_with_one_logit_row_makes_one_token_a_pass() {
    let model = Hashed { logit_rows: 1, ..Hashed::default() };
    let mut backend = CausalBackend::new(model, fixed(8));
    let told = generate(&mut backend, &refrain(4), &Sampling::default(), &most(20));
    assert_eq!((told.stats.passes, told.stats.evaluated), (20, 20));
}

#[test]
fn ids_past_the_vocabulary_are_never_made() {
    for options in [fixed(1), fixed(8), auto()] {
        for sampling in samplings() {
            let mut backend = CausalBackend::new(Hashed::default(), options).with_vocabulary(30);
            let prompt: Vec<u32> = prompt(1, 20).into_iter().map(|id| id % 30).collect();
            let told = generate(&mut backend, &prompt, &sampling, &most(40));
            assert!(told.tokens.iter().all(|&id| id < 30), "{:?}", told.tokens);
        }
    }
}
