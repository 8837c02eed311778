//! Running kernels: arguments, work sizes, and launches prepared once for many runs.

use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;

use opencl_sys as sys;
use opencl3::error_codes::CL_SUCCESS;
use opencl3::kernel as krn;

use super::context::{Device, Shared};
use super::error::{ClCode, DeviceError};
use super::fault;
use super::handle::Handle;
use super::memory::Buffer;
use super::program::{Kernel, KernelInner, Param};

/// One argument of a kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arg<'a> {
    /// A pointer to device memory.
    Buffer(&'a Buffer),
    /// `int`.
    I32(i32),
    /// `uint`.
    U32(u32),
    /// `long`.
    I64(i64),
    /// `ulong`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// That many bytes of local memory.
    Local(usize),
}

impl Arg<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Buffer(buffer) if buffer.is_read_only() => "a read-only buffer",
            Self::Buffer(_) => "a buffer",
            Self::I32(_) => "an int",
            Self::U32(_) => "a uint",
            Self::I64(_) => "a long",
            Self::U64(_) => "a ulong",
            Self::F32(_) => "a float",
            Self::Local(_) => "local memory",
        }
    }

    fn fits(&self, param: Param) -> bool {
        match (self, param) {
            (_, Param::Unknown) => true,
            (Self::Buffer(buffer), Param::Pointer { reads_only }) => reads_only || !buffer.is_read_only(),
            (Self::Local(_), Param::Local) => true,
            (Self::Buffer(_) | Self::Local(_), _) => false,
            (_, param) => param == Param::Value,
        }
    }
}

/// What a launch moves and computes, for profiles: what it has to, whatever a kernel does on the way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of weights and the like that it reads.
    pub bytes: u64,
    /// f32 operations.
    pub operations: u64,
    /// More bytes for each position before its rows.
    pub bytes_a_position: u64,
    /// More operations for each of them.
    pub operations_a_position: u64,
    /// As far back as it looks.
    pub most_positions: u64,
}

impl Work {
    /// The work with so many positions before the rows.
    fn behind(self, positions: u64) -> Self {
        let positions = positions.min(self.most_positions);
        Self {
            bytes: self.bytes.saturating_add(self.bytes_a_position.saturating_mul(positions)),
            operations: self.operations.saturating_add(self.operations_a_position.saturating_mul(positions)),
            ..self
        }
    }
}

/// Work sizes in the form the runtime takes them, without a heap.
#[derive(Debug, Clone, Copy)]
struct WorkSize {
    dims: usize,
    global: [usize; 3],
    local: Option<[usize; 3]>,
}

impl WorkSize {
    fn new(kernel: &KernelInner, global: &[usize], local: Option<&[usize]>) -> Result<Self, DeviceError> {
        let padded = |sizes: &[usize]| {
            let mut all = [1; 3];
            let fits = (1..=3).contains(&sizes.len()) && !sizes.contains(&0);
            fits.then(|| {
                all[..sizes.len()].copy_from_slice(sizes);
                all
            })
        };
        let wrong = || DeviceError::WorkSize {
            kernel: kernel.name.to_string(),
            global: global.to_vec(),
            local: local.map(<[usize]>::to_vec),
        };
        if local.is_some_and(|local| local.len() != global.len()) {
            return Err(wrong());
        }
        let local = match local {
            Some(local) => Some(padded(local).ok_or_else(wrong)?),
            None => None,
        };
        Ok(Self { dims: global.len(), global: padded(global).ok_or_else(wrong)?, local })
    }
}

/// Sets one argument, after a look at what the kernel declares: a runtime takes eight bytes of a number for a buffer
/// handle and crashes.
#[allow(unsafe_code)]
fn set_arg(object: &Handle, kernel: &KernelInner, index: usize, arg: Arg<'_>) -> Result<(), DeviceError> {
    let wrong = |expected: String| DeviceError::BadArg {
        kernel: kernel.name.to_string(),
        index,
        given: arg.kind(),
        expected,
    };
    let Some(&param) = kernel.params.get(index) else {
        return Err(wrong(format!("the kernel takes {} arguments", kernel.params.len())));
    };
    if !arg.fits(param) {
        return Err(wrong(format!("the kernel declares {param}")));
    }
    let set = |size: usize, value: *const c_void| {
        // SAFETY: the kernel is live, the index is one it has, `value` points to `size` bytes of a plain number or of
        // a live buffer handle (null for local memory), and the runtime copies them. Another size is refused.
        unsafe { krn::set_kernel_arg(object.get(), index as u32, size, value) }
    };
    let done = match arg {
        Arg::Buffer(buffer) => {
            if !Rc::ptr_eq(buffer.shared(), &kernel.shared) {
                return Err(DeviceError::Foreign { what: format!("a {} buffer", buffer.purpose()) });
            }
            let mem = buffer.mem();
            set(size_of::<*mut c_void>(), (&raw const mem).cast())
        }
        Arg::I32(value) => set(4, (&raw const value).cast()),
        Arg::U32(value) => set(4, (&raw const value).cast()),
        Arg::I64(value) => set(8, (&raw const value).cast()),
        Arg::U64(value) => set(8, (&raw const value).cast()),
        Arg::F32(value) => set(4, (&raw const value).cast()),
        Arg::Local(bytes) => set(bytes, ptr::null()),
    };
    done.map_err(|code| wrong(ClCode(code).to_string()))
}

/// Enqueues a kernel object whose arguments are all set and whose buffers live.
///
/// Calls the C function itself: opencl3 always asks for an event, which is then to be released.
#[allow(unsafe_code)]
fn enqueue(
    shared: &Shared,
    object: &Handle,
    kernel: &KernelInner,
    size: &WorkSize,
    work: Work,
) -> Result<(), DeviceError> {
    fault::strike(&kernel.name)?;
    shared.count(|calls| calls.launches += 1);
    let mut event = ptr::null_mut();
    let wanted: *mut sys::cl_event = if shared.profiler.is_some() { &raw mut event } else { ptr::null_mut() };
    // SAFETY: queue and kernel are live and of one context; the sizes have `dims` numbers each; the callers set all
    // arguments, and hold their buffers until the call is over, from when on the runtime does.
    let status = unsafe {
        sys::clEnqueueNDRangeKernel(
            shared.queue.get(),
            object.get(),
            size.dims as u32,
            ptr::null(),
            size.global.as_ptr(),
            size.local.as_ref().map_or(ptr::null(), |local| local.as_ptr()),
            0,
            ptr::null(),
            wanted,
        )
    };
    if status != CL_SUCCESS {
        let code = ClCode(status);
        if code.is_lost() || code.is_out_of_memory() {
            return Err(DeviceError::from_call(format!("launching kernel '{}'", kernel.name), status));
        }
        return Err(DeviceError::Launch {
            kernel: kernel.name.to_string(),
            global: size.global[..size.dims].to_vec(),
            local: size.local.map(|local| local[..size.dims].to_vec()),
            code,
        });
    }
    match (&shared.profiler, kernel.slot) {
        (Some(profiler), Some(slot)) => profiler.borrow_mut().record(slot, event, work),
        _ => Ok(()),
    }
}

impl Device {
    /// Runs a kernel with these arguments over `global` work-items (1 to 3 dimensions), in work-groups of `local` or
    /// of what the runtime likes. Only enqueued; all launches run in order.
    ///
    /// # Errors
    /// [`DeviceError::ArgCount`], [`DeviceError::BadArg`], [`DeviceError::WorkSize`] or [`DeviceError::Launch`], each
    /// naming the kernel; [`DeviceError::Lost`] if the device is gone.
    pub fn launch(
        &self,
        kernel: &Kernel,
        args: &[Arg<'_>],
        global: &[usize],
        local: Option<&[usize]>,
    ) -> Result<(), DeviceError> {
        let kernel = &*kernel.inner;
        self.check_launch(kernel)?;
        if args.len() != kernel.params.len() {
            return Err(DeviceError::ArgCount {
                kernel: kernel.name.to_string(),
                expected: kernel.params.len(),
                given: args.len(),
            });
        }
        let size = WorkSize::new(kernel, global, local)?;
        for (index, arg) in args.iter().enumerate() {
            set_arg(&kernel.handle, kernel, index, *arg)?;
        }
        enqueue(&self.shared, &kernel.handle, kernel, &size, Work::default())
    }

    /// Runs a prepared launch. Only enqueued; all launches run in order.
    ///
    /// # Errors
    /// [`DeviceError::ArgUnset`] if an argument has no value yet, otherwise as [`launch`](Self::launch).
    pub fn enqueue(&self, launch: &Launch) -> Result<(), DeviceError> {
        let kernel = &*launch.kernel.inner;
        self.check_launch(kernel)?;
        if let Some(index) = launch.args.iter().position(|arg| matches!(arg, Held::Nothing)) {
            return Err(DeviceError::ArgUnset { kernel: kernel.name.to_string(), index });
        }
        enqueue(&self.shared, &launch.object, kernel, &launch.size, launch.work.behind(launch.positions))
    }

    fn check_launch(&self, kernel: &KernelInner) -> Result<(), DeviceError> {
        if !Rc::ptr_eq(&self.shared, &kernel.shared) {
            return Err(DeviceError::Foreign { what: format!("kernel '{}'", kernel.name) });
        }
        self.shared.refuse_if_mapped("launching a kernel")
    }
}

/// What a prepared launch keeps for an argument.
enum Held {
    Nothing,
    /// A number, or a size of local memory.
    Value(Arg<'static>),
    /// Kept, since a kernel object does not keep its buffers alive.
    Memory(Buffer),
}

/// A kernel with arguments and sizes that stay from run to run, for [`Device::enqueue`]; it keeps its buffers alive.
///
/// It has a kernel object of its own, so that only arguments that change have to be set again.
pub struct Launch {
    /// Dropped before the buffers that its arguments point to.
    object: Handle,
    kernel: Kernel,
    size: WorkSize,
    args: Vec<Held>,
    work: Work,
    positions: u64,
}

impl Launch {
    /// A launch of `kernel` without arguments yet; sizes as for [`Device::launch`].
    ///
    /// # Errors
    /// [`DeviceError::WorkSize`], or what the runtime answers.
    pub fn new(kernel: &Kernel, global: &[usize], local: Option<&[usize]>) -> Result<Self, DeviceError> {
        let size = WorkSize::new(&kernel.inner, global, local)?;
        let object = kernel.another_object()?;
        let args = kernel.inner.params.iter().map(|_| Held::Nothing).collect();
        Ok(Self { object, kernel: kernel.clone(), size, args, work: Work::default(), positions: 0 })
    }

    /// A launch with all its arguments.
    ///
    /// # Errors
    /// As [`new`](Self::new) and [`set`](Self::set), and [`DeviceError::ArgCount`].
    pub fn with_args(
        kernel: &Kernel,
        args: &[Arg<'_>],
        global: &[usize],
        local: Option<&[usize]>,
    ) -> Result<Self, DeviceError> {
        let mut launch = Self::new(kernel, global, local)?;
        if args.len() != launch.args.len() {
            return Err(DeviceError::ArgCount {
                kernel: kernel.name().to_owned(),
                expected: launch.args.len(),
                given: args.len(),
            });
        }
        for (index, arg) in args.iter().enumerate() {
            launch.set(index, *arg)?;
        }
        Ok(launch)
    }

    /// Gives argument `index` (from zero) a value for all runs enqueued from now on.
    ///
    /// # Errors
    /// [`DeviceError::BadArg`] if there is no such argument or the value does not fit it; the old value stays.
    pub fn set(&mut self, index: usize, arg: Arg<'_>) -> Result<(), DeviceError> {
        set_arg(&self.object, &self.kernel.inner, index, arg)?;
        if let Some(held) = self.args.get_mut(index) {
            *held = match arg {
                Arg::Buffer(buffer) => Held::Memory(buffer.clone()),
                Arg::I32(value) => Held::Value(Arg::I32(value)),
                Arg::U32(value) => Held::Value(Arg::U32(value)),
                Arg::I64(value) => Held::Value(Arg::I64(value)),
                Arg::U64(value) => Held::Value(Arg::U64(value)),
                Arg::F32(value) => Held::Value(Arg::F32(value)),
                Arg::Local(bytes) => Held::Value(Arg::Local(bytes)),
            };
        }
        Ok(())
    }

    /// The same launch, which moves and computes so much.
    #[must_use]
    pub fn doing(self, work: Work) -> Self {
        Self { work, ..self }
    }

    /// Says how many positions are before the rows of the runs enqueued from now on.
    pub fn behind(&mut self, positions: u64) {
        self.positions = positions;
    }

    /// Changes the work sizes for all runs enqueued from now on.
    ///
    /// # Errors
    /// [`DeviceError::WorkSize`]; the old sizes stay.
    pub fn resize(&mut self, global: &[usize], local: Option<&[usize]>) -> Result<(), DeviceError> {
        self.size = WorkSize::new(&self.kernel.inner, global, local)?;
        Ok(())
    }

    /// Its arguments, in order; none for one that has no value yet.
    pub fn args(&self) -> impl Iterator<Item = Option<Arg<'_>>> {
        self.args.iter().map(|held| match held {
            Held::Nothing => None,
            Held::Value(value) => Some(*value),
            Held::Memory(buffer) => Some(Arg::Buffer(buffer)),
        })
    }

    /// Its work-items along each dimension, 1 for those it does not have; none where several of them are in a work-group,
    /// or may be.
    pub fn single_items(&self) -> Option<[usize; 3]> {
        (self.size.local == Some([1; 3])).then_some(self.size.global)
    }

    /// The kernel it runs.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}
