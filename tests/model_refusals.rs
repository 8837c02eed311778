//! Keys and tensors that the forward pass has no use for keep a model from loading: each by name, with its value.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;
#[path = "support/edited_gguf.rs"]
mod edited_gguf;
#[allow(dead_code, reason = "shared with the tests of windows")]
#[path = "support/reference_model.rs"]
mod reference_model;
mod support;

use std::path::PathBuf;
use std::sync::Arc;

use axe::checkpoint::gguf::Gguf;
use axe::model::{Causal, CausalConfig, LoadOptions, Logits, Scaling};
use axe::ops::{CacheKind, Products};
use checkpoint_support::{BOOL, Bytes, F32, STRING, U32};
use edited_gguf::Edited;
use reference_model::ReferenceModel;
use support::{device, fixture, open_model};
use tempfile::TempDir;

/// A copy of a fixture with one more key.
fn with_key(name: &str, key: Bytes) -> (TempDir, PathBuf) {
    const KEYS: usize = 16; // after magic, version and the number of tensors
    let mut bytes = std::fs::read(fixture(name)).unwrap();
    let count = u64::from_le_bytes(bytes[KEYS..KEYS + 8].try_into().unwrap());
    bytes[KEYS..KEYS + 8].copy_from_slice(&(count + 2).to_le_bytes());
    // Tensors stay aligned when what comes before them grows by whole steps.
    let filler = |length: usize| key.clone().key("general.filler", STRING).string(&"x".repeat(length));
    let length = (0..32).find(|&length| filler(length).0.len() % 32 == 0).unwrap();
    bytes.splice(KEYS + 8..KEYS + 8, filler(length).0);
    Bytes(bytes).save()
}

fn read(name: &str, key: Bytes) -> Result<CausalConfig, String> {
    let (_dir, path) = with_key(name, key);
    CausalConfig::read(&Gguf::open(&path).unwrap()).map_err(|error| error.to_string())
}

const LLAMA: &str = "causal-families/llama.gguf";
const GEMMA3: &str = "causal-families/gemma3.gguf";

fn number(name: &str, value: f32) -> Bytes {
    Bytes::default().key(name, F32).raw(&value.to_le_bytes())
}

fn truth(name: &str, value: bool) -> Bytes {
    Bytes::default().key(name, BOOL).raw(&[u8::from(value)])
}

fn count(name: &str, value: u32) -> Bytes {
    Bytes::default().key(name, U32).u32(value)
}

fn truths(name: &str, values: &[bool]) -> Bytes {
    let bytes: Vec<u8> = values.iter().map(|&value| u8::from(value)).collect();
    Bytes::default().array(name, BOOL, values.len() as u64).raw(&bytes)
}

#[test]
fn keys_that_ask_for_what_is_not_done_are_refused_with_their_value() {
    let text = |name: &str, value: &str| Bytes::default().key(name, STRING).string(value);
    let cases = [
        (LLAMA, number("llama.rope.scale_linear", 2.0), "llama.rope.scale_linear is the f32 2.0"),
        (LLAMA, number("llama.rope.scaling.attn_factor", 1.5), "attn_factor is the f32 1.5"),
        (LLAMA, truth("llama.attention.causal", false), "llama.attention.causal is the bool false"),
        (LLAMA, number("llama.attention.scale", 0.5), "llama.attention.scale is the f32 0.5"),
        (LLAMA, number("llama.logit_scale", 8.0), "llama.logit_scale is the f32 8.0"),
        (LLAMA, number("llama.embedding_scale", 12.0), "llama.embedding_scale is the f32 12.0"),
        (LLAMA, number("llama.residual_scale", 0.2), "llama.residual_scale is the f32 0.2"),
        (LLAMA, number("llama.attention.clamp_kqv", 8.0), "clamp_kqv is the f32 8.0"),
        (LLAMA, number("llama.attention.max_alibi_bias", 8.0), "max_alibi_bias is the f32 8.0"),
        (LLAMA, count("llama.expert_count", 8), "llama.expert_count is the u32 8"),
        (LLAMA, count("llama.expert_used_count", 2), "llama.expert_used_count is the u32 2"),
        (GEMMA3, number("gemma3.final_logit_softcapping", 30.0), "softcapping is the f32 30.0"),
        (GEMMA3, text("gemma3.attn_logit_softcapping", "50"), "softcapping is the string `50`"),
        (LLAMA, text("llama.new.trick", "yes"), "llama.new.trick is the string `yes`"),
        (LLAMA, text("llama.rope.scaling.type", "dynamic"), "llama.rope.scaling.type is `dynamic`"),
        (LLAMA, text("llama.rope.scaling.type", "\x1b[2J"), "llama.rope.scaling.type is `\\u{1b}[2J`"),
        (LLAMA, text("llama.rope.scaling.type", "yarn"), "key `llama.rope.scaling.factor` is missing"),
        (
            LLAMA,
            text("llama.rope.scaling.type", "longrope"),
            "rope_factors_long.weight and rope_factors_short",
        ),
        (LLAMA, number("llama.rope.scaling.factor", f32::NAN), "llama.rope.scaling.factor is NaN"),
        (LLAMA, count("llama.attention.sliding_window_pattern", 6), "sliding_window_pattern is the u32 6"),
        (GEMMA3, count("gemma3.vocab_size", 511), "token_embd.weight has 512 rows"),
        (GEMMA3, truths("gemma3.attention.sliding_window_pattern", &[true, true]), "for each of 7 layers"),
    ];
    for (name, key, expected) in cases {
        let error = read(name, key).expect_err(expected);
        assert!(error.contains(expected) && error.contains("model.gguf: "), "{expected}: {error}");
    }
}

/// As little as can be asked for.
fn small() -> LoadOptions {
    LoadOptions {
        context: 16,
        rows: 4,
        logit_rows: 1,
        cache: CacheKind::F32,
        cache_dir: None,
        join: false,
        products: Products::MatrixUnit,
    }
}

/// Why a changed tiny model is not loaded.
fn refusal(model: &Edited) -> String {
    let (_dir, path) = model.save();
    let gguf = Gguf::open(&path).unwrap();
    let error = Causal::plan(&gguf, &small()).expect_err("the model is refused");
    error.to_string()
}

#[test]
fn what_a_family_needs_is_missed_by_name() {
    let edited = |name: &str| Edited::of(&fixture(&format!("causal-families/{name}.gguf")));
    let (gemma2, gemma4, gemma4e) = (edited("gemma2"), edited("gemma4"), edited("gemma4e"));
    let bias = vec![0.0; 64];
    let divisors = |last: f32| (0..16).map(|i| if i < 3 { 1.0 } else { last }).collect::<Vec<f32>>();
    let choice_bias = |value: f32| {
        let values = (0..8).map(|i| if i == 5 { value } else { 0.0 }).collect();
        edited("deepseek2").tensor("blk.2.exp_probs_b.bias", &[8], values)
    };
    let cases = [
        (
            gemma2.clone().without_key("gemma2.attn_logit_softcapping"),
            "`gemma2.attn_logit_softcapping` is missing",
        ),
        (
            gemma2.clone().without_key("gemma2.final_logit_softcapping"),
            "`gemma2.final_logit_softcapping` is missing",
        ),
        (gemma2.clone().without_key("gemma2.attention.sliding_window"), "gemma2.attention.sliding_window"),
        (gemma2.clone().number("gemma2.final_logit_softcapping", 0.0), "gemma2.final_logit_softcapping is 0"),
        (gemma2.number("gemma2.rope.freq_base_swa", 5e4), "gemma2.rope.freq_base_swa is the f32 50000"),
        (edited("gemma3").without("ffn_norm"), "blk.0.ffn_norm.weight"),
        (edited("qwen2").without("blk.1.attn_k.bias"), "blk.1.attn_k.bias"),
        (edited("qwen2").without_key("qwen2.rope.freq_base"), "`qwen2.rope.freq_base` is missing"),
        (
            edited("qwen2").count("qwen2.attention.sliding_window", 16),
            "qwen2.attention.sliding_window is the u32 16",
        ),
        (
            edited("qwen3").tensor("blk.2.attn_q.bias", &[64], bias.clone()),
            "no use for the tensors blk.2.attn_q.bias",
        ),
        (
            edited("llama").tensor("blk.2.attn_q.bias", &[64], bias),
            "no use for the tensors blk.2.attn_q.bias",
        ),
        (edited("qwen3").without("blk.3.attn_q_norm"), "blk.3.attn_q_norm.weight"),
        (edited("qwen3").count("qwen3.attention.value_length", 16), "qwen3.attention.value_length is 16"),
        (edited("qwen3").count("qwen3.rope.dimension_count", 7), "qwen3.rope.dimension_count is 7"),
        (edited("llama").number("llama.rope.scaling.yarn_ext_factor", 0.5), "yarn_ext_factor is the f32 0.5"),
        (
            edited("llama3").tensor("rope_freqs.weight", &[8], vec![0.0; 8]),
            "rope_freqs.weight divides frequency 0 by 0",
        ),
        (gemma4.clone().without("rope_freqs"), "rope_freqs.weight"),
        (gemma4.clone().tensor("rope_freqs.weight", &[16], divisors(-1.0)), "divides frequency 3 by -1"),
        (gemma4.clone().without("blk.1.attn_v"), "blk.1.attn_v.weight"),
        (gemma4.clone().without("blk.2.post_ffw_norm_1"), "blk.2.post_ffw_norm_1.weight"),
        (gemma4.clone().count("gemma4.expert_used_count", 9), "gemma4.expert_used_count is 9"),
        (gemma4.clone().count("gemma4.expert_count", 7), "blk.0.ffn_gate_up_exps.weight"),
        (
            gemma4.clone().without_key("gemma4.expert_count"),
            "gemma4.expert_feed_forward_length is the u32 32",
        ),
        (
            gemma4.clone().without_key("gemma4.attention.key_length_swa"),
            "`gemma4.attention.key_length_swa` is missing",
        ),
        (
            gemma4.clone().count("gemma4.attention.value_length_swa", 32),
            "value_length_swa is 32, keys have 16",
        ),
        (
            gemma4.clone().counts("gemma4.attention.head_count_kv", &[2, 2, 3, 1]),
            "cannot share 3 key-value heads",
        ),
        (gemma4.clone().counts("gemma4.attention.head_count_kv", &[2, 2, 1]), "for each of 4 layers"),
        (
            gemma4.clone().tensor("blk.0.layer_output_scale.weight", &[1], vec![f32::NAN]),
            "layer_output_scale.weight is NaN",
        ),
        (gemma4.count("gemma4.embedding_length_per_layer_input", 16), "per_layer_token_embd.weight"),
        (gemma4e.clone().count("gemma4.embedding_length_per_layer_input", 17), "per_layer_input is 17"),
        (gemma4e.clone().count("gemma4.embedding_length_per_layer_input", 0), "no use for the tensors"),
        (
            gemma4e.clone().count("gemma4.attention.shared_kv_layers", 4),
            "shared_kv_layers is 4; of the 2 layers",
        ),
        (
            gemma4e.clone().count("gemma4.attention.shared_kv_layers", 6),
            "shared_kv_layers is 6; of the 0 layers",
        ),
        (
            gemma4e.clone().counts("gemma4.attention.head_count_kv", &[2, 2, 2, 2, 2, 1]),
            "gemma4.attention.head_count_kv is 1 for layer 5, which looks at the keys and values of layer 2, and 2",
        ),
        (gemma4e.count("gemma4.attention.shared_kv_layers", 2), "blk.3.attn_k.weight"),
        (edited("mistral").count("llama.attention.shared_kv_layers", 2), "shared_kv_layers is the u32 2"),
        (edited("qwen3moe").count("qwen3moe.expert_used_count", 9), "expert_used_count is 9"),
        (edited("qwen3moe").without_key("qwen3moe.expert_count"), "`qwen3moe.expert_count` is missing"),
        (edited("qwen3moe").without("blk.2.ffn_gate_inp"), "blk.2.ffn_gate_inp.weight"),
        (edited("deepseek2").count("deepseek2.expert_gating_func", 3), "expert_gating_func is 3"),
        (edited("deepseek2").count("deepseek2.expert_group_count", 3), "cannot come from 1 of 3 groups"),
        (edited("deepseek2").count("deepseek2.attention.kv_lora_rank", 24), "multiples of 16"),
        (
            edited("deepseek2").count("deepseek2.attention.kv_lora_rank", 2048),
            "kv_lora_rank is 2048; expected 1",
        ),
        (edited("deepseek2").count("deepseek2.attention.kv_lora_rank", 1024), "1024, and 16 values turn"),
        (edited("qwen3").count("qwen3.attention.key_length", 2048), "key_length is 2048; expected 1 to 1024"),
        (
            edited("qwen3")
                .without_key("qwen3.attention.key_length")
                .count("qwen3.embedding_length", 1 << 14),
            "a head size of 4096; multiples of 16 up to 1024",
        ),
        (choice_bias(f32::NAN), "value 5 of blk.2.exp_probs_b.bias is NaN"),
        (choice_bias(f32::INFINITY), "value 5 of blk.2.exp_probs_b.bias is inf"),
        (edited("deepseek2").without("blk.1.attn_v_b"), "blk.1.attn_v_b.weight"),
        (edited("deepseek2").number("deepseek2.expert_weights_scale", -1.0), "expert_weights_scale is -1"),
        (edited("llama").count("llama.context_length", 1), "llama.context_length is 1; expected at least 2"),
    ];
    for (model, expected) in cases {
        let error = refusal(&model);
        assert!(error.contains(expected) && error.contains("model.gguf"), "{expected}: {error}");
    }
}

#[test]
fn keys_that_ask_for_nothing_or_are_understood_are_taken() {
    let plain = read(LLAMA, truth("llama.attention.causal", true)).unwrap();
    for key in [
        number("llama.rope.scale_linear", 1.0),
        number("llama.final_logit_softcapping", 0.0),
        count("llama.expert_count", 0),
        count("llama.rope.scaling.original_context_length", 512),
        truth("llama.rope.scaling.finetuned", true),
        number("llama.rope.scaling.factor", 1.0),
        count("llama.attention.sliding_window", 0),
        number("other.logit_scale", 3.0),
    ] {
        assert_eq!(read(LLAMA, key).unwrap(), plain);
    }
    // A factor alone is linear.
    let scaled = read(LLAMA, number("llama.rope.scaling.factor", 4.0)).unwrap();
    assert_eq!(scaled.ropes[0].scaling, Scaling::Linear { factor: 4.0 });

    let sees_all = |key: Bytes| -> Vec<bool> {
        read(GEMMA3, key).unwrap().layers.iter().map(|layer| layer.window.is_none()).collect()
    };
    let every = |n: usize| -> Vec<bool> { (1..=7).map(|number| number % n == 0).collect() };
    let pattern = "gemma3.attention.sliding_window_pattern";
    assert_eq!(sees_all(count("gemma3.expert_count", 0)), every(6));
    assert_eq!(sees_all(count(pattern, 3)), every(3));
    assert_eq!(sees_all(count(pattern, 0)), [false; 7]);
    assert_eq!(sees_all(truths(pattern, &[true, true, false, true, true, false, true])), every(3));
    assert_eq!(sees_all(truths(pattern, &[true; 7])), [false; 7]);
    let uneven = [true, false, false, true, true, true, false];
    assert_eq!(sees_all(truths(pattern, &uneven)), uneven.map(|slides| !slides));
}

#[test]
fn a_window_of_a_model_without_alternating_layers_holds_in_all_of_them() {
    let (_dir, path) = with_key(LLAMA, count("llama.attention.sliding_window", 5));
    let ids: Vec<u32> = (0..40).map(|i| 3 + (i * 197 + i * i * 31) % 500).collect();
    let expected = ReferenceModel::open(&path).logits(&ids);
    let mut model = open_model(&path, ids.len(), ids.len(), CacheKind::F32);
    model.forward(&ids, 0, Logits::All).unwrap();
    for (position, expected) in expected.iter().enumerate() {
        let found = model.with_logits(position, <[f32]>::to_vec).unwrap();
        let off =
            found.iter().zip(expected).fold(0.0, |off, (&f, e)| f64::max(off, (f64::from(f) - e).abs()));
        assert!(off <= 1e-4, "position {position}: logits differ by {off}");
    }
}

#[test]
fn tensors_without_use_are_refused_by_name() {
    // A model that says it has one layer less than it has.
    let mut bytes = std::fs::read(fixture(LLAMA)).unwrap();
    let key = Bytes::default().key("llama.block_count", U32).0;
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    bytes[at..at + 4].copy_from_slice(&3u32.to_le_bytes());
    let (_dir, path) = Bytes(bytes).save();
    let gguf = Arc::new(Gguf::open(&path).unwrap());
    let error = Causal::load(device(), gguf, &small(), &mut |_| {}).err().expect("the model is refused");
    let error = error.to_string();
    assert!(
        error.contains("model.gguf: ") && error.contains("blk.3.") && error.contains(" and 5 more"),
        "{error}"
    );
}
