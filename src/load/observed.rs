//! A backend whose kernels' times the operator's board shows.

use std::sync::Arc;

use axectl::protocol;

use crate::admin::Board;
use crate::decode::{Backend, BackendError, Generation, Memory, Sampling, Texts};
use crate::device::Device;

/// A backend and the board that hears what its kernels took.
pub(super) struct Observed {
    pub(super) backend: Box<dyn Backend>,
    pub(super) device: Device,
    pub(super) board: Arc<Board>,
}

impl Backend for Observed {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.backend.start(prompt, sampling)
    }

    fn infill<'a>(
        &'a mut self,
        texts: Texts<'_>,
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.backend.infill(texts, sampling)
    }

    fn context_length(&self) -> usize {
        self.backend.context_length()
    }

    /// The engine asks after every job: the moment to show what kernels took, too.
    fn memory(&self) -> Memory {
        match self.device.profile() {
            Ok(times) => self.board.pin_profile(protocol::Profile {
                enabled: self.device.is_profiling(),
                kernels: times
                    .into_iter()
                    .map(|time| protocol::KernelTime {
                        kernel: format!("{}: {}", time.program, time.kernel),
                        launches: time.launches,
                        total_ns: time.total_ns,
                    })
                    .collect(),
            }),
            Err(error) => tracing::debug!(%error, "no kernel times"),
        }
        self.backend.memory()
    }
}
