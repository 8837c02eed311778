//! What the miniature's card says: the built daemon answers every question of it as exactly as PyTorch does, and denoises
//! as fast. `scripts/test.sh card` asks with seeds 1 to 20 and judges the steps of each set, too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod served;
mod support;

use std::collections::BTreeMap;
use std::fs::{read, read_dir};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use served::Daemon;
use support::fixture;

const SEEDS: [u64; 2] = [1, 2];
/// A rate may be this much below PyTorch's.
const POINTS: f64 = 0.03;
/// Steps a canvas may be this much off PyTorch's, as a share.
const STEPS: f64 = 0.05;

/// What is in a directory, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path: PathBuf = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), read(&path).unwrap())
        })
        .collect()
}

#[tokio::test]
async fn every_set_of_the_card_is_answered_as_exactly_as_pytorch_does() {
    let sets: Value = serde_json::from_slice(&read(fixture("tiny-diffusion-sets.json")).unwrap()).unwrap();
    let daemon = Daemon::start(&fixture("tiny-diffusion")).await;
    let (mut steps, mut canvases, mut wanted_steps) = (0.0, 0.0, 0.0);
    for (name, set) in sets["sets"].as_object().unwrap() {
        let pairs = set["pairs"].as_array().unwrap();
        let mut wrong = Vec::new();
        for seed in SEEDS {
            for pair in pairs {
                let message = json!({"role": "user", "content": pair[0]});
                let body = json!({"messages": [message], "seed": seed, "max_tokens": 128});
                let answer = daemon.ask("/v1/chat/completions", &body).await;
                let text = &answer["choices"][0]["message"]["content"];
                if *text != pair[1] {
                    wrong.push(format!("{} with seed {seed}: {text}", pair[0]));
                }
                steps += answer["axe"]["denoising_steps"].as_f64().unwrap();
                canvases += answer["axe"]["canvases"].as_f64().unwrap();
                wanted_steps += set["steps"].as_f64().unwrap();
            }
        }
        let asked = (pairs.len() * SEEDS.len()) as f64;
        let (rate, wanted) = (1.0 - wrong.len() as f64 / asked, set["exact"].as_f64().unwrap());
        let lowest = if name == "facts" { 1.0 } else { wanted - POINTS };
        println!("{name}: {rate:.4} exact, PyTorch {wanted}");
        assert!(rate >= lowest, "{name}: {rate:.4} exact, PyTorch {wanted}: {wrong:#?}");
    }
    // With two seeds one canvas that is slow to settle moves the mean of a small set by more than the bound allows: here
    // all sets are judged together, each as often as it was asked.
    let asked: usize =
        sets["sets"].as_object().unwrap().values().map(|s| s["pairs"].as_array().unwrap().len()).sum();
    let (found, wanted) = (steps / canvases, wanted_steps / (asked * SEEDS.len()) as f64);
    println!("{found:.4} steps a canvas, PyTorch {wanted:.4}");
    assert!((found / wanted - 1.0).abs() <= STEPS, "{found:.4} steps a canvas, PyTorch {wanted:.4}");
}

#[test]
fn the_miniature_is_what_the_converter_makes_of_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("made");
    let status = Command::new(env!("CARGO_BIN_EXE_axed"))
        .arg("convert")
        .arg(fixture("tiny-diffusiongemma"))
        .arg(&made)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let mut kept = files(&fixture("tiny-diffusion"));
    assert!(kept.remove("CARD.md").is_some());
    let mut made = files(&made);
    // It names the version of the program that made it.
    for files in [&mut kept, &mut made] {
        let mut meta: Value = serde_json::from_slice(&files["w4_meta.json"]).unwrap();
        meta["made_by"] = Value::Null;
        files.insert("w4_meta.json".to_owned(), meta.to_string().into_bytes());
    }
    assert_eq!(kept.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
    for (name, bytes) in &kept {
        assert!(made[name] == *bytes, "{name} differs");
    }
}
