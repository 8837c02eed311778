//! What the 4-bit codes of the types with a codebook stand for, in units of the block's scale.

/// The numbers of IQ4_NL and IQ4_XS: steps grow with the distance from zero, as few weights are large.
pub const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The numbers of MXFP4, doubled to be whole: a sign above two bits of exponent and one of mantissa (FP4, E2M1). Minus zero
/// is zero.
pub const MXFP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The scale of an MXFP4 block by its exponent byte (E8M0), halved because the numbers are doubled: 2^(exponent - 128),
/// denormal at both of its least values.
pub const fn mxfp4_scale(exponent: u8) -> f32 {
    let bits = match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (exponent as u32 - 1) << 23,
    };
    f32::from_bits(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_numbers_are_e2m1_doubled() {
        for (code, &number) in MXFP4.iter().enumerate() {
            let (negative, exponent, mantissa) =
                (code >> 3 == 1, code as i32 >> 1 & 3, f64::from(code as u8 & 1));
            let size =
                if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1) };
            assert_eq!(f64::from(number) / 2.0, if negative { -size } else { size }, "code {code}");
        }
    }

    #[test]
    fn mxfp4_scales_are_powers_of_two() {
        for exponent in 0..=255u8 {
            assert_eq!(f64::from(mxfp4_scale(exponent)), 2f64.powi(i32::from(exponent) - 128));
        }
    }
}
