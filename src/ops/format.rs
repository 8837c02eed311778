//! How repacked weights lie in memory; the same layout as `cl/include/weights.h`, which says why.

use half::{bf16, f16};

use super::round_up;

/// Outputs (rows of the weight matrix) in a tile.
pub const TILE: usize = 16;
/// Rows of a matrix are padded to a multiple of this: kernels take tiles in pairs.
pub const ROW_MULTIPLE: usize = 2 * TILE;
/// Columns in a group.
const GROUP: usize = 32;

/// A weight format of the kernels; the numbers are those of `FORMAT_…` in `cl/include/weights.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named like the GGUF types they hold, W4 like the experts of dg-w4a16-v1
pub enum Format {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
    Q4_0 = 3,
    Q4_1 = 4,
    Q5_0 = 5,
    Q5_1 = 6,
    Q8_0 = 7,
    Q4K = 8,
    Q5K = 9,
    Q6K = 10,
    W4 = 11,
}

/// Scales of one block of one row as stored in the file: bits of f16 and small integers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scales<'a> {
    /// Bits of the f16 scale.
    pub scale: u16,
    /// Bits of the f16 offset: added for Q4_1 and Q5_1, subtracted for K formats, subtracted from the code for W4; 0
    /// where there is none.
    pub offset: u16,
    /// Integer scales of the groups of a K format: 8, or 16 signed ones for Q6_K.
    pub scales: &'a [u8],
    /// Integer offsets of the 8 groups of Q4_K and Q5_K.
    pub offsets: &'a [u8],
}

impl Format {
    /// All formats, in the order of their numbers.
    pub const ALL: [Self; 12] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::W4,
    ];

    /// The name people know, as in `Q4_K`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::W4 => "W4",
        }
    }

    /// Groups of 32 columns in a block.
    pub fn block_groups(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::Q4_1 | Self::Q5_1 => 1,
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::W4 => 2,
            Self::Q4K | Self::Q5K | Self::Q6K => 8,
        }
    }

    /// Codes that [`put_codes`](Self::put_codes) takes at a time, those of one [`Scales`]; 1 for plain numbers.
    pub fn block_codes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => GROUP,
            Self::W4 => 2 * GROUP,
            Self::Q4K | Self::Q5K | Self::Q6K => 8 * GROUP,
        }
    }

    /// Columns that share a scale in the kernels' arithmetic.
    pub fn scale_group(self) -> usize {
        if self == Self::Q6K { 16 } else { GROUP }
    }

    fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::W4 => 64,
            Self::Q4K | Self::Q5K | Self::Q6K => 320,
        }
    }

    fn group_bytes(self) -> usize {
        match self {
            Self::F32 => 2048,
            Self::F16 | Self::Bf16 => 1024,
            Self::Q4_0 | Self::Q4_1 | Self::Q4K | Self::W4 => 256,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 320,
            Self::Q6K => 384,
            Self::Q8_0 => 512,
        }
    }

    /// Bits above the nibble of a code: 0, 1 or 2.
    fn high_bits(self) -> usize {
        match self {
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 1,
            Self::Q6K => 2,
            _ => 0,
        }
    }

    fn centre(self) -> f32 {
        match self {
            Self::Q4_0 => 8.0,
            Self::Q5_0 => 16.0,
            Self::Q8_0 => 128.0,
            Self::Q6K => 32.0,
            _ => 0.0,
        }
    }

    fn block_bytes(self) -> usize {
        self.scale_bytes() + self.block_groups() * self.group_bytes()
    }

    /// `columns` padded to whole blocks.
    pub fn padded_columns(self, columns: usize) -> usize {
        round_up(columns, self.block_groups() * GROUP)
    }

    /// Bytes of a tile of 16 rows and `columns` columns.
    pub fn tile_bytes(self, columns: usize) -> usize {
        self.padded_columns(columns) / (self.block_groups() * GROUP) * self.block_bytes()
    }

    /// Bytes of a matrix of `rows` and `columns`, padding included.
    pub fn matrix_bytes(self, rows: usize, columns: usize) -> usize {
        round_up(rows, ROW_MULTIPLE) / TILE * self.tile_bytes(columns)
    }

    /// Offsets in a tile of the block and of the codes of the group that `column` lies in.
    fn place(self, column: usize) -> (usize, usize) {
        let group = column / GROUP;
        let block = group / self.block_groups() * self.block_bytes();
        (block, block + self.scale_bytes() + group % self.block_groups() * self.group_bytes())
    }

    /// Puts [`block_codes`](Self::block_codes) codes of one row into a zeroed tile, as its `lane`-th row from column
    /// `first` on; a row's last block may be shorter by whole groups of 32. `tile` must be
    /// [`tile_bytes`](Self::tile_bytes) long and `first` a multiple of `block_codes`.
    pub fn put_codes(self, tile: &mut [u8], lane: usize, first: usize, codes: &[u8], scales: Scales<'_>) {
        let (block, _) = self.place(first);
        let half_of_block = match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => first / GROUP % 2 * 32,
            _ => 0,
        };
        let at = block + half_of_block + lane * 2;
        tile[at..at + 2].copy_from_slice(&scales.scale.to_le_bytes());
        if matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K | Self::W4) {
            let at = block + 32 + lane * 2;
            tile[at..at + 2].copy_from_slice(&scales.offset.to_le_bytes());
        }
        for (i, &s) in scales.scales.iter().enumerate() {
            tile[block + 64 + i * TILE + lane] = s;
        }
        for (i, &s) in scales.offsets.iter().enumerate() {
            tile[block + 192 + i * TILE + lane] = s;
        }
        for (g, group) in codes.chunks_exact(GROUP).enumerate() {
            let (_, base) = self.place(first + g * GROUP);
            let mut put = |word: usize, value: u32| {
                let at = base + (word * TILE + lane) * 4;
                tile[at..at + 4].copy_from_slice(&value.to_le_bytes());
            };
            if self == Self::Q8_0 {
                for (j, bytes) in group.chunks_exact(4).enumerate() {
                    put(j, bytes.iter().rev().fold(0, |word, &b| word << 8 | u32::from(b)));
                }
                continue;
            }
            let bits = self.high_bits();
            let mut high = [0u32; 2];
            for (j, eight) in group.chunks_exact(8).enumerate() {
                let mut word = 0;
                for (i, &code) in eight.iter().enumerate() {
                    word |= u32::from(code & 15) << (4 * i);
                    if bits > 0 {
                        high[j * bits / 4] |= u32::from(code >> 4) << (4 * ((i + 1) & 7) + j * bits % 4);
                    }
                }
                put(j, word);
            }
            for (j, &word) in high.iter().enumerate().take(bits) {
                put(4 + j, word);
            }
        }
    }

    /// Puts plain numbers of one row (little-endian elements of F32, F16 or BF16) into a tile, from column 0 on.
    pub fn put_numbers(self, tile: &mut [u8], lane: usize, elements: &[u8]) {
        let size = self.group_bytes() / GROUP / TILE;
        for (column, element) in elements.chunks_exact(size).enumerate() {
            let at = (column * TILE + lane) * size;
            tile[at..at + size].copy_from_slice(element);
        }
    }

    /// The weight at `column` of the `lane`-th row of a tile, computed as the file's format defines it.
    pub fn weight(self, tile: &[u8], lane: usize, column: usize) -> f32 {
        let (block, base) = self.place(column);
        let within = column % GROUP;
        let u16_at = |at: usize| u16::from_le_bytes([tile[at], tile[at + 1]]);
        let f16_at = |at: usize| f16::from_bits(u16_at(at)).to_f32();
        let u32_at = |at: usize| u32::from_le_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]]);
        let element = within * TILE + lane;
        match self {
            Self::F32 => return f32::from_bits(u32_at(base + element * 4)),
            Self::F16 => return f16_at(base + element * 2),
            Self::Bf16 => return bf16::from_bits(u16_at(base + element * 2)).to_f32(),
            _ => {}
        }
        let code = if self == Self::Q8_0 {
            u32_at(base + (within / 4 * TILE + lane) * 4) >> (8 * (within % 4)) & 255
        } else {
            let (j, i, bits) = (within / 8, within % 8, self.high_bits());
            let low = u32_at(base + (j * TILE + lane) * 4) >> (4 * i) & 15;
            let high = if bits == 0 {
                0
            } else {
                let word = u32_at(base + ((4 + j * bits / 4) * TILE + lane) * 4);
                word >> (4 * ((i + 1) & 7) + j * bits % 4) & ((1 << bits) - 1)
            };
            low | high << 4
        };
        let code = code as f32;
        let group = column / GROUP % 8;
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => {
                f16_at(block + column / GROUP % 2 * 32 + lane * 2) * (code - self.centre())
            }
            Self::Q4_1 | Self::Q5_1 => f16_at(block + lane * 2) * code + f16_at(block + 32 + lane * 2),
            Self::W4 => f16_at(block + lane * 2) * (code - f16_at(block + 32 + lane * 2)),
            Self::Q6K => {
                let scale = tile[block + 64 + column / 16 % 16 * TILE + lane] as i8;
                f16_at(block + lane * 2) * f32::from(scale) * (code - self.centre())
            }
            _ => {
                let scale = f16_at(block + lane * 2) * f32::from(tile[block + 64 + group * TILE + lane]);
                let offset =
                    f16_at(block + 32 + lane * 2) * f32::from(tile[block + 192 + group * TILE + lane]);
                scale * code - offset
            }
        }
    }
}
