//! Logits of tiny models of each family and of each quantisation type against those computed in f32 elsewhere.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::model::{Causal, LoadOptions, Logits};
use axe::ops::{CacheKind, Products, choice_reference};
use support::{FAMILIES, device, fixture, golden, open_every_way, open_model, ways};

/// Largest difference of logits over the golden sequence, fed `width` tokens a pass.
fn largest_difference(topic: &str, name: &str, width: usize) -> f32 {
    difference_to(topic, name, name, width)
}

/// The same for a file whose logits are those of `reference`.
fn difference_to(topic: &str, name: &str, reference: &str, width: usize) -> f32 {
    let file = fixture(&format!("{topic}/{name}.gguf"));
    open_every_way(&file, 64, 64, CacheKind::F32)
        .map(|mut model| difference_of(&mut model, &format!("{topic}/{reference}.safetensors"), width))
        .fold(0f32, f32::max)
}

/// The same of one model.
fn difference_of(model: &mut Causal, reference: &str, width: usize) -> f32 {
    let (ids, expected) = golden(reference);
    let mut largest = 0f32;
    let vocabulary = model.config().vocabulary;
    let mut start = 0;
    for tokens in ids.chunks(width) {
        model.forward(tokens, start, Logits::All).unwrap();
        for row in 0..tokens.len() {
            let expected = &expected[(start + row) * vocabulary..][..vocabulary];
            model
                .with_logits(row, |found| {
                    for (f, e) in found.iter().zip(expected) {
                        assert!(f.is_finite(), "{reference}: logit {f} at position {}", start + row);
                        largest = largest.max((f - e).abs());
                    }
                })
                .unwrap();
        }
        start += tokens.len();
    }
    largest
}

#[test]
fn families_agree_with_their_reference() {
    for name in FAMILIES {
        let off = largest_difference("causal-families", name, 7);
        println!("{name}: {off:.2e}");
        assert!(off <= 1e-4, "{name}: logits differ by {off}");
    }
}

/// Numbers of keys and values that are near the middle between two of f16 may fall to either side, and what f16 keeps of all
/// others costs as much whoever attends.
#[test]
fn families_attend_as_well_by_either_family_of_kernels() {
    for name in FAMILIES {
        let file = fixture(&format!("causal-families/{name}.gguf"));
        let mut by_vectors = None;
        for mut model in open_every_way(&file, 64, 64, CacheKind::F16) {
            let (products, reference) = (model.products(), format!("causal-families/{name}.safetensors"));
            for rows in [1, 7] {
                let kernels = model.pass_kernels(rows, Logits::All).unwrap();
                for (layer, kernels) in model.config().layers.iter().zip(kernels) {
                    let by_xmx = kernels.iter().any(|kernel| kernel.starts_with("attend_"));
                    let wanted = products == Products::Xmx && layer.latent.is_none();
                    assert_eq!(by_xmx, wanted, "{name} by {products:?}: {kernels:?}");
                }
            }
            let off = difference_of(&mut model, &reference, 7);
            let vectors = *by_vectors.get_or_insert(off);
            println!("{name} by {products:?}: {off:.3e}");
            assert!(
                off <= 1.1 * vectors,
                "{name} by {products:?}: logits differ by {off}, by vectors {vectors}"
            );
        }
    }
}

#[test]
fn a_model_takes_what_its_plan_says() {
    for (name, products) in
        FAMILIES.into_iter().flat_map(|name| ways().into_iter().map(move |way| (name, way)))
    {
        let gguf = Arc::new(Gguf::open(&fixture(&format!("causal-families/{name}.gguf"))).unwrap());
        let options = LoadOptions {
            context: 100,
            rows: 20,
            logit_rows: 3,
            cache: CacheKind::F16,
            cache_dir: None,
            join: false,
            products,
        };
        let plan = Causal::plan(&gguf, &options).unwrap();
        let device = device();
        let model = Causal::load(device.clone(), gguf, &options, &mut |_| {}).unwrap();
        let report = device.memory();
        println!("{name} by {products:?}: {plan:?}");
        assert_eq!(
            [plan.weights, plan.kv_cache, plan.scratch].map(|bytes| bytes as u64),
            [report.weights, report.kv_cache, report.scratch],
            "{name}"
        );
        drop(model);
    }
}

#[test]
fn choices_are_the_largest_logits() {
    let (ids, _) = golden("causal-families/llama.safetensors");
    let mut model = open_model(&fixture("causal-families/llama.gguf"), 64, 64, CacheKind::F32);
    assert!(model.choices().unwrap().is_empty());
    let vocabulary = model.config().vocabulary;
    for limit in [vocabulary, vocabulary - 5, 3] {
        model.limit_choices(limit);
        for (logits, rows) in [(Logits::All, 11), (Logits::All, 2), (Logits::Last, 1), (Logits::None, 0)] {
            model.forward(&ids[..rows.max(5)], 0, logits).unwrap();
            let choices = model.choices().unwrap();
            assert_eq!(choices.len(), if logits == Logits::All { rows.max(5) } else { rows });
            for (row, found) in choices.iter().enumerate() {
                let expected = model.with_logits(row, |logits| choice_reference(&logits[..limit])).unwrap();
                assert_eq!(*found, expected, "row {row} below {limit}");
            }
        }
    }
}

#[test]
fn quantisation_types_agree_with_their_reference() {
    for name in [
        "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K",
        "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4",
    ] {
        let off = largest_difference("quant-types", name, 40);
        println!("{name}: {off:.2e}");
        assert!(off <= 1e-4, "{name}: logits differ by {off}");
    }
}

#[test]
fn older_files_join_the_matrices_of_keys_and_values() {
    let off = difference_to("causal-families", "deepseek2-joined", "deepseek2", 7);
    assert!(off <= 1e-4, "logits differ by {off}");
}

#[test]
fn a_row_has_the_same_bits_at_every_width() {
    for name in ["llama", "gemma3", "qwen3moe", "deepseek2"] {
        let (ids, _) = golden(&format!("causal-families/{name}.safetensors"));
        let file = fixture(&format!("causal-families/{name}.gguf"));
        for mut model in open_every_way(&file, 64, 64, CacheKind::F16) {
            let mut bits = |width: usize| -> Vec<u32> {
                let mut all = Vec::new();
                for (chunk, tokens) in ids.chunks(width).enumerate() {
                    model.forward(tokens, chunk * width, Logits::All).unwrap();
                    for row in 0..tokens.len() {
                        let row =
                            model.with_logits(row, |logits| logits.iter().map(|v| v.to_bits()).collect());
                        all.extend::<Vec<u32>>(row.unwrap());
                    }
                }
                all
            };
            let alone = bits(1);
            for width in [2, 3, 8, 16, 40] {
                assert!(bits(width) == alone, "{name}: logits differ at width {width}");
            }
        }
    }
}
