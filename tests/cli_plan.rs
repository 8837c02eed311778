//! `axed plan`: what it says is what loading does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, mpsc};

use axe::admin::Board;
use axe::config::Config;
use axe::decode::Memory;
use axe::device::telemetry::Sampler;
use axe::engine::{Engine, Options, State};
use serde_json::Value;
use support::{cache_dir, fixture, real_model};

/// Small models of both kinds, with rings, plain experts and 4-bit ones. The causal fixtures' one merge makes no token;
/// without it their vocabulary is sound.
fn models() -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().unwrap();
    let mut all = vec![fixture("tiny-diffusion"), fixture("tiny-diffusiongemma")];
    for name in ["llama", "gemma3", "mistral"] {
        let mut bytes = std::fs::read(fixture(&format!("causal-families/{name}.gguf"))).unwrap();
        let key = b"tokenizer.ggml.merges";
        if let Some(at) = bytes.windows(key.len()).position(|window| window == key) {
            bytes[at..at + key.len()].copy_from_slice(b"tokenizer.ggml.others");
        }
        all.push(folder.path().join(format!("{name}.gguf")));
        std::fs::write(all.last().unwrap(), bytes).unwrap();
    }
    (folder, all)
}

fn config(variables: &[(&str, &str)]) -> Config {
    let cache = cache_dir();
    let mut all: BTreeMap<String, String> =
        variables.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    all.insert("AXE_DEVICE_CACHE_DIR".to_owned(), cache.display().to_string());
    Config::from_sources(None, all, Vec::new()).unwrap()
}

/// What is allocated once the model is loaded, and its context.
fn loaded(config: &Config, path: &Path) -> (Memory, usize) {
    let (send_board, board) = mpsc::channel::<Arc<Board>>();
    let (wanted, of_model) = (config.clone(), path.to_owned());
    let engine = Engine::spawn(
        move |progress| axe::load::load(&wanted, &of_model, progress, &board.recv().unwrap()),
        Options { queue_capacity: 1, ..Options::default() },
    )
    .unwrap();
    let handle = engine.handle();
    send_board
        .send(Arc::new(Board::new(handle.clone(), axectl::protocol::Config::default(), Sampler::new())))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut watch = handle.watch();
    let state = runtime.block_on(async {
        watch.wait_for(|state| !matches!(state, State::Loading { .. })).await.unwrap().clone()
    });
    assert_eq!(state, State::Ready, "{}", path.display());
    let status = handle.status();
    handle.shutdown();
    engine.join();
    (status.memory, status.context_length.unwrap())
}

#[test]
fn memory_is_what_loading_allocates() {
    let (_folder, models) = models();
    for variables in [
        &[][..],
        &[
            ("AXE_MODEL_CONTEXT_LENGTH", "301"),
            ("AXE_DEVICE_PREFILL_CHUNK", "37"),
            ("AXE_DEVICE_KV_CACHE", "f32"),
            ("AXE_DEVICE_MATRIX_UNIT", "false"),
            ("AXE_DEVICE_ZERO_COPY", "false"),
            ("AXE_MODEL_DENSE", "q8"),
            ("AXE_DECODE_BLOCK_SIZE", "1"),
        ],
        &[("AXE_DECODE_BLOCK_SIZE", "5")],
    ] {
        let config = config(variables);
        for path in &models {
            let device = axe::load::open_device(&config.device).unwrap();
            let plan = axe::load::plan(&config, path, &device).unwrap();
            assert_eq!(device.memory().total, 0, "a plan takes no memory");
            drop(device);
            let (memory, context) = loaded(&config, path);
            let planned = plan.choice.memory;
            assert_eq!(
                [planned.weights, planned.kv_cache, planned.scratch].map(|bytes| bytes as u64),
                [memory.weights, memory.kv_cache, memory.scratch],
                "{}: {variables:?}",
                path.display()
            );
            assert_eq!(plan.choice.shape.context, context);
            assert_eq!(plan.device.budget, memory.budget);
        }
    }
}

fn axed(variables: &[(&str, &str)], arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.arg("plan").args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR")).stdin(Stdio::null());
    for name in ["AXE_MODEL", "AXE_CONFIG"] {
        command.env_remove(name);
    }
    command.env("AXE_DEVICE_CACHE_DIR", cache_dir()).envs(variables.iter().copied());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert!(!err.contains("panicked"), "{err}");
    (status.code().unwrap(), out, err)
}

#[test]
fn both_kinds_are_told_of_in_words_and_in_json() {
    let causal = real_model("smollm2-135m-instruct-q4_1.gguf");
    let causal = causal.to_str().unwrap();
    let (code, out, err) = axed(&[("AXE_DEVICE_MATRIX_UNIT", "false")], &["-m", causal, "-c", "300"]);
    assert_eq!((code, &*err), (0, ""));
    for words in [
        "llama, Q4_1, causal, trained for 8192 tokens",
        "context    300 tokens: model.context_length says so",
        "chunk      256 rows: ",
        "kernels    vectors: device.matrix_unit is false",
        "blocks     1 to 16 rows: as many as pay",
        "memory     10",
        "a token    reads 92.1 MiB of weights",
    ] {
        assert!(out.contains(words), "no '{words}' in:\n{out}");
    }
    let scratch = |size: &str| {
        let (code, out, err) = axed(&[], &["-m", causal, "-c", "300", "-b", size, "--json"]);
        assert_eq!((code, &*err), (0, ""));
        let plan: Value = serde_json::from_str(&out).unwrap();
        plan["memory"]["scratch_bytes"].as_u64().unwrap()
    };
    // Logits of as many rows as can commit tokens.
    assert!(scratch("1") < scratch("4") && scratch("4") < scratch("16"));
    assert_eq!(scratch("16"), scratch("auto"));
    let diffusion = fixture("tiny-diffusion");
    let (code, _, err) = axed(&[], &["-m", diffusion.to_str().unwrap(), "-b", "4"]);
    assert!(code == 2 && err.contains("--block-size: ") && err.contains("denoises"), "{err}");
    let (code, out, err) = axed(&[("AXE_DEVICE_MATRIX_UNIT", "false")], &["-m", diffusion.to_str().unwrap()]);
    assert_eq!((code, &*err), (0, ""));
    assert!(out.contains("diffusion-gemma, W4-experts-BF16, denoises canvases of 32"), "{out}");
    assert!(out.contains("kernels    vectors: device.matrix_unit is false"), "{out}");

    let (code, out, err) = axed(&[("AXE_DEVICE_KERNELS", "xmx")], &["-m", causal]);
    assert_eq!((code, &*err), (0, ""));
    assert!(out.contains("kernels    xmx: device.kernels is xmx"), "{out}");
    let (code, _, err) = axed(&[("AXE_DEVICE_KERNELS", "tensor")], &["-m", causal]);
    assert!(code == 1 && err.contains("expected auto, vector or xmx"), "{code}: {err}");

    let (code, out, err) = axed(&[], &["-m", causal, "--json"]);
    assert_eq!((code, &*err), (0, ""));
    let plan: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plan["model"]["kind"], "causal");
    assert_eq!(plan["context_length"], 8192);
    let memory = &plan["memory"];
    let sum: u64 = ["weights_bytes", "kv_cache_bytes", "scratch_bytes"]
        .iter()
        .map(|key| memory[key].as_u64().unwrap())
        .sum();
    assert_eq!(memory["total_bytes"], sum);
    assert_eq!(plan["reasons"].as_array().unwrap().len(), 4);
}

#[test]
fn a_model_whose_text_cannot_be_read_is_warned_of() {
    let (model, json) = (fixture("causal-families/llama.gguf"), "--json");
    let (code, out, err) = axed(&[], &["-m", model.to_str().unwrap(), json]);
    assert_eq!(code, 0, "{err}");
    let plan: Value = serde_json::from_str(&out).unwrap();
    let warnings = plan["warnings"].to_string();
    assert!(warnings.contains("refuse this model") && warnings.contains("merge 0"), "{warnings}");
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_what_would() {
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let model = model.to_str().unwrap();
    let limit = [("AXE_DEVICE_MEMORY_LIMIT_MIB", "120")];
    // Left alone, a context is chosen that fits.
    let (code, out, _) = axed(&limit, &["-m", model, "--json"]);
    assert_eq!(code, 0);
    let plan: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plan["context_length"], 1024);
    assert!(plan["memory"]["total_bytes"].as_u64().unwrap() <= 120 << 20);
    // What was asked for is not made smaller.
    let (code, out, err) = axed(&limit, &["-m", model, "-c", "8192"]);
    assert_eq!((code, &*out), (1, ""));
    assert!(
        err.contains("180 MiB for a context of 8192 tokens") && err.contains("limit is 120 MiB"),
        "{err}"
    );
    let fits = err.split("a context of ").last().unwrap().split(' ').next().unwrap();
    let (code, _, err) = axed(&limit, &["-m", model, "-c", fits]);
    assert_eq!(code, 0, "{fits} tokens: {err}");
    let more = (fits.parse::<usize>().unwrap() + 1).to_string();
    let (code, _, err) = axed(&limit, &["-m", model, "-c", &more]);
    assert!(code == 1 && err.contains(&format!("a context of {fits} tokens would fit")), "{more}: {err}");
    let (code, _, err) = axed(&[("AXE_DEVICE_MEMORY_LIMIT_MIB", "50")], &["-m", model]);
    assert_eq!(code, 1);
    assert!(err.contains("MiB weights") && err.contains("no context would fit"), "{err}");
    let (code, _, err) = axed(&[], &["-m", "nowhere"]);
    assert!(code == 1 && err.contains("nowhere"), "{err}");
}

/// Times of a card's kernels are predicted from the checkpoint alone, for both kinds of model; what is read is what the files have.
#[test]
fn a_card_is_told_of_without_one() {
    let causal = real_model("smollm2-135m-instruct-q4_1.gguf");
    let causal = causal.to_str().unwrap();
    let (code, out, err) = axed(&[], &["-m", causal, "-c", "300", "--card", "b70"]);
    assert_eq!((code, &*err), (0, ""));
    for words in
        ["Arc Pro B70, predicted", "prefill, 256 rows behind 300", "a token behind 0", "a block, 16 rows"]
    {
        assert!(out.contains(words), "no '{words}' in:\n{out}");
    }
    assert!(!axed(&[], &["-m", causal]).1.contains("B70"), "only where it is asked for");
    let passes = |model: &str| {
        let (code, out, err) = axed(&[], &["-m", model, "--card", "b70", "--json"]);
        assert_eq!((code, &*err), (0, ""));
        let plan: Value = serde_json::from_str(&out).unwrap();
        let passes = plan["b70"].as_array().unwrap().clone();
        for pass in &passes {
            let parts = pass["parts"].as_array().unwrap();
            for key in ["floor_ms", "one_term_ms", "two_terms_ms"] {
                let sum: f64 = parts.iter().map(|part| part[key].as_f64().unwrap()).sum();
                let whole = pass[key].as_f64().unwrap();
                assert!((sum - whole).abs() < 1e-9 * whole && whole > 0.0, "{key}: {pass}");
            }
        }
        (plan, passes)
    };
    let (plan, of_causal) = passes(causal);
    // A token of an empty context reads the weights, and but little else: 2 % are norms and activations.
    let token = of_causal.iter().find(|pass| pass["pass"] == "a token" && pass["context"] == 0).unwrap();
    let read: u64 =
        token["parts"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    let weights = plan["weights_bytes_a_token"].as_u64().unwrap();
    assert!(read.abs_diff(weights) * 50 < weights, "{read} bytes of {weights}");
    let (_, of_diffusion) = passes(fixture("tiny-diffusion").to_str().unwrap());
    let named: Vec<_> = of_diffusion.iter().map(|pass| pass["pass"].as_str().unwrap()).collect();
    assert_eq!(named, ["encoding", "encoding", "denoising step", "denoising step"]);
    let (code, _, err) = axed(&[], &["-m", causal, "--card", "b71"]);
    assert!(code == 2 && err.contains("b70"), "{err}");
}
