//! The two real model files against log-probabilities and greedy text computed in f32 from dequantised weights.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod support;

use axe::model::{Causal, Logits};
use axe::ops::CacheKind;
use support::{fixture, open_by, open_model, real_model, tensor_f32, tensor_i32, units};

/// Per model: its file, and the stem of its golden files.
const MODELS: [(&str, &str); 2] = [
    ("smollm2-135m-instruct-q4_1.gguf", "smollm2-135m-instruct-q4_1"),
    ("gemma-3-270m-q4_k_m.gguf", "gemma-3-270m-q4_k_m"),
];
/// Best tokens whose log-probabilities the golden files hold.
const TOP: usize = 64;

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let top = logits.iter().fold(f64::NEG_INFINITY, |top, &v| top.max(f64::from(v)));
    let total = logits.iter().map(|&v| (f64::from(v) - top).exp()).sum::<f64>().ln();
    logits.iter().map(|&v| f64::from(v) - top - total).collect()
}

/// Kullback-Leibler divergence of one position, the tokens past the best 64 taken together.
fn divergence(best: &[i32], reference: &[f32], found: &[f64]) -> f64 {
    let (mut kl, mut p_rest, mut q_rest) = (0.0, 1.0, 1.0);
    for (&id, &log_p) in best.iter().zip(reference) {
        let (log_p, log_q) = (f64::from(log_p), found[id as usize]);
        kl += log_p.exp() * (log_p - log_q);
        p_rest -= log_p.exp();
        q_rest -= log_q.exp();
    }
    if p_rest > 1e-9 && q_rest > 1e-9 { kl + p_rest * (p_rest / q_rest).ln() } else { kl }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold(0, |best, (i, v)| if *v > logits[best] { i } else { best });
    best as u32
}

#[test]
fn teacher_forced_text_has_the_reference_distribution() {
    for (file, stem) in MODELS {
        let bytes = std::fs::read(fixture(&format!("real-models/{stem}.teacher.safetensors"))).unwrap();
        let ids: Vec<u32> = tensor_i32(&bytes, "ids").iter().map(|&id| id as u32).collect();
        let (best, reference) = (tensor_i32(&bytes, "top_ids"), tensor_f32(&bytes, "top_logprobs"));
        // The xmx family without an engine would take a quarter of an hour.
        for &products in units() {
            let mut model = open_by(products, &real_model(file), ids.len(), 128, CacheKind::F16);
            let (mut total, mut agreed) = (0.0, 0);
            for (part, tokens) in ids.chunks(128).enumerate() {
                model.forward(tokens, part * 128, Logits::All).unwrap();
                for row in 0..tokens.len() {
                    let at = (part * 128 + row) * TOP;
                    model
                        .with_logits(row, |logits| {
                            total += divergence(
                                &best[at..at + TOP],
                                &reference[at..at + TOP],
                                &log_probabilities(logits),
                            );
                            agreed += usize::from(argmax(logits) == best[at] as u32);
                        })
                        .unwrap();
                }
            }
            let (kl, top1) = (total / ids.len() as f64, agreed as f64 / ids.len() as f64);
            let products = model.products();
            println!(
                "{stem} by {products:?}: mean KL {kl:.2e}, top-1 agreement {top1:.4} over {} tokens",
                ids.len()
            );
            assert!(kl <= 1e-4, "{stem}: mean KL {kl}");
            assert!(top1 >= 0.995, "{stem}: top-1 agreement {top1}");
        }
    }
}

/// Greedy tokens after a prompt.
fn greedy(model: &mut Causal, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut start = 0;
    for part in prompt.chunks(model.rows()) {
        model.forward(part, start, Logits::Last).unwrap();
        start += part.len();
    }
    loop {
        tokens.push(model.with_logits(0, argmax).unwrap());
        if tokens.len() == count {
            return tokens;
        }
        model.forward(&tokens[tokens.len() - 1..], start, Logits::Last).unwrap();
        start += 1;
    }
}

#[test]
fn greedy_text_is_the_references() {
    for (file, stem) in MODELS {
        let golden = std::fs::read(fixture(&format!("real-models/{stem}.greedy.json"))).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&golden).unwrap();
        let mut model = open_model(&real_model(file), 1024, 128, CacheKind::F16);
        for case in golden.as_array().unwrap() {
            let ids = |key: &str| -> Vec<u32> {
                case[key].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
            };
            let (prompt, expected) = (ids("prompt_ids"), ids("tokens"));
            let found = greedy(&mut model, &prompt, expected.len());
            let Some(at) = (0..expected.len()).find(|&i| found[i] != expected[i]) else { continue };
            let gap = case["gaps"][at].as_f64().unwrap();
            println!(
                "{stem}: {:?} leaves the reference at token {at}: {} for {}, where the reference's own gap is {gap}",
                case["text"]
                    .as_str()
                    .unwrap_or_default()
                    .chars()
                    .rev()
                    .take(40)
                    .collect::<Vec<_>>()
                    .iter()
                    .rev()
                    .collect::<String>(),
                found[at],
                expected[at]
            );
            assert!(gap < 1e-2, "{stem}: token {at} differs where the reference's gap is {gap}");
        }
    }
}

#[test]
fn logits_do_not_depend_on_the_width_of_a_pass() {
    for (file, stem) in MODELS {
        let bytes = std::fs::read(fixture(&format!("real-models/{stem}.teacher.safetensors"))).unwrap();
        let ids: Vec<u32> = tensor_i32(&bytes, "ids").iter().take(64).map(|&id| id as u32).collect();
        let mut model = open_model(&real_model(file), 64, 64, CacheKind::F16);
        let mut run = |widths: &[usize]| -> Vec<u32> {
            let mut bits = Vec::new();
            let mut start = 0;
            for &width in widths {
                model.forward(&ids[start..start + width], start, Logits::All).unwrap();
                for row in 0..width {
                    model.with_logits(row, |logits| bits.extend(logits.iter().map(|v| v.to_bits()))).unwrap();
                }
                start += width;
            }
            bits
        };
        let one_by_one = run(&[1; 64]);
        for widths in [&[8; 8][..], &[16; 4], &[64], &[63, 1], &[5, 59], &[2, 3, 11, 31, 17]] {
            assert!(run(widths) == one_by_one, "{stem}: widths {widths:?} give other bits than one by one");
        }
    }
}
