//! Buffers and the account of what they hold.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use serde::Serialize;

use super::context::Shared;
use super::handle::Handle;

/// What a buffer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Weights of the model.
    Weights,
    /// Keys and values of past positions.
    KvCache,
    /// Activations and all else.
    Scratch,
    /// Arguments of launches: kilobytes, which are counted as little as those that the runtime keeps for itself.
    Arguments,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::KvCache => "kv_cache",
            Self::Scratch => "scratch",
            Self::Arguments => "arguments",
        })
    }
}

/// Bytes in buffers, by purpose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Bytes in [`Purpose::Weights`] buffers.
    pub weights: u64,
    /// Bytes in [`Purpose::KvCache`] buffers.
    pub kv_cache: u64,
    /// Bytes in [`Purpose::Scratch`] buffers.
    pub scratch: u64,
    /// All of these.
    pub total: u64,
    /// The most they may have together.
    pub budget: u64,
}

/// Counts bytes by purpose; every buffer adds itself when made and takes itself off when dropped.
#[derive(Debug)]
pub(super) struct Ledger {
    used: [Cell<u64>; 4],
    pub(super) budget: u64,
}

impl Ledger {
    pub(super) fn new(budget: u64) -> Self {
        Self { used: Default::default(), budget }
    }

    pub(super) fn total(&self) -> u64 {
        let arguments = &self.used[Purpose::Arguments as usize];
        self.used.iter().map(Cell::get).sum::<u64>() - arguments.get()
    }

    pub(super) fn report(&self) -> MemoryReport {
        let of = |purpose| self.used[purpose as usize].get();
        MemoryReport {
            weights: of(Purpose::Weights),
            kv_cache: of(Purpose::KvCache),
            scratch: of(Purpose::Scratch),
            total: self.total(),
            budget: self.budget,
        }
    }

    fn add(&self, purpose: Purpose, bytes: u64) {
        let cell = &self.used[purpose as usize];
        cell.set(cell.get() + bytes);
    }

    fn take(&self, purpose: Purpose, bytes: u64) {
        let cell = &self.used[purpose as usize];
        cell.set(cell.get() - bytes);
    }
}

/// Host memory a buffer looks at: anything that gives bytes and may be dropped anywhere.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Memory of the device. Cloning gives another handle to the same bytes; the last one frees them.
#[derive(Clone)]
pub struct Buffer {
    pub(super) inner: Rc<BufferInner>,
}

pub(super) struct BufferInner {
    mem: Handle,
    bytes: usize,
    purpose: Purpose,
    access: Access,
    shared: Rc<Shared>,
}

/// Whose bytes a buffer has and who may write them.
pub(super) enum Access {
    /// The runtime's own memory.
    ReadWrite,
    /// A copy of host memory that is used like the original.
    Copied,
    /// Bytes of another buffer, which is no part itself, stays for as long as this one does and counts them.
    Part {
        /// The other one.
        whole: Buffer,
        /// Where the bytes begin in it.
        at: usize,
    },
    /// Host memory, kept for as long as the runtime may look at it.
    Wrapped {
        /// Never read, only kept.
        _owner: HostBytes,
        zero_copy: bool,
    },
}

impl Drop for BufferInner {
    fn drop(&mut self) {
        if matches!(self.access, Access::Wrapped { .. }) {
            // Kernels on the queue may still read the host's memory, which the runtime does not keep alive.
            self.shared.finish_before_release();
        }
        if !matches!(self.access, Access::Part { .. }) {
            self.shared.ledger.take(self.purpose, self.bytes as u64);
        }
        // The fields go in their order: the memory object before the host memory under it.
    }
}

impl Buffer {
    /// Enters a new buffer into the account; a part of another is in it already.
    pub(super) fn enter(
        mem: Handle,
        bytes: usize,
        purpose: Purpose,
        shared: &Rc<Shared>,
        access: Access,
    ) -> Self {
        if !matches!(access, Access::Part { .. }) {
            shared.ledger.add(purpose, bytes as u64);
        }
        Self { inner: Rc::new(BufferInner { mem, bytes, purpose, access, shared: Rc::clone(shared) }) }
    }

    /// Its bytes, never 0.
    pub fn size(&self) -> usize {
        self.inner.bytes
    }

    /// What it is for.
    pub fn purpose(&self) -> Purpose {
        self.inner.purpose
    }

    /// True if the device works right on the host memory that was wrapped.
    pub fn is_zero_copy(&self) -> bool {
        match &self.inner.access {
            Access::Wrapped { zero_copy, .. } => *zero_copy,
            Access::Part { whole, .. } => whole.is_zero_copy(),
            Access::ReadWrite | Access::Copied => false,
        }
    }

    /// The buffer that this one is part of, and where its bytes begin there; itself, if it is no part.
    pub(super) fn whole(&self) -> (&Self, usize) {
        match &self.inner.access {
            Access::Part { whole, at } => (whole, *at),
            _ => (self, 0),
        }
    }

    /// True if the other one is a handle to the same buffer.
    pub fn is_same(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    /// True if it is a view of host memory that no kernel may write.
    pub fn is_read_only(&self) -> bool {
        match &self.inner.access {
            Access::ReadWrite => false,
            Access::Part { whole, .. } => whole.is_read_only(),
            Access::Copied | Access::Wrapped { .. } => true,
        }
    }

    pub(super) fn mem(&self) -> *mut std::ffi::c_void {
        self.inner.mem.get()
    }

    pub(super) fn shared(&self) -> &Rc<Shared> {
        &self.inner.shared
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("purpose", &self.inner.purpose)
            .field("bytes", &self.inner.bytes)
            .field("zero_copy", &self.is_zero_copy())
            .finish_non_exhaustive()
    }
}
