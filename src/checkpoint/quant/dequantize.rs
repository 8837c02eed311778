//! Exact values in f32, in the operation order of the format's reference implementation.

use half::{bf16, f16};

use super::codebook::{self, mxfp4_scale};
use super::unpack::{Unpacked, unpack_block};
use super::{GgmlType, QuantError};

/// Writes the values of `bytes` to `out`.
///
/// `bytes` must hold exactly `out.len()` values of type `ty` in whole blocks. The result is bit-equal to the
/// reference (`dequantize_row_*`): each product and sum is rounded to f32 once, in the order that
/// [`Unpacked`] writes down. NaN and infinite scales are carried into the values.
pub fn dequantize(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let Some(needed) = ty.bytes_for(out.len() as u64) else {
        return Err(QuantError::PartBlock { ty, bytes: bytes.len(), values: out.len() });
    };
    if needed != bytes.len() as u64 {
        return Err(QuantError::Length { ty, bytes: bytes.len(), values: out.len(), needed });
    }
    match ty {
        GgmlType::F32 => plain(bytes, out, f32::from_le_bytes),
        GgmlType::F16 => plain(bytes, out, |raw| f16::from_le_bytes(raw).to_f32()),
        GgmlType::BF16 => plain(bytes, out, |raw| bf16::from_le_bytes(raw).to_f32()),
        GgmlType::Q4_0 => blocks(ty, bytes, out, |b, out| centred(b.scale(), &b.codes, 8, out)),
        GgmlType::Q5_0 => blocks(ty, bytes, out, |b, out| centred(b.scale(), &b.codes, 16, out)),
        GgmlType::Q8_0 => blocks(ty, bytes, out, |b, out| centred(b.scale(), &b.codes, 128, out)),
        GgmlType::Q4_1 | GgmlType::Q5_1 => blocks(ty, bytes, out, |b, out| {
            let (d, m) = (b.scale(), b.minimum());
            for (out, &code) in out.iter_mut().zip(&b.codes) {
                *out = d * f32::from(code) + m;
            }
        }),
        GgmlType::Q4K | GgmlType::Q5K => blocks(ty, bytes, out, |b, out| {
            let (d, m) = (b.scale(), b.minimum());
            let subs = out.chunks_exact_mut(32).zip(b.codes.chunks_exact(32));
            for ((out, codes), (&scale, &min)) in subs.zip(b.scales.iter().zip(&b.mins)) {
                offset(d * f32::from(scale), codes, m * f32::from(min), out);
            }
        }),
        GgmlType::Q2K => blocks(ty, bytes, out, |b, out| {
            let (d, m) = (b.scale(), b.minimum());
            let subs = out.chunks_exact_mut(16).zip(b.codes.chunks_exact(16));
            for ((out, codes), (&scale, &min)) in subs.zip(b.scales.iter().zip(&b.mins)) {
                offset(d * f32::from(scale), codes, m * f32::from(min), out);
            }
        }),
        GgmlType::Q3K => blocks(ty, bytes, out, |b, out| sixteens(b, 4, out)),
        GgmlType::Q6K => blocks(ty, bytes, out, |b, out| sixteens(b, 32, out)),
        GgmlType::IQ4_NL => {
            blocks(ty, bytes, out, |b, out| looked_up(b.scale(), &b.codes, &codebook::IQ4, out))
        }
        GgmlType::IQ4_XS => blocks(ty, bytes, out, |b, out| {
            let d = b.scale();
            let subs = out.chunks_exact_mut(32).zip(b.codes.chunks_exact(32));
            for ((out, codes), &scale) in subs.zip(&b.scales) {
                looked_up(d * f32::from(scale.cast_signed()), codes, &codebook::IQ4, out);
            }
        }),
        GgmlType::TQ1_0 | GgmlType::TQ2_0 => {
            blocks(ty, bytes, out, |b, out| centred(b.scale(), &b.codes, 1, out))
        }
        GgmlType::MXFP4 => blocks(ty, bytes, out, |b, out| {
            looked_up(mxfp4_scale(b.scales[0]), &b.codes, &codebook::MXFP4, out);
        }),
    }
}

/// Plain numbers of `N` bytes.
fn plain<const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    value: impl Fn([u8; N]) -> f32,
) -> Result<(), QuantError> {
    let (raw, _) = bytes.as_chunks::<N>();
    for (out, &raw) in out.iter_mut().zip(raw) {
        *out = value(raw);
    }
    Ok(())
}

/// Quantised blocks: `values` fills one block's values.
fn blocks(
    ty: GgmlType,
    bytes: &[u8],
    out: &mut [f32],
    values: impl Fn(&Unpacked, &mut [f32]),
) -> Result<(), QuantError> {
    let mut block = Unpacked::default();
    for (raw, out) in bytes.chunks_exact(ty.block_bytes()).zip(out.chunks_exact_mut(ty.block_values())) {
        unpack_block(ty, raw, &mut block)?;
        values(&block, out);
    }
    Ok(())
}

/// Codes above a minimum that is subtracted.
fn offset(scale: f32, codes: &[u8], min: f32, out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * f32::from(code) - min;
    }
}

/// 256 codes around `zero` in sub-blocks of 16, each with a signed scale.
fn sixteens(block: &Unpacked, zero: i16, out: &mut [f32]) {
    let d = block.scale();
    let subs = out.chunks_exact_mut(16).zip(block.codes.chunks_exact(16));
    for ((out, codes), &scale) in subs.zip(&block.scales) {
        centred(d * f32::from(scale.cast_signed()), codes, zero, out);
    }
}

/// Codes that stand for the numbers of a codebook.
fn looked_up(scale: f32, codes: &[u8], numbers: &[i8; 16], out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * f32::from(numbers[usize::from(code & 15)]);
    }
}

/// Codes that stand for signed integers around `zero`, under one scale.
fn centred(scale: f32, codes: &[u8], zero: i16, out: &mut [f32]) {
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = scale * f32::from(i16::from(code) - zero);
    }
}
