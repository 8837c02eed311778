//! One block's raw codes and scales, taken apart without rounding anything.
//!
//! This is the only place that knows how the bits of a block lie; values in f32 and layouts for a device
//! are both made from what it returns.

use half::f16;

use super::{GgmlType, QuantError};

/// A block's fields as integers, exactly as stored. Values follow from them, all products and sums in f32
/// and in the order written (`c` is the code of value `i`):
///
/// | type | value `i` |
/// | --- | --- |
/// | Q4_0 | `d * (c - 8)` |
/// | Q4_1 | `d * c + m` |
/// | Q5_0 | `d * (c - 16)` |
/// | Q5_1 | `d * c + m` |
/// | Q8_0 | `d * (c - 128)` |
/// | Q4_K, Q5_K | `(d * scales[i / 32]) * c - (m * mins[i / 32])` |
/// | Q6_K | `(d * (scales[i / 16] as i8)) * (c - 32)` |
///
/// Fields that a type does not have keep what they held before, so that one `Unpacked` can be reused at no
/// cost; [`m`](Self::m) is set to zero where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// The codes as unsigned integers in the order of the values: below 16 (Q4), 32 (Q5) or 64 (Q6), and
    /// the signed byte plus 128 for Q8_0. Blocks of 32 values use the first 32.
    pub codes: [u8; 256],
    /// The bits of the block's scale, an f16.
    pub d: u16,
    /// The bits of the minimum, an f16: `m` of Q4_1 and Q5_1 (added), `dmin` of Q4_K and Q5_K (subtracted).
    pub m: u16,
    /// The scales of the sub-blocks: 8 unsigned ones of 6 bits for Q4_K and Q5_K, 16 signed bytes for Q6_K.
    pub scales: [u8; 16],
    /// The minima of the sub-blocks, 6 bits each, for Q4_K and Q5_K.
    pub mins: [u8; 8],
}

impl Default for Unpacked {
    fn default() -> Self {
        Unpacked { codes: [0; 256], d: 0, m: 0, scales: [0; 16], mins: [0; 8] }
    }
}

impl Unpacked {
    /// The scale [`d`](Self::d) as a number; exact.
    pub fn scale(&self) -> f32 {
        f16::from_bits(self.d).to_f32()
    }

    /// The minimum [`m`](Self::m) as a number; exact.
    pub fn minimum(&self) -> f32 {
        f16::from_bits(self.m).to_f32()
    }
}

/// Takes one block apart. `block` must be exactly one block of a quantised type.
pub fn unpack_block(ty: GgmlType, block: &[u8], out: &mut Unpacked) -> Result<(), QuantError> {
    let wrong_length = |_| QuantError::BlockLength { ty, bytes: block.len() };
    match ty {
        GgmlType::Q4_0 => q4_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q4_1 => q4_1(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q5_0 => q5_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q5_1 => q5_1(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q8_0 => q8_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q4K => q4_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q5K => q5_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q6K => q6_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => return Err(QuantError::NotQuantised { ty }),
    }
    Ok(())
}

const fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// 32 codes of 4 bits in 16 bytes: the low halves are values 0..16, the high halves 16..32.
fn nibbles(packed: &[u8], codes: &mut [u8; 256]) {
    for (j, &byte) in packed.iter().enumerate() {
        codes[j] = byte & 0x0F;
        codes[j + 16] = byte >> 4;
    }
}

/// Adds the fifth bit of 32 codes, bit `j` of the little-endian word for value `j`.
fn fifth_bits(high: &[u8], codes: &mut [u8; 256]) {
    for (j, code) in codes[..32].iter_mut().enumerate() {
        *code |= (high[j / 8] >> (j % 8) & 1) << 4;
    }
}

fn q4_0(block: &[u8; 18], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), 0);
    nibbles(&block[2..], &mut out.codes);
}

fn q4_1(block: &[u8; 20], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), u16_at(block, 2));
    nibbles(&block[4..], &mut out.codes);
}

fn q5_0(block: &[u8; 22], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), 0);
    nibbles(&block[6..], &mut out.codes);
    fifth_bits(&block[2..6], &mut out.codes);
}

fn q5_1(block: &[u8; 24], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), u16_at(block, 2));
    nibbles(&block[8..], &mut out.codes);
    fifth_bits(&block[4..8], &mut out.codes);
}

fn q8_0(block: &[u8; 34], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), 0);
    for (code, &byte) in out.codes.iter_mut().zip(&block[2..]) {
        *code = byte.wrapping_add(128);
    }
}

/// The 12 bytes that hold 8 scales and 8 minima of 6 bits. The first four of each lie in the low six bits of
/// bytes 0..4 and 4..8; the last four have their low halves in bytes 8..12 and their top two bits above the
/// first four.
fn six_bit_scales(packed: &[u8], scales: &mut [u8; 16], mins: &mut [u8; 8]) {
    for j in 0..4 {
        scales[j] = packed[j] & 0x3F;
        mins[j] = packed[j + 4] & 0x3F;
        scales[j + 4] = (packed[j + 8] & 0x0F) | (packed[j] >> 6 << 4);
        mins[j + 4] = (packed[j + 8] >> 4) | (packed[j + 4] >> 6 << 4);
    }
}

/// 256 codes of 4 bits in 128 bytes: each 32 bytes give 32 values from their low and 32 from their high halves.
fn nibbles_256(packed: &[u8], codes: &mut [u8; 256]) {
    for (codes, packed) in codes.chunks_exact_mut(64).zip(packed.chunks_exact(32)) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
            *low = byte & 0x0F;
            *high = byte >> 4;
        }
    }
}

fn q4_k(block: &[u8; 144], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), u16_at(block, 2));
    six_bit_scales(&block[4..16], &mut out.scales, &mut out.mins);
    nibbles_256(&block[16..], &mut out.codes);
}

fn q5_k(block: &[u8; 176], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), u16_at(block, 2));
    six_bit_scales(&block[4..16], &mut out.scales, &mut out.mins);
    nibbles_256(&block[48..], &mut out.codes);
    // Bit `s` of byte `l` is the fifth bit of value `l` in sub-block `s`.
    for (s, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &high) in codes.iter_mut().zip(&block[16..48]) {
            *code |= (high >> s & 1) << 4;
        }
    }
}

fn q6_k(block: &[u8; 210], out: &mut Unpacked) {
    let (low, rest) = block.split_at(128);
    let (high, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(16);
    (out.d, out.m) = (u16_at(d, 0), 0);
    out.scales.copy_from_slice(scales);
    // Each half of 128 values: 64 bytes hold the low four bits (values 0..64 low halves, 64..128 high halves),
    // 32 bytes the top two bits, two bits for each run of 32 values.
    for ((codes, low), high) in
        out.codes.chunks_exact_mut(128).zip(low.chunks_exact(64)).zip(high.chunks_exact(32))
    {
        for l in 0..32 {
            codes[l] = (low[l] & 0x0F) | (high[l] & 3) << 4;
            codes[l + 32] = (low[l + 32] & 0x0F) | (high[l] >> 2 & 3) << 4;
            codes[l + 64] = (low[l] >> 4) | (high[l] >> 4 & 3) << 4;
            codes[l + 96] = (low[l + 32] >> 4) | (high[l] >> 6) << 4;
        }
    }
}
