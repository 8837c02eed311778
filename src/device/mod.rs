//! The `device` room: OpenCL, made safe to use.
//!
//! [`Device`] is one opened device with one in-order queue; it makes [`Program`]s, [`Kernel`]s and [`Buffer`]s. All
//! handles belong to the thread that opened it. [`list_devices`] shows what there is.

mod cache;
mod checks;
mod context;
mod discover;
mod error;
mod fault;
mod handle;
mod launch;
mod matrix_unit;
mod memory;
pub mod process;
mod profile;
mod program;
pub mod runtime;
/// What the kernel shows of card and host.
pub use axectl::sensors as telemetry;

pub use checks::Check;
pub use context::{Calls, Device, DeviceOptions};
pub use discover::{DeviceInfo, DeviceKind, DeviceSelector, ListedDevice, list_devices};
pub use error::{ClCode, DeviceError};
pub use launch::{Arg, Launch, Work};
pub use memory::{Buffer, HostBytes, MemoryReport, Purpose};
pub use profile::KernelTime;
pub use program::{Kernel, Program};
