//! The type table: ids, names and block sizes.

use std::fmt;

use thiserror::Error;

/// The type of a tensor's elements, as far as this program computes with it.
///
/// A row is a whole number of blocks of [`block_values`](Self::block_values) values, each of
/// [`block_bytes`](Self::block_bytes) bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)] // Q4_0 is the name everybody knows.
pub enum GgmlType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point, IEEE 754.
    F16,
    /// The upper 16 bits of an F32.
    BF16,
    /// 32 codes of 4 bits, one scale.
    Q4_0,
    /// 32 codes of 4 bits, one scale and one minimum.
    Q4_1,
    /// 32 codes of 5 bits, one scale.
    Q5_0,
    /// 32 codes of 5 bits, one scale and one minimum.
    Q5_1,
    /// 32 signed bytes, one scale.
    Q8_0,
    /// 256 codes of 2 bits in 16 sub-blocks, each with a scale and a minimum of 4 bits.
    Q2K,
    /// 256 codes of 3 bits in 16 sub-blocks, each with a signed scale of 6 bits.
    Q3K,
    /// 256 codes of 4 bits in 8 sub-blocks, each with a scale and a minimum of 6 bits.
    Q4K,
    /// 256 codes of 5 bits in 8 sub-blocks, each with a scale and a minimum of 6 bits.
    Q5K,
    /// 256 codes of 6 bits in 16 sub-blocks, each with a signed scale of 8 bits.
    Q6K,
    /// 32 codes of 4 bits that stand for the numbers of [`codebook::IQ4`](super::codebook::IQ4), one scale.
    IQ4_NL,
    /// 256 such codes in 8 sub-blocks, each with a signed scale of 6 bits.
    IQ4_XS,
    /// 256 codes of -1, 0 and 1, five to a byte as digits of base 3, one scale.
    TQ1_0,
    /// 256 codes of 2 bits, one scale.
    TQ2_0,
    /// 32 numbers of 4 bits (FP4, E2M1), one scale that is a power of two (E8M0).
    MXFP4,
}

/// A type id that this program does not compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("type {} is not supported; supported types: {}", self.described(), Supported)]
pub struct UnknownType {
    /// The id that was found.
    pub id: u32,
}

impl UnknownType {
    /// The id, with its name where the format defines one.
    pub fn described(&self) -> String {
        // Types that the format knows, or once knew, and that are not computed with here.
        let name = match self.id {
            4 => "Q4_2",
            5 => "Q4_3",
            9 => "Q8_1",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            21 => "IQ3_S",
            22 => "IQ2_S",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            40 => "NVFP4",
            41 => "Q1_0",
            _ => return format!("id {}", self.id),
        };
        format!("{name} (id {})", self.id)
    }
}

/// Displays as the list of supported types, for error texts.
pub struct Supported;

impl fmt::Display for Supported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, ty) in GgmlType::ALL.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { ", " }, ty.name())?;
        }
        Ok(())
    }
}

impl GgmlType {
    /// Every supported type.
    pub const ALL: [GgmlType; 18] = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::BF16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q2K,
        GgmlType::Q3K,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
        GgmlType::IQ4_NL,
        GgmlType::IQ4_XS,
        GgmlType::TQ1_0,
        GgmlType::TQ2_0,
        GgmlType::MXFP4,
    ];

    /// The type with the given id in a GGUF file; the error names the id and lists what is supported.
    pub fn from_id(id: u32) -> Result<GgmlType, UnknownType> {
        Self::ALL.into_iter().find(|ty| ty.id() == id).ok_or(UnknownType { id })
    }

    /// The id in a GGUF file.
    pub const fn id(self) -> u32 {
        match self {
            GgmlType::F32 => 0,
            GgmlType::F16 => 1,
            GgmlType::Q4_0 => 2,
            GgmlType::Q4_1 => 3,
            GgmlType::Q5_0 => 6,
            GgmlType::Q5_1 => 7,
            GgmlType::Q8_0 => 8,
            GgmlType::Q2K => 10,
            GgmlType::Q3K => 11,
            GgmlType::Q4K => 12,
            GgmlType::Q5K => 13,
            GgmlType::Q6K => 14,
            GgmlType::IQ4_NL => 20,
            GgmlType::IQ4_XS => 23,
            GgmlType::BF16 => 30,
            GgmlType::TQ1_0 => 34,
            GgmlType::TQ2_0 => 35,
            GgmlType::MXFP4 => 39,
        }
    }

    /// How many values one block holds; 1 for plain numbers.
    pub const fn block_values(self) -> usize {
        match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => 1,
            GgmlType::Q4_0
            | GgmlType::Q4_1
            | GgmlType::Q5_0
            | GgmlType::Q5_1
            | GgmlType::Q8_0
            | GgmlType::IQ4_NL
            | GgmlType::MXFP4 => 32,
            GgmlType::Q2K
            | GgmlType::Q3K
            | GgmlType::Q4K
            | GgmlType::Q5K
            | GgmlType::Q6K
            | GgmlType::IQ4_XS
            | GgmlType::TQ1_0
            | GgmlType::TQ2_0 => 256,
        }
    }

    /// How many bytes one block takes.
    pub const fn block_bytes(self) -> usize {
        match self {
            GgmlType::F32 => 4,
            GgmlType::F16 | GgmlType::BF16 => 2,
            GgmlType::Q4_0 => 2 + 16,
            GgmlType::Q4_1 => 2 + 2 + 16,
            GgmlType::Q5_0 => 2 + 4 + 16,
            GgmlType::Q5_1 => 2 + 2 + 4 + 16,
            GgmlType::Q8_0 => 2 + 32,
            GgmlType::Q2K => 16 + 64 + 2 + 2,
            GgmlType::Q3K => 32 + 64 + 12 + 2,
            GgmlType::Q4K => 2 + 2 + 12 + 128,
            GgmlType::Q5K => 2 + 2 + 12 + 32 + 128,
            GgmlType::Q6K => 128 + 64 + 16 + 2,
            GgmlType::IQ4_NL => 2 + 16,
            GgmlType::IQ4_XS => 2 + 2 + 4 + 128,
            GgmlType::TQ1_0 => 48 + 4 + 2,
            GgmlType::TQ2_0 => 64 + 2,
            GgmlType::MXFP4 => 1 + 16,
        }
    }

    /// The name that the format's own tools print.
    pub const fn name(self) -> &'static str {
        match self {
            GgmlType::F32 => "F32",
            GgmlType::F16 => "F16",
            GgmlType::BF16 => "BF16",
            GgmlType::Q4_0 => "Q4_0",
            GgmlType::Q4_1 => "Q4_1",
            GgmlType::Q5_0 => "Q5_0",
            GgmlType::Q5_1 => "Q5_1",
            GgmlType::Q8_0 => "Q8_0",
            GgmlType::Q2K => "Q2_K",
            GgmlType::Q3K => "Q3_K",
            GgmlType::Q4K => "Q4_K",
            GgmlType::Q5K => "Q5_K",
            GgmlType::Q6K => "Q6_K",
            GgmlType::IQ4_NL => "IQ4_NL",
            GgmlType::IQ4_XS => "IQ4_XS",
            GgmlType::TQ1_0 => "TQ1_0",
            GgmlType::TQ2_0 => "TQ2_0",
            GgmlType::MXFP4 => "MXFP4",
        }
    }

    /// Whether values are codes under a block's scale, as [`unpack_block`](super::unpack_block) takes apart.
    pub const fn is_quantised(self) -> bool {
        self.block_values() > 1
    }

    /// How many bytes `values` values take; none when they are not whole blocks or the product overflows.
    pub fn bytes_for(self, values: u64) -> Option<u64> {
        let per_block = self.block_values() as u64;
        if !values.is_multiple_of(per_block) {
            return None;
        }
        (values / per_block).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_id() {
        for ty in GgmlType::ALL {
            assert_eq!(GgmlType::from_id(ty.id()), Ok(ty));
        }
    }

    #[test]
    fn a_known_type_without_support_is_named_with_the_supported_list() {
        let error = GgmlType::from_id(21).unwrap_err().to_string();
        assert_eq!(
            error,
            "type IQ3_S (id 21) is not supported; supported types: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, \
             Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4"
        );
    }

    #[test]
    fn an_id_outside_the_table_is_named() {
        assert!(
            GgmlType::from_id(u32::MAX).unwrap_err().to_string().starts_with("type id 4294967295 is not")
        );
    }

    #[test]
    fn bytes_for_refuses_part_blocks_and_overflow() {
        assert_eq!(GgmlType::Q4_0.bytes_for(64), Some(36));
        assert_eq!(GgmlType::Q4_0.bytes_for(33), None);
        assert_eq!(GgmlType::Q6K.bytes_for(0), Some(0));
        assert_eq!(GgmlType::F32.bytes_for(u64::MAX), None);
    }
}
