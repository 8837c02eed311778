//! `axed denoise` from outside: what it takes, what it refuses, and a replay.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::{cache_dir, fixture};

fn axed(arguments: &[&str]) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.arg("denoise").args(arguments).current_dir(folder.path()).stdin(Stdio::null());
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
        "llama.gguf: general.architecture is 'llama'; expected 'diffusion-gemma'",
    );
    let (model, run) =
        (fixture("diffusion-random/model"), fixture("diffusion-random/traj_short.safetensors"));
    // Another prompt than the recorded one.
    let (code, out, err) = axed(&["--model", text(&model), "--replay", text(&run), "--ids", "2,5,9"]);
    assert_eq!((code, &*out), (1, ""));
    assert!(err.contains("canvas 0, step 0, row "), "{err}");
}
