//! Weights that are no numbers: never a word of text.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod safetensors_support;
mod support;

use std::path::Path;

use axe::decode::diffusion::DenoisingRules;
use axe::decode::{Backend, Denoising, DiffusionBackend, Sampling, Step};
use axe::model::diffusion_gemma::{
    DiffusionCheckpoint, DiffusionGemma, DiffusionOptions, ExpertWeights, GenerationConfig,
};
use axe::ops::CacheKind;
use half::bf16;
use safetensors_support::{Tensors, directory, tiny};
use support::device;

fn open(
    path: &Path,
    cache: CacheKind,
    experts: ExpertWeights,
) -> Result<DiffusionBackend<DiffusionGemma>, String> {
    let checkpoint = DiffusionCheckpoint::open(path).map_err(|error| error.to_string())?;
    let options = DiffusionOptions { rows: 64, cache, experts, ..DiffusionOptions::new(128) };
    let model = DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {})
        .map_err(|error| error.to_string())?;
    Ok(DiffusionBackend::new(model, GenerationConfig::default(), DenoisingRules::default()))
}

/// The error of a request that must fail before it commits anything.
fn failure(backend: &mut DiffusionBackend<DiffusionGemma>) -> Result<String, &'static str> {
    let denoising = Denoising { max_steps: Some(3), ..Denoising::default() };
    let sampling = Sampling { temperature: 1.0, denoising, ..Sampling::default() };
    let prompt: Vec<u32> = (2..60).collect();
    let mut generation = backend.start(&prompt, &sampling).unwrap();
    loop {
        match generation.step() {
            Err(error) => return Ok(error.to_string()),
            Ok(Step::Commit(_)) => return Err("text was committed"),
            Ok(_) => {}
        }
    }
}

/// Puts `value` at the head of a tensor, or of each expert's part of one.
fn spoil(tensors: &Tensors, name: &str, value: f32) -> Tensors {
    let mut tensors = tensors.clone();
    let raw = tensors.get_mut(name).unwrap();
    let parts = if name.contains("expert") { raw.shape[0] } else { 1 };
    let step = raw.bytes.len() / parts;
    for part in 0..parts {
        raw.bytes[part * step..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
    tensors
}

/// Tensors of the text model: those of the first sliding and the first full layer, and those of no layer.
fn names(tensors: &Tensors) -> Vec<String> {
    let names: Vec<String> = tensors
        .keys()
        .filter(|name| !name.contains("vision"))
        .filter(|name| !name.contains("layers.2.") && !name.contains("layers.3."))
        .cloned()
        .collect();
    assert_eq!(names.len(), 6 + 22 + 21 + 2);
    names
}

fn never_text(value: f32, cache: CacheKind, experts: ExpertWeights, wanted: impl Fn(&str) -> bool) {
    let sound = tiny();
    let folder = tempfile::tempdir().unwrap();
    let mut faults = Vec::new();
    for name in names(&sound).into_iter().filter(|name| wanted(name)) {
        let path = folder.path().join("damaged");
        directory(&path, &spoil(&sound, &name, value));
        match open(&path, cache, experts) {
            Err(error) => {
                assert!(error.contains("damaged") && error.contains(&name), "{name}: refused by {error}");
            }
            Ok(mut backend) => match failure(&mut backend) {
                Ok(error) => {
                    assert!(error.contains("not finite") || error.contains("NaN"), "{name}: {error}");
                    // Nothing hangs, and nothing of it is kept.
                    if let Err(what) = failure(&mut backend) {
                        faults.push(format!("{name}, the second time: {what}"));
                    }
                }
                Err(what) => faults.push(format!("{name}: {what}")),
            },
        }
    }
    assert!(faults.is_empty(), "{value} in\n{}", faults.join("\n"));
}

#[test]
fn nan_in_any_tensor_is_an_error() {
    never_text(f32::NAN, CacheKind::F16, ExpertWeights::AsStored, |_| true);
}

#[test]
fn infinity_in_any_tensor_is_an_error() {
    // A layer less: each model takes its time to load.
    let wanted = |name: &str| !name.contains("layers.1.");
    never_text(f32::INFINITY, CacheKind::F16, ExpertWeights::AsStored, wanted);
}

#[test]
fn so_they_are_with_a_cache_in_f32() {
    let wanted = |name: &str| name.contains("self_attn") || name.contains("scalar");
    never_text(f32::NAN, CacheKind::F32, ExpertWeights::AsStored, wanted);
    never_text(f32::NEG_INFINITY, CacheKind::F32, ExpertWeights::AsStored, wanted);
}

#[test]
fn so_they_are_in_experts_of_4_bits() {
    never_text(f32::NAN, CacheKind::F16, ExpertWeights::Quantised, |name| name.contains("experts."));
    never_text(f32::INFINITY, CacheKind::F16, ExpertWeights::Quantised, |name| name.contains("experts."));
}
