//! DiffusionGemma's forward pass against the reference's, intermediate values included.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::model::diffusion_gemma::{DenoiseStep, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions};
use axe::ops::{CacheKind, Products};
use safetensors::SafeTensors;
use serde_json::Value;
use support::fixture;

/// How far numbers may be off.
#[derive(Clone, Copy)]
struct Bounds {
    /// Of logits, keys and values.
    numbers: f32,
    /// Two experts whose probabilities are nearer than this may change places.
    router_gap: f32,
}

/// What the issue of numbers allows against the reference in f32.
const EXACT: Bounds = Bounds { numbers: 1e-4, router_gap: 1e-6 };
/// What eleven bits of keys and values cost, whoever attends.
const KEPT_IN_F16: Bounds = Bounds { numbers: 1e-2, router_gap: 1e-3 };

fn directory(name: &str) -> DiffusionCheckpoint {
    DiffusionCheckpoint::open(&fixture(name)).unwrap()
}

fn gguf(name: &str) -> DiffusionCheckpoint {
    DiffusionCheckpoint::Gguf(Arc::new(Gguf::open(&fixture(name)).unwrap()))
}

fn load(checkpoint: &DiffusionCheckpoint, products: Products, cache: CacheKind) -> DiffusionGemma {
    let options = DiffusionOptions { rows: 64, cache, products, ..DiffusionOptions::new(256) };
    DiffusionGemma::load(support::device(), checkpoint, &options, &mut |_| {}).unwrap()
}

/// One recorded forward case.
struct Case {
    chunks: Vec<Vec<u32>>,
    canvas: Vec<u32>,
    start: usize,
    file: Vec<u8>,
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn cases(folder: &str) -> Vec<(String, Case)> {
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(fixture(folder).join("manifest.json")).unwrap()).unwrap();
    manifest["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| {
            let name = case["name"].as_str().unwrap().to_owned();
            let file = std::fs::read(fixture(folder).join(format!("case_{name}.safetensors"))).unwrap();
            let case = Case {
                chunks: case["encoder_chunks"].as_array().unwrap().iter().map(ids).collect(),
                canvas: ids(&case["canvas"]),
                start: case["canvas_start"].as_u64().unwrap() as usize,
                file,
            };
            (name, case)
        })
        .collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.chunks_exact(4).map(|word| word.try_into().unwrap())
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let tensor = tensors.tensor(name).unwrap();
    (tensor.shape().to_vec(), words(tensor.data()).map(f32::from_le_bytes).collect())
}

fn ints(tensors: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<i32>) {
    let tensor = tensors.tensor(name).unwrap();
    (tensor.shape().to_vec(), words(tensor.data()).map(i32::from_le_bytes).collect())
}

fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance, "{what}: value {i} is {f}, the reference says {e}");
    }
}

/// Each row's experts, in any order, wherever the reference was not near a tie.
fn assert_routes(what: &str, found: &[Vec<i32>], tensors: &SafeTensors<'_>, prefix: &str, gap: f32) {
    let (shape, expected) = ints(tensors, &format!("{prefix}_topk_idx"));
    let (probabilities_shape, probabilities) = floats(tensors, &format!("{prefix}_router_prob"));
    let [_, rows, top] = shape[..] else { panic!("{shape:?}") };
    let experts = probabilities_shape[2];
    let mut compared = 0;
    for (layer, chosen) in found.iter().enumerate() {
        for row in 0..rows {
            let at = layer * rows + row;
            let mut sorted = probabilities[at * experts..][..experts].to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            if sorted[top - 1] - sorted[top] <= gap {
                continue;
            }
            compared += 1;
            let set = |list: &[i32]| {
                let mut list = list.to_vec();
                list.sort_unstable();
                list
            };
            assert_eq!(
                set(&chosen[row * top..][..top]),
                set(&expected[at * top..][..top]),
                "{what}: layer {layer}, row {row}"
            );
        }
    }
    assert!(compared > 0, "{what}: nothing to compare");
}

/// Every way that there is here to make products.
fn check(checkpoint: &DiffusionCheckpoint, folder: &str) {
    for products in support::canvas_ways() {
        let mut model = load(checkpoint, products, CacheKind::F32);
        assert_eq!(model.products(), products, "the self-test of these products fails");
        agrees(&mut model, folder, EXACT);
    }
}

/// What f16 keeps of keys and values costs as much whoever attends.
fn check_attention(checkpoint: &DiffusionCheckpoint, folder: &str) {
    for products in support::canvas_ways() {
        let mut model = load(checkpoint, products, CacheKind::F16);
        assert_eq!(model.products(), products, "the self-test of these products fails");
        let kernels = model.step_kernels(true).unwrap();
        for kernels in &kernels[..model.config().layers.len()] {
            let by_xmx = kernels.iter().any(|kernel| kernel.starts_with("attend_"));
            assert_eq!(by_xmx, products == Products::Xmx, "{kernels:?}");
        }
        agrees(&mut model, folder, KEPT_IN_F16);
    }
}

fn agrees(model: &mut DiffusionGemma, folder: &str, bounds: Bounds) {
    let Bounds { numbers, router_gap } = bounds;
    let (layers, window) = (model.config().layers.clone(), model.config().window);
    for (name, case) in cases(folder) {
        let tensors = SafeTensors::deserialize(&case.file).unwrap();
        let mut at = 0;
        for chunk in &case.chunks {
            model.encode(chunk, at).unwrap();
            at += chunk.len();
        }
        let rows = case.chunks.last().unwrap().len();
        // The encoder's last layer ends with its keys and values.
        let routes: Vec<_> =
            (0..layers.len() - 1).map(|layer| model.chosen_experts(layer, rows).unwrap()).collect();
        assert_routes(&format!("{folder} {name} encoder"), &routes, &tensors, "enc", router_gap);
        for (index, layer) in layers.iter().enumerate() {
            let from = if layer.sliding { at.saturating_sub(window - 1) } else { 0 };
            let (keys, values) = model.cached(index, from, at).unwrap();
            for (part, found) in [("k", keys), ("v", values)] {
                let (_, expected) = floats(&tensors, &format!("kv.{index}.{part}"));
                assert_near(&format!("{folder} {name} kv.{index}.{part}"), &found, &expected, numbers);
            }
        }
        let previous = tensors.tensor("sc_logits").ok().map(|_| floats(&tensors, "sc_logits").1);
        let logits = model.canvas_logits(&case.canvas, case.start, previous.as_deref()).unwrap();
        let routes: Vec<_> =
            (0..layers.len()).map(|layer| model.chosen_experts(layer, case.canvas.len()).unwrap()).collect();
        let expected = floats(&tensors, "logits").1;
        let off = logits.iter().zip(&expected).map(|(f, e)| (f - e).abs()).fold(0f32, f32::max);
        println!("{folder} {name} by {:?}: logits within {off:.2e}", model.products());
        assert_near(&format!("{folder} {name} logits"), &logits, &expected, numbers);
        assert_routes(&format!("{folder} {name} decoder"), &routes, &tensors, "dec", router_gap);
        streaming_head_agrees(model, &case, previous.is_none(), &logits);
    }
}

/// The streaming head says of a canvas what its plain logits say.
fn streaming_head_agrees(model: &mut DiffusionGemma, case: &Case, first: bool, logits: &[f32]) {
    const TEMPERATURE: f32 = 0.7;
    let step = DenoiseStep {
        first,
        temperature: TEMPERATURE,
        seed: 3,
        canvas: 0,
        step: 0,
        greedy: true,
        barred: Vec::new(),
    };
    let choices = model.denoise(&case.canvas, case.start, &step).unwrap();
    let vocabulary = model.config().vocabulary;
    for (row, (choice, logits)) in choices.iter().zip(logits.chunks_exact(vocabulary)).enumerate() {
        let scaled: Vec<f64> =
            logits.iter().map(|&logit| f64::from(logit) / f64::from(TEMPERATURE)).collect();
        let top = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scaled.iter().map(|logit| (logit - top).exp()).sum();
        let entropy: f64 = scaled
            .iter()
            .map(|logit| {
                let p = (logit - top).exp() / total;
                if p > 0.0 { -p * p.ln() } else { 0.0 }
            })
            .sum();
        assert!(
            (f64::from(choice.entropy) - entropy).abs() < 1e-4,
            "row {row}: {} {entropy}",
            choice.entropy
        );
        assert_eq!(scaled[choice.argmax as usize], top, "row {row}");
        assert_eq!(choice.sampled, choice.argmax, "row {row}: greedy");
    }
}

#[test]
fn random_model_in_bf16_agrees_with_the_reference() {
    check(&directory("diffusion-random/model"), "diffusion-random");
}

#[test]
fn random_model_as_gguf_agrees_with_the_reference() {
    check(&gguf("diffusion-random/model.gguf"), "diffusion-random");
}

#[test]
fn trained_model_agrees_with_the_reference() {
    check(&directory("tiny-diffusiongemma"), "diffusion-trained");
}

#[test]
fn attention_is_as_good_by_either_family_of_kernels() {
    // A model of random numbers chooses other experts for what f16 rounds.
    check_attention(&directory("tiny-diffusiongemma"), "diffusion-trained");
}
