//! Matrices as tiles, piece by piece: while one is repacked, where it is to lie or to be taken by the caller meanwhile, what the
//! next ones are made of is read from the disk.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

use super::repack::{Blueprint, RepackError};

/// Bytes of a piece; a tile at least.
const PIECE: usize = 8 << 20;
/// Pieces there are at a time: one that is taken, one that waits, one that is made.
const PIECES: usize = 3;
/// Pieces whose rows the disk is asked for before they are made, so that it has something to do all the time.
const AHEAD: usize = 4;

/// Some tiles of a matrix.
struct Piece {
    /// Which matrix.
    matrix: usize,
    /// Where its bytes begin in the matrix.
    at: usize,
    bytes: Vec<u8>,
}

/// Repacks all matrices, in order. `take` gets each piece: which matrix it is of, where it starts in it, and its bytes.
/// Files are let go of as they are read, so memory stays flat whatever the size.
///
/// # Errors
/// Rows that cannot be repacked; what `take` says, which ends it.
pub(super) fn each_piece<E: From<RepackError>>(
    blueprints: &[Blueprint],
    take: impl FnMut(usize, usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    each_piece_of(PIECE, blueprints, take)
}

/// The same with pieces of `most` bytes.
fn each_piece_of<E: From<RepackError>>(
    most: usize,
    blueprints: &[Blueprint],
    mut take: impl FnMut(usize, usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    std::thread::scope(|scope| {
        let (full, pieces) = sync_channel(1);
        let (empty, empties) = channel();
        for _ in 0..PIECES {
            // The other end is in this function.
            let _ = empty.send(Vec::new());
        }
        let maker = scope.spawn(move || make(most, blueprints, &full, &empties));
        for piece in pieces {
            let Piece { matrix, at, bytes } = piece?;
            take(matrix, at, &bytes)?;
            // Nobody needs it any more once the last piece is made.
            let _ = empty.send(bytes);
        }
        match maker.join() {
            Ok(()) => Ok(()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Nobody takes pieces any more.
struct Ended;

/// Makes the pieces, until all are made or nobody takes them.
fn make(
    most: usize,
    blueprints: &[Blueprint],
    full: &SyncSender<Result<Piece, RepackError>>,
    empties: &Receiver<Vec<u8>>,
) {
    let made = each_run_of(most, blueprints, |run| {
        let mut bytes = empties.recv().map_err(|_| Ended)?;
        let place = run.place(blueprints);
        bytes.resize(place.len(), 0);
        let made = blueprints[run.matrix].write(run.tile, &mut bytes);
        let failed = made.is_err();
        let piece = made.map(|()| Piece { matrix: run.matrix, at: place.start, bytes });
        full.send(piece).map_err(|_| Ended)?;
        if failed { Err(Ended) } else { Ok(()) }
    });
    match made {
        Ok(()) | Err(Ended) => {}
    }
}

/// Has `make` make all tiles, in order, some at a time, while what later ones are made of is read from the disk. Files are let go
/// of as they are read.
///
/// # Errors
/// What `make` says, which ends it.
pub(super) fn each_run<E>(
    blueprints: &[Blueprint],
    make: impl FnMut(&Run) -> Result<(), E>,
) -> Result<(), E> {
    each_run_of(PIECE, blueprints, make)
}

fn each_run_of<E>(
    most: usize,
    blueprints: &[Blueprint],
    mut make: impl FnMut(&Run) -> Result<(), E>,
) -> Result<(), E> {
    let mut ahead = runs(most, blueprints);
    let mut prefetch = |count| {
        for next in ahead.by_ref().take(count) {
            blueprints[next.matrix].prefetch(next.tile, next.tiles);
        }
    };
    prefetch(AHEAD);
    for run in runs(most, blueprints) {
        prefetch(1);
        let made = make(&run);
        blueprints[run.matrix].release();
        made?;
    }
    Ok(())
}

/// Tiles of a matrix that are made together.
pub(super) struct Run {
    /// Which matrix.
    pub(super) matrix: usize,
    /// The first tile.
    pub(super) tile: usize,
    tiles: usize,
}

impl Run {
    /// Where its bytes lie in the matrix.
    pub(super) fn place(&self, blueprints: &[Blueprint]) -> Range<usize> {
        let tile_bytes = blueprints[self.matrix].tile_bytes();
        self.tile * tile_bytes..(self.tile + self.tiles) * tile_bytes
    }
}

fn runs(most: usize, blueprints: &[Blueprint]) -> impl Iterator<Item = Run> {
    blueprints.iter().enumerate().flat_map(move |(matrix, blueprint)| {
        let at_once = (most / blueprint.tile_bytes()).max(1);
        let all = blueprint.tiles();
        (0..all).step_by(at_once).map(move |tile| Run { matrix, tile, tiles: at_once.min(all - tile) })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::checkpoint::mapping::Mapping;
    use crate::checkpoint::quant::GgmlType;
    use crate::checkpoint::rows::{Encoding, Rows, Span};
    use crate::model::repack::Arrangement;
    use crate::ops::Family;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    const COLUMNS: usize = 64;
    /// Three tiles and a bit.
    const MOST: usize = 4000;

    /// Matrices of plain numbers, the second of several pieces; `broken` makes its last weight no number.
    fn matrices(broken: bool) -> (tempfile::NamedTempFile, Vec<Blueprint>) {
        let rows = [3, 250, 40];
        let file = tempfile::NamedTempFile::new().unwrap();
        let count = rows.iter().sum::<usize>() * COLUMNS;
        let mut numbers: Vec<f32> = (0..count).map(|at| (at % 8191) as f32 - 4095.0).collect();
        if broken {
            numbers[(rows[0] + rows[1]) * COLUMNS - 1] = f32::NAN;
        }
        std::fs::write(file.path(), bytemuck::cast_slice::<f32, u8>(&numbers)).unwrap();
        let map = Arc::new(Mapping::open(file.path()).unwrap());
        let mut first = 0;
        let blueprints = rows.map(|rows| {
            let bytes =
                Span::new(Arc::clone(&map), first * COLUMNS * 4..(first + rows) * COLUMNS * 4).unwrap();
            first += rows;
            let part = Rows {
                name: "w".to_owned(),
                encoding: Encoding::ToQ8(GgmlType::F32),
                rows,
                columns: COLUMNS,
                bytes,
            };
            Blueprint {
                name: "w".to_owned(),
                parts: vec![part],
                arrangement: Arrangement::Stacked,
                family: Family::Vector,
            }
        });
        (file, blueprints.to_vec())
    }

    #[test]
    fn pieces_are_the_matrices_in_order() {
        let (_file, blueprints) = matrices(false);
        assert_eq!(runs(MOST, &blueprints).count(), 1 + 6 + 2, "{}", blueprints[1].tile_bytes());
        let mut found = vec![Vec::new(); blueprints.len()];
        let mut last = 0;
        each_piece_of(MOST, &blueprints, |matrix, at, bytes| -> Result<(), RepackError> {
            assert!(matrix >= last && at == found[matrix].len() && bytes.len() <= MOST);
            last = matrix;
            found[matrix].extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
        for (blueprint, found) in blueprints.iter().zip(found) {
            let mut whole = vec![0; blueprint.bytes()];
            blueprint.write(0, &mut whole).unwrap();
            assert!(whole == found);
        }
    }

    #[test]
    fn whoever_ends_it_ends_all_of_it() {
        let (_file, blueprints) = matrices(true);
        let mut taken = 0;
        let error = each_piece_of(MOST, &blueprints, |matrix, _, _| -> Result<(), RepackError> {
            taken = matrix;
            Ok(())
        });
        assert!(matches!(error, Err(RepackError::NotFinite { row: 249, .. })), "{error:?}");
        assert!(taken < 2, "nothing is taken behind what is broken");
        // The taker fails, or unwinds, as a load that nobody wants any more does: this returns at all.
        let (_file, blueprints) = matrices(false);
        let stop = RepackError::NotFinite { tensor: String::new(), row: 7, column: 0, value: 0.0 };
        let mut stop = Some(stop);
        let error = each_piece_of(MOST, &blueprints, |_, _, _| stop.take().map_or(Ok(()), Err));
        assert!(matches!(error, Err(RepackError::NotFinite { row: 7, .. })), "{error:?}");
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            each_piece_of(MOST, &blueprints, |_, _, _| -> Result<(), RepackError> {
                std::panic::resume_unwind(Box::new(7u8))
            })
        }));
        assert_eq!(unwound.unwrap_err().downcast_ref::<u8>(), Some(&7));
    }
}
