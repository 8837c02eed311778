//! What kernels take, request by request, beside what the device can do.

use axectl::protocol::{KernelTime, Limits, Profile};

use crate::admin::Board;
use crate::device::Device;
use crate::ops::{Kernels, OpsError};

/// The kernels' times of one request after the other, where the device measures them.
pub(super) struct Profiled {
    limits: Option<Limits>,
    request: Option<String>,
}

impl Profiled {
    /// Measures what the device can do, in about a second; nothing where kernels are not measured.
    pub(super) fn new(device: &Device) -> Self {
        let limits = device.is_profiling().then(|| {
            limits(device)
                .inspect_err(
                    |error| tracing::warn!(%error, "what the device can do at best was not measured"),
                )
                .ok()
        });
        Self { limits: limits.flatten(), request: None }
    }

    /// Begins anew with the request that now runs.
    pub(super) fn begin(&mut self, device: &Device, board: &Board) {
        if device.is_profiling() {
            device.reset_profile();
            self.request = board.running_id();
        }
    }

    /// Shows the times since then.
    pub(super) fn show(&self, device: &Device, board: &Board) {
        match device.profile() {
            Ok(times) => board.pin_profile(Profile {
                enabled: device.is_profiling(),
                request: self.request.clone(),
                limits: self.limits,
                kernels: times
                    .into_iter()
                    .map(|time| KernelTime {
                        kernel: format!("{}: {}", time.program, time.kernel),
                        launches: time.launches,
                        total_ns: time.total_ns,
                        bytes: time.bytes,
                        operations: time.operations,
                        waited_ns: time.waited_ns,
                    })
                    .collect(),
            }),
            Err(error) => tracing::debug!(%error, "no kernel times"),
        }
    }
}

fn limits(device: &Device) -> Result<Limits, OpsError> {
    let peak = Kernels::new(device)?.peak(device)?;
    Ok(Limits { read_bytes_per_s: peak.read, operations_per_s: peak.multiply_add })
}
