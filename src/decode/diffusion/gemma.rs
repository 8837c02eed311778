//! DiffusionGemma as the loops see it.

use super::model::CanvasModel;
use crate::decode::Memory;
use crate::model::ModelError;
use crate::model::diffusion_gemma::{DenoiseStep, DiffusionGemma, RowChoice};

impl CanvasModel for DiffusionGemma {
    fn canvas(&self) -> usize {
        self.config().canvas
    }

    fn vocabulary(&self) -> usize {
        self.config().vocabulary
    }

    fn context(&self) -> usize {
        self.context()
    }

    fn rows(&self) -> usize {
        self.rows()
    }

    fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError> {
        self.encode(tokens, start)
    }

    fn finish(&mut self) -> Result<(), ModelError> {
        Ok(self.device().finish()?)
    }

    fn reusable(&self, start: usize) -> bool {
        self.reusable(start)
    }

    fn denoise(
        &mut self,
        canvas: &[u32],
        start: usize,
        step: &DenoiseStep,
    ) -> Result<Vec<RowChoice>, ModelError> {
        self.denoise(canvas, start, step)
    }

    fn canvas_logits(
        &mut self,
        canvas: &[u32],
        start: usize,
        previous: Option<&[f32]>,
    ) -> Result<Vec<f32>, ModelError> {
        self.canvas_logits(canvas, start, previous)
    }

    fn memory(&self) -> Memory {
        Memory::of(self.device())
    }
}
