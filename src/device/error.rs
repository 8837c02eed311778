//! What can go wrong on the way to the device, in words a user can act on.

use std::fmt;

use opencl3::error_codes as codes;
use opencl3::types::cl_int;

use super::memory::Purpose;

/// An OpenCL status, shown by its name from `cl.h` and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClCode(pub i32);

impl fmt::Display for ClCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", codes::error_text(self.0), self.0)
    }
}

impl ClCode {
    /// True for the statuses after which the queue and all that was on it is gone.
    ///
    /// `CL_OUT_OF_RESOURCES` is what GPU drivers answer after a hang or a reset; a negative execution status of an
    /// event shows up as one of the event errors.
    pub fn is_lost(self) -> bool {
        matches!(
            self.0,
            codes::CL_OUT_OF_RESOURCES
                | codes::CL_DEVICE_NOT_AVAILABLE
                | codes::CL_INVALID_EVENT
                | codes::CL_INVALID_EVENT_WAIT_LIST
                | codes::CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST
                | codes::CL_INVALID_COMMAND_QUEUE
                | codes::CL_INVALID_CONTEXT
                | codes::CL_CONTEXT_TERMINATED_KHR
        )
    }

    /// True for the statuses that mean there was no memory left.
    pub fn is_out_of_memory(self) -> bool {
        matches!(self.0, codes::CL_MEM_OBJECT_ALLOCATION_FAILURE | codes::CL_OUT_OF_HOST_MEMORY)
    }
}

/// Everything the device room answers instead of a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    // -- choosing and opening ------------------------------------------------------------------------------------
    /// The loader knows no platform.
    #[error(
        "no OpenCL platform found (looked in {looked}{}): run scripts/setup.sh to install a CPU runtime, or source \
         scripts/env.sh if that was done, or install the driver of your GPU",
        broken.iter().map(|what| format!("; {what}")).collect::<String>()
    )]
    NoPlatform {
        /// The vendor folder the loader reads.
        looked: String,
        /// What is wrong with files in it, in words.
        broken: Vec<String>,
    },
    /// Platforms are there, but no device is what was asked for.
    #[error(
        "no OpenCL device matches {wanted}; there is: {found}. Change the [device] keys of the configuration"
    )]
    NoMatch {
        /// The selector in words.
        wanted: String,
        /// Every device there is, in words.
        found: String,
    },
    /// `AXE_OPENCL` or the state of the process does not allow what was asked for.
    #[error("choosing the OpenCL runtime: {0}")]
    Runtime(String),
    /// A query about a platform or device failed.
    #[error("asking OpenCL for {what}: {code}")]
    Query {
        /// What was asked for.
        what: String,
        /// The answer.
        code: ClCode,
    },
    /// The device was found, but no context or queue could be made on it.
    #[error(
        "opening {device}: cannot create its {step}: {code}; is the device in use by others or its driver broken?"
    )]
    Open {
        /// Name of the device.
        device: String,
        /// `context` or `queue`.
        step: &'static str,
        /// The answer.
        code: ClCode,
    },

    // -- programs ------------------------------------------------------------------------------------------------
    /// The compiler refused a program.
    #[error("building program '{label}' for {device} with options '{options}': {code}\n{log}")]
    Build {
        /// Label the program was built under.
        label: String,
        /// Name of the device.
        device: String,
        /// Build options.
        options: String,
        /// The answer.
        code: ClCode,
        /// The complete build log.
        log: String,
    },
    /// A program has no kernel of that name.
    #[error("program '{label}' has no kernel '{kernel}' ({code}); it has: {available}")]
    NoKernel {
        /// Label of the program.
        label: String,
        /// The name asked for.
        kernel: String,
        /// Names of the kernels there are.
        available: String,
        /// The answer.
        code: ClCode,
    },

    // -- launches ------------------------------------------------------------------------------------------------
    /// A launch gave more or fewer arguments than the kernel takes.
    #[error("kernel '{kernel}' takes {expected} arguments, {given} were given")]
    ArgCount {
        /// Name of the kernel.
        kernel: String,
        /// How many it takes.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// An argument is not of the kind or size that the kernel declares.
    #[error("kernel '{kernel}', argument {index}: {given} does not fit ({expected})")]
    BadArg {
        /// Name of the kernel.
        kernel: String,
        /// Position, from zero.
        index: usize,
        /// What was given.
        given: &'static str,
        /// What the kernel declares, or the status of the runtime.
        expected: String,
    },
    /// A prepared launch was enqueued before all its arguments were set.
    #[error("kernel '{kernel}': argument {index} was never set")]
    ArgUnset {
        /// Name of the kernel.
        kernel: String,
        /// The first argument without a value.
        index: usize,
    },
    /// Work sizes have no, too many or zero dimensions.
    #[error(
        "kernel '{kernel}': work size global {global:?}, local {local:?} is not 1 to 3 positive numbers each"
    )]
    WorkSize {
        /// Name of the kernel.
        kernel: String,
        /// Global size.
        global: Vec<usize>,
        /// Local size.
        local: Option<Vec<usize>>,
    },
    /// The runtime refused to run a kernel.
    #[error("launching kernel '{kernel}' with global {global:?}, local {local:?}: {code}")]
    Launch {
        /// Name of the kernel.
        kernel: String,
        /// Global size.
        global: Vec<usize>,
        /// Local size.
        local: Option<Vec<usize>>,
        /// The answer.
        code: ClCode,
    },
    /// A handle of one [`Device`](super::Device) was given to another.
    #[error("{what} belongs to another open device")]
    Foreign {
        /// What was given.
        what: String,
    },

    // -- memory --------------------------------------------------------------------------------------------------
    /// A buffer of no bytes was asked for.
    #[error("a {purpose} buffer of 0 bytes was asked for")]
    ZeroSize {
        /// What for.
        purpose: Purpose,
    },
    /// One buffer is larger than the device allows for any.
    #[error(
        "a {purpose} buffer of {asked} bytes is larger than the {limit} bytes that the device allows for one buffer: \
         use a smaller model or context"
    )]
    TooLarge {
        /// What for.
        purpose: Purpose,
        /// Bytes asked for.
        asked: u64,
        /// `CL_DEVICE_MAX_MEM_ALLOC_SIZE`.
        limit: u64,
    },
    /// All buffers together would be larger than the budget.
    #[error(
        "a {purpose} buffer of {asked} bytes does not fit: {used} of {budget} bytes are in use: use a smaller model or \
         context, or raise the memory limit of the device in the configuration"
    )]
    OverBudget {
        /// What for.
        purpose: Purpose,
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// The limit for all.
        budget: u64,
    },
    /// The budget allowed it, the runtime did not.
    #[error(
        "{operation} needs {bytes} bytes and the device has no memory left: {code}; stop other users of the device or use a smaller model or context"
    )]
    OutOfMemory {
        /// What was tried.
        operation: String,
        /// Bytes asked for; 0 where not known.
        bytes: u64,
        /// The answer.
        code: ClCode,
    },
    /// An offset or length reaches over the end of a buffer.
    #[error("{operation}: bytes {start}..{end} of a {purpose} buffer of {size} bytes")]
    Range {
        /// What was tried.
        operation: &'static str,
        /// What the buffer is for.
        purpose: Purpose,
        /// First byte.
        start: u64,
        /// Byte after the last, saturated.
        end: u64,
        /// Size of the buffer.
        size: u64,
    },
    /// A wrapped, read-only buffer was to be written.
    #[error("{operation}: the {purpose} buffer is a read-only view of host memory")]
    ReadOnly {
        /// What was tried.
        operation: &'static str,
        /// What the buffer is for.
        purpose: Purpose,
    },
    /// Work was enqueued while the host looks at mapped memory.
    #[error("{operation} while a buffer is mapped: leave the mapping closure first")]
    Mapped {
        /// What was tried.
        operation: &'static str,
    },

    // -- the rest ------------------------------------------------------------------------------------------------
    /// The device, its driver or the queue is gone; only opening it anew can help.
    #[error("the device was lost at {operation}: {code}; see the kernel log for the driver's reason")]
    Lost {
        /// What was tried.
        operation: String,
        /// The answer.
        code: ClCode,
    },
    /// Any other refusal.
    #[error("{operation}: {code}")]
    Call {
        /// What was tried.
        operation: String,
        /// The answer.
        code: ClCode,
    },
}

impl DeviceError {
    /// Sorts a status into lost, out of memory and other.
    pub(super) fn from_call(operation: impl Into<String>, code: cl_int) -> Self {
        let (operation, code) = (operation.into(), ClCode(code));
        if code.is_lost() {
            Self::Lost { operation, code }
        } else if code.is_out_of_memory() {
            Self::OutOfMemory { operation, bytes: 0, code }
        } else {
            Self::Call { operation, code }
        }
    }

    /// True when only a new [`Device::open`](super::Device::open) can help.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kills_the_queue_is_lost_and_what_lacks_memory_is_not() {
        for code in [codes::CL_OUT_OF_RESOURCES, codes::CL_DEVICE_NOT_AVAILABLE, codes::CL_INVALID_EVENT] {
            let error = DeviceError::from_call("finishing the queue", code);
            assert!(error.is_lost(), "{error}");
            assert!(error.to_string().contains("finishing the queue: CL_"), "{error}");
        }
        for code in [codes::CL_MEM_OBJECT_ALLOCATION_FAILURE, codes::CL_OUT_OF_HOST_MEMORY] {
            let error = DeviceError::from_call("a buffer", code);
            assert!(matches!(error, DeviceError::OutOfMemory { .. }) && !error.is_lost(), "{error}");
        }
        let other = DeviceError::from_call("a buffer", codes::CL_INVALID_VALUE);
        assert_eq!(other.to_string(), "a buffer: CL_INVALID_VALUE (-30)");
    }
}
