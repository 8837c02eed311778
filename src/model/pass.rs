//! A forward pass over a fixed number of rows, prepared once: every launch with its arguments.

use crate::device::{Arg, Device, DeviceError, Launch};

/// The launches of a pass in order.
#[derive(Default)]
pub struct Pass {
    launches: Vec<Launch>,
    /// Launches that need the position of the first row, and the index of that argument.
    positioned: Vec<(usize, usize)>,
}

impl Pass {
    /// Adds a launch whose arguments stay.
    pub fn push(&mut self, launch: Launch) {
        self.launches.push(launch);
    }

    /// Adds a launch whose argument `index` is the position of the first row.
    pub fn push_positioned(&mut self, launch: Launch, index: usize) {
        self.positioned.push((self.launches.len(), index));
        self.launches.push(launch);
    }

    /// Enqueues all of it for rows from position `start` on.
    ///
    /// # Errors
    /// What the device says; the pass is then incomplete.
    pub fn run(&mut self, device: &Device, start: i32) -> Result<(), DeviceError> {
        for &(launch, index) in &self.positioned {
            self.launches[launch].set(index, Arg::I32(start))?;
            self.launches[launch].behind(u64::try_from(start).unwrap_or(0));
        }
        self.launches.iter().try_for_each(|launch| device.enqueue(launch))
    }

    /// How many launches it has.
    pub fn len(&self) -> usize {
        self.launches.len()
    }
}
