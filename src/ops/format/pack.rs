//! Rows into tiles.

use super::codes::GROUP;
use super::{Format, Scales, Scaling, TILE};

/// The bytes of a tile's 16 rows, each from column 0 on; none for a row that is not there.
pub type Lanes<'a> = [&'a [u8]; TILE];

/// What the rows of a tile have of one thing, 16 times `N` bytes.
type Across<const N: usize> = [[u8; N]; TILE];

impl Format {
    /// Puts [`block_codes`](Self::block_codes) codes of one row into a zeroed tile, as its `lane`-th row from column
    /// `first` on; a row's last block may be shorter by whole groups of 32. `tile` must be
    /// [`tile_bytes`](Self::tile_bytes) long and `first` a multiple of `block_codes`.
    pub fn put_codes(self, tile: &mut [u8], lane: usize, first: usize, codes: &[u8], scales: Scales<'_>) {
        let (block, base) = self.place(first);
        self.put_scales(&mut tile[block..][..self.scale_bytes()], lane, first / GROUP, scales);
        let groups = tile[base..].chunks_exact_mut(self.group_bytes());
        for (group, codes) in groups.zip(codes.as_chunks::<GROUP>().0) {
            for (words, word) in across::<4>(group).iter_mut().zip(self.codes().words(codes)) {
                words[lane] = word.to_le_bytes();
            }
        }
    }

    /// Puts the scales of the block that `group` lies in where they stand in front of its codes.
    fn put_scales(self, block: &mut [u8], lane: usize, group: usize, scales: Scales<'_>) {
        let mut half = |at: usize, bits: u16| across::<2>(block)[at][lane] = bits.to_le_bytes();
        match self.scaling() {
            Scaling::None => {}
            Scaling::Halves => half(group % 2, scales.scale),
            Scaling::Whole { offset } | Scaling::Groups { offset, .. } => {
                half(0, scales.scale);
                if offset {
                    half(1, scales.offset);
                }
            }
            Scaling::Shared => {
                half(0, scales.scale);
                half(1, scales.offset);
            }
            Scaling::Exponents => block[group % 4 * TILE + lane] = scales.scale as u8 ^ 0x80,
        }
        // Those of single bytes stand behind four rows of as many.
        let bytes = block.as_chunks_mut::<TILE>().0.iter_mut().skip(4);
        match self.scaling() {
            Scaling::Groups { groups, offset } => {
                let offsets = scales.offsets.iter().take(if offset { groups } else { 0 });
                for (byte, &value) in bytes.zip(scales.scales.iter().take(groups).chain(offsets)) {
                    byte[lane] = value;
                }
            }
            Scaling::Shared => {
                for (byte, (&scale, &offset)) in bytes.zip(scales.scales.iter().zip(scales.offsets)) {
                    byte[lane] = scale & 15 | offset << 4;
                }
            }
            _ => {}
        }
    }

    /// Writes a tile of W4, all of it, from whole rows; zeros for those that are not there. Their codes lie two a byte, the lower nibble first, so that four bytes of them
    /// are a word of a tile as they are; of scales and offsets, bits of f16, each `group` columns have one. `group` is a
    /// multiple of the 64 columns of a block.
    pub fn put_w4_rows(tile: &mut [u8], codes: &Lanes<'_>, [scales, offsets]: [&Lanes<'_>; 2], group: usize) {
        const COLUMNS: usize = 2 * GROUP;
        for (index, block) in tile.chunks_exact_mut(Self::W4.block_bytes()).enumerate() {
            let (halves, words) = block.split_at_mut(Self::W4.scale_bytes());
            let first = index * COLUMNS;
            for (half, rows) in across::<2>(halves).iter_mut().zip([scales, offsets]) {
                put_run::<2, 1>(std::slice::from_mut(half), rows, first / group);
            }
            put_run::<4, { COLUMNS / 8 }>(across(words), codes, first / 8);
        }
    }

    /// Writes a tile of plain numbers (little-endian elements of F32, F16 or BF16), all of it, from whole rows; zeros for those
    /// that are not there.
    pub fn put_number_rows(self, tile: &mut [u8], rows: &Lanes<'_>) {
        match self {
            Self::F32 => put_all::<4>(tile, rows),
            _ => put_all::<2>(tile, rows),
        }
    }

    /// Puts plain numbers of one row into a tile, from column 0 on.
    pub fn put_numbers(self, tile: &mut [u8], lane: usize, elements: &[u8]) {
        match self {
            Self::F32 => put_lane(across::<4>(tile), lane, elements.as_chunks().0),
            _ => put_lane(across::<2>(tile), lane, elements.as_chunks().0),
        }
    }
}

/// Bytes as what the rows of a tile have of one thing after the other.
fn across<const N: usize>(bytes: &mut [u8]) -> &mut [Across<N>] {
    bytes.as_chunks_mut::<N>().0.as_chunks_mut::<TILE>().0
}

/// Puts rows of elements of `N` bytes column after column.
fn put_all<const N: usize>(tile: &mut [u8], rows: &Lanes<'_>) {
    for (index, run) in across::<N>(tile).chunks_mut(GROUP).enumerate() {
        put_run::<N, GROUP>(run, rows, index * GROUP);
    }
}

/// Puts the elements of `N` bytes from the `first` of each row on column after column, `RUN` at most; zeros where a row has none.
fn put_run<const N: usize, const RUN: usize>(run: &mut [Across<N>], rows: &Lanes<'_>, first: usize) {
    for (lane, row) in rows.iter().enumerate() {
        let elements = row.as_chunks::<N>().0.get(first..).unwrap_or_default();
        match (run.first_chunk_mut::<RUN>(), elements.first_chunk::<RUN>()) {
            // Of one length at a time: loops over arrays are much faster.
            (Some(run), Some(elements)) => put_lane(run, lane, elements),
            _ => {
                let ends = elements.len().min(run.len());
                put_lane(run, lane, elements);
                run[ends..].iter_mut().for_each(|place| place[lane] = [0; N]);
            }
        }
    }
}

#[inline(always)]
fn put_lane<const N: usize>(run: &mut [Across<N>], lane: usize, elements: &[[u8; N]]) {
    for (place, element) in run.iter_mut().zip(elements) {
        place[lane] = *element;
    }
}
