//! What a model takes on its device, checked before anything is allocated.

use super::error::ModelError;
use crate::device::Device;

/// Bytes a model takes on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Repacked matrices and norms.
    pub weights: usize,
    /// Keys and values of all layers.
    pub kv_cache: usize,
    /// Activations, logits and tables.
    pub scratch: usize,
}

impl MemoryPlan {
    /// Says the plan in the log; refuses one that `device` has no room for. `context` is in tokens.
    ///
    /// # Errors
    /// [`ModelError::TooLarge`] with the numbers.
    pub fn check(&self, device: &Device, context: usize) -> Result<(), ModelError> {
        let report = device.memory();
        let needed = self.weights + self.kv_cache + self.scratch;
        if needed as u64 > report.budget.saturating_sub(report.total) {
            return Err(ModelError::TooLarge {
                weights_mib: self.weights as u64 >> 20,
                kv_mib: self.kv_cache as u64 >> 20,
                scratch_mib: self.scratch as u64 >> 20,
                context,
                limit_mib: report.budget >> 20,
            });
        }
        tracing::info!(
            weights_mib = self.weights >> 20,
            kv_cache_mib = self.kv_cache >> 20,
            scratch_mib = self.scratch >> 20,
            limit_mib = report.budget >> 20,
            context,
            "memory plan"
        );
        Ok(())
    }
}
