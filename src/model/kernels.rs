//! Which kernels a model runs on.

use super::error::ModelError;
use crate::device::Device;
use crate::ops::{Kernels, OpsError};

/// Kernels that have passed `test`: those for the matrix unit if there are any, else those that do without.
///
/// # Errors
/// Kernels without the matrix unit that fail, or what the device says.
pub(super) fn tested(
    device: &Device,
    unit: Option<Kernels>,
    test: impl Fn(&Kernels) -> Result<(), OpsError>,
) -> Result<Kernels, ModelError> {
    if let Some(kernels) = unit {
        match test(&kernels) {
            Ok(()) => {
                tracing::info!(products = "matrix unit (AMX)", "kernels chosen");
                return Ok(kernels);
            }
            Err(error @ OpsError::SelfTest { .. }) => {
                tracing::warn!(%error, "the matrix unit is left alone");
            }
            Err(error) => return Err(error.into()),
        }
    }
    let kernels = Kernels::new(device)?;
    test(&kernels)?;
    tracing::info!(products = "vectors", "kernels chosen");
    Ok(kernels)
}
