//! What decides in denoising, against every step of the recorded runs of the reference; and the replay itself, on a
//! model that plays the records back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::collections::BTreeMap;

use axe::decode::diffusion::replay::{Agreement, Difference, ReplayOptions, follow, replay};
use axe::decode::diffusion::{
    CanvasModel, Distribution, Plan, StepRecord, Trajectory, accept, manifest_entry,
};
use axe::decode::{BackendError, Memory};
use axe::model::ModelError;
use axe::model::diffusion_gemma::{DenoiseStep, GenerationConfig, RowChoice};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use support::fixture;

const RUNS: [(&str, &[&str]); 2] = [
    ("diffusion-random", &["short", "long", "two_canvases"]),
    (
        "diffusion-trained",
        &["alphabet", "capital", "months", "sum", "system", "thinking", "two_turns", "unknown"],
    ),
];

fn manifest(topic: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(&format!("{topic}/manifest.json"))).unwrap()).unwrap()
}

fn recorded(topic: &str, name: &str) -> Vec<u8> {
    std::fs::read(fixture(&format!("{topic}/traj_{name}.safetensors"))).unwrap()
}

/// Runs `check` on every recorded run; `entry` is its place in the manifest.
fn each_run(mut check: impl FnMut(&str, &Value, &GenerationConfig, &Trajectory<'_>)) {
    for (topic, names) in RUNS {
        let manifest = manifest(topic);
        let entries = manifest["trajectories"].as_array().unwrap();
        assert_eq!(entries.len(), names.len(), "every run of {topic} is compared");
        for name in names {
            let bytes = recorded(topic, name);
            let (_, config) = manifest_entry(&manifest, name).unwrap();
            let entry = entries.iter().find(|entry| entry["name"] == *name).unwrap();
            check(name, entry, &config, &Trajectory::read(&bytes).unwrap());
        }
    }
}

#[test]
fn every_decision_of_every_recorded_step_follows_from_what_was_recorded() {
    let (mut steps, mut off) = (0, 0f32);
    each_run(|name, entry, config, trajectory| {
        let plan = Plan::new(config);
        let told = entry["canvases"].as_array().unwrap();
        assert_eq!(trajectory.canvases(), told.len());
        for canvas in 0..trajectory.canvases() {
            let whole = trajectory.canvas(canvas).unwrap();
            let told = &told[canvas];
            assert_eq!(told["steps"].as_u64().unwrap() as usize, whole.steps);
            let mut stop = plan.stop_test();
            let mut tokens = whole.init;
            let mut argmax = Vec::new();
            for step in 0..whole.steps {
                let place = format!("{name}, canvas {canvas}, step {step}");
                let record = trajectory.step(canvas, step).unwrap();
                assert_eq!(record.canvas_in, tokens, "{place}");
                let logits = record.logits.unwrap();
                let vocabulary = logits.len() / trajectory.rows();
                let temperature = plan.schedule.temperature(step);
                let rows: Vec<Distribution> = logits
                    .chunks_exact(vocabulary)
                    .map(|row| Distribution::new(row, temperature).unwrap())
                    .collect();
                argmax = rows.iter().map(Distribution::argmax).collect();
                assert_eq!(argmax, record.argmax, "{place}");
                for (row, &entropy) in rows.iter().zip(&record.entropy) {
                    off = off.max((row.entropy() - entropy).abs());
                }
                let sampled: Vec<u32> = rows.iter().zip(&record.u).map(|(row, &u)| row.draw(u)).collect();
                assert_eq!(sampled, record.sampled, "{place}");
                let accepted = accept(&record.entropy, plan.entropy_bound);
                assert_eq!(accepted, record.accepted, "{place}");
                let count = accepted.iter().filter(|&&kept| kept).count();
                assert_eq!(told["accepted"][step].as_u64().unwrap() as usize, count, "{place}");
                tokens = (0..accepted.len())
                    .map(|row| if accepted[row] { sampled[row] } else { record.renoise[row] })
                    .collect();
                assert_eq!(tokens, record.canvas_out, "{place}");
                let done = stop.done(&argmax, &record.entropy);
                assert_eq!(told["stop"][step].as_bool().unwrap(), done, "{place}");
                assert_eq!(done || step + 1 == plan.schedule.steps(), step + 1 == whole.steps, "{place}");
                steps += 1;
            }
            let end = argmax.iter().position(|id| config.eos.contains(id));
            if let Some(end) = end {
                argmax[end + 1..].fill(config.pad.unwrap());
            }
            assert_eq!(argmax, whole.finished, "{name}, canvas {canvas}");
            assert_eq!(told["finished"].as_bool().unwrap(), end.is_some());
        }
    });
    println!("{steps} steps, entropies within {off:.1e}");
    assert!(off < 1e-5, "entropies from recorded logits differ by {off}");
    assert_eq!(steps, 79);
}

/// A model that knows the recorded runs by heart, and that checks what it is asked.
struct Tape {
    rows: usize,
    vocabulary: usize,
    prompt: Vec<u32>,
    /// Steps by canvas and step, with the temperature of each.
    steps: BTreeMap<(usize, usize), (StepRecord, f32)>,
    finals: Vec<Vec<u32>>,
    cache: Vec<u32>,
    /// Added to a logit: canvas, step, index, what.
    wrong: Option<(usize, usize, usize, f32)>,
    /// Entropy that the streaming head adds.
    astray: f32,
    next: usize,
}

impl Tape {
    fn new(prompt: &[u32], config: &GenerationConfig, trajectory: &Trajectory<'_>) -> Self {
        let plan = Plan::new(config);
        let mut steps = BTreeMap::new();
        let mut finals = Vec::new();
        for canvas in 0..trajectory.canvases() {
            let whole = trajectory.canvas(canvas).unwrap();
            for step in 0..whole.steps {
                let record = trajectory.step(canvas, step).unwrap();
                steps.insert((canvas, step), (record, plan.schedule.temperature(step)));
            }
            finals.push(whole.finished);
        }
        let vocabulary =
            steps[&(0, 0)].0.logits.as_ref().map_or(512, |logits| logits.len() / trajectory.rows());
        Self {
            rows: trajectory.rows(),
            vocabulary,
            prompt: prompt.to_vec(),
            steps,
            finals,
            cache: Vec::new(),
            wrong: None,
            astray: 0.0,
            next: 0,
        }
    }

    /// The step that is asked for: they come in order, each behind all that was committed before.
    fn place(&mut self, canvas: &[u32], start: usize) -> (usize, usize) {
        let place = *self.steps.keys().nth(self.next).expect("no more steps than recorded");
        self.next += 1;
        let before = [&self.prompt[..], &self.finals[..place.0].concat()].concat();
        assert_eq!(self.cache, before, "what stands before canvas {}", place.0);
        assert_eq!(start, before.len());
        assert_eq!(canvas, self.steps[&place].0.canvas_in);
        place
    }
}

impl CanvasModel for Tape {
    fn canvas(&self) -> usize {
        self.rows
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        4096
    }

    fn rows(&self) -> usize {
        7
    }

    fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError> {
        assert!(tokens.len() <= 7 && start == self.cache.len());
        self.cache.extend_from_slice(tokens);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ModelError> {
        Ok(())
    }

    fn reusable(&self, _: usize) -> bool {
        false
    }

    fn denoise(
        &mut self,
        canvas: &[u32],
        start: usize,
        step: &DenoiseStep,
    ) -> Result<Vec<RowChoice>, ModelError> {
        let place = self.place(canvas, start);
        let (record, temperature) = &self.steps[&place];
        assert_eq!((step.canvas as usize, step.step as usize), place);
        assert_eq!((step.first, step.temperature), (place.1 == 0, *temperature));
        assert!(step.barred.is_empty(), "the reference bars nothing");
        let choice = |row: usize| RowChoice {
            argmax: record.argmax[row],
            sampled: 0,
            entropy: record.entropy[row] + self.astray,
        };
        Ok((0..self.rows).map(choice).collect())
    }

    fn canvas_logits(
        &mut self,
        canvas: &[u32],
        start: usize,
        previous: Option<&[f32]>,
    ) -> Result<Vec<f32>, ModelError> {
        let place = self.place(canvas, start);
        let before = place.1.checked_sub(1).map(|step| {
            let (record, temperature) = &self.steps[&(place.0, step)];
            record.logits.as_ref().unwrap().iter().map(|logit| logit / temperature).collect::<Vec<f32>>()
        });
        assert_eq!(previous, before.as_deref(), "conditioned on the logits of the step before, tempered");
        let mut logits = self.steps[&place].0.logits.clone().unwrap();
        if let Some((canvas, step, index, what)) = self.wrong
            && (canvas, step) == place
        {
            logits[index] += what;
        }
        Ok(logits)
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }
}

type Outcome = Result<Option<Difference>, BackendError>;

/// Replays recorded bytes on a tape of the untouched record.
fn play(
    bytes: &[u8],
    config: &GenerationConfig,
    tape: &mut Tape,
    options: &ReplayOptions,
) -> (Outcome, Vec<Agreement>) {
    let mut seen = Vec::new();
    let prompt = tape.prompt.clone();
    let trajectory = Trajectory::read(bytes).unwrap();
    let outcome =
        replay(tape, &prompt, &trajectory, config, options, &mut |step: &Agreement| seen.push(step.clone()));
    (outcome, seen)
}

#[test]
fn a_model_that_agrees_is_told_so_for_every_run() {
    for (topic, names) in RUNS {
        let manifest = manifest(topic);
        for name in names {
            let bytes = recorded(topic, name);
            let (prompt, config) = manifest_entry(&manifest, name).unwrap();
            let trajectory = Trajectory::read(&bytes).unwrap();
            let mut tape = Tape::new(&prompt, &config, &trajectory);
            let (outcome, seen) = play(&bytes, &config, &mut tape, &ReplayOptions::default());
            assert_eq!(outcome.unwrap(), None, "{name}");
            assert_eq!((seen.len(), tape.next), (tape.steps.len(), tape.steps.len()));
            assert!(seen.iter().all(|step| step.logits == Some(0.0) && step.entropy < 1e-5));
            assert!(seen.last().unwrap().done);

            let mut tape = Tape::new(&prompt, &config, &trajectory);
            let mut followed = 0;
            let options = ReplayOptions::default();
            let outcome = follow(&mut tape, &prompt, &trajectory, &config, &options, &mut |_| followed += 1);
            assert_eq!((outcome.unwrap(), followed), (None, seen.len()), "{name}");
        }
    }
}

/// The tensors of a file with one changed.
fn changed(bytes: &[u8], name: &str, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    let found = tensors.iter_mut().find(|tensor| tensor.0 == name).expect("a tensor of this name");
    change(&mut found.3);
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

fn set<const N: usize>(row: usize, value: [u8; N]) -> impl Fn(&mut Vec<u8>) {
    move |bytes| bytes[row * N..][..N].copy_from_slice(&value)
}

/// Logits judged as strictly as entropies.
fn strict() -> ReplayOptions {
    ReplayOptions { logits: Some(1e-4), ..ReplayOptions::default() }
}

/// The run that the tests below spoil.
fn long() -> (Vec<u8>, Vec<u32>, GenerationConfig) {
    let (prompt, config) = manifest_entry(&manifest("diffusion-random"), "long").unwrap();
    (recorded("diffusion-random", "long"), prompt, config)
}

#[test]
fn the_first_difference_is_told_with_its_place_whatever_it_is() {
    let (bytes, prompt, config) = long();
    let trajectory = Trajectory::read(&bytes).unwrap();
    let at = trajectory.step(1, 4).unwrap();
    let entropy = at.entropy[9];
    let kept = at.accepted.iter().position(|&kept| kept).unwrap();
    let lost = at.accepted.iter().position(|&kept| !kept).unwrap();
    let other = |id: u32| ((id + 1) % 512) as i32;
    let place = |what: &str| format!("p1.s4.{what}");
    let cases = [
        ("argmax", 9, changed(&bytes, &place("argmax"), set(9, other(at.argmax[9]).to_le_bytes()))),
        ("entropy", 9, changed(&bytes, &place("entropy"), set(9, (entropy + 3e-4).to_le_bytes()))),
        ("entropy", 9, changed(&bytes, &place("entropy"), set(9, f32::NAN.to_le_bytes()))),
        ("sampled", 9, changed(&bytes, &place("sampled"), set(9, other(at.sampled[9]).to_le_bytes()))),
        ("accepted", kept, changed(&bytes, &place("accepted"), set(kept, [0u8]))),
        ("accepted", lost, changed(&bytes, &place("accepted"), set(lost, [1u8]))),
        (
            "canvas_out",
            lost,
            changed(&bytes, &place("canvas_out"), set(lost, other(at.canvas_out[lost]).to_le_bytes())),
        ),
        (
            "canvas_out",
            lost,
            changed(&bytes, &place("renoise"), set(lost, other(at.renoise[lost]).to_le_bytes())),
        ),
        ("logit", 9, changed(&bytes, &place("logits"), set(9 * 512 + 100, 77f32.to_le_bytes()))),
    ];
    for (what, row, spoiled) in cases {
        let mut tape = Tape::new(&prompt, &config, &trajectory);
        let (outcome, seen) = play(&spoiled, &config, &mut tape, &strict());
        let difference = outcome.unwrap().unwrap_or_else(|| panic!("{what} was not noticed"));
        assert_eq!(
            (difference.canvas, difference.step, difference.row, difference.what),
            (1, 4, Some(row), what)
        );
        assert_ne!(difference.expected, difference.found);
        assert!(
            difference.to_string().starts_with(&format!("canvas 1, step 4, row {row}: {what}: expected "))
        );
        assert_eq!(seen.len(), 16, "the steps before agree");
    }
}

#[test]
fn a_wrong_logit_of_the_model_is_found_and_a_small_one_is_told() {
    let (bytes, prompt, config) = long();
    let trajectory = Trajectory::read(&bytes).unwrap();
    for (wrong, found) in [(2e-4, true), (f32::NAN, true), (f32::INFINITY, true), (5e-5, false)] {
        let mut tape = Tape::new(&prompt, &config, &trajectory);
        tape.wrong = Some((0, 7, 3 * 512 + 11, wrong));
        let (outcome, seen) = play(&bytes, &config, &mut tape, &strict());
        match outcome.unwrap() {
            Some(difference) if found => {
                assert_eq!((difference.canvas, difference.step, difference.row), (0, 7, Some(3)));
                assert!(difference.expected.contains("token 11"), "{difference}");
            }
            None if !found => {
                let off = seen[7].logits.unwrap();
                assert!(off > 4e-5 && off < 6e-5, "{off}");
                continue;
            }
            other => panic!("{wrong}: {other:?}"),
        }
        // Told and not judged, unless it is no number.
        let mut tape = Tape::new(&prompt, &config, &trajectory);
        tape.wrong = Some((0, 7, 3 * 512 + 11, wrong));
        let (outcome, seen) = play(&bytes, &config, &mut tape, &ReplayOptions::default());
        if wrong.is_finite() {
            assert_eq!(outcome.unwrap(), None);
            assert!(seen[7].logits.unwrap() > 1e-4);
        } else {
            assert_eq!(outcome.unwrap().unwrap().what, "logit");
        }
    }
}

#[test]
fn the_streaming_head_is_compared_too() {
    let (bytes, prompt, config) = long();
    let trajectory = Trajectory::read(&bytes).unwrap();
    let mut tape = Tape::new(&prompt, &config, &trajectory);
    tape.astray = 2e-4;
    let outcome = follow(&mut tape, &prompt, &trajectory, &config, &ReplayOptions::default(), &mut |_| {});
    assert_eq!(outcome.unwrap().unwrap().what, "entropy");
}

#[test]
fn another_schedule_and_another_stop_test_are_noticed() {
    let (bytes, prompt, config) = long();
    let trajectory = Trajectory::read(&bytes).unwrap();
    let tape = || Tape::new(&prompt, &config, &trajectory);
    let hotter = GenerationConfig { t_max: 0.81, ..config.clone() };
    let (outcome, _) = play(&bytes, &hotter, &mut tape(), &ReplayOptions::default());
    let difference = outcome.unwrap().unwrap();
    assert_eq!((difference.canvas, difference.step, difference.what), (0, 0, "entropy"));

    let careless =
        GenerationConfig { stability_threshold: Some(0), confidence_threshold: Some(50.0), ..config.clone() };
    let (outcome, _) = play(&bytes, &careless, &mut tape(), &ReplayOptions::default());
    let difference = outcome.unwrap().unwrap();
    assert_eq!((difference.step, difference.row, difference.what), (0, None, "stop test"));

    let last = trajectory.canvas(0).unwrap().finished[5] as i32;
    let spoiled = changed(&bytes, "p0.final", set(5, (last + 1).to_le_bytes()));
    let (outcome, _) = play(&spoiled, &config, &mut tape(), &ReplayOptions::default());
    let difference = outcome.unwrap().unwrap();
    assert_eq!(
        (difference.canvas, difference.step, difference.row, difference.what),
        (0, 11, Some(5), "final token")
    );
}

#[test]
fn records_that_are_damaged_or_of_another_model_are_errors() {
    let (bytes, prompt, config) = long();
    let trajectory = Trajectory::read(&bytes).unwrap();
    let tape = || Tape::new(&prompt, &config, &trajectory);
    let fails = |bytes: &[u8], tape: &mut Tape, words: &str| {
        let (outcome, _) = play(bytes, &config, tape, &ReplayOptions::default());
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let spoiled = changed(&bytes, "p0.s3.canvas_in", set(2, 5i32.to_le_bytes()));
    fails(&spoiled, &mut tape(), "contradicts itself: `p0.s3.canvas_in`");
    let spoiled = changed(&bytes, "p0.s3.argmax", set(2, (-5i32).to_le_bytes()));
    fails(&spoiled, &mut tape(), "tensor `p0.s3.argmax`: found -5");
    let spoiled = changed(&bytes, "p0.s3.accepted", set(2, [9u8]));
    fails(&spoiled, &mut tape(), "`p0.s3.accepted`: found the byte 9");
    let mut other = tape();
    other.rows = 16;
    fails(&bytes, &mut other, "canvases of 32 rows, the model has 16");
    let mut nothing = tape();
    nothing.prompt.clear();
    fails(&bytes, &mut nothing, "the prompt has no tokens");

    let read = |bytes: &[u8]| Trajectory::read(bytes).err().expect("refused").to_string();
    assert!(read(b"nonsense").contains("not a safetensors file"));
    for cut in [0, 7, 8, 100, bytes.len() - 1] {
        assert!(Trajectory::read(&bytes[..cut]).is_err(), "cut to {cut} bytes");
    }
    let case =
        safetensors::serialize([("logits", TensorView::new(Dtype::F32, vec![1], &[0; 4]).unwrap())], None);
    assert!(read(&case.unwrap()).contains("`p0.init`: missing"));
    let empty =
        safetensors::serialize([("p0.init", TensorView::new(Dtype::I32, vec![0], &[]).unwrap())], None);
    assert!(read(&empty.unwrap()).contains("without rows"));
}

#[test]
fn the_manifest_tells_prompt_and_sampling_of_a_run() {
    let manifest = manifest("diffusion-random");
    let (prompt, config) = manifest_entry(&manifest, "two_canvases").unwrap();
    assert_eq!((prompt.len(), &config.eos[..], config.pad), (23, &[511][..], Some(0)));
    assert_eq!((config.max_denoising_steps, config.entropy_bound, config.t_min), (12, 0.1, 0.4));
    assert_eq!((config.stability_threshold, config.confidence_threshold), (Some(1), Some(0.005)));

    let mut switched_off = manifest.clone();
    switched_off["trajectories"][0]["confidence_threshold"] = Value::Null;
    assert_eq!(manifest_entry(&switched_off, "short").unwrap().1.confidence_threshold, None);

    let refused = |manifest: &Value, name| manifest_entry(manifest, name).unwrap_err().to_string();
    let error = refused(&manifest, "none");
    assert!(error.contains("no trajectory `none`; there are short, long, two_canvases"), "{error}");
    assert!(refused(&Value::Null, "short").contains("no list `trajectories`"));
    let mut broken = manifest.clone();
    broken["trajectories"][0]["prompt"][2] = Value::from(-1);
    assert!(refused(&broken, "short").contains("`prompt` is no list of token ids"));
    let mut broken = manifest;
    broken["trajectories"][0].as_object_mut().unwrap().remove("t_max");
    assert!(refused(&broken, "short").contains("no key `t_max`"));
}
