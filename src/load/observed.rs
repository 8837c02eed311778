//! A backend that the operator's board shows once it serves, and the times of its kernels.

use std::cell::Cell;
use std::sync::Arc;

use axectl::protocol;

use super::profiled::Profiled;
use crate::admin::Board;
use crate::decode::{Backend, BackendError, Generation, Memory, Sampling, Texts};
use crate::device::{Device, process};

/// A backend and the board that hears what its kernels took.
pub(super) struct Observed {
    backend: Box<dyn Backend>,
    profiled: Profiled,
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
        let profiled = Profiled::new(&device);
        Self { backend, profiled, device, board, pins: Cell::new(Some(pins)), _freed: Freed }
    }
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

    /// The engine asks when the model begins to serve, and after every job: the moment to show what kernels took, too.
    fn memory(&self) -> Memory {
        if let Some(Pins { device, model, kernels, warnings }) = self.pins.take() {
            self.board.pin_device(device);
            self.board.pin_model(model);
            self.board.pin_kernels(kernels);
            self.board.pin_warnings(warnings);
        }
        self.profiled.show(&self.device, &self.board);
        self.backend.memory()
    }
}
