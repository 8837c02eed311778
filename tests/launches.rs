//! How many launches passes are, and that nothing comes back to the host before their end.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::device::Calls;
use axe::model::diffusion_gemma::{DenoiseStep, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions};
use axe::model::{Causal, LoadOptions, Logits};
use axe::ops::{CacheKind, Kernels, Products};
use support::{cache_dir, device, fixture};

/// How often each kernel stands in a list.
fn counted(kernels: &[String]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for kernel in kernels {
        *counts.entry(kernel.as_str()).or_default() += 1;
    }
    counts
}

fn since(now: Calls, before: Calls) -> Calls {
    Calls {
        launches: now.launches - before.launches,
        reads: now.reads - before.reads,
        writes: now.writes - before.writes,
    }
}

fn step(first: bool) -> DenoiseStep {
    let step = u32::from(!first);
    DenoiseStep { first, temperature: 0.8, seed: 1, canvas: 0, step, greedy: false, barred: Vec::new() }
}

/// A layer of a DiffusionGemma, launch by launch. The combine of one packs what the next begins with.
const LAYER: [&str; 12] = [
    "matmul",
    "rotate_and_cache",
    "attention",
    "matmul",
    "pack_rows",
    "matmul_gated",
    "matmul",
    "route_rows",
    "pack_for_experts",
    "expert_gate_up",
    "expert_down",
    "combine",
];

/// Launches before the first layer: embeddings, what conditions them, their norm, and the first to be packed.
fn inputs(first: bool) -> usize {
    if first { 3 } else { 6 }
}

#[test]
fn a_denoising_step_is_so_many_launches_and_reads_once() {
    let device = device();
    let checkpoint = DiffusionCheckpoint::open(&fixture("tiny-diffusion")).unwrap();
    let options = DiffusionOptions { rows: 64, cache_dir: Some(cache_dir()), ..DiffusionOptions::new(256) };
    let mut model = DiffusionGemma::load(device.clone(), &checkpoint, &options, &mut |_| {}).unwrap();
    let layers = model.config().layers.len();
    let (canvas, prompt): (Vec<u32>, Vec<u32>) = ((600..632).collect(), (200..264).collect());
    for conditioned in [false, true] {
        let kernels = model.step_kernels(conditioned).unwrap();
        assert_eq!(kernels.len(), layers + 1);
        for (index, layer) in kernels[..layers].iter().enumerate() {
            // The first layer's come after the embeddings and what conditions them.
            let before = if index > 0 { 0 } else { inputs(!conditioned) };
            assert_eq!(layer[before..], LAYER, "layer {index}: {:?}", counted(layer));
        }
        assert!(kernels[layers].is_empty());
    }
    assert_eq!(model.head_launches(), 2);
    let before = device.calls();
    model.encode(&prompt, 0).unwrap();
    let encoded = since(device.calls(), before);
    // Its last layer ends with keys and values.
    assert_eq!(encoded, Calls { launches: (2 + LAYER.len() * (layers - 1) + 2) as u64, reads: 0, writes: 1 });
    for first in [true, false, false] {
        let before = device.calls();
        model.denoise(&canvas, prompt.len(), &step(first)).unwrap();
        let launches = (inputs(first) + LAYER.len() * layers + 2) as u64;
        // The ids go there; what comes back are the rows of the head.
        assert_eq!(since(device.calls(), before), Calls { launches, reads: 1, writes: 1 });
    }
}

/// By the `xmx` family a row's largest number must be known before it is rounded, which takes launches of their own.
#[test]
fn a_layer_by_the_xmx_family_is_so_many_launches() {
    const MOST: usize = 16;
    let device = device();
    if Kernels::with_xmx(&device).unwrap().is_none() {
        println!("no sub-groups with loads of blocks here: the xmx family cannot run");
        return;
    }
    let checkpoint = DiffusionCheckpoint::open(&fixture("tiny-diffusion")).unwrap();
    let options = DiffusionOptions {
        rows: 64,
        cache_dir: Some(cache_dir()),
        products: Products::Xmx,
        ..DiffusionOptions::new(256)
    };
    let model = DiffusionGemma::load(device, &checkpoint, &options, &mut |_| {}).unwrap();
    assert_eq!(model.products(), Products::Xmx);
    let kernels = model.step_kernels(true).unwrap();
    for layer in &kernels[1..kernels.len() - 1] {
        assert!((LAYER.len()..=MOST).contains(&layer.len()), "{:?}", counted(layer));
        assert!(!layer.iter().any(|kernel| kernel == "norm_rows" || kernel == "embed"), "{layer:?}");
    }
}

/// Most launches of a dense layer in a pass of a few rows.
const DENSE: usize = 8;

#[test]
fn a_block_pass_is_so_many_launches_and_reads_at_its_end() {
    const ROWS: usize = 8;
    for name in ["llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"] {
        for join in [false, true] {
            let device = device();
            let gguf = Arc::new(Gguf::open(&fixture(&format!("causal-families/{name}.gguf"))).unwrap());
            let options = LoadOptions {
                context: 64,
                rows: 16,
                logit_rows: 16,
                cache: CacheKind::F16,
                cache_dir: Some(cache_dir()),
                join,
                products: Products::Vector,
            };
            let mut model = Causal::load(device.clone(), gguf, &options, &mut |_| {}).unwrap();
            for rows in [1, ROWS] {
                let kernels = model.pass_kernels(rows, Logits::All).unwrap();
                let (behind, layers) = kernels.split_last().unwrap();
                assert_eq!(layers.len(), model.config().layers.len());
                for layer in layers {
                    assert!((6..=DENSE).contains(&layer.len()), "{name}: {:?}", counted(layer));
                }
                let ids: Vec<u32> = (0..rows as u32).collect();
                // Prepares the pass, and reads where things lie if it is to be one launch.
                model.forward(&ids, 0, Logits::All).unwrap();
                let expected = match join && device.info().finds_by_address() {
                    true => 1,
                    false => layers.iter().map(Vec::len).sum::<usize>() + behind.len(),
                };
                assert_eq!(model.launches(rows, Logits::All), expected, "{name}");
                let before = device.calls();
                model.forward(&ids, 0, Logits::All).unwrap();
                assert_eq!(since(device.calls(), before).reads, 0, "{name}");
                assert_eq!(model.choices().unwrap().len(), rows);
                let calls = Calls { launches: expected as u64, reads: 1, writes: 1 };
                assert_eq!(since(device.calls(), before), calls, "{name}");
            }
        }
    }
}
