//! The `device` room.

pub mod telemetry;
