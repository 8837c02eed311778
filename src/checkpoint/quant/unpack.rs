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
/// | Q2_K | `(d * scales[i / 16]) * c - (m * mins[i / 16])` |
/// | Q3_K | `(d * (scales[i / 16] as i8)) * (c - 4)` |
/// | Q6_K | `(d * (scales[i / 16] as i8)) * (c - 32)` |
/// | IQ4_NL | `d * IQ4[c]` |
/// | IQ4_XS | `(d * (scales[i / 32] as i8)) * IQ4[c]` |
/// | TQ1_0, TQ2_0 | `d * (c - 1)` |
/// | MXFP4 | `mxfp4_scale(scales[0]) * MXFP4[c]` |
///
/// The numbers of IQ4 and MXFP4, and what an exponent is as a scale, are in [`codebook`](super::codebook).
///
/// Fields that a type does not have keep what they held before, so that one `Unpacked` can be reused at no
/// cost; [`d`](Self::d) and [`m`](Self::m) are set to zero where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// The codes as unsigned integers in the order of the values: below 4 (Q2, TQ2), 8 (Q3), 16 (Q4, IQ4, MXFP4), 32 (Q5)
    /// or 64 (Q6), up to 2 (TQ1), and the signed byte plus 128 for Q8_0. Blocks of 32 values use the first 32.
    pub codes: [u8; 256],
    /// The bits of the block's scale, an f16.
    pub d: u16,
    /// The bits of the minimum, an f16: `m` of Q4_1 and Q5_1 (added), `dmin` of Q2_K, Q4_K and Q5_K (subtracted).
    pub m: u16,
    /// The scales of the sub-blocks: 16 unsigned ones of 4 bits for Q2_K, 8 of 6 bits for Q4_K and Q5_K, 16 signed bytes
    /// for Q3_K (-32 to 31) and Q6_K, 8 for IQ4_XS (-32 to 31). The first is the block's exponent for MXFP4.
    pub scales: [u8; 16],
    /// The minima of the sub-blocks: 16 of 4 bits for Q2_K, 8 of 6 bits for Q4_K and Q5_K.
    pub mins: [u8; 16],
}

impl Default for Unpacked {
    fn default() -> Self {
        Unpacked { codes: [0; 256], d: 0, m: 0, scales: [0; 16], mins: [0; 16] }
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
        GgmlType::Q2K => q2_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q3K => q3_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q4K => q4_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q5K => q5_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::Q6K => q6_k(block.try_into().map_err(wrong_length)?, out),
        GgmlType::IQ4_NL => q4_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::IQ4_XS => iq4_xs(block.try_into().map_err(wrong_length)?, out),
        GgmlType::TQ1_0 => tq1_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::TQ2_0 => tq2_0(block.try_into().map_err(wrong_length)?, out),
        GgmlType::MXFP4 => mxfp4(block.try_into().map_err(wrong_length)?, out),
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

/// Q4_0, and IQ4_NL, whose bits lie the same way.
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
fn six_bit_scales(packed: &[u8], scales: &mut [u8; 16], mins: &mut [u8; 16]) {
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

/// 256 codes of 2 bits in 64 bytes: each 32 bytes give 32 values from their lowest two bits, 32 from the next two, and so on.
fn pairs_256(packed: &[u8], codes: &mut [u8; 256]) {
    for (codes, packed) in codes.chunks_exact_mut(128).zip(packed.chunks_exact(32)) {
        for (pair, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, &byte) in codes.iter_mut().zip(packed) {
                *code = byte >> (2 * pair) & 3;
            }
        }
    }
}

fn q2_k(block: &[u8; 84], out: &mut Unpacked) {
    let (scales, rest) = block.split_at(16);
    let (codes, halves) = rest.split_at(64);
    (out.d, out.m) = (u16_at(halves, 0), u16_at(halves, 2));
    for ((scale, min), &byte) in out.scales.iter_mut().zip(&mut out.mins).zip(scales) {
        (*scale, *min) = (byte & 0x0F, byte >> 4);
    }
    pairs_256(codes, &mut out.codes);
}

fn q3_k(block: &[u8; 110], out: &mut Unpacked) {
    let (high, rest) = block.split_at(32);
    let (low, rest) = rest.split_at(64);
    let (scales, d) = rest.split_at(12);
    (out.d, out.m) = (u16_at(d, 0), 0);
    // The low four bits of the 16 scales are the low and then the high halves of 8 bytes; four bytes hold the top two
    // bits, of scale `j` at bit `2 * (j / 4)` of byte `j % 4`. A scale is what they make less 32.
    for (j, scale) in out.scales.iter_mut().enumerate() {
        let low = scales[j % 8] >> (4 * (j / 8)) & 0x0F;
        let top = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
        *scale = (low | top << 4).wrapping_sub(32);
    }
    pairs_256(low, &mut out.codes);
    // Bit `s` of byte `l` is the third bit of value `l` in the `s`-th run of 32.
    for (s, codes) in out.codes.chunks_exact_mut(32).enumerate() {
        for (code, &high) in codes.iter_mut().zip(high) {
            *code |= (high >> s & 1) << 2;
        }
    }
}

fn iq4_xs(block: &[u8; 136], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 0), 0);
    // Scale `j`: four bits from half a byte of four, the top two from two bits of a word; less 32.
    let top = u16_at(block, 2);
    for (j, scale) in out.scales[..8].iter_mut().enumerate() {
        let low = block[4 + j / 2] >> (4 * (j % 2)) & 0x0F;
        *scale = (low | ((top >> (2 * j) & 3) << 4) as u8).wrapping_sub(32);
    }
    for (codes, packed) in out.codes.chunks_exact_mut(32).zip(block[8..].chunks_exact(16)) {
        let (low, high) = codes.split_at_mut(16);
        for ((low, high), &byte) in low.iter_mut().zip(high).zip(packed) {
            (*low, *high) = (byte & 0x0F, byte >> 4);
        }
    }
}

/// 52 bytes hold digits of base 3, the first of each the most significant: a byte is a fraction of 256, rounded up, and its
/// next digit is what three times it carries. 32 bytes give the first digit of 32 values, then the second of the next 32,
/// up to five; 16 bytes likewise of 16 values; 4 bytes four digits.
fn tq1_0(block: &[u8; 54], out: &mut Unpacked) {
    let (first, rest) = block.split_at(32);
    let (second, rest) = rest.split_at(16);
    let (third, d) = rest.split_at(4);
    (out.d, out.m) = (u16_at(d, 0), 0);
    let mut codes = out.codes.iter_mut();
    for (bytes, digits) in [(first, 5), (second, 5), (third, 4)] {
        for digit in 0..digits {
            for (&byte, code) in bytes.iter().zip(&mut codes) {
                let rest = byte.wrapping_mul(3u8.pow(digit));
                *code = ((u16::from(rest) * 3) >> 8) as u8;
            }
        }
    }
}

fn tq2_0(block: &[u8; 66], out: &mut Unpacked) {
    (out.d, out.m) = (u16_at(block, 64), 0);
    pairs_256(&block[..64], &mut out.codes);
}

fn mxfp4(block: &[u8; 17], out: &mut Unpacked) {
    (out.d, out.m, out.scales[0]) = (0, 0, block[0]);
    nibbles(&block[1..], &mut out.codes);
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
