//! What files of the families may have besides what the tiny models have, against the plain reference: every way to stretch
//! rotary embeddings, dense Gemma 4, networks of different widths.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;
#[path = "support/edited_gguf.rs"]
mod edited_gguf;
#[allow(dead_code, reason = "shared with the tests of windows")]
#[path = "support/reference_model.rs"]
mod reference_model;
mod support;

use axe::model::Logits;
use axe::ops::CacheKind;
use edited_gguf::{Edited, Tensor};
use reference_model::ReferenceModel;
use support::{fixture, open_model};

/// Tokens of each text: more than a window, and enough for slow pairs to turn.
const TOKENS: usize = 40;

fn edited(name: &str) -> Edited {
    Edited::of(&fixture(&format!("causal-families/{name}.gguf")))
}

/// Logits of the last positions by program and reference, in a context of so many positions; they must agree.
fn check(what: &str, model: &Edited, context: usize) -> Vec<f32> {
    let (_dir, path) = model.save();
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| 3 + (i * 197 + i * i * 31) % 500).collect();
    let expected = ReferenceModel::open(&path).in_context(context).logits(&ids);
    let mut model = open_model(&path, context, TOKENS, CacheKind::F32);
    model.forward(&ids[..17], 0, Logits::None).unwrap();
    model.forward(&ids[17..], 17, Logits::All).unwrap();
    let mut all = Vec::new();
    for (row, expected) in expected[17..].iter().enumerate() {
        let found = model.with_logits(row, <[f32]>::to_vec).unwrap();
        let off =
            found.iter().zip(expected).fold(0.0, |off, (&f, e)| f64::max(off, (f64::from(f) - e).abs()));
        assert!(off <= 1e-4, "{what}: position {}: logits differ by {off}", 17 + row);
        all.extend(found);
    }
    all
}

fn differ(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-2)
}

#[test]
fn positions_are_divided_by_a_linear_factor() {
    let plain = check("plain", &edited("llama"), 64);
    let linear =
        edited("llama").text("llama.rope.scaling.type", "linear").number("llama.rope.scaling.factor", 4.0);
    assert!(differ(&plain, &check("linear", &linear, 64)));
    // In Gemma 3 only layers that see everything are stretched.
    let gemma =
        edited("gemma3").text("gemma3.rope.scaling.type", "linear").number("gemma3.rope.scaling.factor", 8.0);
    check("gemma3, linear", &gemma, 64);
}

#[test]
fn yarn_mixes_by_turns_and_strengthens() {
    for (name, original) in [("llama", 256), ("qwen2", 32), ("qwen3", 1024)] {
        let key = |part: &str| format!("{name}.rope.scaling.{part}");
        let yarn = edited(name)
            .text(&key("type"), "yarn")
            .number(&key("factor"), 4.0)
            .count(&key("original_context_length"), original);
        assert!(differ(&check(name, &edited(name), 64), &check(&format!("{name}, yarn"), &yarn, 64)));
    }
}

#[test]
fn long_contexts_turn_by_the_long_factors() {
    let pairs = 8;
    let long: Vec<f32> = (0..pairs).map(|i| 1.0 + i as f32 * 1.5).collect();
    let short: Vec<f32> = (0..pairs).map(|i| 1.0 + i as f32 * 0.1).collect();
    let model = edited("qwen2")
        .tensor("rope_factors_long.weight", &[pairs as u64], long)
        .tensor("rope_factors_short.weight", &[pairs as u64], short)
        .number("qwen2.rope.scaling.attn_factor", 1.19)
        .count("qwen2.rope.scaling.original_context_length", 64);
    let in_short = check("short factors", &model, 64);
    let in_long = check("long factors", &model, 65);
    assert!(differ(&in_short, &in_long));
    let named = model.text("qwen2.rope.scaling.type", "longrope");
    assert_eq!(check("short factors by name", &named, 64), in_short);
}

#[test]
fn parts_of_heads_turn_alone() {
    for name in ["llama", "qwen3"] {
        let partial = edited(name).count(&format!("{name}.rope.dimension_count"), 8);
        assert!(differ(&check(name, &edited(name), 64), &check(&format!("{name}, partial"), &partial, 64)));
    }
    // Halves with divisors of their own.
    let divisors: Vec<f32> = (0..16).map(|i| 1.0 + i as f32).collect();
    check("qwen3, divided", &edited("qwen3").tensor("rope_freqs.weight", &[16], divisors), 64);
}

/// Gemma 4 without experts, as the dense model is: raw keys are the values of layers that see everything.
#[test]
fn gemma_4_may_be_dense() {
    let dense = edited("gemma4")
        .without("_exps")
        .without("ffn_gate_inp")
        .without("pre_ffw_norm_2")
        .without("post_ffw_norm_1")
        .without("post_ffw_norm_2")
        .without_key("gemma4.expert_count")
        .without_key("gemma4.expert_used_count")
        .without_key("gemma4.expert_feed_forward_length");
    check("gemma4, dense", &dense, 64);
}

/// The first `rows` of each of `count` matrices.
fn first_rows(tensor: &Tensor, rows: usize, skip: usize) -> Tensor {
    let [columns, all] = [0, 1].map(|i| tensor.shape[i] as usize);
    let values = tensor.values.chunks_exact(columns * all);
    let values = values.flat_map(|matrix| matrix[skip * columns..][..rows * columns].to_vec()).collect();
    let mut shape = tensor.shape.clone();
    shape[1] = rows as u64;
    Tensor { shape, values }
}

#[test]
fn gates_and_ups_of_experts_may_lie_apart() {
    let together = edited("gemma4");
    let mut apart = together.clone().without("ffn_gate_up_exps");
    for layer in 0..4 {
        let both = together.get(&format!("blk.{layer}.ffn_gate_up_exps.weight"));
        for (part, skip) in [("ffn_gate_exps", 0), ("ffn_up_exps", 32)] {
            let Tensor { shape, values } = first_rows(both, 32, skip);
            apart = apart.tensor(&format!("blk.{layer}.{part}.weight"), &shape, values);
        }
    }
    let logits = |model: &Edited| {
        let (_dir, path) = model.save();
        let mut model = open_model(&path, 16, 16, CacheKind::F32);
        model.forward(&[5, 6, 7, 8], 0, Logits::Last).unwrap();
        model.with_logits(0, <[f32]>::to_vec).unwrap()
    };
    assert_eq!(logits(&together), logits(&apart));
}

#[test]
fn layers_may_have_networks_of_different_widths() {
    let mut model = edited("gemma4e").counts("gemma4.feed_forward_length", &[128, 96, 128, 48, 128, 48]);
    for (layer, inner) in [(1, 96), (3, 48), (5, 48)] {
        for part in ["ffn_gate", "ffn_up"] {
            let name = format!("blk.{layer}.{part}.weight");
            let Tensor { shape, values } = first_rows(model.get(&name), inner, 0);
            model = model.tensor(&name, &shape, values);
        }
        let name = format!("blk.{layer}.ffn_down.weight");
        let values =
            model.get(&name).values.chunks_exact(128).flat_map(|row| row[..inner].to_vec()).collect();
        model = model.tensor(&name, &[inner as u64, 64], values);
    }
    check("gemma4e, widths", &model, 64);
}

/// Training keeps matrices of keys and values that nothing reads.
#[test]
fn what_layers_with_a_shared_cache_do_not_need_is_passed_over() {
    let plain = edited("gemma4e");
    let key = plain.get("blk.0.attn_k.weight").clone();
    let norm = plain.get("blk.0.attn_k_norm.weight").clone();
    let with = plain
        .clone()
        .tensor("blk.3.attn_k.weight", &key.shape, key.values.clone())
        .tensor("blk.3.attn_v.weight", &key.shape, key.values)
        .tensor("blk.3.attn_k_norm.weight", &norm.shape, norm.values);
    assert_eq!(check("gemma4e", &plain, 64), check("gemma4e with more", &with, 64));
}

#[test]
fn deepseek_v2_chooses_by_softmax_and_groups_by_their_best() {
    let v2 = edited("deepseek2")
        .without("exp_probs_b")
        .without_key("deepseek2.expert_weights_norm")
        .count("deepseek2.expert_gating_func", 1)
        .number("deepseek2.expert_weights_scale", 4.0);
    let first = check("deepseek2, softmax", &v2, 64);
    let whole = v2
        .clone()
        .without_key("deepseek2.expert_gating_func")
        .without_key("deepseek2.expert_group_count")
        .without_key("deepseek2.expert_group_used_count");
    assert!(differ(&first, &check("deepseek2, softmax of all", &whole, 64)));
    let none_shared = whole.without("_shexp").without_key("deepseek2.expert_shared_count");
    check("deepseek2, none shared", &none_shared, 64);
}

#[test]
fn deepseek_may_make_queries_out_of_the_stream() {
    let with = edited("deepseek2");
    let mut lite =
        with.clone().without("attn_q_a").without("attn_q_b").without_key("deepseek2.attention.q_lora_rank");
    for layer in 0..4 {
        // Any numbers of the right size will do.
        let values = with.get("output.weight").values[layer * 8192..][..64 * 128].to_vec();
        lite = lite.tensor(&format!("blk.{layer}.attn_q.weight"), &[64, 128], values);
    }
    assert!(differ(&check("deepseek2", &with, 64), &check("deepseek2, no latent of queries", &lite, 64)));
}

#[test]
fn yarn_makes_scores_over_latents_steeper() {
    let key = |part: &str| format!("deepseek2.rope.scaling.{part}");
    let yarn = edited("deepseek2")
        .text(&key("type"), "yarn")
        .number(&key("factor"), 40.0)
        .count(&key("original_context_length"), 64);
    let steeper = yarn.clone().number(&key("yarn_log_multiplier"), 0.1);
    let plain = check("deepseek2, yarn without multiplier", &yarn, 64);
    assert!(differ(&plain, &check("deepseek2, yarn", &steeper, 64)));
}
