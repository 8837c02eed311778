//! The key-value cache of a layer.

use std::fmt;
use std::str::FromStr;

use half::f16;
use serde::{Deserialize, Serialize};

use super::check::check;
use super::kernels::{Family, OpsError};
use super::{round_up, xmx};
use crate::device::{Buffer, Device, DeviceError, Purpose};

/// Positions per step of the running softmax of `attention`; a cache is padded to whole steps.
const TILE: usize = 64;
/// Most values of a key or of a value head: a work-item of `attention` keeps the sums of all its looks beside each other,
/// eight times the values of a head.
pub const MOST_HEAD_SIZE: usize = 1024;

/// Number type of a key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    /// Half the memory; keys and values are rounded to 11 bits.
    #[default]
    F16,
    /// Nothing is rounded.
    F32,
}

impl CacheKind {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

impl FromStr for CacheKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f16" => Ok(Self::F16),
            "f32" => Ok(Self::F32),
            other => Err(format!("'{other}' is no type of key-value cache: f16 or f32")),
        }
    }
}

/// Keys and values of one layer.
#[derive(Debug, Clone)]
pub struct Cache {
    /// Whose attention looks at it.
    pub family: Family,
    /// Type of its numbers.
    pub kind: CacheKind,
    /// `[kv head][position / 16][head size][16]`; of the `xmx` family `[kv head][position][head size]`, at least 32 values
    /// a key.
    pub keys: Buffer,
    /// `[kv head][position][value size]`; the keys' buffer where the values are parts of the keys. Of the `xmx` family
    /// `[kv head][value size][position]`.
    pub values: Buffer,
    /// Positions it holds, a multiple of 64. Position p lies in slot p % capacity: with a window, what is out of sight
    /// may be written over.
    pub capacity: usize,
    /// Key-value heads.
    pub heads: usize,
    /// Values of a key, and of a query.
    pub head_size: usize,
    /// Values of a value head.
    pub value_size: usize,
    latent: bool,
}

impl Cache {
    /// Memory of the `vector` family for at least `positions` positions. It is not cleared: what has not been written is not
    /// looked at, so that the system need not give pages for it.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn new(
        device: &Device,
        kind: CacheKind,
        heads: usize,
        head_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        Self::with_value_size(device, kind, heads, head_size, head_size, positions)
    }

    /// The same of whichever family. Values of the `xmx` family are zero where nothing was written: it multiplies them.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn of_family(
        device: &Device,
        family: Family,
        kind: CacheKind,
        heads: usize,
        head_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        if family == Family::Vector {
            return Self::new(device, kind, heads, head_size, positions);
        }
        let (key, capacity) = (xmx::key_values(head_size), capacity(family, head_size, positions));
        let buffer = |size: usize| device.alloc(Purpose::KvCache, capacity * heads * size * kind.bytes());
        let (keys, values) = (buffer(key)?, buffer(head_size)?);
        device.fill(&values, 0)?;
        Ok(Self {
            family,
            kind,
            keys,
            values,
            capacity,
            heads,
            head_size,
            value_size: head_size,
            latent: false,
        })
    }

    /// The same of the `vector` family for value heads of another size than keys.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn with_value_size(
        device: &Device,
        kind: CacheKind,
        heads: usize,
        head_size: usize,
        value_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        let capacity = round_up(positions, TILE);
        let buffer = |size: usize| device.alloc(Purpose::KvCache, capacity * heads * size * kind.bytes());
        let (keys, values) = (buffer(head_size)?, buffer(value_size)?);
        let family = Family::Vector;
        Ok(Self { family, kind, keys, values, capacity, heads, head_size, value_size, latent: false })
    }

    /// One key head, whose first `value_size` values are the value of the position, too.
    ///
    /// # Errors
    /// [`DeviceError`] when it does not fit.
    pub fn latent(
        device: &Device,
        kind: CacheKind,
        head_size: usize,
        value_size: usize,
        positions: usize,
    ) -> Result<Self, DeviceError> {
        let capacity = round_up(positions, TILE);
        let keys = device.alloc(Purpose::KvCache, capacity * head_size * kind.bytes())?;
        let values = keys.clone();
        let family = Family::Vector;
        Ok(Self { family, kind, keys, values, capacity, heads: 1, head_size, value_size, latent: true })
    }

    /// Makes all its numbers 1/16, for measuring: memory that nobody has written may be one page, seen again and again.
    ///
    /// # Errors
    /// What the device says.
    pub fn fill(&self, device: &Device) -> Result<(), DeviceError> {
        let pattern = match self.kind {
            CacheKind::F16 => 0x2c00_2c00,
            CacheKind::F32 => 0x3d80_0000,
        };
        device.fill(&self.keys, pattern)?;
        if self.latent { Ok(()) } else { device.fill(&self.values, pattern) }
    }

    /// Whether a value is the first part of its key, rather than stored by itself.
    pub fn values_in_keys(&self) -> bool {
        self.latent
    }

    /// Keys and values of the positions `from..to`, each `[head][position][values of it]`, as numbers. For tests and tools:
    /// it waits for the device and copies much more than it shows.
    ///
    /// # Errors
    /// [`DeviceError`] when the device refuses.
    pub fn read(&self, device: &Device, from: usize, to: usize) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
        let numbers = |buffer: &Buffer| -> Result<Vec<f32>, DeviceError> {
            let mut bytes = vec![0u8; buffer.size()];
            device.read(buffer, 0, &mut bytes)?;
            Ok(match self.kind {
                CacheKind::F16 => {
                    bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
                }
                CacheKind::F32 => {
                    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
                }
            })
        };
        let (keys, values) = (numbers(&self.keys)?, numbers(&self.values)?);
        let capacity = self.capacity;
        let of = |size: usize, value: &dyn Fn(usize, usize, usize) -> f32| {
            (0..self.heads)
                .flat_map(|head| (from..to).map(move |position| (head, position % capacity)))
                .flat_map(|(head, slot)| (0..size).map(move |i| value(head, slot, i)))
                .collect()
        };
        let (key, value) = (self.head_size, self.value_size);
        let key_at = |head, slot, i| match self.family {
            Family::Vector => keys[head * capacity * key + slot / 16 * key * 16 + i * 16 + slot % 16],
            Family::Xmx => keys[(head * capacity + slot) * xmx::key_values(key) + i],
        };
        let value_at = |head, slot, i| match self.family {
            Family::Vector if self.latent => key_at(head, slot, i),
            Family::Vector => values[(head * capacity + slot) * value + i],
            Family::Xmx => values[(head * value + i) * capacity + slot],
        };
        Ok((of(key, &key_at), of(value, &value_at)))
    }

    /// Bytes of the queries of `rows` rows in the form that the `xmx` family wants them in; see
    /// [`Rotation::queries`](super::Rotation::queries).
    pub fn query_bytes(&self, q_heads: usize, rows: usize) -> usize {
        xmx::query_bytes(q_heads, self.heads, self.head_size, rows)
    }

    pub(super) fn check(&self, op: &'static str) -> Result<(), OpsError> {
        let (key, value) = (self.head_size, self.value_size);
        check(op, key > 0 && value > 0 && key.is_multiple_of(16) && value.is_multiple_of(16), || {
            format!("head sizes of {key} and {value} are not multiples of 16")
        })?;
        check(op, key.max(value) <= MOST_HEAD_SIZE, || {
            format!("head sizes of {key} and {value}, {MOST_HEAD_SIZE} at most")
        })?;
        check(op, !self.latent || value <= key, || format!("values of {value} in keys of {key}"))?;
        check(op, self.family == Family::Vector || xmx::attends(self.kind, key), || {
            format!("a cache in {} with heads of {key}, for which the xmx family has no kernels", self.kind)
        })
    }

    /// Bytes of a cache of latents.
    pub fn latent_bytes(kind: CacheKind, head_size: usize, positions: usize) -> usize {
        kind.bytes() * head_size * round_up(positions, TILE)
    }

    /// Bytes of a cache of that size, value heads being as large as keys.
    pub fn bytes(family: Family, kind: CacheKind, heads: usize, head_size: usize, positions: usize) -> usize {
        let key = match family {
            Family::Vector => head_size,
            Family::Xmx => xmx::key_values(head_size),
        };
        kind.bytes() * heads * (key + head_size) * capacity(family, head_size, positions)
    }
}

/// Positions of a cache that must hold so many: whole steps of whoever walks over them.
fn capacity(family: Family, head_size: usize, positions: usize) -> usize {
    round_up(
        positions,
        match family {
            Family::Vector => TILE,
            Family::Xmx => TILE.max(xmx::block(head_size)),
        },
    )
}
