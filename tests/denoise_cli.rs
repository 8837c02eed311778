//! `axed denoise` from outside: what it takes, what it refuses, and a replay.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::{cache_dir, fixture};

fn axed(arguments: &[&str]) -> (i32, String, String) {
    let arguments = [&["denoise"], arguments].concat();
    command(&arguments)
}

fn command(arguments: &[&str]) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.args(arguments).current_dir(folder.path()).stdin(Stdio::null());
    for name in ["AXE_MODEL", "AXE_CONFIG"] {
        command.env_remove(name);
    }
    let Output { status, stdout, stderr } =
        command.env("AXE_DEVICE_CACHE_DIR", cache_dir()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (code, out, err) = (status.code().expect("the program is not killed"), text(stdout), text(stderr));
    assert!(!err.contains("panicked"), "{arguments:?}: {err}");
    (code, out, err)
}

/// The command on a sound model and a device that there is not: what it says is said before one is opened.
fn early(arguments: &[&str], words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.toml");
    std::fs::write(&config, "[device]\nname = \"no such device\"\n").unwrap();
    let (code, out, err) = command(&[arguments, &["--config", text(&config)]].concat());
    assert_eq!((code, &*out), (1, ""), "{arguments:?}: {err}");
    assert!(err.contains(words), "{arguments:?}: no '{words}' in: {err}");
}

fn fails(arguments: &[&str], code: i32, words: &str) {
    let (found, out, err) = axed(arguments);
    assert_eq!((found, &*out), (code, ""), "{arguments:?}: {err}");
    assert!(err.contains(words), "{arguments:?}: no '{words}' in: {err}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn what_is_wrong_with_a_replay_is_told_before_a_model_is_opened() {
    let model = ["--model", "none"];
    let with = |rest: &[&'static str]| [&model[..], rest].concat();
    let run = fixture("diffusion-random/traj_short.safetensors");
    let manifest = fixture("diffusion-random/manifest.json");
    let other = fixture("diffusion-trained/manifest.json");
    fails(&with(&[]), 2, "--ids");
    fails(&with(&["--ids", "1", "--steps", "0"]), 2, "--steps");
    fails(&with(&["--manifest", "m.json"]), 2, "--replay");
    fails(&with(&["--ids", "1", "--tolerance", "NaN"]), 2, "a number from 0");
    fails(&with(&["--ids", "1", "--logits-tolerance=-1"]), 2, "a number from 0");
    fails(&with(&["--ids", "1,2", "--replay", "nowhere"]), 1, "nowhere");
    fails(
        &["--model", "none", "--ids", "1", "--replay", text(&manifest)],
        1,
        "manifest.json: not a safetensors file",
    );
    fails(
        &["--model", "none", "--replay", text(&run), "--manifest", text(&other)],
        1,
        "no trajectory `short`; there are ",
    );
    fails(
        &["--model", "none", "--replay", text(&run), "--manifest", text(&run)],
        1,
        "traj_short.safetensors",
    );
}

#[test]
fn what_does_not_fit_a_model_is_told_before_it_is_repacked() {
    let model = fixture("diffusion-random/model");
    let run = fixture("diffusion-trained/traj_capital.safetensors");
    let denoise =
        |rest: &[&str], words| early(&[&["denoise", "--model", text(&model)], rest].concat(), words);
    denoise(&["--ids", "2"], "no such device");
    denoise(&["--ids", "2", "--t-min", "0.9"], "t_min is 0.9");
    denoise(&["--ids", "2", "--entropy-bound", "0"], "entropy_bound is 0");
    denoise(&["--ids", "2,512"], "token id 512 is outside the vocabulary of 512 tokens");
    denoise(&["--ids", "2,512", "--replay", text(&run)], "token id 512");
    denoise(&["--ids", &["2"; 4096].join(",")], "the prompt has 4096 tokens, expected 1 to 4095");
    let canvas = ["1"; 32].join(",");
    let logits = |ids: &str, canvas: &str, words| {
        early(&["logits", "-m", text(&model), "-o", "x", "--ids", ids, "--canvas", canvas], words);
    };
    logits("2", &canvas, "no such device");
    logits("2", "1,2", "the canvas has 2 ids (--canvas), the model's has 32");
    logits("512", &canvas, "token id 512");
    logits("2", &canvas.replacen('1', "600", 1), "token id 600");
    logits(&["2"; 4090].join(","), &canvas, "4122 tokens are more than the 4096");
    let causal = fixture("causal-families/llama.gguf");
    early(&["logits", "-m", text(&causal), "-o", "x", "--ids", "99999999"], "token id 99999999");
}

#[test]
fn settings_that_are_assumed_are_told() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(&format!("diffusion-random/model/{name}")), folder.path().join(name)).unwrap();
    }
    let path = text(folder.path());
    early(&["denoise", "--model", path, "--ids", "2"], "generation_config.json is missing: assuming ");
    early(&["denoise", "--model", path, "--ids", "2"], "entropy_bound: 0.1");
}

#[test]
fn more_ends_of_a_reply_than_kernels_bar_are_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(&format!("diffusion-random/model/{name}")), folder.path().join(name)).unwrap();
    }
    let ends: Vec<String> = (0..65).map(|id| id.to_string()).collect();
    let said = format!("{{\"eos_token_id\": [{}]}}", ends.join(","));
    std::fs::write(folder.path().join("generation_config.json"), said).unwrap();
    let (code, out, err) =
        command(&["denoise", "--model", text(folder.path()), "--ids", "2,70", "--steps", "1"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("canvas 0: ") && err.contains("65 tokens end a reply"), "{out}{err}");
}

#[test]
fn a_benchmark_s_prompt_is_bounded() {
    let model = fixture("diffusion-random/model");
    for (prompt, code, words) in [
        ("18446744073709551615", 2, "--prompt"),
        ("4294967295", 2, "--prompt"),
        ("268435456", 1, "268435456 tokens and a canvas are more than the 4096 of the model"),
    ] {
        let (found, _, err) = command(&["bench-denoise", "--model", text(&model), "--prompt", prompt]);
        assert_eq!(found, code, "{prompt}: {err}");
        assert!(err.contains(words), "{prompt}: {err}");
    }
}

#[test]
fn a_benchmark_times_passes_at_a_depth_and_counts_their_launches() {
    let model = fixture("tiny-diffusion");
    let arguments = ["bench-denoise", "--model", text(&model), "--prompt", "40", "--steps", "2"];
    for at in ["0", "900"] {
        let (code, out, err) = command(&[&arguments[..], &["--at", at, "--json"]].concat());
        assert_eq!(code, 0, "{err}");
        let found: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(found["at"].to_string(), at);
        // 6 before the layers, 12 for each of 4 and the head's 2.
        assert_eq!(found["launches_per_step"], 6 + 4 * 12 + 2, "{out}");
        assert!(
            found["step_s"].as_f64().unwrap() > 0.0 && found["encode_s"].as_f64().unwrap() > 0.0,
            "{out}"
        );
    }
    let (code, out, _) = command(&[&arguments[..], &["--at", "900"]].concat());
    assert!(code == 0 && out.contains("40 tokens at 900") && out.contains("; 56 launches)"), "{out}");
    let (code, _, err) = command(&[&arguments[..], &["--at", "2000"]].concat());
    assert_eq!(code, 1);
    assert!(err.contains("2040 tokens and a canvas are more than the 2048 of the model"), "{err}");
}

#[test]
fn recorded_runs_are_replayed_and_the_first_difference_is_told() {
    let (model, manifest) = (fixture("diffusion-random/model"), fixture("diffusion-random/manifest.json"));
    for name in ["short", "long", "two_canvases"] {
        let run = fixture(&format!("diffusion-random/traj_{name}.safetensors"));
        let arguments = ["--model", text(&model), "--replay", text(&run), "--manifest", text(&manifest)];
        let (code, out, err) = axed(&arguments);
        assert_eq!(code, 0, "{name}: {err}");
        assert!(out.starts_with("canvas 0 step 0: temperature 0.8000, logits within "), "{out}");
        assert!(out.lines().last().unwrap().starts_with("all agrees: canvases "), "{out}");
        // A logit is judged when asked for; nothing is as exact as this.
        let (code, out, err) = axed(&[&arguments[..], &["--logits-tolerance", "1e-9"]].concat());
        assert_eq!(code, 1, "{name}: {out}");
        assert!(err.contains(": logit: expected "), "{err}");
    }
    let (model, manifest) = (fixture("tiny-diffusiongemma"), fixture("diffusion-trained/manifest.json"));
    let run = fixture("diffusion-trained/traj_capital.safetensors");
    let arguments = ["--model", text(&model), "--replay", text(&run), "--manifest", text(&manifest)];
    let (code, out, err) = axed(&[&arguments[..], &["--streaming"]].concat());
    assert_eq!(code, 0, "{err}");
    assert!(out.lines().last().unwrap().contains("logits not compared, entropies within "), "{out}");
    // A model that does not denoise.
    fails(
        &["--model", text(&fixture("causal-families/llama.gguf")), "--ids", "1"],
        1,
        "llama.gguf: general.architecture is `llama`; expected `diffusion-gemma`",
    );
    let (model, run) =
        (fixture("diffusion-random/model"), fixture("diffusion-random/traj_short.safetensors"));
    // Another prompt than the recorded one.
    let (code, out, err) = axed(&["--model", text(&model), "--replay", text(&run), "--ids", "2,5,9"]);
    assert_eq!((code, &*out), (1, ""));
    assert!(err.contains("canvas 0, step 0, row "), "{err}");
}
