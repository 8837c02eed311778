//! Dequantisation and unpacking, against values that the format's reference implementation gave
//! (fixtures/quant-types/make_blocks.py), and on arbitrary bytes.
// The lints know test functions, not their helpers: those fail by panicking too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use axe::checkpoint::quant::codebook::{IQ4, MXFP4, mxfp4_scale};
use axe::checkpoint::quant::{GgmlType, QuantError, Unpacked, dequantize, unpack_block};
use half::f16;
use proptest::prelude::*;
use safetensors::SafeTensors;

/// Equal bits, or both NaN: which NaN an operation gives is up to the machine.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn quantised() -> impl Iterator<Item = GgmlType> {
    GgmlType::ALL.into_iter().filter(|ty| ty.is_quantised())
}

/// The bytes and values of one type in the fixture.
fn reference(ty: GgmlType) -> (Vec<u8>, Vec<f32>) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quant-types/blocks.safetensors");
    let file = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let bytes = tensors.tensor(&format!("{ty}.bytes")).unwrap().data().to_vec();
    let values = tensors.tensor(&format!("{ty}.values")).unwrap().data().to_vec();
    (bytes, values.chunks_exact(4).map(|v| f32::from_le_bytes(v.try_into().unwrap())).collect())
}

/// The value of `i` by the table in the documentation of `Unpacked`, written out one value at a time.
fn by_formula(ty: GgmlType, u: &Unpacked, i: usize) -> f32 {
    let d = f16::from_bits(u.d).to_f32();
    let m = f16::from_bits(u.m).to_f32();
    let c = f32::from(u.codes[i]);
    match ty {
        GgmlType::Q4_0 => d * (c - 8.0),
        GgmlType::Q5_0 => d * (c - 16.0),
        GgmlType::Q8_0 => d * (c - 128.0),
        GgmlType::Q4_1 | GgmlType::Q5_1 => d * c + m,
        GgmlType::Q4K | GgmlType::Q5K => {
            (d * f32::from(u.scales[i / 32])) * c - (m * f32::from(u.mins[i / 32]))
        }
        GgmlType::Q2K => (d * f32::from(u.scales[i / 16])) * c - (m * f32::from(u.mins[i / 16])),
        GgmlType::Q3K => (d * f32::from(u.scales[i / 16] as i8)) * (c - 4.0),
        GgmlType::Q6K => (d * f32::from(u.scales[i / 16] as i8)) * (c - 32.0),
        GgmlType::IQ4_NL => d * f32::from(IQ4[usize::from(u.codes[i])]),
        GgmlType::IQ4_XS => (d * f32::from(u.scales[i / 32] as i8)) * f32::from(IQ4[usize::from(u.codes[i])]),
        GgmlType::TQ1_0 | GgmlType::TQ2_0 => d * (c - 1.0),
        GgmlType::MXFP4 => mxfp4_scale(u.scales[0]) * f32::from(MXFP4[usize::from(u.codes[i])]),
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => panic!("{ty} has no blocks"),
    }
}

#[test]
fn every_type_is_bit_equal_to_the_reference_at_every_number_of_blocks() {
    for ty in GgmlType::ALL {
        let (bytes, expected) = reference(ty);
        let blocks = bytes.len() / ty.block_bytes();
        assert!(blocks >= 97 && expected.len() == blocks * ty.block_values(), "{ty}: fixture too small");
        for blocks in [0, 1, 2, 3, 7, 31, blocks] {
            let mut out = vec![f32::NAN; blocks * ty.block_values()];
            dequantize(ty, &bytes[..blocks * ty.block_bytes()], &mut out).unwrap();
            for (i, (&out, &expected)) in out.iter().zip(&expected).enumerate() {
                assert!(same(out, expected), "{ty}, value {i}: {out:e} where the reference has {expected:e}");
            }
        }
    }
}

#[test]
fn unpacked_fields_give_the_reference_values() {
    for ty in quantised() {
        let (bytes, expected) = reference(ty);
        // One for all blocks and types: what a type does not set must not matter.
        let mut unpacked = Unpacked { codes: [0xAA; 256], d: 1, m: 1, scales: [0xAA; 16], mins: [0xAA; 16] };
        let blocks = bytes.chunks_exact(ty.block_bytes()).zip(expected.chunks_exact(ty.block_values()));
        for (number, (block, expected)) in blocks.enumerate() {
            unpack_block(ty, block, &mut unpacked).unwrap();
            for (i, &expected) in expected.iter().enumerate() {
                let value = by_formula(ty, &unpacked, i);
                assert!(same(value, expected), "{ty}, block {number}, value {i}: {value:e} for {expected:e}");
            }
        }
    }
}

#[test]
fn codes_and_scales_span_their_whole_documented_range() {
    for (ty, top) in [
        (GgmlType::Q4_0, 15),
        (GgmlType::Q4_1, 15),
        (GgmlType::Q5_0, 31),
        (GgmlType::Q5_1, 31),
        (GgmlType::Q2K, 3),
        (GgmlType::Q3K, 7),
        (GgmlType::Q4K, 15),
        (GgmlType::Q5K, 31),
        (GgmlType::Q6K, 63),
        (GgmlType::IQ4_NL, 15),
        (GgmlType::IQ4_XS, 15),
        (GgmlType::TQ2_0, 3),
        (GgmlType::MXFP4, 15),
    ] {
        for (fill, code) in [(0u8, 0u8), (255, top)] {
            let mut unpacked = Unpacked::default();
            unpack_block(ty, &vec![fill; ty.block_bytes()], &mut unpacked).unwrap();
            assert!(unpacked.codes[..ty.block_values()].iter().all(|&c| c == code), "{ty} {fill}");
            if matches!(ty, GgmlType::Q4K | GgmlType::Q5K) {
                assert_eq!((unpacked.scales[7], unpacked.mins[7]), (fill & 63, fill & 63), "{ty}");
            }
            match ty {
                GgmlType::Q2K => assert_eq!((unpacked.scales[15], unpacked.mins[15]), (fill & 15, fill & 15)),
                GgmlType::Q3K => assert_eq!(unpacked.scales[15] as i8, if fill == 0 { -32 } else { 31 }),
                GgmlType::IQ4_XS => assert_eq!(unpacked.scales[7] as i8, if fill == 0 { -32 } else { 31 }),
                GgmlType::MXFP4 => assert_eq!(unpacked.scales[0], fill),
                _ => {}
            }
        }
    }
    let mut unpacked = Unpacked::default();
    let mut block = vec![0x80; GgmlType::Q8_0.block_bytes()];
    block[33] = 0x7F;
    unpack_block(GgmlType::Q8_0, &block, &mut unpacked).unwrap();
    assert_eq!((unpacked.codes[0], unpacked.codes[31]), (0, 255));
}

#[test]
fn lengths_that_do_not_fit_are_errors_that_say_what_would() {
    let mut out = [0.0; 64];
    assert_eq!(
        dequantize(GgmlType::Q4_0, &[0; 35], &mut out).unwrap_err().to_string(),
        "Q4_0: 64 values need 36 bytes in whole blocks of 32 values, found 35 bytes"
    );
    assert_eq!(
        dequantize(GgmlType::Q6K, &[0; 210], &mut out).unwrap_err().to_string(),
        "Q6_K: 64 values are not whole blocks of 256 values (210 bytes given)"
    );
    assert_eq!(
        unpack_block(GgmlType::Q4_1, &[0; 18], &mut Unpacked::default()),
        Err(QuantError::BlockLength { ty: GgmlType::Q4_1, bytes: 18 })
    );
    assert_eq!(
        unpack_block(GgmlType::F16, &[0; 2], &mut Unpacked::default()),
        Err(QuantError::NotQuantised { ty: GgmlType::F16 })
    );
}

proptest! {
    #[test]
    fn arbitrary_bytes_give_values_or_an_error(
        ty in prop::sample::select(GgmlType::ALL.to_vec()),
        bytes in prop::collection::vec(any::<u8>(), 0..900),
        values in 0usize..1100,
    ) {
        let fits = ty.bytes_for(values as u64) == Some(bytes.len() as u64);
        prop_assert_eq!(dequantize(ty, &bytes, &mut vec![0.0; values]).is_ok(), fits);
        let block = unpack_block(ty, &bytes, &mut Unpacked::default());
        prop_assert_eq!(block.is_ok(), ty.is_quantised() && bytes.len() == ty.block_bytes());
    }

    #[test]
    fn arbitrary_blocks_dequantise_to_what_their_fields_say(
        ty in prop::sample::select(quantised().collect::<Vec<_>>()),
        seed in prop::collection::vec(any::<u8>(), 3 * 210),
    ) {
        let bytes = &seed[..3 * ty.block_bytes()];
        let mut out = vec![0.0; 3 * ty.block_values()];
        dequantize(ty, bytes, &mut out).unwrap();
        let mut unpacked = Unpacked::default();
        for (block, out) in bytes.chunks_exact(ty.block_bytes()).zip(out.chunks_exact(ty.block_values())) {
            unpack_block(ty, block, &mut unpacked).unwrap();
            for (i, &value) in out.iter().enumerate() {
                prop_assert!(same(value, by_formula(ty, &unpacked, i)));
            }
        }
    }
}
