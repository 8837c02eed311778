//! From OpenCL C to kernels.

use std::ffi::CString;
use std::fmt;
use std::ptr;
use std::rc::Rc;

use opencl_sys as sys;
use opencl3::error_codes::{CL_INVALID_BINARY, CL_INVALID_VALUE, CL_SUCCESS};
use opencl3::kernel as krn;
use opencl3::program as prg;
use opencl3::types::{cl_int, cl_uint, cl_ulong};

use super::cache::Key;
use super::context::{Device, Shared};
use super::error::{ClCode, DeviceError};
use super::handle::Handle;

/// A built program. Cloning gives another handle to it.
#[derive(Clone)]
pub struct Program {
    inner: Rc<ProgramInner>,
}

struct ProgramInner {
    handle: Handle,
    label: Rc<str>,
    from_cache: bool,
    shared: Rc<Shared>,
}

/// A kernel of a program. Cloning gives another handle to the same kernel object.
#[derive(Clone)]
pub struct Kernel {
    pub(super) inner: Rc<KernelInner>,
}

pub(super) struct KernelInner {
    /// The object that plain launches set all arguments of, every time.
    pub(super) handle: Handle,
    pub(super) name: Rc<str>,
    c_name: CString,
    pub(super) params: Vec<Param>,
    /// Where its times are added up.
    pub(super) slot: Option<usize>,
    program: Program,
    pub(super) shared: Rc<Shared>,
}

/// What a kernel declares for one of its parameters, as far as the runtime tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Param {
    /// `__global` or `__constant` pointer.
    Pointer {
        /// Declared `const` or `__constant`.
        reads_only: bool,
    },
    /// `__local` pointer.
    Local,
    /// Passed by value.
    Value,
    /// The runtime does not tell.
    Unknown,
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pointer { reads_only: true } => "a pointer to const memory",
            Self::Pointer { reads_only: false } => "a pointer to memory it may write",
            Self::Local => "a pointer to local memory",
            Self::Value => "a value",
            Self::Unknown => "an unknown parameter",
        })
    }
}

impl Device {
    /// Compiles `source` with `options`, or takes it from the cache of an earlier start.
    ///
    /// `label` names the program in errors and times. The source must be complete: what it includes from files is
    /// not part of the cache's key.
    ///
    /// # Errors
    /// [`DeviceError::Build`] with the whole log if the compiler refuses.
    pub fn program(&self, label: &str, source: &str, options: &str) -> Result<Program, DeviceError> {
        let info = &self.shared.info;
        // The parameters' kinds are asked for below, to refuse arguments that would crash the runtime.
        let options = format!("{options} -cl-kernel-arg-info");
        let options = options.trim();
        let refused = |code: ClCode, log: String| DeviceError::Build {
            label: label.to_owned(),
            device: info.name.clone(),
            options: options.to_owned(),
            code,
            log,
        };
        let c_options = CString::new(options)
            .map_err(|_| refused(ClCode(CL_INVALID_VALUE), "the options hold a zero byte".into()))?;
        let key = Key::of(&[
            source,
            options,
            &info.platform,
            &info.platform_version,
            &info.name,
            &info.driver_version,
            &info.version,
        ]);
        if let Some(cache) = &self.shared.cache
            && let Some(binary) = cache.load(key)
        {
            match from_binary(&self.shared, &binary, &c_options) {
                Ok(handle) => return Ok(self.finish_program(handle, label, true)),
                Err(code) => {
                    tracing::debug!(label, code = %ClCode(code), "the cached binary is refused, compiling anew");
                }
            }
        }
        let mut handle = from_source(&self.shared, source)
            .map_err(|code| DeviceError::from_call(format!("creating program '{label}'"), code))?;
        let built = prg::build_program(handle.get(), &[self.shared.id], &c_options, None, ptr::null_mut());
        let log = build_log(&self.shared, &handle);
        if let Err(code) = built {
            return Err(refused(ClCode(code), log));
        }
        if !log.is_empty() {
            tracing::debug!(label, log, "the compiler has something to say");
        }
        if let Some(cache) = &self.shared.cache {
            match binary_of(&handle) {
                Ok(binary) => {
                    cache.store(key, &binary);
                    // A program from source keeps what its compiler made of it: megabytes, for nothing.
                    match from_binary(&self.shared, &binary, &c_options) {
                        Ok(lean) => handle = lean,
                        Err(code) => {
                            tracing::debug!(label, code = %ClCode(code), "the new binary is refused")
                        }
                    }
                }
                Err(code) => tracing::debug!(label, code = %ClCode(code), "the runtime gives no binary"),
            }
        }
        Ok(self.finish_program(handle, label, false))
    }

    fn finish_program(&self, handle: Handle, label: &str, from_cache: bool) -> Program {
        let shared = Rc::clone(&self.shared);
        Program { inner: Rc::new(ProgramInner { handle, label: label.into(), from_cache, shared }) }
    }
}

/// Calls the C function itself: opencl3 casts a slice of `&str` to one of C pointers.
#[allow(unsafe_code)]
fn from_source(shared: &Shared, source: &str) -> Result<Handle, cl_int> {
    let (text, length) = (source.as_ptr().cast(), source.len());
    let mut status = CL_INVALID_VALUE;
    // SAFETY: the context is live; one pointer and one length are given, and the runtime copies the text.
    let raw = unsafe { sys::clCreateProgramWithSource(shared.context.get(), 1, &text, &length, &mut status) };
    if status != CL_SUCCESS {
        return Err(status);
    }
    // SAFETY: just created, the reference is ours.
    Ok(unsafe { Handle::own(raw, prg::release_program, "program") })
}

/// Loads and builds a binary; for the reason of the direct call see [`from_source`].
#[allow(unsafe_code)]
fn from_binary(shared: &Shared, binary: &[u8], options: &CString) -> Result<Handle, cl_int> {
    let (bytes, length) = (binary.as_ptr(), binary.len());
    let (mut of_binary, mut status) = (CL_INVALID_VALUE, CL_INVALID_VALUE);
    // SAFETY: the context is live and holds the device; one device, pointer, length and status are given, and the
    // runtime copies the bytes. They are what this very runtime gave out: key and checksum were compared.
    let raw = unsafe {
        sys::clCreateProgramWithBinary(
            shared.context.get(),
            1,
            &shared.id,
            &length,
            &bytes,
            &mut of_binary,
            &mut status,
        )
    };
    if status != CL_SUCCESS {
        return Err(status);
    }
    // SAFETY: just created, the reference is ours.
    let handle = unsafe { Handle::own(raw, prg::release_program, "program") };
    if of_binary != CL_SUCCESS {
        return Err(of_binary);
    }
    prg::build_program(handle.get(), &[shared.id], options, None, ptr::null_mut())?;
    Ok(handle)
}

/// The binary of a built program for its one device.
#[allow(unsafe_code)]
fn binary_of(program: &Handle) -> Result<Vec<u8>, cl_int> {
    let mut size = 0_usize;
    // SAFETY: the program is live and has one device, so one size is written.
    let status = unsafe {
        sys::clGetProgramInfo(
            program.get(),
            sys::CL_PROGRAM_BINARY_SIZES,
            size_of::<usize>(),
            (&raw mut size).cast(),
            ptr::null_mut(),
        )
    };
    if status != CL_SUCCESS {
        return Err(status);
    }
    if size == 0 {
        return Err(CL_INVALID_BINARY);
    }
    let mut binary = vec![0_u8; size];
    let mut target = binary.as_mut_ptr();
    // SAFETY: one pointer is given for one device, to as many bytes as the runtime just asked for.
    let status = unsafe {
        sys::clGetProgramInfo(
            program.get(),
            sys::CL_PROGRAM_BINARIES,
            size_of::<*mut u8>(),
            (&raw mut target).cast(),
            ptr::null_mut(),
        )
    };
    if status == CL_SUCCESS { Ok(binary) } else { Err(status) }
}

fn build_log(shared: &Shared, program: &Handle) -> String {
    prg::get_program_build_info(program.get(), shared.id, prg::CL_PROGRAM_BUILD_LOG).map_or_else(
        |code| format!("(no build log: {})", ClCode(code)),
        |log| String::from(log).trim_end().to_owned(),
    )
}

impl Program {
    /// The label it was built under.
    pub fn label(&self) -> &str {
        &self.inner.label
    }

    /// True if it was loaded from the cache instead of compiled.
    pub fn is_from_cache(&self) -> bool {
        self.inner.from_cache
    }

    /// The kernel of that name.
    ///
    /// # Errors
    /// [`DeviceError::NoKernel`] with the names there are.
    pub fn kernel(&self, name: &str) -> Result<Kernel, DeviceError> {
        let c_name = CString::new(name).map_err(|_| self.no_kernel(name, CL_INVALID_VALUE))?;
        let handle = self.kernel_object(&c_name, name)?;
        let count: cl_uint = krn::get_kernel_info(handle.get(), krn::CL_KERNEL_NUM_ARGS)
            .map_err(|code| {
                DeviceError::from_call(format!("asking for the arguments of kernel '{name}'"), code)
            })?
            .into();
        let params = (0..count).map(|index| param(&handle, index)).collect();
        let name: Rc<str> = name.into();
        let shared = Rc::clone(&self.inner.shared);
        let slot =
            shared.profiler.as_ref().map(|profiler| profiler.borrow_mut().slot(&self.inner.label, &name));
        let program = self.clone();
        Ok(Kernel { inner: Rc::new(KernelInner { handle, name, c_name, params, slot, program, shared }) })
    }

    #[allow(unsafe_code)]
    fn kernel_object(&self, c_name: &CString, name: &str) -> Result<Handle, DeviceError> {
        let raw =
            krn::create_kernel(self.inner.handle.get(), c_name).map_err(|code| self.no_kernel(name, code))?;
        // SAFETY: just created, the reference is ours.
        Ok(unsafe { Handle::own(raw, krn::release_kernel, "kernel") })
    }

    fn no_kernel(&self, name: &str, code: cl_int) -> DeviceError {
        let available = prg::get_program_info(self.inner.handle.get(), prg::CL_PROGRAM_KERNEL_NAMES)
            .map_or_else(
                |code| format!("(no list: {})", ClCode(code)),
                |names| String::from(names).replace(';', ", "),
            );
        let (label, kernel) = (self.inner.label.to_string(), name.to_owned());
        DeviceError::NoKernel { label, kernel, available, code: ClCode(code) }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("label", &self.inner.label).finish_non_exhaustive()
    }
}

/// Kind of a parameter; a runtime that keeps no such information leaves it unknown.
fn param(kernel: &Handle, index: cl_uint) -> Param {
    let ask = |what| krn::get_kernel_arg_info(kernel.get(), index, what);
    let Ok(space) = ask(krn::CL_KERNEL_ARG_ADDRESS_QUALIFIER).map(cl_uint::from) else {
        return Param::Unknown;
    };
    match space {
        krn::CL_KERNEL_ARG_ADDRESS_GLOBAL => match ask(krn::CL_KERNEL_ARG_TYPE_QUALIFIER).map(cl_ulong::from)
        {
            Ok(bits) => {
                Param::Pointer { reads_only: bits & cl_ulong::from(krn::CL_KERNEL_ARG_TYPE_CONST) != 0 }
            }
            Err(_) => Param::Unknown,
        },
        krn::CL_KERNEL_ARG_ADDRESS_CONSTANT => Param::Pointer { reads_only: true },
        krn::CL_KERNEL_ARG_ADDRESS_LOCAL => Param::Local,
        krn::CL_KERNEL_ARG_ADDRESS_PRIVATE => Param::Value,
        _ => Param::Unknown,
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Label of the program it is of.
    pub fn program(&self) -> &str {
        self.inner.program.label()
    }

    /// How many arguments it takes.
    pub fn arg_count(&self) -> usize {
        self.inner.params.len()
    }

    /// Another object of the same kernel, with arguments of its own.
    pub(super) fn another_object(&self) -> Result<Handle, DeviceError> {
        self.inner.program.kernel_object(&self.inner.c_name, &self.inner.name)
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.inner.name)
            .field("params", &self.inner.params)
            .finish_non_exhaustive()
    }
}
