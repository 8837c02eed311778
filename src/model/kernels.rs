//! Which kernels a model runs on.

use super::error::ModelError;
use crate::device::Device;
use crate::ops::{Kernels, OpsError, Products};

/// Kernels that make products so; none where that is by vectors, or by a matrix unit that is not there.
///
/// # Errors
/// The device has nothing that kernels of the `xmx` family need; or what it says.
pub(super) fn wanted(device: &Device, products: Products) -> Result<Option<Kernels>, ModelError> {
    match products {
        Products::Vector => Ok(None),
        Products::MatrixUnit => Ok(Kernels::with_matrix_unit(device)?),
        Products::Integer => Ok(Kernels::with_integers(device)?),
        Products::Xmx => match Kernels::with_xmx(device)? {
            Some(kernels) => Ok(Some(kernels)),
            None => Err(ModelError::NoSubGroups { device: device.info().name.clone() }),
        },
    }
}

/// Kernels that have passed `test`: those that were wanted, if there are any, else those that make products by vectors.
///
/// # Errors
/// Kernels by vectors that fail, or what the device says.
pub(super) fn tested(
    device: &Device,
    wanted: Option<Kernels>,
    test: impl Fn(&Kernels) -> Result<(), OpsError>,
) -> Result<Kernels, ModelError> {
    if let Some(kernels) = wanted {
        let products = kernels.products();
        match test(&kernels) {
            Ok(()) => {
                tracing::info!(?products, "kernels chosen");
                return Ok(kernels);
            }
            Err(error @ OpsError::SelfTest { .. }) => {
                tracing::warn!(%error, ?products, "kernels are left alone");
            }
            Err(error) => return Err(error.into()),
        }
    }
    let kernels = Kernels::new(device)?;
    test(&kernels)?;
    tracing::info!(products = "vectors", "kernels chosen");
    Ok(kernels)
}
