//! Whether a failure took the device with it.

use super::BackendError;
use crate::device::DeviceError;
use crate::model::ModelError;
use crate::ops::OpsError;

/// Whether the device, its driver or its queue is gone: then only a model that is loaded anew can go on.
#[must_use]
pub fn is_lost(error: &BackendError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
    while let Some(error) = cause {
        if of_device(error).is_some_and(DeviceError::is_lost) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Errors that speak with another's words hide that one from whoever walks along the causes.
fn of_device<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a DeviceError> {
    if let Some(error) = error.downcast_ref::<DeviceError>() {
        return Some(error);
    }
    let ops = match error.downcast_ref::<ModelError>() {
        Some(ModelError::Device(error)) => return Some(error),
        Some(ModelError::Ops(error)) => Some(error),
        _ => error.downcast_ref::<OpsError>(),
    };
    match ops {
        Some(OpsError::Device(error)) => Some(error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ClCode;

    #[test]
    fn a_lost_device_shows_through_every_wrapping() {
        let lost = || DeviceError::Lost { operation: "reading".to_owned(), code: ClCode(-5) };
        let other = || DeviceError::Call { operation: "reading".to_owned(), code: ClCode(-30) };
        for (error, expected) in [
            (Box::new(lost()) as BackendError, true),
            (Box::new(ModelError::from(lost())), true),
            (Box::new(OpsError::from(lost())), true),
            (Box::new(ModelError::from(OpsError::from(lost()))), true),
            (Box::new(other()), false),
            (Box::new(ModelError::from(other())), false),
            ("lost".into(), false),
        ] {
            assert_eq!(is_lost(&error), expected, "{error:?}");
        }
    }
}
