//! The tensor table: names, shapes, types and where the bytes lie.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::error::{CONVERT_AGAIN, COPY_AGAIN, Fault, Place, quoted};
use super::reader::Reader;
use crate::checkpoint::quant::{GgmlType, Supported};

/// The format's limit on the bytes of a tensor's name.
const NAME_BYTES: usize = 64;
/// The format's limit on a tensor's dimensions.
const DIMENSIONS: usize = 4;
/// A name's length and one byte of it, the number of dimensions, one dimension, the type, the offset.
pub(super) const LEAST_INFO_BYTES: usize = 8 + 1 + 4 + 8 + 4 + 8;

/// What a file says about one tensor, checked: rows are whole blocks, the bytes lie in the file and overlap
/// with no other tensor's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// The dimensions, 1 to 4 of them, none zero; `shape[0]` is the contiguous one: a matrix of `n` rows of
    /// `k` values is `[k, n]`.
    pub shape: Vec<u64>,
    /// The type of the elements.
    pub ty: GgmlType,
    /// Where the first byte lies, counted from the start of the file that holds it.
    pub offset: u64,
    /// How many bytes there are.
    pub nbytes: u64,
    /// Where this description starts in the file; errors about the tensor name it.
    pub declared_at: u64,
    /// Which of the model's files holds it, counted from 0.
    pub shard: usize,
}

impl TensorInfo {
    /// The number of values; the file holds them all, so that the product fits.
    pub fn values(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The number of values in a row.
    pub fn row_values(&self) -> u64 {
        self.shape.first().copied().unwrap_or(0)
    }

    /// The number of rows: the product of all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    /// The bytes of a row, which is a whole number of blocks.
    pub fn row_bytes(&self) -> u64 {
        self.nbytes / self.rows().max(1)
    }

    /// Where the bytes lie in the file.
    pub fn range(&self) -> Range<usize> {
        // Opening the file has checked that both ends lie in the map, so that they fit.
        self.offset as usize..(self.offset + self.nbytes) as usize
    }
}

/// A tensor whose place in the file is not known yet, since the table's end is not.
pub(super) struct Declared {
    info: TensorInfo,
    /// The offset from the start of the tensor data, as the file gives it.
    relative: u64,
    /// Where that number stands in the file.
    relative_at: usize,
}

/// All tensors of a model in the order of its files' tables.
#[derive(Debug, Default)]
pub(super) struct Tensors {
    pub list: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl Tensors {
    /// Of tensors with different names.
    pub fn new(list: Vec<TensorInfo>) -> Tensors {
        let by_name = list.iter().enumerate().map(|(index, info)| (info.name.clone(), index)).collect();
        Tensors { list, by_name }
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|&index| self.list.get(index))
    }
}

/// Reads `count` descriptions and places them: tensor data starts at the next multiple of `alignment`. The file is
/// number `shard` of its model.
pub(super) fn read_table(
    reader: &mut Reader<'_>,
    count: usize,
    alignment: u64,
    shard: usize,
) -> Result<Vec<TensorInfo>, Box<Fault>> {
    let mut declared = Vec::with_capacity(count);
    for index in 0..count {
        declared.push(declare(reader, index as u64, shard)?);
    }
    let table_end = reader.at() as u64;
    let file_len = table_end + reader.left() as u64;
    let data_start = table_end.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    let mut names = HashSet::with_capacity(count);
    let mut list = Vec::with_capacity(count);
    for Declared { mut info, relative, relative_at } in declared {
        reader.place = Place::Tensor(info.name.clone());
        if !relative.is_multiple_of(alignment) {
            let expected = format!("a multiple of the file's alignment, {alignment}");
            return Err(reader.fault(relative_at, format!("offset {relative}"), expected, COPY_AGAIN));
        }
        let start = data_start.checked_add(relative);
        match start.and_then(|start| start.checked_add(info.nbytes)) {
            Some(end) if end <= file_len => info.offset = data_start + relative,
            _ => {
                let found = format!(
                    "{} bytes at offset {relative} of the tensor data, which starts at byte {data_start}",
                    info.nbytes
                );
                let expected = format!("an end within the file's {file_len} bytes");
                return Err(reader.fault(relative_at, found, expected, COPY_AGAIN));
            }
        }
        if !names.insert(info.name.clone()) {
            let at = info.declared_at as usize;
            return Err(reader.fault(at, "the name a second time", "each tensor once", CONVERT_AGAIN));
        }
        list.push(info);
    }
    check_overlaps(&list, reader)?;
    Ok(list)
}

fn check_overlaps(list: &[TensorInfo], reader: &mut Reader<'_>) -> Result<(), Box<Fault>> {
    let mut by_offset: Vec<&TensorInfo> = list.iter().collect();
    by_offset.sort_by_key(|info| info.offset);
    for pair in by_offset.windows(2) {
        let (before, info) = (pair[0], pair[1]);
        let end = before.offset + before.nbytes;
        if info.offset < end {
            reader.place = Place::Tensor(info.name.clone());
            let found = format!("bytes from {}, inside tensor {}", info.offset, quoted(&before.name));
            let expected = format!("a start at {end} or later");
            return Err(reader.fault(info.declared_at as usize, found, expected, CONVERT_AGAIN));
        }
    }
    Ok(())
}

fn declare(reader: &mut Reader<'_>, index: u64, shard: usize) -> Result<Declared, Box<Fault>> {
    reader.place = Place::TensorName(index);
    let start = reader.at();
    let (name, _) = reader.string("a tensor's name")?;
    if name.is_empty() || name.len() > NAME_BYTES {
        let found = format!("a name of {} bytes", name.len());
        return Err(reader.fault(start, found, format!("1 to {NAME_BYTES} bytes"), COPY_AGAIN));
    }
    if name.contains(char::is_control) {
        return Err(reader.fault(start, quoted(name), "no control characters", CONVERT_AGAIN));
    }
    reader.place = Place::Tensor(name.to_owned());

    let at = reader.at();
    let count = reader.u32("the number of dimensions")? as usize;
    if !(1..=DIMENSIONS).contains(&count) {
        return Err(reader.fault(
            at,
            format!("{count} dimensions"),
            format!("1 to {DIMENSIONS}"),
            COPY_AGAIN,
        ));
    }
    let shape_at = reader.at();
    let shape = (0..count).map(|_| reader.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;

    let type_at = reader.at();
    let id = reader.u32("the tensor's type")?;
    let ty = GgmlType::from_id(id).map_err(|unknown| {
        let found = format!("type {}, which is not supported", unknown.described());
        reader.fault(
            type_at,
            found,
            format!("one of {Supported}"),
            "use a file with a quantisation from this list",
        )
    })?;

    if shape.contains(&0) {
        let found = format!("shape {shape:?}");
        return Err(reader.fault(shape_at, found, "no dimension of zero", COPY_AGAIN));
    }
    let per_block = ty.block_values() as u64;
    if !shape[0].is_multiple_of(per_block) {
        let found = format!("rows of {} values of type {ty}", shape[0]);
        return Err(reader.fault(shape_at, found, format!("a multiple of {per_block}"), CONVERT_AGAIN));
    }
    let values = shape.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let Some(nbytes) = values.and_then(|values| ty.bytes_for(values)) else {
        let found = format!("shape {shape:?} of type {ty}, which overflows 64 bits");
        return Err(reader.fault(shape_at, found, "a tensor that fits the file", COPY_AGAIN));
    };

    let relative_at = reader.at();
    let relative = reader.u64("the tensor's offset")?;
    let name = name.to_owned();
    let info = TensorInfo { name, shape, ty, offset: 0, nbytes, declared_at: start as u64, shard };
    Ok(Declared { info, relative, relative_at })
}
