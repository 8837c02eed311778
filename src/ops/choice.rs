//! What a pass says of the next tokens: each row's largest logits. The device finds those of slices of the vocabulary,
//! the host puts the few of them together.

use super::check::{check, holds_floats, int};
use super::kernels::{Kernels, OpsError};
use crate::device::{Arg, Buffer, Device, Launch};

/// Logits of a row that are kept.
pub const TOP: usize = 8;
/// Slices of the vocabulary, each a work-item's.
pub(super) const SLICES: usize = 8;
/// Words of a slice: logits, ids, and whether something was not finite.
const SLICE_WORDS: usize = 2 * TOP + 1;

/// The largest logits of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowTop {
    /// A logit is not a number or not finite: the others mean nothing.
    pub bad: bool,
    /// Ids of the largest logits; where logits are equal, lower ids come first. [`u32::MAX`] where there are fewer.
    pub ids: [u32; TOP],
    /// Their logits, falling. Minus infinity where there are fewer.
    pub logits: [f32; TOP],
}

impl RowTop {
    const NONE: Self = Self { bad: false, ids: [u32::MAX; TOP], logits: [f32::NEG_INFINITY; TOP] };

    /// Takes one more logit, of an id larger than those before.
    fn keep(&mut self, id: u32, logit: f32) {
        // The first that the new one is larger than; a NaN is larger than none.
        let Some(place) = self.logits.iter().position(|&kept| logit > kept) else { return };
        self.logits[place..].rotate_right(1);
        self.ids[place..].rotate_right(1);
        self.logits[place] = logit;
        self.ids[place] = id;
    }
}

/// Values (of 4 bytes) of the buffer for the choices of `rows` rows.
pub const fn choice_values(rows: usize) -> usize {
    rows * SLICES * SLICE_WORDS
}

impl Kernels {
    /// Finds the largest of the first `limit` logits in each of `rows` rows, f32 and `stride` apart, for
    /// [`read_choices`]. `choices` has [`choice_values`].
    ///
    /// # Errors
    /// Sizes that do not fit, or what the device says.
    pub fn choose(
        &self,
        device: &Device,
        logits: &Buffer,
        stride: usize,
        limit: usize,
        rows: usize,
        choices: &Buffer,
    ) -> Result<Launch, OpsError> {
        const OP: &str = "top_of_rows";
        let read = limit.next_multiple_of(16);
        check(OP, limit > 0 && rows > 0 && (rows == 1 || stride >= limit), || {
            format!("{limit} logits in {rows} rows with a stride of {stride}")
        })?;
        holds_floats(OP, "the logits", logits, (rows - 1) * stride + read)?;
        holds_floats(OP, "the choices", choices, choice_values(rows))?;
        Ok(Launch::with_args(
            &self.choice_kernel(device, OP)?,
            &[
                Arg::Buffer(logits),
                Arg::Buffer(choices),
                Arg::I32(int(OP, "stride", stride)?),
                Arg::I32(int(OP, "logits", limit)?),
            ],
            &[SLICES, rows],
            Some(&[1, 1]),
        )?)
    }
}

/// Waits for the device and gives what [`Kernels::choose`] found in the first `rows` rows.
///
/// # Errors
/// A buffer that is too small, or what the device says.
pub fn read_choices(device: &Device, choices: &Buffer, rows: usize) -> Result<Vec<RowTop>, OpsError> {
    let mut words = vec![0u32; choice_values(rows)];
    device.read(choices, 0, bytemuck::cast_slice_mut(&mut words))?;
    let row = |row: &[u32]| {
        let mut top = RowTop::NONE;
        for slice in row.chunks_exact(SLICE_WORDS) {
            for (&logit, &id) in slice[..TOP].iter().zip(&slice[TOP..2 * TOP]) {
                top.keep(id, f32::from_bits(logit));
            }
            top.bad |= slice[2 * TOP] != 0;
        }
        top
    };
    Ok(words.chunks_exact(choice_values(1)).map(row).collect())
}

/// CPU reference of a row's choices.
pub fn choice_reference(logits: &[f32]) -> RowTop {
    let mut order: Vec<usize> = (0..logits.len()).filter(|&id| !logits[id].is_nan()).collect();
    order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(std::cmp::Ordering::Equal));
    let mut top = RowTop { bad: logits.iter().any(|logit| !logit.is_finite()), ..RowTop::NONE };
    for (place, id) in order.into_iter().filter(|&id| logits[id] > f32::NEG_INFINITY).take(TOP).enumerate() {
        (top.ids[place], top.logits[place]) = (id as u32, logits[id]);
    }
    top
}
