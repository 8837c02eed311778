//! Random checkpoints with the sizes of real models, as scripts/make-synthetic-26b.sh and -e4b.sh write them: small ones
//! run, and the real sizes fit where they should.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::model::diffusion_gemma::{
    DenoiseStep, DenseWeights, DiffusionCheckpoint, DiffusionGemma, DiffusionOptions,
};
use axe::model::{Causal, LoadOptions, Logits};
use axe::ops::{CacheKind, Products};
use support::{cache_dir, device};

const GIB: usize = 1 << 30;

/// A folder, and what a script writes to the place of that name in it.
fn written(script: &str, word: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("model.gguf");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(script);
    let done = Command::new(script).arg(word).arg(&place).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    (folder, place)
}

#[test]
fn a_small_one_denoises_and_uses_all_of_itself() {
    let (_folder, path) = written("make-synthetic-26b.sh", "--small");
    let checkpoint = DiffusionCheckpoint::open(&path).unwrap();
    let options = DiffusionOptions { rows: 64, cache_dir: Some(cache_dir()), ..DiffusionOptions::new(256) };
    let mut model = DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {}).unwrap();
    let config = model.config().clone();
    assert_eq!((config.layers.len(), config.canvas, config.vocabulary), (4, 32, 1536));
    assert_eq!(
        config.layers.iter().map(|layer| layer.sliding).collect::<Vec<_>>(),
        [true, false, true, false]
    );
    let prompt: Vec<u32> = (200..264).collect();
    model.encode(&prompt, 0).unwrap();
    let mut canvas: Vec<u32> = (600..632).collect();
    for step in 0..3 {
        let how = DenoiseStep {
            first: step == 0,
            temperature: 0.8,
            seed: 1,
            canvas: 0,
            step,
            greedy: false,
            barred: Vec::new(),
        };
        let rows = model.denoise(&canvas, prompt.len(), &how).unwrap();
        // Neither sure of anything nor indifferent, as numbers would be that grow or vanish on the way.
        let most = (config.vocabulary as f32).ln();
        for row in &rows {
            assert!((0.4 * most..0.999 * most).contains(&row.entropy), "{row:?}");
        }
        canvas = rows.iter().map(|row| row.sampled).collect();
        assert!(canvas.iter().collect::<BTreeSet<_>>().len() > canvas.len() / 2, "{canvas:?}");
        for layer in 0..config.layers.len() {
            let chosen = model.chosen_experts(layer, canvas.len()).unwrap();
            assert!(
                chosen.iter().collect::<BTreeSet<_>>().len() > config.experts / 2,
                "layer {layer}: {chosen:?}"
            );
        }
    }
}

#[test]
fn the_26b_takes_less_than_20_gib_with_a_context_of_32k() {
    let (_folder, path) = written("make-synthetic-26b.sh", "--hollow");
    let checkpoint = DiffusionCheckpoint::open(&path).unwrap();
    let total = |context, dense, products| {
        let options = DiffusionOptions { dense, ..DiffusionOptions::new(context) };
        let plan = DiffusionGemma::plan(&checkpoint, &options, products).unwrap();
        (plan.weights, plan.weights + plan.kv_cache + plan.scratch)
    };
    for products in [Products::Vector, Products::MatrixUnit] {
        let (weights, short) = total(4096, DenseWeights::AsStored, products);
        let (_, long) = total(32_768, DenseWeights::AsStored, products);
        assert!((16 * GIB..17 * GIB).contains(&weights), "{weights}");
        // 20 KiB a position, and angles.
        assert!(
            long < 20 * GIB && (20 << 10..23 << 10).contains(&((long - short) / (32_768 - 4096))),
            "{short} {long}"
        );
        assert!(total(32_768, DenseWeights::Quantised, products).1 < 16 * GIB);
    }
}

fn causal(context: usize) -> LoadOptions {
    LoadOptions {
        context,
        rows: 256,
        logit_rows: 16,
        cache: CacheKind::F16,
        cache_dir: Some(cache_dir()),
        join: false,
        products: Products::Vector,
    }
}

#[test]
fn a_small_e4b_tells_its_tokens_apart() {
    let (_folder, path) = written("make-synthetic-e4b.sh", "--small");
    let gguf = Arc::new(Gguf::open(&path).unwrap());
    let mut model = Causal::load(device(), gguf, &causal(64), &mut |_| {}).unwrap();
    assert_eq!((model.config().layers.len(), model.config().vocabulary), (6, 1536));
    let ids: Vec<u32> = (300..316).collect();
    model.forward(&ids, 0, Logits::All).unwrap();
    let mut best = BTreeSet::new();
    for row in 0..ids.len() {
        let (most, deviation) = model
            .with_logits(row, |logits| {
                let mean = logits.iter().sum::<f32>() / logits.len() as f32;
                let squares = logits.iter().map(|logit| (logit - mean).powi(2)).sum::<f32>();
                let most = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                (most, (squares / logits.len() as f32).sqrt())
            })
            .unwrap();
        assert!((0.5..2.0).contains(&deviation), "row {row}: {deviation}");
        best.insert(most);
    }
    assert!(best.len() > ids.len() / 2, "{best:?}");
}

#[test]
fn the_e4b_takes_less_than_5_gib_with_a_context_of_32k() {
    let (_folder, path) = written("make-synthetic-e4b.sh", "--hollow");
    let plan = Causal::plan(&Gguf::open(&path).unwrap(), &causal(32_768)).unwrap();
    // The table of the layers' inputs stays in the file.
    assert!((2 * GIB..3 * GIB).contains(&plan.weights), "{plan:?}");
    assert!(plan.weights + plan.kv_cache + plan.scratch < 5 * GIB, "{plan:?}");
}
