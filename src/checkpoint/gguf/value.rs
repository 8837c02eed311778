//! Metadata values, as views of the mapped file.

use std::fmt;

use super::error::quoted;

/// The type of a metadata value or of an array's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it all.
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// All types in the order of their ids in a file, which start at 0.
    const BY_ID: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    pub(super) fn from_id(id: u32) -> Option<ValueType> {
        Self::BY_ID.get(usize::try_from(id).ok()?).copied()
    }

    /// The names of all types, as error texts list them.
    pub(super) fn known() -> String {
        let names: Vec<_> =
            Self::BY_ID.iter().enumerate().map(|(id, ty)| format!("{id} {}", ty.name())).collect();
        names.join(", ")
    }

    /// The name that errors use.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "u8",
            ValueType::I8 => "i8",
            ValueType::U16 => "u16",
            ValueType::I16 => "i16",
            ValueType::U32 => "u32",
            ValueType::I32 => "i32",
            ValueType::F32 => "f32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "u64",
            ValueType::I64 => "i64",
            ValueType::F64 => "f64",
        }
    }

    /// The bytes of a value of fixed size; none for strings and arrays.
    pub(super) const fn fixed_bytes(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }

    /// The fewest bytes that a value of this type takes in a file: a string has a length, an array an
    /// element type and a length.
    pub(super) const fn least_bytes(self) -> usize {
        match self.fixed_bytes() {
            Some(bytes) => bytes,
            None => match self {
                ValueType::Array => 4 + 8,
                _ => 8,
            },
        }
    }

    /// Whether values are whole numbers.
    pub(super) const fn is_integer(self) -> bool {
        matches!(
            self,
            ValueType::U8
                | ValueType::I8
                | ValueType::U16
                | ValueType::I16
                | ValueType::U32
                | ValueType::I32
                | ValueType::U64
                | ValueType::I64
        )
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A metadata value. Texts and arrays are views of the mapped file.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // The names say it all.
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// The type of this value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// The value of a whole number of any width; none for other types.
    pub fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Reads a value of fixed size from exactly its bytes; none for strings, arrays and other lengths.
    pub(super) fn from_fixed(ty: ValueType, raw: &[u8]) -> Option<Value<'a>> {
        Some(match ty {
            ValueType::U8 => Value::U8(u8::from_le_bytes(raw.try_into().ok()?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(raw.try_into().ok()?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(raw.try_into().ok()?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(raw.try_into().ok()?)),
            ValueType::U32 => Value::U32(u32::from_le_bytes(raw.try_into().ok()?)),
            ValueType::I32 => Value::I32(i32::from_le_bytes(raw.try_into().ok()?)),
            ValueType::U64 => Value::U64(u64::from_le_bytes(raw.try_into().ok()?)),
            ValueType::I64 => Value::I64(i64::from_le_bytes(raw.try_into().ok()?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(raw.try_into().ok()?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(raw.try_into().ok()?)),
            ValueType::Bool => Value::Bool(u8::from_le_bytes(raw.try_into().ok()?) != 0),
            ValueType::String | ValueType::Array => return None,
        })
    }
}

/// As errors show it: the type and, where short, the value itself.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::String(text) => write!(f, "the string {}", quoted(text)),
            Value::Array(array) => write!(f, "an array of {} {}", array.len(), array.element_type()),
            Value::F32(number) => write!(f, "the f32 {number:?}"),
            Value::F64(number) => write!(f, "the f64 {number:?}"),
            Value::Bool(truth) => write!(f, "the bool {truth}"),
            other => write!(f, "the {} {}", other.value_type(), other.integer().unwrap_or_default()),
        }
    }
}

/// An array in the mapped file. Its elements are read where they lie: nothing is copied or allocated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    pub(super) element: ValueType,
    pub(super) len: usize,
    /// The elements' bytes.
    pub(super) bytes: &'a [u8],
    /// For strings, where each one's length field starts in `bytes`; otherwise empty.
    pub(super) starts: &'a [u64],
}

impl<'a> Array<'a> {
    /// The type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Element `index`; none past the end. Arrays within arrays are checked when a file is opened, but nothing
    /// reads their elements, so that there is none here either.
    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        if self.element == ValueType::String {
            return self.text(index).map(Value::String);
        }
        let size = self.element.fixed_bytes()?;
        let start = index.checked_mul(size)?;
        Value::from_fixed(self.element, self.bytes.get(start..start.checked_add(size)?)?)
    }

    fn text(&self, index: usize) -> Option<&'a str> {
        let start = usize::try_from(*self.starts.get(index)?).ok()?;
        let (len, rest) = self.bytes.get(start..)?.split_first_chunk::<8>()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        std::str::from_utf8(rest.get(..len)?).ok()
    }
}

/// An array whose elements are known to be of one Rust type: what the typed getters of
/// [`Metadata`](super::Metadata) return.
#[derive(Debug, Clone, Copy)]
pub struct List<'a, T> {
    array: Array<'a>,
    read: fn(Value<'a>) -> Option<T>,
}

impl<'a, T> List<'a, T> {
    /// `read` must know every element of `array`.
    pub(super) fn new(array: Array<'a>, read: fn(Value<'a>) -> Option<T>) -> Self {
        List { array, read }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.array.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.array.is_empty()
    }

    /// Element `index`; none past the end.
    pub fn get(&self, index: usize) -> Option<T> {
        self.array.get(index).and_then(self.read)
    }

    /// All elements in order.
    pub fn iter(&self) -> impl Iterator<Item = T> + use<'a, T> {
        let List { array, read } = *self;
        (0..array.len()).map_while(move |index| array.get(index).and_then(read))
    }
}
