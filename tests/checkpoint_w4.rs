//! `dg-w4a16-v1`: the quantiser against the format's description, and directories sound or not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod safetensors_support;

use std::fs;
use std::path::{Path, PathBuf};

use axe::checkpoint::directory::HfDirectory;
use axe::checkpoint::rows::Encoding;
use axe::checkpoint::w4::convert::{ConvertOptions, convert};
use axe::checkpoint::w4::{QuantiseError, dequantise_row, pack_codes, quantise_group};
use half::f16;
use proptest::prelude::*;
use safetensors_support::*;
use tempfile::TempDir;

/// The miniature, converted.
fn converted() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("w4");
    convert(&fixture("tiny-diffusiongemma"), &path, &ConvertOptions::default(), &mut |_| {}).unwrap();
    (dir, path)
}

#[test]
fn every_expert_is_given_as_rows() {
    let (_dir, path) = converted();
    let dir = HfDirectory::open(&path).unwrap();
    let experts = dir.experts.as_ref().unwrap();
    assert_eq!(experts.layers().len(), 4);
    let file = tensors_of(&path.join("experts_002.safetensors"));
    let raw = |name: &str| &file[&format!("model.decoder.layers.2.experts.{name}")].bytes;
    let layer = &experts.layers()[2];
    assert_eq!((layer.experts(), layer.hidden(), layer.width()), (8, 128, 64));
    layer.check_values().unwrap();
    for (rows, codes, scales, zeros, shape, row) in [
        (layer.gate(3), "gu_q", "gu_s", "gu_z", (64, 128, 128), 3 * 128),
        (layer.up(3), "gu_q", "gu_s", "gu_z", (64, 128, 128), 3 * 128 + 64),
        (layer.down(3), "dn_q", "dn_s", "dn_z", (128, 64, 64), 3 * 128),
    ] {
        let rows = rows.unwrap();
        let Encoding::W4 { scales: s, zeros: z, group } = &rows.encoding else { panic!("{rows:?}") };
        assert_eq!((rows.rows, rows.columns, *group), shape);
        let (n, bytes, groups) = (shape.0, shape.1 / 2, shape.1 / shape.2 * 2);
        assert_eq!(rows.bytes.as_ref(), &raw(codes)[row * bytes..(row + n) * bytes]);
        assert_eq!(s.as_ref(), &raw(scales)[row * groups..(row + n) * groups]);
        assert_eq!(z.as_ref(), &raw(zeros)[row * groups..(row + n) * groups]);
    }
    assert!(layer.gate(8).is_none() && layer.up(8).is_none() && layer.down(8).is_none());
    assert!(layer.up(usize::MAX).is_none());
    let plain = HfDirectory::open(&fixture("tiny-diffusiongemma")).unwrap();
    assert_ne!(dir.identity(), plain.identity());
    assert_ne!(dir.identity(), dir.safetensors.identity());
}

/// Changes the file of a layer's experts and says how opening fails.
fn tampered(layer: usize, change: impl FnOnce(&mut Tensors)) -> String {
    let (_dir, path) = converted();
    let file = path.join(format!("experts_{layer:03}.safetensors"));
    let mut tensors = tensors_of(&file);
    change(&mut tensors);
    fs::write(&file, file_of(&tensors)).unwrap();
    HfDirectory::open(&path).expect_err("the directory must be refused").to_string()
}

fn name(layer: usize, tensor: &str) -> String {
    format!("model.decoder.layers.{layer}.experts.{tensor}")
}

#[test]
fn unsound_experts_are_refused_by_name() {
    for tensor in ["gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z"] {
        let full = name(1, tensor);
        let error = tampered(1, |tensors| drop(tensors.remove(&full)));
        assert!(error.contains(&format!("layers.1.experts.{tensor}` is missing")), "{error}");

        let error = tampered(1, |tensors| {
            let raw = tensors.get_mut(&full).unwrap();
            raw.dtype = if raw.dtype == "U8" { "I8" } else { "BF16" };
        });
        assert!(error.contains(&full) && error.contains("found type"), "{error}");

        // One expert less than the others.
        let error = tampered(1, |tensors| {
            let raw = tensors.get_mut(&full).unwrap();
            raw.shape[0] -= 1;
            raw.bytes.truncate(raw.bytes.len() / 8 * 7);
        });
        assert!(error.contains("layers.1.experts.") && error.contains("found shape"), "{error}");
    }
    let shaped = |tensor: &'static str, shape: &'static [usize]| {
        tampered(0, |tensors| {
            let raw = tensors.get_mut(&name(0, tensor)).unwrap();
            raw.shape = shape.to_vec();
            let size = if raw.dtype == "U8" { 1 } else { 2 };
            raw.bytes.resize(shape.iter().product::<usize>() * size, 0);
        })
    };
    assert!(shaped("gu_q", &[8, 128 * 64]).contains("three dimensions"));
    assert!(shaped("gu_q", &[8, 128, 32]).contains("rows of a multiple of 128 codes"));
    assert!(shaped("gu_q", &[0, 128, 64]).contains("none of them zero"));
    assert!(shaped("dn_q", &[8, 128, 33]).contains("rows of a multiple of 64 codes"));
    // Groups of 64 where the format has 128.
    assert!(shaped("gu_s", &[8, 128, 2]).contains("[8, 128, 1]: one for 128 columns"));
    assert!(shaped("dn_z", &[8, 64, 2]).contains("[8, 128, 1]: one for 64 columns"));

    let renamed = |from: String, to: &'static str| {
        tampered(2, |tensors| {
            let raw = tensors.remove(&from).unwrap();
            tensors.insert(to.to_owned(), raw);
        })
    };
    for other in [
        "model.decoder.layers.2.experts.gu_x",
        "model.decoder.layers.+2.experts.gu_q",
        "model.decoder.layers.99999999999999999999.experts.gu_q",
        "model.vision.layers.2.experts.gu_q",
        "gu_q",
    ] {
        let error = renamed(name(2, "gu_q"), other);
        assert!(error.contains(&format!("tensor `{other}`: found a tensor of another name")), "{error}");
    }
}

#[test]
fn layers_count_from_zero_without_gaps_and_share_their_sizes() {
    let (_dir, path) = converted();
    fs::remove_file(path.join("experts_001.safetensors")).unwrap();
    let error = HfDirectory::open(&path).unwrap_err().to_string();
    assert!(error.contains("experts of layer 2, but none of layer 1"), "{error}");
    for layer in [0, 2, 3] {
        fs::remove_file(path.join(format!("experts_{layer:03}.safetensors"))).unwrap();
    }
    let error = HfDirectory::open(&path).unwrap_err().to_string();
    assert!(error.contains("no experts in files named experts_"), "{error}");

    let error = tampered(3, |tensors| {
        for raw in tensors.values_mut() {
            raw.shape[0] = 4;
            raw.bytes.truncate(raw.bytes.len() / 2);
        }
    });
    assert!(error.contains("layers.3.") && error.contains("8 experts"), "{error}");
}

/// Adds the experts of layer 1 once more, under the encoder's name and in a file whose name says nothing.
fn twice(path: &Path, change: impl FnOnce(&mut Tensors)) -> Result<HfDirectory, String> {
    let tensors = tensors_of(&path.join("experts_001.safetensors"));
    let mut again: Tensors = tensors
        .into_iter()
        .map(|(name, raw)| (name.replace("model.decoder.", "model.encoder.language_model."), raw))
        .collect();
    change(&mut again);
    fs::write(path.join("experts_000_a.safetensors"), file_of(&again)).unwrap();
    HfDirectory::open(path).map_err(|error| error.to_string())
}

#[test]
fn a_layer_in_two_files_must_agree() {
    let (_dir, path) = converted();
    let dir = twice(&path, |_| {}).unwrap();
    assert_eq!(dir.experts.unwrap().layers().len(), 4);
    for tensor in ["gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z"] {
        let full = format!("model.encoder.language_model.layers.1.experts.{tensor}");
        let error =
            twice(&path, |again| *again.get_mut(&full).unwrap().bytes.last_mut().unwrap() ^= 1).unwrap_err();
        assert!(error.contains("other bytes from byte"), "{error}");
        assert!(error.contains("layers.1.experts") && error.contains("experts_000_a"), "{error}");
    }
    let error = twice(&path, |again| {
        again.get_mut("model.encoder.language_model.layers.1.experts.dn_s").unwrap().dtype = "BF16";
    })
    .unwrap_err();
    assert!(error.contains("of which it is a second copy"), "{error}");
}

#[test]
fn scales_and_zeros_are_what_the_format_allows() {
    let values = |tensor: &str, value: f32| {
        let (_dir, path) = converted();
        let file = path.join("experts_000.safetensors");
        let mut tensors = tensors_of(&file);
        tensors.get_mut(&name(0, tensor)).unwrap().bytes[10..12]
            .copy_from_slice(&f16::from_f32(value).to_le_bytes());
        fs::write(&file, file_of(&tensors)).unwrap();
        let dir = HfDirectory::open(&path).unwrap();
        dir.experts.unwrap().layers()[0].check_values().map_err(|error| error.to_string())
    };
    for (tensor, value) in [
        ("gu_s", f32::NAN),
        ("gu_s", -0.5),
        ("dn_s", f32::INFINITY),
        ("gu_z", 16.0),
        ("dn_z", 1.5),
        ("dn_z", -1.0),
    ] {
        let error = values(tensor, value).unwrap_err();
        assert!(error.contains(&name(0, tensor)) && error.contains("at index 5"), "{error}");
    }
    for (tensor, value) in [("gu_s", 0.0), ("gu_z", 15.0), ("dn_z", 0.0)] {
        values(tensor, value).unwrap();
    }
}

#[test]
fn the_meta_file_names_the_format() {
    let (_dir, path) = converted();
    for (text, expected) in [
        ("{}", "key `format`: found nothing, expected \"dg-w4a16-v1\""),
        (r#"{"format":"dg-w4a16-v2"}"#, "found \"dg-w4a16-v2\""),
        (r#"{"format":4}"#, "found 4"),
        ("[]", "w4_meta.json: found text that does not fit"),
        ("", "w4_meta.json: found text that does not fit"),
    ] {
        fs::write(path.join("w4_meta.json"), text).unwrap();
        let error = HfDirectory::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    fs::write(path.join("w4_meta.json"), r#"{"format":"dg-w4a16-v1","more":[1]}"#).unwrap();
    HfDirectory::open(&path).unwrap();
}

/// Codes, scale and zero of a group.
fn quantised(weights: &[f32]) -> (Vec<u8>, f16, f16) {
    let mut codes = vec![99; weights.len()];
    let group = quantise_group(weights, &mut codes).unwrap();
    (codes, group.scale, group.zero)
}

#[test]
fn corner_cases_of_groups() {
    let zero = f16::from_f32(0.0);
    // The least range has a step that f16 cannot hold.
    assert_eq!(quantised(&[0.0; 64]), (vec![0; 64], zero, zero));
    assert_eq!(quantised(&[-0.0; 64]).2.to_bits(), 0);
    let (codes, scale, zero_point) = quantised(&[3.0; 64]);
    assert_eq!((codes[0], scale, zero_point), (15, zero, zero));
    let (codes, _, zero_point) = quantised(&[-3.0; 64]);
    assert_eq!((codes[0], zero_point.to_f32()), (0, 15.0));
    // Ties go to the even code: 0.5 and 2.5 steps above the zero.
    let mut weights = vec![0.0; 64];
    (weights[0], weights[1], weights[2], weights[3]) = (15.0, 0.5, 1.5, 2.5);
    assert_eq!(quantised(&weights).0[..5], [15, 0, 2, 2, 0]);
    let mut codes = vec![0; 3];
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = quantise_group(&[0.0, bad, 0.0], &mut codes).unwrap_err();
        assert!(matches!(error, QuantiseError::NotFinite { index: 1, .. }), "{error}");
    }
    // 65504 is the largest f16, 65520 the first number that is rounded beyond it.
    assert_eq!(quantised(&[0.0, 65519.0 * 15.0]).1, f16::MAX);
    for range in [65520.0 * 15.0, f32::MAX] {
        let error = quantise_group(&[-1.0, range], &mut codes).unwrap_err();
        assert!(matches!(error, QuantiseError::Range { .. }), "{error}");
    }
    assert!(quantise_group(&[f32::MIN, f32::MAX], &mut codes).is_err());
    let mut packed = [0; 2];
    pack_codes(&[1, 2, 15, 0], &mut packed);
    assert_eq!(packed, [0x21, 0x0F]);
}

/// Weights of one magnitude, some of them repeated, some exactly half a step apart.
fn group() -> impl Strategy<Value = Vec<f32>> {
    let weight = prop_oneof![
        8 => -1.0f32..1.0,
        1 => Just(0.0f32),
        2 => (-30i8..30).prop_map(|halves| f32::from(halves) / 32.0),
    ];
    let magnitude = prop_oneof![Just(1.0f32), Just(0.02), Just(1e-7), Just(3e-9), Just(3000.0)];
    let shift = prop_oneof![4 => Just(0.0f32), 1 => -3.0f32..3.0];
    (prop::collection::vec(weight, 64..=64), magnitude, shift).prop_map(|(weights, magnitude, shift)| {
        weights
            .into_iter()
            .map(|weight| half::bf16::from_f32((weight + shift) * magnitude).to_f32())
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn groups_are_quantised_as_the_format_says(weights in group()) {
        let (codes, scale, zero) = quantised(&weights);
        let (expected, expected_scale, expected_zero) = reference_quantise(&weights);
        prop_assert_eq!(&codes, &expected);
        prop_assert_eq!(scale.to_bits(), f16::from_f32(expected_scale).to_bits());
        prop_assert_eq!(zero.to_f32(), expected_zero);
        prop_assert!(codes.iter().all(|&code| code <= 15));
        prop_assert!(zero.to_f32().fract() == 0.0 && (0.0..=15.0).contains(&zero.to_f32()));
        // Around zero, no weight is off by more than a step: half for its code, half for the zero, and what f16 loses.
        let step = scale.to_f32();
        if weights.iter().any(|&w| w >= 0.0) && weights.iter().any(|&w| w <= 0.0) && step > 1e-4 {
            for (&weight, &code) in weights.iter().zip(&codes) {
                let error = ((f32::from(code) - zero.to_f32()) * step - weight).abs();
                prop_assert!(error <= step * 1.02, "{} off by {} of a step", weight, error / step);
            }
        }
    }

    #[test]
    fn codes_survive_packing(codes in prop::collection::vec(0u8..16, 64..=64)) {
        let mut packed = [0; 32];
        pack_codes(&codes, &mut packed);
        for (index, &code) in codes.iter().enumerate() {
            prop_assert_eq!(packed[index / 2] >> (index % 2 * 4) & 15, code);
        }
    }
}

#[test]
fn rows_are_dequantised_with_the_stored_scale() {
    let (_dir, path) = converted();
    let dir = HfDirectory::open(&path).unwrap();
    let down = dir.experts.unwrap().layers()[1].down(2).unwrap();
    let mut row = vec![0.0; 64];
    dequantise_row(&down, 5, &mut row).unwrap();
    let Encoding::W4 { scales, zeros, .. } = &down.encoding else { panic!("{down:?}") };
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[10], bytes[11]]).to_f32();
    let (scale, zero) = (half(scales.as_ref()), half(zeros.as_ref()));
    for (index, &value) in row.iter().enumerate() {
        let code = down.bytes.as_ref()[5 * 32 + index / 2] >> (index % 2 * 4) & 15;
        assert_eq!(value, (f32::from(code) - zero) * scale);
    }
    assert!(dequantise_row(&down, 128, &mut row).is_err());
    assert!(dequantise_row(&down, 0, &mut row[..63]).is_err());
}
