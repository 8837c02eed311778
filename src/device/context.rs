//! An opened device: its context, its one queue, and what moves bytes over them.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ops::Range;
use std::path::PathBuf;
use std::ptr;
use std::rc::Rc;

use opencl_sys as sys;
use opencl3::command_queue as queue;
use opencl3::error_codes::{CL_INVALID_VALUE, CL_OUT_OF_RESOURCES, CL_SUCCESS};
use opencl3::event;
use opencl3::memory as mem;
use opencl3::types::{CL_BLOCKING, cl_device_id, cl_event, cl_int};

use super::cache::BinaryCache;
use super::checks::{Check, Checks};
use super::discover::{DeviceInfo, DeviceKind, DeviceSelector, select};
use super::error::{ClCode, DeviceError};
use super::handle::Handle;
use super::memory::{Access, Buffer, HostBytes, Ledger, MemoryReport, Purpose};
use super::profile::{KernelTime, Profiler};

/// How a device is opened.
#[derive(Debug, Clone, Default)]
pub struct DeviceOptions {
    /// Folder for compiled programs (they go to `programs/` in it); none: every start compiles.
    pub cache_dir: Option<PathBuf>,
    /// Measure every kernel; costs an event a launch.
    pub profiling: bool,
    /// Bytes all buffers together may have; none: the device's memory.
    pub memory_limit: Option<u64>,
}

/// A device that is open: one context and one in-order queue. Belongs to the thread that opened it; cloning gives
/// another handle to the same.
///
/// A kernel is code that this layer cannot check: it may write anywhere in the buffers it is given, and a kernel that
/// reaches outside of them breaks the process on a CPU. Kernels are therefore part of the trusted program, like the
/// program's own source; never build one from text that a user sent.
#[derive(Clone)]
pub struct Device {
    pub(super) shared: Rc<Shared>,
}

/// How often a device was asked for what costs a round trip or the start of something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Kernels that were put on the queue.
    pub launches: u64,
    /// Times that the host waited for bytes of the device, copied or mapped.
    pub reads: u64,
    /// Times that bytes of the host were copied to it.
    pub writes: u64,
}

/// Stands in [`Shared::mapped`] for one mapping that writes.
const EXCLUSIVE: u32 = u32::MAX;

/// What every handle of a device keeps alive.
pub(super) struct Shared {
    pub(super) id: cl_device_id,
    pub(super) info: DeviceInfo,
    pub(super) ledger: Ledger,
    pub(super) cache: Option<BinaryCache>,
    pub(super) profiler: Option<RefCell<Profiler>>,
    pub(super) calls: Cell<Calls>,
    checks: RefCell<Checks>,
    /// How many closures look at mapped memory; [`EXCLUSIVE`] while one writes it. The host may hold a slice of device
    /// memory only while nothing runs, and a writable one only while there is no other.
    mapped: Cell<u32>,
    pub(super) queue: Handle,
    pub(super) context: Handle,
}

impl Shared {
    pub(super) fn count(&self, count: impl FnOnce(&mut Calls)) {
        let mut calls = self.calls.get();
        count(&mut calls);
        self.calls.set(calls);
    }

    /// Refuses work while the host holds a slice of device memory.
    pub(super) fn refuse_if_mapped(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.mapped.get() == 0 { Ok(()) } else { Err(DeviceError::Mapped { operation }) }
    }

    /// Refuses to look at device memory while the host holds a writable slice of it.
    fn refuse_if_exclusive(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.mapped.get() == EXCLUSIVE { Err(DeviceError::Mapped { operation }) } else { Ok(()) }
    }

    /// Waits for the queue before host memory goes that kernels may be reading.
    pub(super) fn finish_before_release(&self) {
        if let Err(code) = queue::finish(self.queue.get()) {
            let code = ClCode(code);
            tracing::warn!(%code, "the queue did not finish before wrapped host memory was released");
        }
    }
}

/// opencl3 keeps its own to itself.
///
/// # Safety
/// `raw` must be a live context and a reference to it the caller's to give back.
#[allow(unsafe_code)]
unsafe fn release_context(raw: *mut c_void) -> Result<(), cl_int> {
    // SAFETY: the caller's promise.
    match unsafe { sys::clReleaseContext(raw) } {
        CL_SUCCESS => Ok(()),
        code => Err(code),
    }
}

/// Releases the event of a call whose end nobody waits for.
#[allow(unsafe_code)]
fn forget(raw: cl_event) {
    // SAFETY: the enqueue that returned the event gave us the only reference to it.
    drop(unsafe { Handle::own(raw, event::release_event, "event") });
}

impl Device {
    /// Opens the device that the selector takes.
    ///
    /// # Errors
    /// [`DeviceError::NoPlatform`], [`DeviceError::NoMatch`], or [`DeviceError::Open`] if the driver refuses.
    #[allow(unsafe_code, deprecated)]
    pub fn open(selector: &DeviceSelector, options: &DeviceOptions) -> Result<Self, DeviceError> {
        let found = select(selector)?;
        let (id, info) = (found.id, found.info);
        let refused = |step| {
            let device = info.name.clone();
            move |code: cl_int| DeviceError::Open { device, step, code: ClCode(code) }
        };
        let mut status = CL_INVALID_VALUE;
        // SAFETY: one live device is given; no properties and no callback.
        let raw = unsafe { sys::clCreateContext(ptr::null(), 1, &id, None, ptr::null_mut(), &mut status) };
        if status != CL_SUCCESS {
            return Err(refused("context")(status));
        }
        // SAFETY: just created, the reference is ours.
        let context = unsafe { Handle::own(raw, release_context, "context") };
        let properties = if options.profiling { queue::CL_QUEUE_PROFILING_ENABLE } else { 0 };
        // Deprecated, but the only call that runtimes of OpenCL 1.2 have, and every later one keeps it.
        // SAFETY: the context is live and holds this device.
        let raw = unsafe { sys::clCreateCommandQueue(context.get(), id, properties, &mut status) };
        if status != CL_SUCCESS {
            return Err(refused("queue")(status));
        }
        // SAFETY: just created, the reference is ours.
        let queue = unsafe { Handle::own(raw, queue::release_command_queue, "queue") };
        let budget = options.memory_limit.unwrap_or(info.global_mem);
        let cache = options.cache_dir.as_ref().map(|dir| BinaryCache::new(dir.join("programs")));
        let profiler = options.profiling.then(|| RefCell::new(Profiler::default()));
        tracing::debug!(device = %info, budget, "device opened");
        Ok(Self {
            shared: Rc::new(Shared {
                id,
                info,
                ledger: Ledger::new(budget),
                cache,
                profiler,
                calls: Cell::default(),
                checks: RefCell::default(),
                mapped: Cell::new(0),
                queue,
                context,
            }),
        })
    }

    /// What the device says about itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// What it was asked for since it was opened.
    pub fn calls(&self) -> Calls {
        self.shared.calls.get()
    }

    /// Bytes in buffers, by purpose.
    pub fn memory(&self) -> MemoryReport {
        self.shared.ledger.report()
    }

    /// A buffer of `bytes` bytes with undefined content.
    ///
    /// # Errors
    /// [`DeviceError::ZeroSize`], [`DeviceError::TooLarge`] or [`DeviceError::OverBudget`] before anything is tried,
    /// [`DeviceError::OutOfMemory`] if the runtime refuses.
    pub fn alloc(&self, purpose: Purpose, bytes: usize) -> Result<Buffer, DeviceError> {
        self.check_room(purpose, bytes)?;
        // Memory that the runtime gets from the host is page-aligned on CPUs and maps without a copy.
        let host = if self.shared.info.kind == DeviceKind::Cpu { mem::CL_MEM_ALLOC_HOST_PTR } else { 0 };
        let handle = self.create(purpose, bytes, mem::CL_MEM_READ_WRITE | host, ptr::null_mut())?;
        Ok(Buffer::enter(handle, bytes, purpose, &self.shared, Access::ReadWrite))
    }

    /// A read-only buffer over `range` of host memory, such as an mmap of a weights file.
    ///
    /// Where device and host share memory and the address is aligned to [`DeviceInfo::base_align`], the device works
    /// on the host's bytes and keeps `owner` alive; otherwise the bytes are copied. [`Buffer::is_zero_copy`] tells.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc), and [`DeviceError::Range`] if `range` does not lie in the owner's bytes.
    #[allow(unsafe_code)]
    pub fn wrap(
        &self,
        purpose: Purpose,
        owner: HostBytes,
        range: Range<usize>,
    ) -> Result<Buffer, DeviceError> {
        let all: &[u8] = (*owner).as_ref();
        let Some(bytes) = all.get(range.clone()) else {
            return Err(out_of(&range, "wrapping host memory", purpose, all.len()));
        };
        self.check_room(purpose, bytes.len())?;
        let (address, len) = (bytes.as_ptr(), bytes.len());
        let aligned = (address as usize).is_multiple_of(self.shared.info.base_align);
        if aligned && self.shared.info.unified_memory {
            let flags = mem::CL_MEM_READ_ONLY | mem::CL_MEM_USE_HOST_PTR;
            let handle = self.create(purpose, len, flags, address.cast_mut().cast())?;
            // The runtime may still work on a copy of its own: it does not if it maps to the very same address.
            let mapping = Mapping::shared(&self.shared, handle.get(), mem::CL_MAP_READ, 0, 1)?;
            let zero_copy = ptr::eq(mapping.address.cast_const().cast(), address);
            drop(mapping);
            return Ok(Buffer::enter(
                handle,
                len,
                purpose,
                &self.shared,
                Access::Wrapped { _owner: owner, zero_copy },
            ));
        }
        let flags = mem::CL_MEM_READ_ONLY | mem::CL_MEM_COPY_HOST_PTR;
        let handle = self.create(purpose, len, flags, address.cast_mut().cast())?;
        Ok(Buffer::enter(handle, len, purpose, &self.shared, Access::Copied))
    }

    /// A buffer that is `range` of another one's bytes, which are the same memory: what is written through one is read
    /// through the other. It must start at a multiple of [`DeviceInfo::base_align`]. A part of a part is one of
    /// the whole.
    ///
    /// # Errors
    /// [`DeviceError::Range`] if `range` does not lie in the buffer, [`DeviceError::ZeroSize`], or what the runtime
    /// refuses.
    #[allow(unsafe_code)]
    pub fn part(&self, whole: &Buffer, range: Range<usize>) -> Result<Buffer, DeviceError> {
        const OPERATION: &str = "taking a part of a buffer";
        self.check_own(whole)?;
        let purpose = whole.purpose();
        if range.start > range.end || range.end > whole.size() {
            return Err(out_of(&range, OPERATION, purpose, whole.size()));
        }
        if range.is_empty() {
            return Err(DeviceError::ZeroSize { purpose });
        }
        let (whole, at) = whole.whole();
        let at = at + range.start;
        let region = mem::cl_buffer_region { origin: at, size: range.len() };
        let flags = if whole.is_read_only() { mem::CL_MEM_READ_ONLY } else { mem::CL_MEM_READ_WRITE };
        // SAFETY: the buffer is live and the region lies in it; the call reads the region, which outlives it.
        let raw = unsafe {
            mem::create_sub_buffer(
                whole.mem(),
                flags,
                mem::CL_BUFFER_CREATE_TYPE_REGION,
                (&raw const region).cast(),
            )
        };
        let raw = raw.map_err(|code| DeviceError::from_call(format!("{OPERATION} for {purpose}"), code))?;
        // SAFETY: just created, the reference is ours.
        let handle = unsafe { Handle::own(raw, mem::release_mem_object, "part of a buffer") };
        Ok(Buffer::enter(
            handle,
            range.len(),
            purpose,
            &self.shared,
            Access::Part { whole: whole.clone(), at },
        ))
    }

    /// Checks the numbers before the runtime is asked for memory.
    fn check_room(&self, purpose: Purpose, bytes: usize) -> Result<(), DeviceError> {
        let (asked, limit) = (bytes as u64, self.shared.info.max_alloc);
        let (used, budget) = (self.shared.ledger.total(), self.shared.ledger.budget);
        if asked == 0 {
            return Err(DeviceError::ZeroSize { purpose });
        }
        if asked > limit {
            return Err(DeviceError::TooLarge { purpose, asked, limit });
        }
        let counts = purpose != Purpose::Arguments;
        if counts && used.checked_add(asked).is_none_or(|total| total > budget) {
            return Err(DeviceError::OverBudget { purpose, asked, used, budget });
        }
        Ok(())
    }

    /// Makes the memory object. `host` must be null or point to `bytes` readable bytes that outlive it when
    /// `flags` say that the runtime uses them.
    #[allow(unsafe_code)]
    fn create(
        &self,
        purpose: Purpose,
        bytes: usize,
        flags: u64,
        host: *mut c_void,
    ) -> Result<Handle, DeviceError> {
        // SAFETY: the context is live; the two callers give null or a slice of that many bytes, which the buffer's
        // owner keeps alive where it is used in place. The runtime only reads it, since the flags say READ_ONLY.
        let raw = unsafe { mem::create_buffer(self.shared.context.get(), flags, bytes, host) };
        let raw = raw.map_err(|code| {
            let (code, operation) = (ClCode(code), format!("a {purpose} buffer"));
            // Here no command ran, so a lack of resources is a lack of memory.
            if code.is_out_of_memory() || code.0 == CL_OUT_OF_RESOURCES {
                DeviceError::OutOfMemory { operation, bytes: bytes as u64, code }
            } else {
                DeviceError::from_call(operation, code.0)
            }
        })?;
        // SAFETY: just created, the reference is ours.
        Ok(unsafe { Handle::own(raw, mem::release_mem_object, "buffer") })
    }

    /// Copies `data` to the buffer, from byte `offset` on. Returns when it is there.
    ///
    /// # Errors
    /// [`DeviceError::Range`], [`DeviceError::ReadOnly`], or what the queue answers.
    #[allow(unsafe_code)]
    pub fn write(&self, buffer: &Buffer, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        const OPERATION: &str = "writing";
        self.check_writable(buffer, OPERATION)?;
        check_range(buffer, offset, data.len(), OPERATION)?;
        if data.is_empty() {
            return Ok(());
        }
        self.shared.count(|calls| calls.writes += 1);
        // SAFETY: queue and buffer are live and of one context, the range lies in the buffer, and `data` outlives
        // the call, which blocks until the copy is done.
        let done = unsafe {
            queue::enqueue_write_buffer(
                self.shared.queue.get(),
                buffer.mem(),
                CL_BLOCKING,
                offset,
                data.len(),
                data.as_ptr().cast(),
                0,
                ptr::null(),
            )
        };
        forget(done.map_err(|code| DeviceError::from_call("writing a buffer", code))?);
        Ok(())
    }

    /// Copies bytes from `offset` on into `out`. Returns when they are there.
    ///
    /// # Errors
    /// [`DeviceError::Range`], or what the queue answers.
    #[allow(unsafe_code)]
    pub fn read(&self, buffer: &Buffer, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check_own(buffer)?;
        self.shared.refuse_if_exclusive("reading")?;
        check_range(buffer, offset, out.len(), "reading")?;
        if out.is_empty() {
            return Ok(());
        }
        self.shared.count(|calls| calls.reads += 1);
        // SAFETY: queue and buffer are live and of one context, the range lies in the buffer, and `out` is ours alone
        // until the call returns, which blocks until the copy is done.
        let done = unsafe {
            queue::enqueue_read_buffer(
                self.shared.queue.get(),
                buffer.mem(),
                CL_BLOCKING,
                offset,
                out.len(),
                out.as_mut_ptr().cast(),
                0,
                ptr::null(),
            )
        };
        forget(done.map_err(|code| DeviceError::from_call("reading a buffer", code))?);
        Ok(())
    }

    /// Fills the whole buffer with a 32-bit pattern (in the host's byte order); the last 1 to 3 bytes of an odd size
    /// get the pattern's first bytes. Only enqueued.
    ///
    /// # Errors
    /// [`DeviceError::ReadOnly`], or what the queue answers.
    #[allow(unsafe_code)]
    pub fn fill(&self, buffer: &Buffer, pattern: u32) -> Result<(), DeviceError> {
        self.check_writable(buffer, "filling")?;
        let bytes = pattern.to_ne_bytes();
        let whole = buffer.size() & !3;
        if whole > 0 {
            // SAFETY: queue and buffer are live and of one context, the range lies in the buffer, and the runtime
            // copies the pattern before it returns.
            let queued = unsafe {
                queue::enqueue_fill_buffer(
                    self.shared.queue.get(),
                    buffer.mem(),
                    bytes.as_ptr().cast(),
                    bytes.len(),
                    0,
                    whole,
                    0,
                    ptr::null(),
                )
            };
            forget(queued.map_err(|code| DeviceError::from_call("filling a buffer", code))?);
        }
        self.write(buffer, whole, &bytes[..buffer.size() - whole])
    }

    /// Waits for all that is enqueued and lets `look` see `range` of the buffer, without a copy where device and host
    /// share memory. Work that is enqueued from within is refused with [`DeviceError::Mapped`].
    ///
    /// # Errors
    /// [`DeviceError::Range`], or what the queue answers.
    #[allow(unsafe_code)]
    pub fn with_mapped<T>(
        &self,
        buffer: &Buffer,
        range: Range<usize>,
        look: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, DeviceError> {
        self.check_own(buffer)?;
        if range.start > range.end {
            return Err(out_of(&range, "mapping", buffer.purpose(), buffer.size()));
        }
        let len = range.end - range.start;
        check_range(buffer, range.start, len, "mapping")?;
        if len == 0 {
            return Ok(look(&[]));
        }
        let mapping = Mapping::shared(&self.shared, buffer.mem(), mem::CL_MAP_READ, range.start, len)?;
        // SAFETY: the runtime gave `len` readable bytes that stay until the unmap in `mapping`'s drop, and nobody
        // writes them meanwhile: the queue was drained by the blocking map, and refuses work while one exists.
        let bytes = unsafe { std::slice::from_raw_parts(mapping.address.cast_const().cast::<u8>(), len) };
        Ok(look(bytes))
    }

    /// As [`with_mapped`](Self::with_mapped), for writing: `fill` sees what is there and may change it.
    ///
    /// # Errors
    /// [`DeviceError::Range`], [`DeviceError::ReadOnly`], [`DeviceError::Mapped`], or what the queue answers.
    #[allow(unsafe_code)]
    pub fn map_write<T>(
        &self,
        buffer: &Buffer,
        range: Range<usize>,
        fill: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, DeviceError> {
        const OPERATION: &str = "mapping for writing";
        self.check_writable(buffer, OPERATION)?;
        if range.start > range.end {
            return Err(out_of(&range, OPERATION, buffer.purpose(), buffer.size()));
        }
        let len = range.end - range.start;
        check_range(buffer, range.start, len, OPERATION)?;
        if len == 0 {
            return Ok(fill(&mut []));
        }
        let flags = mem::CL_MAP_READ | mem::CL_MAP_WRITE;
        let mapping = Mapping::exclusive(&self.shared, buffer.mem(), flags, range.start, len)?;
        // SAFETY: the runtime gave `len` bytes that stay until the unmap in `mapping`'s drop; no other slice of device
        // memory exists (`exclusive`), none can be made and no work be enqueued while this one does.
        let bytes = unsafe { std::slice::from_raw_parts_mut(mapping.address.cast::<u8>(), len) };
        Ok(fill(bytes))
    }

    /// Hands what is enqueued to the device without waiting for it.
    ///
    /// # Errors
    /// What the queue answers.
    pub fn flush(&self) -> Result<(), DeviceError> {
        queue::flush(self.shared.queue.get())
            .map_err(|code| DeviceError::from_call("flushing the queue", code))
    }

    /// Waits until all that is enqueued is done.
    ///
    /// # Errors
    /// What the queue answers; [`DeviceError::Lost`] if the work failed.
    pub fn finish(&self) -> Result<(), DeviceError> {
        queue::finish(self.shared.queue.get())
            .map_err(|code| DeviceError::from_call("finishing the queue", code))?;
        match &self.shared.profiler {
            Some(profiler) => profiler.borrow_mut().collect(usize::MAX),
            None => Ok(()),
        }
    }

    /// Time of each kernel since the start or the last reset, the costliest first; waits for what is enqueued. Empty
    /// unless the device was opened with [`DeviceOptions::profiling`].
    ///
    /// # Errors
    /// What the queue answers.
    pub fn profile(&self) -> Result<Vec<KernelTime>, DeviceError> {
        self.shared
            .profiler
            .as_ref()
            .map_or_else(|| Ok(Vec::new()), |profiler| profiler.borrow_mut().totals())
    }

    /// Starts the times anew.
    pub fn reset_profile(&self) {
        if let Some(profiler) = &self.shared.profiler {
            profiler.borrow_mut().reset();
        }
    }

    /// Keeps how a kernel did against its reference: the largest deviation as a share of what is allowed.
    pub fn note_check(&self, kernel: &str, worst: f64, passed: bool) {
        self.shared.checks.borrow_mut().note(kernel, worst, passed);
    }

    /// How kernels did, as far as they were compared.
    pub fn checks(&self) -> Vec<Check> {
        self.shared.checks.borrow().all()
    }

    /// True if the device was opened with [`DeviceOptions::profiling`].
    pub fn is_profiling(&self) -> bool {
        self.shared.profiler.is_some()
    }

    fn check_own(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        if Rc::ptr_eq(&self.shared, buffer.shared()) {
            Ok(())
        } else {
            Err(DeviceError::Foreign { what: format!("a {} buffer", buffer.purpose()) })
        }
    }

    fn check_writable(&self, buffer: &Buffer, operation: &'static str) -> Result<(), DeviceError> {
        self.check_own(buffer)?;
        self.shared.refuse_if_mapped(operation)?;
        if buffer.is_read_only() {
            return Err(DeviceError::ReadOnly { operation, purpose: buffer.purpose() });
        }
        Ok(())
    }
}

fn out_of(range: &Range<usize>, operation: &'static str, purpose: Purpose, size: usize) -> DeviceError {
    let (start, end, size) = (range.start as u64, range.end as u64, size as u64);
    DeviceError::Range { operation, purpose, start, end, size }
}

fn check_range(
    buffer: &Buffer,
    offset: usize,
    len: usize,
    operation: &'static str,
) -> Result<(), DeviceError> {
    let end = offset.saturating_add(len);
    if end > buffer.size() {
        return Err(out_of(&(offset..end), operation, buffer.purpose(), buffer.size()));
    }
    Ok(())
}

/// A part of a buffer that the host can see; unmapped when dropped, also by a panic in a closure.
struct Mapping<'a> {
    device: &'a Shared,
    mem: *mut c_void,
    address: *mut c_void,
    /// Value of [`Shared::mapped`] to go back to.
    before: u32,
}

impl<'a> Mapping<'a> {
    /// Maps beside others that only read.
    fn shared(
        device: &'a Shared,
        raw: *mut c_void,
        flags: u64,
        offset: usize,
        len: usize,
    ) -> Result<Self, DeviceError> {
        device.refuse_if_exclusive("mapping")?;
        let mapping = Self::map(device, raw, flags, offset, len)?;
        device.mapped.set(mapping.before + 1);
        Ok(mapping)
    }

    /// Maps when no other mapping exists.
    fn exclusive(
        device: &'a Shared,
        raw: *mut c_void,
        flags: u64,
        offset: usize,
        len: usize,
    ) -> Result<Self, DeviceError> {
        device.refuse_if_mapped("mapping for writing")?;
        let mapping = Self::map(device, raw, flags, offset, len)?;
        device.mapped.set(EXCLUSIVE);
        Ok(mapping)
    }

    #[allow(unsafe_code)]
    fn map(
        device: &'a Shared,
        raw: *mut c_void,
        flags: u64,
        offset: usize,
        len: usize,
    ) -> Result<Self, DeviceError> {
        let mut address = ptr::null_mut();
        device.count(|calls| calls.reads += 1);
        // SAFETY: queue and buffer are live and of one context, and the callers checked the range.
        let done = unsafe {
            let queue = device.queue.get();
            queue::enqueue_map_buffer(
                queue,
                raw,
                CL_BLOCKING,
                flags,
                offset,
                len,
                &mut address,
                0,
                ptr::null(),
            )
        };
        forget(done.map_err(|code| DeviceError::from_call("mapping a buffer", code))?);
        Ok(Self { device, mem: raw, address, before: device.mapped.get() })
    }
}

impl Drop for Mapping<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        self.device.mapped.set(self.before);
        // SAFETY: the address came from mapping this buffer, which is live, and is unmapped only here.
        let queued = unsafe {
            queue::enqueue_unmap_mem_object(self.device.queue.get(), self.mem, self.address, 0, ptr::null())
        };
        match queued {
            Ok(event) => forget(event),
            Err(code) => tracing::warn!(code = %ClCode(code), "a buffer could not be unmapped"),
        }
    }
}
