//! How repacked weights lie in memory; the same layout as `cl/include/weights.h`, which says why.

mod codes;
mod pack;

use half::{bf16, f16};

use super::round_up;
use codes::{Codes, GROUP};
pub use pack::Lanes;

/// Outputs (rows of the weight matrix) in a tile.
pub const TILE: usize = 16;
/// Rows of a matrix are padded to a multiple of this: kernels take tiles in pairs.
pub const ROW_MULTIPLE: usize = 2 * TILE;

/// What the codes of IQ4_NL and IQ4_XS stand for; the same as `CODEBOOK` in `cl/include/weights.h`.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// What those of MXFP4 stand for.
const MXFP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// A weight format of the kernels; the numbers are those of `FORMAT_…` in `cl/include/weights.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named like the GGUF types they hold, W4 like the experts of dg-w4a16-v1; TQ2_0 holds TQ1_0, too
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
    Q2K = 12,
    Q3K = 13,
    Iq4Nl = 14,
    Iq4Xs = 15,
    Mxfp4 = 16,
    Tq2 = 17,
}

/// Scales of one block of one row as stored in the file: bits of f16 and small integers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scales<'a> {
    /// Bits of the f16 scale; the exponent of MXFP4's.
    pub scale: u16,
    /// Bits of the f16 offset: added for Q4_1 and Q5_1, subtracted for Q2_K, Q4_K and Q5_K, subtracted from the code for
    /// W4; 0 where there is none.
    pub offset: u16,
    /// Integer scales of the groups of a format with blocks of 256: 16 for Q2_K, Q3_K and Q6_K, 8 for Q4_K, Q5_K and
    /// IQ4_XS; signed for Q3_K, Q6_K and IQ4_XS.
    pub scales: &'a [u8],
    /// As many integer offsets of Q2_K, Q4_K and Q5_K.
    pub offsets: &'a [u8],
}

/// Where the scales of a block lie, in front of its codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scaling {
    /// Nowhere: there are none.
    None,
    /// half `[2][16]`: of each group.
    Halves,
    /// half `scale[16]`, `offset[16]`; 32 bytes unused where there is no offset.
    Whole { offset: bool },
    /// half `scale[16]`, `offset[16]` likewise; then bytes `scales[groups][16]`, and as many offsets.
    Groups { groups: usize, offset: bool },
    /// half `scale[16]`, `offset[16]`; then bytes `[16][16]`, a scale in the lower half of each and an offset in the upper.
    Shared,
    /// Signed bytes `[4][16]`: exponents of each group, those of the file less 128, so that padding has no denormal scales.
    Exponents,
}

impl Format {
    /// All formats, in the order of their numbers.
    pub const ALL: [Self; 18] = [
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
        Self::Q2K,
        Self::Q3K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
        Self::Tq2,
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
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Iq4Nl => "IQ4_NL",
            Self::Iq4Xs => "IQ4_XS",
            Self::Mxfp4 => "MXFP4",
            Self::Tq2 => "TQ2_0",
        }
    }

    /// Groups of 32 columns in a block.
    pub fn block_groups(self) -> usize {
        match self.scaling() {
            Scaling::None => 1,
            Scaling::Halves => 2,
            Scaling::Whole { .. } => match self {
                Self::W4 => 2,
                Self::Tq2 => 8,
                _ => 1,
            },
            Scaling::Exponents => 4,
            Scaling::Groups { .. } | Scaling::Shared => 8,
        }
    }

    /// Codes that [`put_codes`](Self::put_codes) takes at a time, those of one [`Scales`]; 1 for plain numbers.
    pub fn block_codes(self) -> usize {
        match self.scaling() {
            Scaling::None => 1,
            Scaling::Halves | Scaling::Exponents => GROUP,
            Scaling::Whole { .. } | Scaling::Groups { .. } | Scaling::Shared => self.block_groups() * GROUP,
        }
    }

    /// Columns that share a scale in the kernels' arithmetic.
    pub fn scale_group(self) -> usize {
        match self.scaling() {
            Scaling::Groups { groups: 16, .. } | Scaling::Shared => 16,
            _ => GROUP,
        }
    }

    /// Different codes there are; 0 for plain numbers.
    pub fn codes_below(self) -> u32 {
        self.codes().below()
    }

    fn scaling(self) -> Scaling {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => Scaling::None,
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::Iq4Nl => Scaling::Halves,
            Self::Q4_1 | Self::Q5_1 | Self::W4 => Scaling::Whole { offset: true },
            Self::Tq2 => Scaling::Whole { offset: false },
            Self::Q4K | Self::Q5K => Scaling::Groups { groups: 8, offset: true },
            Self::Iq4Xs => Scaling::Groups { groups: 8, offset: false },
            Self::Q3K | Self::Q6K => Scaling::Groups { groups: 16, offset: false },
            Self::Q2K => Scaling::Shared,
            Self::Mxfp4 => Scaling::Exponents,
        }
    }

    fn codes(self) -> Codes {
        match self {
            Self::F32 => Codes::Numbers(4),
            Self::F16 | Self::Bf16 => Codes::Numbers(2),
            Self::Q4_0 | Self::Q4_1 | Self::Q4K | Self::W4 | Self::Iq4Nl | Self::Iq4Xs | Self::Mxfp4 => {
                Codes::Nibbles { high: 0 }
            }
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => Codes::Nibbles { high: 1 },
            Self::Q6K => Codes::Nibbles { high: 2 },
            Self::Q8_0 => Codes::Bytes,
            Self::Q2K | Self::Tq2 => Codes::Pairs,
            Self::Q3K => Codes::Triples,
        }
    }

    fn scale_bytes(self) -> usize {
        match self.scaling() {
            Scaling::None => 0,
            Scaling::Halves | Scaling::Whole { .. } | Scaling::Exponents => 64,
            Scaling::Groups { groups, offset } => 64 + groups * TILE * if offset { 2 } else { 1 },
            Scaling::Shared => 64 + 16 * TILE,
        }
    }

    fn group_bytes(self) -> usize {
        self.codes().bytes()
    }

    /// The code that stands for zero, where one does for all weights.
    fn centre(self) -> f32 {
        match self {
            Self::Q4_0 => 8.0,
            Self::Q5_0 => 16.0,
            Self::Q8_0 => 128.0,
            Self::Q6K => 32.0,
            Self::Q3K => 4.0,
            Self::Tq2 => 1.0,
            _ => 0.0,
        }
    }

    /// What codes stand for where it is no even scale.
    fn codebook(self) -> Option<&'static [i8; 16]> {
        match self {
            Self::Iq4Nl | Self::Iq4Xs => Some(&IQ4),
            Self::Mxfp4 => Some(&MXFP4),
            _ => None,
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
        // A power of two.
        let groups = self.block_groups();
        let group = column / GROUP;
        let block = (group >> groups.trailing_zeros()) * self.block_bytes();
        (block, block + self.scale_bytes() + (group & (groups - 1)) * self.group_bytes())
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
        let code = self.codes().code(within, |word| u32_at(base + (word * TILE + lane) * 4));
        let number = match self.codebook() {
            Some(numbers) => f32::from(numbers[code as usize & 15]),
            None => code as f32 - self.centre(),
        };
        let group = column / GROUP;
        let (scale, offset) = (f16_at(block + lane * 2), f16_at(block + 32 + lane * 2));
        let byte = |row: usize| tile[block + 64 + row * TILE + lane];
        match self.scaling() {
            Scaling::None => number,
            Scaling::Halves => f16_at(block + group % 2 * 32 + lane * 2) * number,
            Scaling::Whole { .. } if self == Self::W4 => scale * (number - offset),
            Scaling::Whole { offset: true } => scale * number + offset,
            Scaling::Whole { offset: false } => scale * number,
            Scaling::Groups { groups, offset: true } => {
                let at = group % groups;
                scale * f32::from(byte(at)) * number - offset * f32::from(byte(groups + at))
            }
            Scaling::Groups { groups, offset: false } => {
                let at = column % 256 / (256 / groups);
                scale * f32::from(byte(at).cast_signed()) * number
            }
            Scaling::Shared => {
                let byte = byte(column / 16 % 16);
                scale * f32::from(byte & 15) * number - offset * f32::from(byte >> 4)
            }
            Scaling::Exponents => power(tile[block + group % 4 * TILE + lane] ^ 0x80) * number,
        }
    }
}

/// The scale that an exponent of MXFP4 stands for: 2^(exponent - 128), halved because the codebook's numbers are doubled.
fn power(exponent: u8) -> f32 {
    let bits = match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (u32::from(exponent) - 1) << 23,
    };
    f32::from_bits(bits)
}
