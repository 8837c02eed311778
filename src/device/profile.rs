//! How long each kernel ran, from the events of a profiling queue.

use std::rc::Rc;

use opencl3::event as cl;
use opencl3::types::{cl_event, cl_ulong};
use serde::Serialize;

use super::error::DeviceError;
use super::handle::Handle;
use super::launch::Work;

/// Events kept before the older half is waited for and added up.
const PENDING: usize = 256;

/// What one kernel has cost since the start or the last reset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelTime {
    /// Label of its program.
    pub program: String,
    /// Its name.
    pub kernel: String,
    /// How often it ran.
    pub launches: u64,
    /// Nanoseconds on the device, all launches together.
    pub total_ns: u64,
    /// Bytes that all launches had to read; 0 where nobody said.
    pub bytes: u64,
    /// f32 operations of all launches; 0 where nobody said.
    pub operations: u64,
    /// Nanoseconds before its launches in which they were on the queue and no other launch ran: what starting them takes,
    /// or a copy in between.
    pub waited_ns: u64,
}

struct Slot {
    program: Rc<str>,
    kernel: Rc<str>,
    launches: u64,
    total_ns: u64,
    bytes: u64,
    operations: u64,
    waited_ns: u64,
}

/// Adds up event times by kernel; a kernel is known by the slot it got when it was created.
#[derive(Default)]
pub(super) struct Profiler {
    slots: Vec<Slot>,
    pending: Vec<(usize, Handle)>,
    /// When the last launch that is added up ended, by the device's clock.
    ended: cl_ulong,
}

impl Profiler {
    /// The slot of a kernel; the same one for the same names.
    pub(super) fn slot(&mut self, program: &Rc<str>, kernel: &Rc<str>) -> usize {
        let known = self.slots.iter().position(|slot| slot.program == *program && slot.kernel == *kernel);
        known.unwrap_or_else(|| {
            let (program, kernel) = (Rc::clone(program), Rc::clone(kernel));
            self.slots.push(Slot {
                program,
                kernel,
                launches: 0,
                total_ns: 0,
                bytes: 0,
                operations: 0,
                waited_ns: 0,
            });
            self.slots.len() - 1
        })
    }

    /// Takes the event of a launch, and adds up the oldest ones when many wait.
    #[allow(unsafe_code)]
    pub(super) fn record(&mut self, slot: usize, event: cl_event, work: Work) -> Result<(), DeviceError> {
        // SAFETY: the enqueue that returned this event gave us the only reference to it.
        let event = unsafe { Handle::own(event, cl::release_event, "event") };
        self.pending.push((slot, event));
        if let Some(slot) = self.slots.get_mut(slot) {
            slot.bytes = slot.bytes.saturating_add(work.bytes);
            slot.operations = slot.operations.saturating_add(work.operations);
        }
        if self.pending.len() > PENDING {
            self.collect(PENDING / 2)?;
        }
        Ok(())
    }

    /// Waits for the oldest `count` events and adds them up.
    pub(super) fn collect(&mut self, count: usize) -> Result<(), DeviceError> {
        let count = count.min(self.pending.len());
        if count == 0 {
            return Ok(());
        }
        // The queue is in order: when the youngest of them is done, all are.
        let youngest = self.pending[count - 1].1.get();
        cl::wait_for_events(&[youngest])
            .map_err(|code| DeviceError::from_call("waiting for kernels", code))?;
        for (slot, event) in self.pending.drain(..count) {
            let time = |what| -> Result<cl_ulong, DeviceError> {
                cl::get_event_profiling_info(event.get(), what)
                    .map(cl_ulong::from)
                    .map_err(|code| DeviceError::from_call("reading a kernel's time", code))
            };
            let (start, end) = (time(cl::CL_PROFILING_COMMAND_START)?, time(cl::CL_PROFILING_COMMAND_END)?);
            let could_start = time(cl::CL_PROFILING_COMMAND_QUEUED)?.max(self.ended);
            self.ended = self.ended.max(end);
            if let Some(slot) = self.slots.get_mut(slot) {
                slot.launches += 1;
                slot.total_ns = slot.total_ns.saturating_add(end.saturating_sub(start));
                slot.waited_ns = slot.waited_ns.saturating_add(start.saturating_sub(could_start));
            }
        }
        Ok(())
    }

    /// Waits for all events and gives the totals of kernels that ran, the costliest first.
    pub(super) fn totals(&mut self) -> Result<Vec<KernelTime>, DeviceError> {
        self.collect(usize::MAX)?;
        let mut totals: Vec<KernelTime> = self
            .slots
            .iter()
            .filter(|slot| slot.launches > 0)
            .map(|slot| KernelTime {
                program: slot.program.to_string(),
                kernel: slot.kernel.to_string(),
                launches: slot.launches,
                total_ns: slot.total_ns,
                bytes: slot.bytes,
                operations: slot.operations,
                waited_ns: slot.waited_ns,
            })
            .collect();
        totals.sort_by(|a, b| b.total_ns.cmp(&a.total_ns).then_with(|| a.kernel.cmp(&b.kernel)));
        Ok(totals)
    }

    /// Forgets what was added up; launches still on the queue count for nothing.
    pub(super) fn reset(&mut self) {
        self.pending.clear();
        for slot in &mut self.slots {
            (slot.launches, slot.total_ns, slot.bytes, slot.operations) = (0, 0, 0, 0);
            slot.waited_ns = 0;
        }
    }
}
