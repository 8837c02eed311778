//! What block decoding needs of a causal model.

use crate::decode::Memory;
use crate::device::DeviceKind;
use crate::model::{Causal, Logits, ModelError};
use crate::ops::RowTop;

/// A causal model with the key-value cache of one sequence.
pub trait BlockModel {
    /// Ids it has embeddings for.
    fn vocabulary(&self) -> usize;
    /// Positions the cache holds.
    fn context(&self) -> usize;
    /// Most rows of a pass.
    fn rows(&self) -> usize;
    /// Most rows of a pass whose logits are wanted.
    fn logit_rows(&self) -> usize;
    /// Begins a pass of `tokens` at positions `start..`, on top of what the cache holds for the positions before.
    ///
    /// # Errors
    /// Unknown tokens, too many rows, positions past the context, all before anything runs; or what the device says.
    fn forward(&mut self, tokens: &[u32], start: usize, logits: Logits) -> Result<(), ModelError>;
    /// Waits for the pass.
    ///
    /// # Errors
    /// What the device says.
    fn finish(&self) -> Result<(), ModelError>;
    /// Tokens from this id on are padding: none of them is among the best of a row.
    fn limit(&mut self, tokens: usize);
    /// Waits for the pass and tells the best tokens of each row that has logits.
    ///
    /// # Errors
    /// What the device says.
    fn tops(&self) -> Result<Vec<RowTop>, ModelError>;
    /// Waits for the pass and shows all logits of a row.
    ///
    /// # Errors
    /// What the device says.
    fn look(&self, row: usize, look: &mut dyn FnMut(&[f32])) -> Result<(), ModelError>;
    /// What is allocated on the device at present.
    fn memory(&self) -> Memory;
    /// Processors of this machine that the device is made of; none where it is another thing.
    fn processors(&self) -> Option<usize> {
        None
    }
}

impl BlockModel for Causal {
    fn vocabulary(&self) -> usize {
        self.config().vocabulary
    }

    fn context(&self) -> usize {
        self.context()
    }

    fn rows(&self) -> usize {
        self.rows()
    }

    fn logit_rows(&self) -> usize {
        self.logit_rows()
    }

    fn forward(&mut self, tokens: &[u32], start: usize, logits: Logits) -> Result<(), ModelError> {
        self.forward(tokens, start, logits)
    }

    fn finish(&self) -> Result<(), ModelError> {
        Ok(self.device().finish()?)
    }

    fn limit(&mut self, tokens: usize) {
        self.limit_choices(tokens);
    }

    fn tops(&self) -> Result<Vec<RowTop>, ModelError> {
        self.choices()
    }

    fn look(&self, row: usize, look: &mut dyn FnMut(&[f32])) -> Result<(), ModelError> {
        self.with_logits(row, look)
    }

    fn memory(&self) -> Memory {
        Memory::of(self.device())
    }

    fn processors(&self) -> Option<usize> {
        let info = self.device().info();
        (info.kind == DeviceKind::Cpu).then_some(info.compute_units as usize)
    }
}
