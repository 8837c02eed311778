//! A canvas model small enough to read: what it says is a hash of all that a real one would look at.
#![allow(dead_code)] // each test file uses its part
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::rc::Rc;

use axe::decode::Memory;
use axe::decode::diffusion::CanvasModel;
use axe::model::ModelError;
use axe::model::diffusion_gemma::{DenoiseStep, RowChoice};

/// What was asked of a [`Toy`], in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    Encode { start: usize, tokens: Vec<u32> },
    Denoise { start: usize, canvas: Vec<u32>, step: DenoiseStep },
}

/// Breaks one answer of the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    Fails,
    NotFinite,
    RowMissing,
    UnknownToken,
}

/// A model that denoises towards tokens that depend on everything before the canvas. It refuses what no correct loop
/// would ask: holes in the cache, steps out of order, positions that its ring has lost.
pub struct Toy {
    pub canvas: usize,
    pub vocabulary: usize,
    pub context: usize,
    pub rows: usize,
    /// Positions that can be read behind those the model needs for the next token.
    pub ring: usize,
    /// Tokens a sliding layer looks back.
    pub window: usize,
    /// Never sure enough to stop early.
    pub restless: bool,
    pub calls: Rc<RefCell<Vec<Call>>>,
    pub fault: Rc<RefCell<Option<Fault>>>,
    pub cache: Vec<u32>,
    /// One past the last position that was written since the ring began.
    pub written: usize,
    /// What the step before left for the next: canvas, step and a hash of what it said.
    pub state: Option<(u32, u32, u64)>,
}

impl Default for Toy {
    fn default() -> Self {
        Self {
            canvas: 8,
            vocabulary: 97,
            context: 64,
            rows: 64,
            ring: 1024,
            window: 4,
            restless: false,
            calls: Rc::default(),
            fault: Rc::default(),
            cache: Vec::new(),
            written: 0,
            state: None,
        }
    }
}

pub fn hash(parts: impl IntoIterator<Item = u64>) -> u64 {
    parts.into_iter().fold(0xcbf2_9ce4_8422_2325, |state, part| {
        let mixed = (state ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    })
}

impl CanvasModel for Toy {
    fn canvas(&self) -> usize {
        self.canvas
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn context(&self) -> usize {
        self.context
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError> {
        assert!(!tokens.is_empty() && tokens.len() <= self.rows, "a pass of {} tokens", tokens.len());
        assert!(start + tokens.len() <= self.context, "encoded past the context");
        assert!(start <= self.cache.len(), "a hole before position {start}");
        assert!(self.reusable(start), "the ring has lost what stands before {start}");
        self.cache.truncate(start);
        self.cache.extend_from_slice(tokens);
        self.written = if start == 0 { tokens.len() } else { self.written.max(start + tokens.len()) };
        self.calls.borrow_mut().push(Call::Encode { start, tokens: tokens.to_vec() });
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ModelError> {
        Ok(())
    }

    fn reusable(&self, start: usize) -> bool {
        start == 0 || self.written + self.window <= start + self.ring
    }

    fn denoise(
        &mut self,
        canvas: &[u32],
        start: usize,
        step: &DenoiseStep,
    ) -> Result<Vec<RowChoice>, ModelError> {
        assert_eq!(canvas.len(), self.canvas);
        assert!(start <= self.cache.len() && self.reusable(start), "the cache does not reach {start}");
        assert!(start > 0 && start < self.context);
        self.cache.truncate(start);
        self.written = self.written.max(start + self.canvas);
        self.calls.borrow_mut().push(Call::Denoise { start, canvas: canvas.to_vec(), step: step.clone() });
        let fault = self.fault.borrow_mut().take();
        if fault == Some(Fault::Fails) {
            return Err(ModelError::TooManyRows { rows: 1, most: 0 });
        }
        let conditioned = if step.first {
            0
        } else {
            let (canvas, before, hash) = self.state.expect("a first step came before");
            assert_eq!((canvas, before + 1), (step.canvas, step.step), "steps follow each other");
            hash
        };
        let prefix = hash(self.cache.iter().map(|&id| u64::from(id)));
        let wanted: Vec<u32> = (0..canvas.len())
            .map(|row| {
                let token = (hash([prefix, row as u64]) % self.vocabulary as u64) as u32;
                if row == 0 && step.barred.contains(&token) { 0 } else { token }
            })
            .collect();
        let right = wanted.iter().zip(canvas).filter(|(a, b)| a == b).count();
        let unsure = 1.0 - right as f32 / canvas.len() as f32;
        let mut choices: Vec<RowChoice> = wanted
            .iter()
            .enumerate()
            .map(|(row, &argmax)| {
                let draw = hash([
                    prefix,
                    conditioned,
                    u64::from(canvas[row]),
                    u64::from(step.temperature.to_bits()),
                    step.seed,
                    u64::from(step.canvas),
                    u64::from(step.step),
                    row as u64,
                ]);
                let astray = !step.greedy && draw.is_multiple_of(16);
                let own = (draw % 1000) as f32 / 1000.0;
                let least = if self.restless { 0.02 } else { 0.0005 };
                RowChoice {
                    argmax,
                    sampled: if astray { (draw / 16 % self.vocabulary as u64) as u32 } else { argmax },
                    entropy: least + unsure * own * 0.2,
                }
            })
            .collect();
        let said = hash(choices.iter().map(|c| u64::from(c.sampled) << 32 | u64::from(c.entropy.to_bits())));
        self.state = Some((step.canvas, step.step, hash([conditioned, said])));
        match fault {
            Some(Fault::NotFinite) => choices[3].entropy = f32::NAN,
            Some(Fault::RowMissing) => drop(choices.pop()),
            Some(Fault::UnknownToken) => choices[2].argmax = self.vocabulary as u32,
            _ => {}
        }
        Ok(choices)
    }

    fn canvas_logits(&mut self, _: &[u32], _: usize, _: Option<&[f32]>) -> Result<Vec<f32>, ModelError> {
        panic!("the loop asked for logits");
    }

    fn memory(&self) -> Memory {
        Memory { weights: 1, kv_cache: 2, scratch: 3, budget: 4 }
    }
}

/// The steps among the calls: where the canvas began, what stood on it, and what was asked.
pub fn denoised(calls: &[Call]) -> Vec<(usize, Vec<u32>, DenoiseStep)> {
    let denoise = |call: &Call| match call {
        Call::Denoise { start, canvas, step } => Some((*start, canvas.clone(), step.clone())),
        Call::Encode { .. } => None,
    };
    calls.iter().filter_map(denoise).collect()
}
