//! A backend whose kernels' times the operator's board shows.

use std::sync::Arc;

use super::profiled::Profiled;
use crate::admin::Board;
use crate::decode::{Backend, BackendError, Generation, Memory, Sampling, Texts};
use crate::device::Device;

/// A backend and the board that hears what its kernels took.
pub(super) struct Observed {
    pub(super) backend: Box<dyn Backend>,
    pub(super) device: Device,
    pub(super) board: Arc<Board>,
    pub(super) profiled: Profiled,
}

impl Backend for Observed {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.profiled.begin(&self.device, &self.board);
        self.backend.start(prompt, sampling)
    }

    fn infill<'a>(
        &'a mut self,
        texts: Texts<'_>,
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.profiled.begin(&self.device, &self.board);
        self.backend.infill(texts, sampling)
    }

    fn context_length(&self) -> usize {
        self.backend.context_length()
    }

    /// The engine asks after every job: the moment to show what kernels took, too.
    fn memory(&self) -> Memory {
        self.profiled.show(&self.device, &self.board);
        self.backend.memory()
    }
}
