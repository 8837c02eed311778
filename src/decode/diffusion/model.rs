//! What the loops need of a model.

use crate::decode::Memory;
use crate::model::ModelError;
use crate::model::diffusion_gemma::{DenoiseStep, RowChoice};

/// A model that encodes a prefix into a cache and denoises a canvas behind it.
///
/// Positions are absolute. The cache has room for [`CanvasModel::context`] positions and a canvas behind the last of
/// them; what a canvas writes there counts for its step only.
pub trait CanvasModel {
    /// Rows of a canvas.
    fn canvas(&self) -> usize;
    /// Ids below this may be read and chosen.
    fn vocabulary(&self) -> usize;
    /// Most positions of prompt and output together.
    fn context(&self) -> usize;
    /// Most tokens of one [`CanvasModel::encode`].
    fn rows(&self) -> usize;
    /// Appends tokens at position `start` to the cache, where everything before is in it; may return before they have
    /// run.
    ///
    /// # Errors
    /// Too many tokens, ids out of the vocabulary, a full cache, failures of the device.
    fn encode(&mut self, tokens: &[u32], start: usize) -> Result<(), ModelError>;
    /// Waits for everything that was begun.
    ///
    /// # Errors
    /// Failures of the device.
    fn finish(&mut self) -> Result<(), ModelError>;
    /// Whether positions before `start` are still whole in the cache, whatever was written from `start` on since.
    fn reusable(&self, start: usize) -> bool;
    /// Runs one denoising step of the canvas at position `start`; one choice for each row. Steps after the first of a
    /// canvas are conditioned on the step before.
    ///
    /// # Errors
    /// Numbers that are not finite, ids out of the vocabulary, failures of the device.
    fn denoise(
        &mut self,
        canvas: &[u32],
        start: usize,
        step: &DenoiseStep,
    ) -> Result<Vec<RowChoice>, ModelError>;
    /// Soft-capped logits, `[canvas][vocabulary]`, of the canvas at position `start`, before any temperature, conditioned
    /// on the logits of the step before, divided by its temperature, if there was one. Made the plain way, for
    /// comparison with a reference.
    ///
    /// # Errors
    /// As for [`CanvasModel::denoise`]; `previous` of another size.
    fn canvas_logits(
        &mut self,
        canvas: &[u32],
        start: usize,
        previous: Option<&[f32]>,
    ) -> Result<Vec<f32>, ModelError>;
    /// What is allocated on the device.
    fn memory(&self) -> Memory;
}
