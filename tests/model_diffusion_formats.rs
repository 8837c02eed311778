//! One model from all of its file formats: the same numbers to the bit where the weights are the same, and near as far as
//! the weights are near.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;
mod safetensors_support;
mod support;

use std::path::{Path, PathBuf};

use axe::checkpoint::w4::convert::{ConvertOptions, convert};
use axe::decode::diffusion::{DenoisingRules, manifest_entry};
use axe::decode::{Backend, DiffusionBackend, Sampling, Step};
use axe::model::diffusion_gemma::{
    DiffusionCheckpoint, DiffusionConfig, DiffusionGemma, DiffusionOptions, ExpertWeights,
};
use axe::ops::CacheKind;
use checkpoint_support::{ARRAY, BOOL, Bytes, F32, I32, STRING, U32};
use half::{bf16, f16};
use safetensors_support::{Raw, Tensors, numbers, tiny};
use serde_json::Value;
use support::{cache_dir, device, fixture};

const CANVAS: usize = 32;

fn open(path: &Path, experts: ExpertWeights) -> DiffusionGemma {
    let checkpoint = DiffusionCheckpoint::open(path).unwrap();
    let options = DiffusionOptions {
        rows: 64,
        cache: CacheKind::F32,
        cache_dir: Some(cache_dir()),
        experts,
        ..DiffusionOptions::new(256)
    };
    DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {}).unwrap()
}

/// How a matrix is written.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    F32,
    Bf16,
    Q8,
}

impl Kind {
    fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::Bf16 => 30,
            Self::Q8 => 8,
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
            Self::Q8 => values
                .chunks_exact(32)
                .flat_map(|block| {
                    let most = block.iter().fold(0f32, |most, value| most.max(value.abs()));
                    let scale = f16::from_f32(most / 127.0);
                    let code = |value: &f32| (value / scale.to_f32()).round().clamp(-127.0, 127.0) as i8;
                    let codes = block.iter().map(move |value| if most > 0.0 { code(value) as u8 } else { 0 });
                    scale.to_le_bytes().into_iter().chain(codes).collect::<Vec<u8>>()
                })
                .collect(),
        }
    }
}

/// A tensor's name in GGUF files.
fn gguf_name(name: &str) -> Option<String> {
    const LAYER: [(&str, &str); 22] = [
        ("input_layernorm.weight", "attn_norm.weight"),
        ("self_attn.q_proj.weight", "attn_q.weight"),
        ("self_attn.k_proj.weight", "attn_k.weight"),
        ("self_attn.v_proj.weight", "attn_v.weight"),
        ("self_attn.o_proj.weight", "attn_output.weight"),
        ("self_attn.q_norm.weight", "attn_q_norm.weight"),
        ("self_attn.k_norm.weight", "attn_k_norm.weight"),
        ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
        ("mlp.gate_proj.weight", "ffn_gate.weight"),
        ("mlp.up_proj.weight", "ffn_up.weight"),
        ("mlp.down_proj.weight", "ffn_down.weight"),
        ("post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight"),
        ("pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight"),
        ("post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight"),
        ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
        ("router.proj.weight", "ffn_gate_inp.weight"),
        ("router.scale", "ffn_gate_inp.scale"),
        ("router.per_expert_scale", "ffn_down_exps.scale"),
        ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("experts.down_proj", "ffn_down_exps.weight"),
        ("layer_scalar", "layer_output_scale.weight"),
    ];
    if let Some(rest) = name.strip_prefix("model.encoder.language_model.layers.") {
        let (layer, part) = rest.split_once('.').unwrap();
        assert_eq!(part, "layer_scalar");
        return Some(format!("blk.{layer}.enc_layer_output_scale.weight"));
    }
    let name = name.strip_prefix("model.decoder.")?;
    if let Some(rest) = name.strip_prefix("layers.") {
        let (layer, part) = rest.split_once('.').unwrap();
        let (_, part) = LAYER.iter().find(|(hugging_face, _)| *hugging_face == part).unwrap();
        return Some(format!("blk.{layer}.{part}"));
    }
    if let Some(part) = name.strip_prefix("self_conditioning.") {
        return Some(format!("self_cond_{}", part.replace("_proj", "")));
    }
    Some(match name {
        "embed_tokens.weight" => "token_embd.weight".to_owned(),
        "norm.weight" => "output_norm.weight".to_owned(),
        other => panic!("{other}"),
    })
}

/// The miniature as a GGUF, its matrices of this kind.
fn gguf(path: &Path, tensors: &Tensors, config: &DiffusionConfig, kind: Kind) {
    mixed_gguf(path, tensors, config, |_| kind);
}

/// The miniature as a GGUF, each matrix of the kind that goes with its name.
fn mixed_gguf(path: &Path, tensors: &Tensors, config: &DiffusionConfig, kind: impl Fn(&str) -> Kind) {
    let own = |name: &str| format!("diffusion-gemma.{name}");
    let count = |name: String, value: usize| Bytes::default().key(&name, U32).u32(value as u32);
    let number = |name: String, value: f32| Bytes::default().key(&name, F32).raw(&value.to_le_bytes());
    let list = |name: String, ty: u32, bytes: Vec<u8>| {
        Bytes::default().key(&name, ARRAY).u32(ty).u64(config.layers.len() as u64).raw(&bytes)
    };
    let (sliding, full) = (&config.layers[0], &config.layers[1]);
    let kv = config.layers.iter().flat_map(|layer| (layer.kv_heads as i32).to_le_bytes()).collect();
    let slides = config.layers.iter().map(|layer| u8::from(layer.sliding)).collect();
    let keys = [
        Bytes::default().key("general.architecture", STRING).string("diffusion-gemma"),
        count(own("block_count"), config.layers.len()),
        count(own("context_length"), config.context),
        count(own("embedding_length"), config.hidden),
        count(own("feed_forward_length"), config.feed_forward),
        count(own("expert_feed_forward_length"), config.expert_feed_forward),
        count(own("expert_count"), config.experts),
        count(own("expert_used_count"), config.experts_used),
        count(own("attention.head_count"), config.heads),
        list(own("attention.head_count_kv"), I32, kv),
        count(own("attention.key_length"), full.head_size),
        count(own("attention.value_length"), full.head_size),
        count(own("attention.key_length_swa"), sliding.head_size),
        count(own("attention.value_length_swa"), sliding.head_size),
        count(own("attention.sliding_window"), config.window),
        list(own("attention.sliding_window_pattern"), BOOL, slides),
        number(own("attention.layer_norm_rms_epsilon"), config.epsilon),
        number(own("final_logit_softcapping"), config.softcap),
        number(own("rope.freq_base"), full.rope.base),
        number(own("rope.freq_base_swa"), sliding.rope.base),
        count("diffusion.canvas_length".to_owned(), config.canvas),
    ];
    let mut written: Vec<(String, Raw)> =
        tensors.iter().filter_map(|(name, raw)| Some((gguf_name(name)?, raw.clone()))).collect();
    let divisor = |pair: usize| if pair < full.rope.pairs { 1f32 } else { 1e30 };
    let divisors = (0..full.head_size / 2).flat_map(|pair| divisor(pair).to_le_bytes()).collect();
    let shape = vec![full.head_size / 2];
    written.push(("rope_freqs.weight".to_owned(), Raw { dtype: "F32", shape, bytes: divisors }));
    let mut file = Bytes::header(3, written.len() as u64, keys.len() as u64);
    for key in &keys {
        file = file.raw(&key.0);
    }
    let mut data = Vec::new();
    for (name, raw) in &written {
        // Vectors and the router stay as they are, as converters have it.
        let kind = if raw.shape.len() < 2 || name.contains("ffn_gate_inp") { Kind::F32 } else { kind(name) };
        data.resize(data.len().next_multiple_of(32), 0);
        let shape: Vec<u64> = raw.shape.iter().rev().map(|&n| n as u64).collect();
        file = file.tensor(name, &shape, kind.id(), data.len() as u64);
        data.extend(kind.bytes(&numbers(raw)));
    }
    std::fs::write(path, file.data(32, &data).0).unwrap();
}

fn prompts() -> Vec<(String, Vec<u32>)> {
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(fixture("diffusion-trained/manifest.json")).unwrap()).unwrap();
    ["capital", "months", "sum", "alphabet", "thinking"]
        .iter()
        .map(|name| ((*name).to_owned(), manifest_entry(&manifest, name).unwrap().0))
        .collect()
}

/// The logits of two steps over one canvas behind each prompt.
fn logits(model: &mut DiffusionGemma) -> Vec<Vec<f32>> {
    let canvas: Vec<u32> = (0..CANVAS as u32).map(|row| row * 47 % 1500 + 4).collect();
    prompts()
        .iter()
        .flat_map(|(_, prompt)| {
            model.encode(prompt, 0).unwrap();
            let first = model.canvas_logits(&canvas, prompt.len(), None).unwrap();
            let second = model.canvas_logits(&canvas, prompt.len(), Some(&first)).unwrap();
            [first, second]
        })
        .collect()
}

/// The first canvas of each answer up to its end.
fn answers(model: DiffusionGemma) -> Vec<Vec<u32>> {
    let checkpoint = DiffusionCheckpoint::open(&fixture("tiny-diffusiongemma")).unwrap();
    let config = checkpoint.generation_config().unwrap();
    let ends = config.eos.clone();
    let mut backend = DiffusionBackend::new(model, config, DenoisingRules::default());
    let sampling = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
    prompts()
        .iter()
        .map(|(_, prompt)| {
            let mut generation = backend.start(prompt, &sampling).unwrap();
            loop {
                if let Step::Commit(tokens) = generation.step().unwrap() {
                    let end = tokens.iter().position(|id| ends.contains(id)).unwrap();
                    break tokens[..end].to_vec();
                }
            }
        })
        .collect()
}

/// Largest difference of two sets of logits, and their mean divergence KL(expected || found) in nats a row.
fn differ(found: &[Vec<f32>], expected: &[Vec<f32>]) -> (f32, f64) {
    let (mut largest, mut divergence, mut rows) = (0f32, 0f64, 0usize);
    for (found, expected) in found.iter().zip(expected) {
        let vocabulary = found.len() / CANVAS;
        for (found, expected) in found.chunks_exact(vocabulary).zip(expected.chunks_exact(vocabulary)) {
            let logs = |logits: &[f32]| -> Vec<f64> {
                let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                logits.iter().map(|&logit| f64::from(logit) - total.ln()).collect()
            };
            let (q, p) = (logs(found), logs(expected));
            divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            rows += 1;
            largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(largest, f32::max);
        }
    }
    (largest, divergence / rows as f64)
}

#[test]
fn all_formats_are_one_model() {
    let source = fixture("tiny-diffusiongemma");
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| -> PathBuf { folder.path().join(name) };
    let config = DiffusionCheckpoint::open(&source).unwrap().config().unwrap();
    let tensors = tiny();

    let mut stored = open(&source, ExpertWeights::AsStored);
    let expected = logits(&mut stored);
    let said = answers(stored);
    assert!(said.iter().all(|answer| answer.len() > 2), "{said:?}");

    // The same weights, and the same arithmetic on them.
    gguf(&place("bf16.gguf"), &tensors, &config, Kind::Bf16);
    let checkpoint = DiffusionCheckpoint::open(&place("bf16.gguf")).unwrap();
    assert_eq!(checkpoint.config().unwrap(), config);
    let mut model = open(&place("bf16.gguf"), ExpertWeights::AsStored);
    assert!(logits(&mut model) == expected, "bf16 in a GGUF: {:?}", differ(&logits(&mut model), &expected));
    assert_eq!(answers(model), said);

    // The same weights in another type.
    gguf(&place("f32.gguf"), &tensors, &config, Kind::F32);
    let mut model = open(&place("f32.gguf"), ExpertWeights::AsStored);
    let (largest, divergence) = differ(&logits(&mut model), &expected);
    println!("f32 GGUF: logits within {largest:.1e}, KL {divergence:.1e}");
    assert!(largest <= 1e-4, "f32 in a GGUF: {largest}");
    assert_eq!(answers(model), said);

    // Quantised while it is loaded, or ahead of time: the same to the bit.
    let mut quantised = open(&source, ExpertWeights::Quantised);
    let coarse = logits(&mut quantised);
    convert(&source, &place("w4"), &ConvertOptions::default(), &mut |_| {}).unwrap();
    for experts in [ExpertWeights::AsStored, ExpertWeights::Quantised] {
        let mut converted = open(&place("w4"), experts);
        assert!(logits(&mut converted) == coarse, "{:?}", differ(&logits(&mut converted), &coarse));
    }
    assert_ne!(coarse, expected, "nothing was quantised");
    let (largest, divergence) = differ(&coarse, &expected);
    println!("dg-w4a16-v1: logits within {largest:.2}, KL {divergence:.4}");
    // 4 bits in groups of 64 and 128: each weight is off by up to a thirtieth of its group's range.
    assert!(divergence < 1e-3, "{divergence}");
    assert_eq!(answers(quantised), said, "what the miniature knows, it knows in 4 bits");

    gguf(&place("q8.gguf"), &tensors, &config, Kind::Q8);
    let mut model = open(&place("q8.gguf"), ExpertWeights::AsStored);
    let (largest, fine) = differ(&logits(&mut model), &expected);
    println!("Q8_0 GGUF: logits within {largest:.2}, KL {fine:.6}");
    assert!(
        fine < divergence / 4.0,
        "8 bits of everything are nearer than 4 of the experts: {fine}, {divergence}"
    );
    assert_eq!(answers(model), said);
}

#[test]
fn matrices_that_belong_together_may_be_of_different_types() {
    let source = fixture("tiny-diffusiongemma");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixed.gguf");
    let config = DiffusionCheckpoint::open(&source).unwrap().config().unwrap();
    let tensors = tiny();
    let gate = |name: &str| name.contains("ffn_gate.") || name.contains("self_cond_gate");
    let mut stored = open(&source, ExpertWeights::AsStored);
    let expected = logits(&mut stored);

    // The same weights in two types: gate and up are two matrices, and so are queries and keys.
    let kind = |name: &str| if gate(name) || name.contains("attn_k.") { Kind::F32 } else { Kind::Bf16 };
    mixed_gguf(&path, &tensors, &config, kind);
    let mut model = open(&path, ExpertWeights::AsStored);
    let (largest, divergence) = differ(&logits(&mut model), &expected);
    println!("gate in f32, up in bf16: logits within {largest:.1e}, KL {divergence:.1e}");
    assert!(largest <= 1e-4, "{largest}");

    // One of them rounded.
    mixed_gguf(&path, &tensors, &config, |name| if gate(name) { Kind::Q8 } else { Kind::Bf16 });
    let mut model = open(&path, ExpertWeights::AsStored);
    let (_, rounded) = differ(&logits(&mut model), &expected);
    println!("gate in Q8_0, up in bf16: KL {rounded:.1e}");
    assert!(rounded > 0.0 && rounded < 1e-3, "{rounded}");
}
