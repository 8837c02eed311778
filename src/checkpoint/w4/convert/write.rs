//! Fills one file of the result, on all processors, in pieces so small that memory does not grow with the model.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use half::bf16;

use super::ConvertError;
use super::plan::{Job, OutFile};
use crate::checkpoint::quant::{GgmlType, dequantize};
use crate::checkpoint::rows::Rows;
use crate::checkpoint::safetensors::{COPY_AGAIN, Tensor};
use crate::checkpoint::w4::quantise::{pack_codes, quantise_group};

/// Bytes of the source that a piece takes, unless one row is longer.
const PIECE_BYTES: usize = 4 << 20;

/// What a worker does before it takes the next.
struct Piece {
    job: usize,
    /// The first value or row, and how many.
    first: usize,
    count: usize,
}

/// What is told after a piece.
#[derive(Default, Clone, Copy)]
pub(super) struct Done {
    /// Bytes of the source that it took.
    pub bytes: u64,
    /// Groups quantised.
    pub groups: u64,
    /// Those whose weights all lie on one side of zero, farther than half a step.
    pub one_sided: u64,
}

/// Writes the file's header and all its jobs. `done` hears of each piece, on this thread.
pub(super) fn fill(
    out: &OutFile,
    file: &File,
    path: &Path,
    done: &mut dyn FnMut(Done),
) -> Result<(), ConvertError> {
    let failed = |source| ConvertError::Io { action: "write", path: path.to_owned(), source };
    file.write_all_at(&out.header, 0).map_err(failed)?;
    let pieces = pieces(&out.jobs);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let mut failure: Option<(usize, ConvertError)> = None;
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for _ in 0..threads {
            let tell = tell.clone();
            let (pieces, next, stop) = (&pieces, &next, &stop);
            scope.spawn(move || {
                let mut scratch = Scratch::default();
                while !stop.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(piece) = pieces.get(index) else { break };
                    let outcome = make(&out.jobs[piece.job], piece, file, path, &mut scratch);
                    if outcome.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    // The other end listens until all workers are gone.
                    let _ = tell.send((index, outcome));
                }
            });
        }
        drop(tell);
        for (index, outcome) in told {
            match outcome {
                Ok(piece) => done(piece),
                // Pieces are taken in order and each that was taken is finished, so that the first fault is always the
                // same one.
                Err(error) if failure.as_ref().is_none_or(|&(first, _)| index < first) => {
                    failure = Some((index, error));
                }
                Err(_) => {}
            }
        }
    });
    failure.map_or(Ok(()), |(_, error)| Err(error))
}

fn pieces(jobs: &[Job]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (job, work) in jobs.iter().enumerate() {
        let (total, unit_bytes) = match work {
            Job::Plain { tensor, ty, .. } => {
                (tensor.bytes.as_ref().len() / ty.block_bytes(), ty.block_bytes())
            }
            Job::Experts { rows, .. } => (rows.rows, rows.bytes.as_ref().len() / rows.rows.max(1)),
        };
        let at_once = (PIECE_BYTES / unit_bytes.max(1)).max(1);
        for first in (0..total).step_by(at_once) {
            pieces.push(Piece { job, first, count: at_once.min(total - first) });
        }
    }
    pieces
}

/// What a worker keeps between pieces.
#[derive(Default)]
struct Scratch {
    values: Vec<f32>,
    codes: Vec<u8>,
    packed: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
}

fn make(
    job: &Job,
    piece: &Piece,
    file: &File,
    path: &Path,
    scratch: &mut Scratch,
) -> Result<Done, ConvertError> {
    let put = |at: u64, bytes: &[u8]| {
        file.write_all_at(bytes, at).map_err(|source| ConvertError::Io {
            action: "write",
            path: path.to_owned(),
            source,
        })
    };
    match *job {
        Job::Plain { ref tensor, ty, at } => {
            let size = ty.block_bytes();
            let bytes = &tensor.bytes.as_ref()[piece.first * size..][..piece.count * size];
            let at = at + piece.first as u64 * 2;
            if ty == GgmlType::BF16 {
                put(at, bytes)?;
            } else {
                round(tensor, ty, bytes, piece.first, scratch)?;
                put(at, &scratch.packed)?;
            }
            Ok(Done { bytes: bytes.len() as u64, ..Done::default() })
        }
        Job::Experts { ref tensor, ref rows, group, codes_at, scales_at, zeros_at } => {
            let done = quantise(tensor, rows, group, piece, scratch)?;
            let groups = rows.columns / group * 2;
            put(codes_at + (piece.first * (rows.columns / 2)) as u64, &scratch.packed)?;
            put(scales_at + (piece.first * groups) as u64, &scratch.scales)?;
            put(zeros_at + (piece.first * groups) as u64, &scratch.zeros)?;
            Ok(done)
        }
    }
}

/// Puts numbers into `scratch.packed` as bf16, rounded half to even.
fn round(
    tensor: &Tensor,
    ty: GgmlType,
    bytes: &[u8],
    first: usize,
    scratch: &mut Scratch,
) -> Result<(), ConvertError> {
    scratch.values.resize(bytes.len() / ty.block_bytes(), 0.0);
    values(tensor, ty, bytes, &mut scratch.values)?;
    scratch.packed.clear();
    for (index, &value) in scratch.values.iter().enumerate() {
        let rounded = bf16::from_f32(value);
        if value.is_finite() && !rounded.is_finite() {
            return Err(ConvertError::Number {
                path: tensor.path().to_owned(),
                tensor: tensor.name.clone(),
                index: index_of(&tensor.shape, first + index),
                value,
            });
        }
        scratch.packed.extend_from_slice(&rounded.to_le_bytes());
    }
    Ok(())
}

/// Puts codes, scales and zeros of the piece's rows into `scratch`.
fn quantise(
    tensor: &Tensor,
    rows: &Rows,
    group: usize,
    piece: &Piece,
    scratch: &mut Scratch,
) -> Result<Done, ConvertError> {
    let ty = tensor.plain_type()?;
    let row_bytes = rows.columns * ty.block_bytes();
    let bytes = &rows.bytes.as_ref()[piece.first * row_bytes..][..piece.count * row_bytes];
    scratch.values.resize(rows.columns, 0.0);
    scratch.codes.resize(rows.columns, 0);
    scratch.packed.resize(piece.count * rows.columns / 2, 0);
    scratch.scales.clear();
    scratch.zeros.clear();
    let mut done = Done { bytes: bytes.len() as u64, ..Done::default() };
    let packed_rows = scratch.packed.chunks_exact_mut(rows.columns / 2);
    for (row, (bytes, packed)) in bytes.chunks_exact(row_bytes).zip(packed_rows).enumerate() {
        values(tensor, ty, bytes, &mut scratch.values)?;
        let groups = scratch.values.chunks_exact(group).zip(scratch.codes.chunks_exact_mut(group));
        for (index, (weights, codes)) in groups.enumerate() {
            let made = quantise_group(weights, codes).map_err(|fault| ConvertError::Weight {
                path: tensor.path().to_owned(),
                tensor: tensor.name.clone(),
                index: index_of(&tensor.shape, (piece.first + row) * rows.columns + index * group),
                fault,
            })?;
            scratch.scales.extend_from_slice(&made.scale.to_le_bytes());
            scratch.zeros.extend_from_slice(&made.zero.to_le_bytes());
            let half_step = made.scale.to_f32() / 2.0;
            let one_sided = weights.iter().all(|&w| w > half_step) || weights.iter().all(|&w| w < -half_step);
            done.groups += 1;
            done.one_sided += u64::from(one_sided);
        }
        pack_codes(&scratch.codes, packed);
    }
    Ok(done)
}

fn values(tensor: &Tensor, ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), ConvertError> {
    // The lengths agree since opening the file.
    dequantize(ty, bytes, out)
        .map_err(|error| tensor.fault(error.to_string(), "plain numbers", COPY_AGAIN).into())
}

/// One index for each dimension, of the value with this number.
fn index_of(shape: &[usize], mut number: usize) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&dim| {
            let at = number % dim.max(1);
            number /= dim.max(1);
            at
        })
        .collect();
    index.reverse();
    index
}
