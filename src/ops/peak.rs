//! What the device can do at best: the speed of a pure read and of pure multiply-adds.

use std::time::Instant;

use super::kernels::{Kernels, OpsError};
use crate::device::{Arg, Buffer, Device, Launch, Purpose};

/// Measured limits of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Bytes a second of a kernel that only reads, from memory larger than a model's layer.
    pub read: f64,
    /// f32 operations a second of a kernel that only multiplies and adds.
    pub multiply_add: f64,
}

/// Seconds that running all `launches` once takes: the median of `rounds`, after one round that does not count.
///
/// # Errors
/// What the device says.
pub fn seconds(device: &Device, launches: &[Launch], rounds: usize) -> Result<f64, OpsError> {
    let mut times = Vec::with_capacity(rounds);
    for round in 0..=rounds {
        let start = Instant::now();
        for launch in launches {
            device.enqueue(launch)?;
        }
        device.finish()?;
        if round > 0 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(f64::NAN))
}

impl Kernels {
    /// Measures what the device can do, in about a second.
    ///
    /// # Errors
    /// What the device says.
    pub fn peak(&self, device: &Device) -> Result<Peak, OpsError> {
        const ITEMS: usize = 256;
        const WORDS: usize = 8192; // 512 KiB a work-item, 128 MiB in all
        const ROUNDS: i32 = 200_000;
        let data = device.alloc(Purpose::Scratch, ITEMS * WORDS * 64)?;
        device.fill(&data, 1)?;
        let trace = device.alloc(Purpose::Scratch, ITEMS * 64)?;
        let read = Launch::with_args(
            &self.peak_kernel(device, "pure_read")?,
            &[Arg::Buffer(&data), Arg::Buffer(&trace), Arg::I32(WORDS as i32)],
            &[ITEMS],
            Some(&[1]),
        )?;
        let items = self.compute_units() * 4;
        let values: Buffer = device.alloc(Purpose::Scratch, items * 64)?;
        device.fill(&values, 0.5f32.to_bits())?;
        let multiply_add = Launch::with_args(
            &self.peak_kernel(device, "pure_multiply_add")?,
            &[Arg::Buffer(&values), Arg::I32(ROUNDS)],
            &[items],
            Some(&[1]),
        )?;
        let operations = items as f64 * f64::from(ROUNDS) * 12.0 * 16.0 * 2.0;
        Ok(Peak {
            read: (ITEMS * WORDS * 64) as f64 / seconds(device, &[read], 5)?,
            multiply_add: operations / seconds(device, &[multiply_add], 5)?,
        })
    }
}
