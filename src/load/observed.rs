//! A backend that the operator's board shows once it serves, and the times of its kernels.

use std::cell::Cell;
use std::sync::Arc;

use axectl::protocol;

use crate::admin::Board;
use crate::decode::{Backend, BackendError, Generation, Memory, Sampling, Texts};
use crate::device::{Device, process};

/// A backend and the board that hears what its kernels took.
pub(super) struct Observed {
    backend: Box<dyn Backend>,
    device: Device,
    board: Arc<Board>,
    pins: Cell<Option<Pins>>,
    /// The last to go.
    _freed: Freed,
}

/// What the board is to show when the model serves.
pub(super) struct Pins {
    pub(super) device: protocol::Device,
    pub(super) model: protocol::Model,
    pub(super) kernels: protocol::Kernels,
    pub(super) warnings: Vec<String>,
}

/// Gives the system what the model had.
struct Freed;

impl Drop for Freed {
    fn drop(&mut self) {
        process::release_unused();
    }
}

impl Observed {
    pub(super) fn new(backend: Box<dyn Backend>, device: Device, board: Arc<Board>, pins: Pins) -> Self {
        Self { backend, device, board, pins: Cell::new(Some(pins)), _freed: Freed }
    }
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

    /// The engine asks when the model begins to serve, and after every job: the moment to show what kernels took, too.
    fn memory(&self) -> Memory {
        if let Some(Pins { device, model, kernels, warnings }) = self.pins.take() {
            self.board.pin_device(device);
            self.board.pin_model(model);
            self.board.pin_kernels(kernels);
            self.board.pin_warnings(warnings);
        }
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
