//! Replays a recorded run on a model: each step starts from the canvas that was recorded, conditioned on the logits that
//! were, and everything that follows from it is compared. So one wrong step does not hide the next ones' causes.

use std::fmt;

use super::acceptance::accept;
use super::distribution::Distribution;
use super::model::CanvasModel;
use super::plan::Plan;
use super::trajectory::{StepRecord, Trajectory};
use crate::decode::BackendError;
use crate::model::diffusion_gemma::{DenoiseStep, GenerationConfig};

/// How to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayOptions {
    /// Largest difference of a logit; `None`: the difference is told and not judged. What conditions a step are logits
    /// divided by a temperature, which sharpens the last bits of the reference's own f32 sums along with the rest.
    pub logits: Option<f32>,
    /// Largest difference of an entropy, in nats.
    pub entropy: f32,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self { logits: None, entropy: 1e-4 }
    }
}

/// The first thing that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Canvas of the run, from 0.
    pub canvas: usize,
    /// Step of the canvas, from 0.
    pub step: usize,
    /// Row of the canvas; `None` for what concerns it as a whole.
    pub row: Option<usize>,
    /// What was compared.
    pub what: &'static str,
    /// What was recorded.
    pub expected: String,
    /// What the model gave.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "canvas {}, step {}", self.canvas, self.step)?;
        if let Some(row) = self.row {
            write!(f, ", row {row}")?;
        }
        write!(f, ": {}: expected {}, found {}", self.what, self.expected, self.found)
    }
}

/// A step in which everything agreed.
#[derive(Debug, Clone, PartialEq)]
pub struct Agreement {
    /// Canvas of the run, from 0.
    pub canvas: usize,
    /// Step of the canvas, from 0.
    pub step: usize,
    /// Its temperature.
    pub temperature: f32,
    /// Largest difference of a logit, where logits were compared.
    pub logits: Option<f32>,
    /// Largest difference of an entropy, in nats.
    pub entropy: f32,
    /// Mean entropy, in nats.
    pub mean_entropy: f32,
    /// Positions accepted.
    pub accepted: usize,
    /// Rows.
    pub rows: usize,
    /// The canvas is done.
    pub done: bool,
}

/// Replays `trajectory` behind `prompt` with the plain head; `report` is told of each step that agrees. Ends at the first
/// difference. Where logits were not recorded, the model's own of the step before condition a step.
///
/// # Errors
/// A record that is damaged, contradicts itself or is of another model; failures of the model.
pub fn replay<M: CanvasModel>(
    model: &mut M,
    prompt: &[u32],
    trajectory: &Trajectory<'_>,
    config: &GenerationConfig,
    options: &ReplayOptions,
    report: &mut dyn FnMut(&Agreement),
) -> Result<Option<Difference>, BackendError> {
    let walk = Walk { prompt, trajectory, config, plan: Plan::new(config), options };
    let vocabulary = model.vocabulary();
    // The processed logits of the step before.
    let mut previous: Option<Vec<f32>> = None;
    walk.along(model, report, |model, place, record| {
        let given = if place.step == 0 { None } else { previous.as_deref() };
        let logits = model.canvas_logits(&record.canvas_in, place.start, given)?;
        let rows = record.canvas_in.len();
        if logits.len() != rows * vocabulary {
            return Err(
                format!("the model gave {} logits, expected {rows} x {vocabulary}", logits.len()).into()
            );
        }
        let mut largest = None;
        if let Some(recorded) = &record.logits {
            if recorded.len() != logits.len() {
                return Err(format!(
                    "the record is of a model with a vocabulary of {}, this one has {vocabulary}",
                    recorded.len() / rows
                )
                .into());
            }
            let mut worst = 0f32;
            for (index, (&found, &expected)) in logits.iter().zip(recorded).enumerate() {
                let off = (found - expected).abs();
                // A difference that is no number is one, judged or not.
                if !off.is_finite() || options.logits.is_some_and(|most| off > most) {
                    let (row, token) = (index / vocabulary, index % vocabulary);
                    let difference =
                        place.differs(Some(row), "logit", format!("{expected} for token {token}"), found);
                    return Ok(Seen::Differs(difference));
                }
                worst = worst.max(off);
            }
            largest = Some(worst);
        }
        let temperature = walk.plan.schedule.temperature(place.step);
        let mut rows = Vec::with_capacity(rows);
        for (row, (logits, &u)) in logits.chunks_exact(vocabulary).zip(&record.u).enumerate() {
            let Some(seen) = Distribution::new(logits, temperature) else {
                let difference = place.differs(Some(row), "logits", "numbers", "NaN or infinity");
                return Ok(Seen::Differs(difference));
            };
            rows.push(Row { argmax: seen.argmax(), entropy: seen.entropy(), sampled: Some(seen.draw(u)) });
        }
        let mut processed = record.logits.clone().unwrap_or(logits);
        processed.iter_mut().for_each(|logit| *logit /= temperature);
        previous = Some(processed);
        Ok(Seen::Rows { rows, logits: largest })
    })
}

/// Follows `trajectory` with the streaming head, as a server runs it: canvases are those recorded, but what conditions a
/// step is what the model kept of its own step before. Samples are its own, too, so they are not compared.
///
/// # Errors
/// As for [`replay`].
pub fn follow<M: CanvasModel>(
    model: &mut M,
    prompt: &[u32],
    trajectory: &Trajectory<'_>,
    config: &GenerationConfig,
    options: &ReplayOptions,
    report: &mut dyn FnMut(&Agreement),
) -> Result<Option<Difference>, BackendError> {
    let walk = Walk { prompt, trajectory, config, plan: Plan::new(config), options };
    walk.along(model, report, |model, place, record| {
        let step = DenoiseStep {
            first: place.step == 0,
            temperature: walk.plan.schedule.temperature(place.step),
            seed: 0,
            canvas: place.canvas as u32,
            step: place.step as u32,
            greedy: false,
            barred: Vec::new(),
        };
        let choices = model.denoise(&record.canvas_in, place.start, &step)?;
        if choices.len() != record.canvas_in.len() {
            return Err(format!("the model answered {} rows", choices.len()).into());
        }
        let rows = choices
            .iter()
            .map(|choice| Row { argmax: choice.argmax, entropy: choice.entropy, sampled: None })
            .collect();
        Ok(Seen::Rows { rows, logits: None })
    })
}

/// Where a step stands.
#[derive(Debug, Clone, Copy)]
struct Place {
    canvas: usize,
    step: usize,
    /// Position of the canvas.
    start: usize,
}

impl Place {
    fn differs(
        self,
        row: Option<usize>,
        what: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Difference {
        let (expected, found) = (expected.to_string(), found.to_string());
        Difference { canvas: self.canvas, step: self.step, row, what, expected, found }
    }
}

/// What a model says of a row.
struct Row {
    argmax: u32,
    entropy: f32,
    /// From the recorded draw.
    sampled: Option<u32>,
}

/// What a model says of a step.
enum Seen {
    Rows { rows: Vec<Row>, logits: Option<f32> },
    Differs(Difference),
}

/// What is replayed and how.
struct Walk<'a> {
    prompt: &'a [u32],
    trajectory: &'a Trajectory<'a>,
    config: &'a GenerationConfig,
    plan: Plan,
    options: &'a ReplayOptions,
}

impl Walk<'_> {
    /// Encodes what stands before each canvas, asks `see` about each step, and compares.
    fn along<M: CanvasModel>(
        &self,
        model: &mut M,
        report: &mut dyn FnMut(&Agreement),
        mut see: impl FnMut(&mut M, Place, &StepRecord) -> Result<Seen, BackendError>,
    ) -> Result<Option<Difference>, BackendError> {
        let (trajectory, plan) = (self.trajectory, &self.plan);
        if self.prompt.is_empty() {
            return Err("the prompt has no tokens".into());
        }
        if trajectory.rows() != model.canvas() {
            return Err(format!(
                "the record has canvases of {} rows, the model has {}",
                trajectory.rows(),
                model.canvas()
            )
            .into());
        }
        let mut start = 0;
        let mut pending = self.prompt.to_vec();
        for canvas in 0..trajectory.canvases() {
            let whole = trajectory.canvas(canvas)?;
            for tokens in pending.chunks(model.rows().max(1)) {
                model.encode(tokens, start)?;
                start += tokens.len();
            }
            model.finish()?;
            let mut stop = plan.stop_test();
            let mut tokens = whole.init;
            let mut argmax = Vec::new();
            for step in 0..whole.steps {
                let place = Place { canvas, step, start };
                let record = trajectory.step(canvas, step)?;
                if record.canvas_in != tokens {
                    return Err(format!(
                        "the record contradicts itself: `p{canvas}.s{step}.canvas_in` is not what came before"
                    )
                    .into());
                }
                let (rows, logits) = match see(model, place, &record)? {
                    Seen::Differs(difference) => return Ok(Some(difference)),
                    Seen::Rows { rows, logits } => (rows, logits),
                };
                let entropies: Vec<f32> = rows.iter().map(|row| row.entropy).collect();
                if let Some(difference) = self.compare(place, &rows, &record, &entropies) {
                    return Ok(Some(difference));
                }
                argmax = rows.iter().map(|row| row.argmax).collect();
                let done = stop.done(&argmax, &entropies) || step + 1 >= plan.schedule.steps();
                let was_done = step + 1 == whole.steps;
                if done != was_done {
                    let told = |done: bool| if done { "the canvas is done" } else { "another step" };
                    return Ok(Some(place.differs(None, "stop test", told(was_done), told(done))));
                }
                let off = rows.iter().zip(&record.entropy).map(|(row, was)| (row.entropy - was).abs());
                report(&Agreement {
                    canvas,
                    step,
                    temperature: plan.schedule.temperature(step),
                    logits,
                    entropy: off.fold(0.0, f32::max),
                    mean_entropy: entropies.iter().sum::<f32>() / entropies.len() as f32,
                    accepted: record.accepted.iter().filter(|&&kept| kept).count(),
                    rows: rows.len(),
                    done,
                });
                tokens = record.canvas_out;
            }
            if whole.steps == 0 {
                return Err(format!("the record has no step of canvas {canvas}").into());
            }
            let place = Place { canvas, step: whole.steps - 1, start };
            let finished = padded(&argmax, self.config);
            if let Some((row, expected, found)) = first_unequal(&whole.finished, &finished) {
                return Ok(Some(place.differs(Some(row), "final token", expected, found)));
            }
            pending = whole.finished;
        }
        Ok(None)
    }

    /// Everything that follows from a step, in the order in which it follows.
    fn compare(
        &self,
        place: Place,
        rows: &[Row],
        record: &StepRecord,
        entropies: &[f32],
    ) -> Option<Difference> {
        for (row, (seen, (&argmax, &entropy))) in
            rows.iter().zip(record.argmax.iter().zip(&record.entropy)).enumerate()
        {
            if seen.argmax != argmax {
                return Some(place.differs(Some(row), "argmax", argmax, seen.argmax));
            }
            let off = (seen.entropy - entropy).abs();
            if off > self.options.entropy || off.is_nan() {
                return Some(place.differs(Some(row), "entropy", entropy, seen.entropy));
            }
        }
        for (row, (seen, &sampled)) in rows.iter().zip(&record.sampled).enumerate() {
            if let Some(found) = seen.sampled.filter(|&found| found != sampled) {
                return Some(place.differs(Some(row), "sampled", sampled, found));
            }
        }
        let accepted = accept(entropies, self.plan.entropy_bound);
        if let Some((row, expected, found)) = first_unequal(&record.accepted, &accepted) {
            return Some(place.differs(Some(row), "accepted", expected, found));
        }
        let canvas_out: Vec<u32> = rows
            .iter()
            .zip(&accepted)
            .zip(record.sampled.iter().zip(&record.renoise))
            .map(
                |((seen, &kept), (&sampled, &noise))| {
                    if kept { seen.sampled.unwrap_or(sampled) } else { noise }
                },
            )
            .collect();
        let (row, expected, found) = first_unequal(&record.canvas_out, &canvas_out)?;
        Some(place.differs(Some(row), "canvas_out", expected, found))
    }
}

fn first_unequal<T: PartialEq + Copy>(expected: &[T], found: &[T]) -> Option<(usize, T, T)> {
    expected.iter().zip(found).enumerate().find(|(_, (a, b))| a != b).map(|(row, (&a, &b))| (row, a, b))
}

/// A finished canvas as the reference tells it: padding after the first token that ends the reply.
fn padded(argmax: &[u32], config: &GenerationConfig) -> Vec<u32> {
    let mut tokens = argmax.to_vec();
    if let (Some(pad), Some(end)) = (config.pad, tokens.iter().position(|id| config.eos.contains(id))) {
        tokens[end + 1..].fill(pad);
    }
    tokens
}
