//! The recorded runs of the reference, replayed on the model itself, and free runs of its own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use axe::decode::diffusion::replay::{Agreement, ReplayOptions, follow, replay};
use axe::decode::diffusion::{DenoisingRules, Plan, Trajectory, manifest_entry};
use axe::decode::{Backend, DiffusionBackend, Sampling, Step};
use axe::model::diffusion_gemma::{
    DenoiseStep, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, ExpertWeights, GenerationConfig,
};
use axe::ops::CacheKind;
use serde_json::Value;
use support::{cache_dir, device, fixture};

const RANDOM: [&str; 3] = ["short", "long", "two_canvases"];
const TRAINED: [&str; 8] =
    ["alphabet", "capital", "months", "sum", "system", "thinking", "two_turns", "unknown"];

fn open(name: &str, experts: ExpertWeights, cache: CacheKind) -> (DiffusionGemma, GenerationConfig) {
    let checkpoint = DiffusionCheckpoint::open(&fixture(name)).unwrap();
    let options = DiffusionOptions {
        rows: 64,
        cache,
        cache_dir: Some(cache_dir()),
        experts,
        ..DiffusionOptions::new(512)
    };
    let model = DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {}).unwrap();
    (model, checkpoint.generation_config().unwrap())
}

fn manifest(topic: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(&format!("{topic}/manifest.json"))).unwrap()).unwrap()
}

/// What the logits that condition a step may be off when they are the model's own: the reference's recorded f32 logits are
/// off by as much from exact arithmetic.
const OWN: f32 = 1.5e-4;

/// Runs each recorded step through the streaming head, once conditioned on what was recorded of the step before, and once
/// on what the streaming head itself keeps of it; the largest difference of an entropy in each case. Nothing adds up over more than one
/// step: in a model of random weights what a run keeps of itself drifts away from any other rounding of it.
fn stream(model: &mut DiffusionGemma, prompt: &[u32], trajectory: &Trajectory<'_>, plan: &Plan) -> [f32; 2] {
    let (mut worst, mut start, mut pending) = ([0f32; 2], 0, prompt.to_vec());
    for canvas in 0..trajectory.canvases() {
        for tokens in pending.chunks(model.rows()) {
            model.encode(tokens, start).unwrap();
            start += tokens.len();
        }
        let whole = trajectory.canvas(canvas).unwrap();
        let records: Vec<_> = (0..whole.steps).map(|step| trajectory.step(canvas, step).unwrap()).collect();
        let processed = |step: usize| -> Vec<f32> {
            let temperature = plan.schedule.temperature(step);
            records[step].logits.as_ref().unwrap().iter().map(|logit| logit / temperature).collect()
        };
        let mut check = |model: &mut DiffusionGemma, step: usize, own: usize| {
            let run = DenoiseStep {
                first: step == 0,
                temperature: plan.schedule.temperature(step),
                seed: 1,
                canvas: canvas as u32,
                step: step as u32,
                greedy: false,
                barred: Vec::new(),
            };
            let choices = model.denoise(&records[step].canvas_in, start, &run).unwrap();
            for (row, choice) in choices.iter().enumerate() {
                let (argmax, entropy) = (records[step].argmax[row], records[step].entropy[row]);
                assert_eq!(choice.argmax, argmax, "canvas {canvas}, step {step}, row {row}");
                worst[own] = worst[own].max((choice.entropy - entropy).abs());
            }
        };
        for (step, record) in records.iter().enumerate() {
            if step > 0 {
                // Leaves the condition of its step in place.
                model.canvas_logits(&record.canvas_in, start, Some(&processed(step - 1))).unwrap();
            }
            check(model, step, 0);
            if step + 1 < whole.steps {
                check(model, step + 1, 1);
            }
        }
        pending = whole.finished;
    }
    worst
}

/// Replays each run through the plain head, and through the streaming head; `follows`: also as a server runs it, each step
/// conditioned on all before it.
fn each(checkpoint: &str, topic: &str, names: &[&str], steps: usize, follows: bool) {
    let (mut model, _) = open(checkpoint, ExpertWeights::AsStored, CacheKind::F32);
    let manifest = manifest(topic);
    assert_eq!(manifest["trajectories"].as_array().unwrap().len(), names.len(), "every run of {topic}");
    let options = ReplayOptions::default();
    let (mut replayed, mut followed) = (0, 0);
    let (mut logits, mut entropies, mut streamed) = (0f32, 0f32, 0f32);
    for name in names {
        let bytes = std::fs::read(fixture(&format!("{topic}/traj_{name}.safetensors"))).unwrap();
        let (prompt, config) = manifest_entry(&manifest, name).unwrap();
        let trajectory = Trajectory::read(&bytes).unwrap();
        let mut report = |seen: &Agreement| {
            replayed += 1;
            logits = logits.max(seen.logits.unwrap());
            entropies = entropies.max(seen.entropy);
        };
        let outcome = replay(&mut model, &prompt, &trajectory, &config, &options, &mut report).unwrap();
        assert!(outcome.is_none(), "{checkpoint} {name}: {}", outcome.unwrap());
        let [off, own] = stream(&mut model, &prompt, &trajectory, &Plan::new(&config));
        assert!(off <= options.entropy, "{checkpoint} {name}: entropies of the streaming head are {off} off");
        assert!(own <= options.entropy + OWN, "{checkpoint} {name}: conditioned on itself it is {own} off");
        streamed = streamed.max(off);
        if !follows {
            continue;
        }
        let mut report = |seen: &Agreement| {
            followed += 1;
            streamed = streamed.max(seen.entropy);
        };
        let outcome = follow(&mut model, &prompt, &trajectory, &config, &options, &mut report).unwrap();
        assert!(outcome.is_none(), "{checkpoint} {name}, streaming: {}", outcome.unwrap());
    }
    println!(
        "{checkpoint}: {replayed} steps; logits within {logits:.1e} (not judged), entropies within {entropies:.1e}, by \
         the streaming head {streamed:.1e}"
    );
    assert_eq!((replayed, followed), (steps, if follows { steps } else { 0 }), "every step is compared");
}

#[test]
fn runs_of_the_random_model_are_replayed() {
    each("diffusion-random/model", "diffusion-random", &RANDOM, RANDOM_STEPS, false);
}

#[test]
fn runs_of_the_random_model_are_replayed_from_a_gguf() {
    each("diffusion-random/model.gguf", "diffusion-random", &RANDOM, RANDOM_STEPS, false);
}

#[test]
fn runs_of_the_trained_model_are_replayed() {
    each("tiny-diffusiongemma", "diffusion-trained", &TRAINED, 79 - RANDOM_STEPS, true);
}

/// Steps of all runs of the random model.
const RANDOM_STEPS: usize = 60;
/// Canvases of a free run.
const CANVASES: usize = 2;

/// Everything that a run says: tokens and the bits of entropies, draft by draft and canvas by canvas.
fn run(backend: &mut DiffusionBackend<DiffusionGemma>, prompt: &[u32], seed: u64) -> Vec<u32> {
    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
    let mut generation = backend.start(prompt, &sampling).unwrap();
    let (mut said, mut canvases) = (Vec::new(), 0);
    while canvases < CANVASES {
        match generation.step().unwrap() {
            Step::Prefill { .. } => {}
            Step::Draft { tokens, entropy } => {
                said.extend(tokens);
                said.extend(entropy.into_iter().map(f32::to_bits));
            }
            Step::Commit(tokens) => {
                said.extend(tokens);
                canvases += 1;
            }
        }
    }
    said
}

fn backend(experts: ExpertWeights) -> DiffusionBackend<DiffusionGemma> {
    let (model, config) = open("tiny-diffusiongemma", experts, CacheKind::F16);
    DiffusionBackend::new(model, config, DenoisingRules::default())
}

fn same_seed_same_bytes(experts: ExpertWeights) {
    // Asks for a poem, which the model was never shown: noise matters until the last step.
    let prompts = manifest("diffusion-trained");
    let (prompt, _) = manifest_entry(&prompts, "unknown").unwrap();
    let mut first = backend(experts);
    let said = run(&mut first, &prompt, 7);
    for round in 1..10 {
        assert!(run(&mut first, &prompt, 7) == said, "round {round} says something else");
    }
    assert!(run(&mut first, &prompt, 8) != said, "another seed says the same");
    drop(first);
    let mut again = backend(experts);
    assert!(run(&mut again, &prompt, 7) == said, "a fresh load says something else");
}

#[test]
fn a_seed_says_the_same_in_every_run_and_after_a_fresh_load() {
    same_seed_same_bytes(ExpertWeights::AsStored);
}

#[test]
fn so_it_does_with_experts_of_4_bits() {
    same_seed_same_bytes(ExpertWeights::Quantised);
}
