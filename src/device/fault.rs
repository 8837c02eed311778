//! Faults to order, for tests of what happens then. Only debug builds and those with the feature `faults` can make any.
//!
//! `AXE_FAULTS` names a file. As soon as it is there, it says what goes wrong, and is removed when it does:
//! `error N` fails the N-th launch from then on as a lost device does, `hang N S` keeps that launch for S seconds,
//! `panic N` panics there.

#[cfg(any(debug_assertions, feature = "faults"))]
pub(super) use on_demand::strike;

/// There are none in this build.
#[cfg(not(any(debug_assertions, feature = "faults")))]
#[inline(always)]
pub(super) fn strike(_kernel: &str) -> Result<(), super::error::DeviceError> {
    Ok(())
}

#[cfg(any(debug_assertions, feature = "faults"))]
mod on_demand {
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::time::Duration;

    use opencl3::error_codes::CL_OUT_OF_RESOURCES;

    use crate::device::error::DeviceError;

    /// What is to happen.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fault {
        Error,
        Hang(Duration),
        Panic,
    }

    /// What is to happen, and at which launch from now on.
    static PENDING: Mutex<Option<(Fault, u64)>> = Mutex::new(None);

    fn file() -> Option<&'static PathBuf> {
        static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
        FILE.get_or_init(|| std::env::var_os("AXE_FAULTS").map(PathBuf::from)).as_ref()
    }

    /// Does what was ordered for this launch.
    pub(in crate::device) fn strike(kernel: &str) -> Result<(), DeviceError> {
        let Some(file) = file() else { return Ok(()) };
        let fault = {
            let mut pending = PENDING.lock().unwrap_or_else(PoisonError::into_inner);
            if pending.is_none()
                && let Ok(text) = std::fs::read_to_string(file)
                && let Some(ordered) = parse(&text)
                && std::fs::remove_file(file).is_ok()
            {
                *pending = Some(ordered);
            }
            match &mut *pending {
                Some((fault, 1)) => {
                    let fault = *fault;
                    *pending = None;
                    fault
                }
                Some((_, left)) => {
                    *left -= 1;
                    return Ok(());
                }
                None => return Ok(()),
            }
        };
        tracing::warn!(kernel, ?fault, "a fault to order");
        match fault {
            Fault::Error => {
                let operation = format!("launching kernel '{kernel}' (a fault to order)");
                Err(DeviceError::from_call(operation, CL_OUT_OF_RESOURCES))
            }
            Fault::Hang(time) => {
                std::thread::sleep(time);
                Ok(())
            }
            #[allow(clippy::panic, reason = "it was ordered")]
            Fault::Panic => panic!("a fault to order at kernel '{kernel}'"),
        }
    }

    /// `None` while the file is not whole, too.
    fn parse(text: &str) -> Option<(Fault, u64)> {
        let line = text.strip_suffix('\n')?;
        let mut words = line.split(' ');
        let (name, launch) = (words.next()?, words.next()?.parse().ok().filter(|launch| *launch > 0)?);
        let fault = match (name, words.next()) {
            ("error", None) => Fault::Error,
            ("panic", None) => Fault::Panic,
            ("hang", Some(seconds)) => Fault::Hang(Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?),
            _ => return None,
        };
        Some((fault, launch))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn orders_are_read_whole_or_not_at_all() {
            assert_eq!(parse("error 12\n"), Some((Fault::Error, 12)));
            assert_eq!(parse("hang 1 0.5\n"), Some((Fault::Hang(Duration::from_millis(500)), 1)));
            assert_eq!(parse("panic 3\n"), Some((Fault::Panic, 3)));
            for wrong in ["", "error", "error 1", "error 0\n", "hang 1\n", "hang 1 x\n", "crash 1\n"] {
                assert_eq!(parse(wrong), None, "{wrong:?}");
            }
        }
    }
}
