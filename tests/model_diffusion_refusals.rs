//! Checkpoints that are not what they must be are refused with file, key and tensor; nothing panics.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;
mod safetensors_support;
mod support;

use std::path::{Path, PathBuf};

use axe::model::diffusion_gemma::{
    DiffusionCheckpoint, DiffusionConfig, DiffusionGemma, DiffusionOptions, ExpertWeights,
};
use checkpoint_support::{Bytes, F32, STRING, U32};
use safetensors_support::{Raw, Tensors, directory, fixture, tiny};
use serde_json::{Value, json};
use support::device;
use tempfile::TempDir;

fn configuration() -> Value {
    serde_json::from_slice(&std::fs::read(fixture("tiny-diffusiongemma/config.json")).unwrap()).unwrap()
}

fn read(config: &Value) -> Result<DiffusionConfig, String> {
    DiffusionConfig::from_json(Path::new("there/config.json"), config).map_err(|error| error.to_string())
}

/// The configuration with a key changed; null removes it. Keys are given by their path.
fn with(key: &str, value: Value) -> Value {
    let mut config = configuration();
    let mut place = &mut config;
    let parts: Vec<&str> = key.split('.').collect();
    let (last, path) = parts.split_last().unwrap();
    for part in path {
        place = &mut place[*part];
    }
    if value.is_null() {
        place.as_object_mut().unwrap().remove(*last).unwrap();
    } else {
        place[*last] = value;
    }
    config
}

#[test]
fn keys_that_are_wrong_are_named() {
    for (key, value, words) in [
        ("model_type", json!("gemma3"), "model_type is \"gemma3\""),
        ("tie_word_embeddings", json!(false), "tie_word_embeddings is false"),
        ("canvas_length", json!(0), "canvas_length is 0"),
        ("canvas_length", json!("wide"), "canvas_length is \"wide\""),
        ("text_config", Value::Null, "text_config is missing"),
        ("text_config", json!([1]), "text_config is [1]"),
        ("text_config.num_experts", Value::Null, "text_config.num_experts is missing"),
        ("text_config.top_k_experts", Value::Null, "text_config.top_k_experts is missing"),
        ("text_config.moe_intermediate_size", Value::Null, "text_config.moe_intermediate_size is missing"),
        ("text_config.top_k_experts", json!(9), "9 experts a token of only 8"),
        ("text_config.hidden_size", json!(-128), "text_config.hidden_size is -128"),
        ("text_config.hidden_size", json!(128.5), "text_config.hidden_size is 128.5"),
        ("text_config.hidden_size", json!(u64::MAX), "text_config.hidden_size is 18446744073709551615"),
        ("text_config.vocab_size", json!(0), "text_config.vocab_size is 0"),
        ("text_config.num_hidden_layers", json!(5), "text_config.layer_types"),
        ("text_config.num_hidden_layers", json!(0), "text_config.num_hidden_layers is 0"),
        ("text_config.num_hidden_layers", json!(1e6), "text_config.num_hidden_layers"),
        ("text_config.layer_types", json!("sliding"), "text_config.layer_types is \"sliding\""),
        (
            "text_config.layer_types",
            json!(["sliding_attention", "chunked_attention", "sliding_attention", "full_attention"]),
            "chunked_attention",
        ),
        ("text_config.head_dim", json!(33), "heads of 33"),
        ("text_config.global_head_dim", json!(63), "heads of 63"),
        ("text_config.global_head_dim", json!(2048), "heads of 2048; multiples of 16 up to 1024"),
        ("text_config.num_key_value_heads", json!(3), "4 query heads cannot share 3"),
        ("text_config.hidden_activation", json!("silu"), "text_config.hidden_activation is \"silu\""),
        ("text_config.attention_bias", json!(true), "text_config.attention_bias is true"),
        ("text_config.use_bidirectional_attention", json!("all"), "use_bidirectional_attention is \"all\""),
        ("text_config.rms_norm_eps", json!("small"), "text_config.rms_norm_eps is \"small\""),
        ("text_config.final_logit_softcapping", json!(-30), "text_config.final_logit_softcapping is -30"),
        ("text_config.sliding_window", json!(0), "text_config.sliding_window is 0"),
        ("text_config.rope_parameters.full_attention.rope_type", json!("yarn"), "full_attention.rope_type"),
        (
            "text_config.rope_parameters.full_attention.partial_rotary_factor",
            json!(1.5),
            "full_attention.partial_rotary_factor is 1.5",
        ),
        (
            "text_config.rope_parameters.sliding_attention.rope_theta",
            json!(0),
            "sliding_attention.rope_theta",
        ),
        ("text_config.rope_parameters.sliding_attention", json!(7), "sliding_attention is 7"),
    ] {
        let error = read(&with(key, value)).expect_err(key);
        assert!(
            error.contains("there/config.json") && error.contains(words),
            "{key}: no '{words}' in: {error}"
        );
    }
    for whole in [json!(null), json!([]), json!("text")] {
        assert!(read(&whole).unwrap_err().contains("there/config.json"));
    }
}

#[test]
fn full_layers_are_spelt_in_two_ways() {
    let expected = read(&configuration()).unwrap();
    assert_eq!((expected.layers[1].head_size, expected.layers[1].kv_heads), (64, 1));
    let mut other = configuration();
    let text = other["text_config"].as_object_mut().unwrap();
    text.remove("global_head_dim").unwrap();
    text.remove("num_global_key_value_heads").unwrap();
    let own = json!({"head_dim": 64, "num_key_value_heads": 1});
    text.insert("per_layer_config".to_owned(), json!({"1": own, "3": own}));
    assert_eq!(read(&other).unwrap(), expected);
    // One that deviates in one thing has the plain sizes otherwise.
    other["text_config"]["per_layer_config"]["3"] = json!({"head_dim": 64});
    assert_eq!(read(&other).unwrap().layers[3].kv_heads, 2);
    for (value, words) in [
        (json!([]), "text_config.per_layer_config is []"),
        (json!({"1": 5}), "text_config.per_layer_config.1 is 5"),
        (json!({"1": {"head_dim": "64"}}), "text_config.per_layer_config.1.head_dim is \"64\""),
    ] {
        other["text_config"]["per_layer_config"] = value;
        let error = read(&other).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    // Keys that no version of the model has had are passed over.
    assert_eq!(read(&with("text_config.something_new", json!(1))).unwrap(), expected);
}

/// Loads a directory, which must be refused before long.
fn load(path: &Path) -> Result<(), String> {
    let checkpoint = DiffusionCheckpoint::open(path).map_err(|error| error.to_string())?;
    checkpoint.generation_config().map_err(|error| error.to_string())?;
    let options =
        DiffusionOptions { rows: 32, experts: ExpertWeights::Quantised, ..DiffusionOptions::new(64) };
    DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {})
        .map(|_| ())
        .map_err(|error| error.to_string())
}

fn place(tensors: &Tensors) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model");
    directory(&path, tensors);
    (folder, path)
}

#[test]
fn tensors_that_are_wrong_are_named() {
    let sound = tiny();
    let change = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = sound.clone();
        change(&mut tensors);
        let (_folder, path) = place(&tensors);
        let error = load(&path).expect_err("refused");
        assert!(error.contains("model"), "no path in {error}");
        error
    };
    let zeros = |shape: &[usize]| Raw {
        dtype: "BF16",
        shape: shape.to_vec(),
        bytes: vec![0; 2 * shape.iter().product::<usize>()],
    };
    // Any that is missing; each of a kind once.
    for name in sound.keys().filter(|name| !name.contains("vision")) {
        if name.contains("layers.2.") || name.contains("layers.3.") || name.contains("layers.1.") {
            continue;
        }
        let error = change(&|tensors| drop(tensors.remove(name)));
        assert!(error.contains(name.as_str()), "{name} is missing: {error}");
    }
    // Shapes that do not fit the configuration.
    for (name, shape) in [
        ("model.decoder.embed_tokens.weight", &[1536, 64][..]),
        ("model.decoder.embed_tokens.weight", &[1535, 128]),
        ("model.decoder.layers.0.self_attn.q_proj.weight", &[128, 127]),
        ("model.decoder.layers.1.self_attn.k_proj.weight", &[32, 128]),
        ("model.decoder.layers.0.experts.gate_up_proj", &[7, 128, 128]),
        ("model.decoder.layers.0.experts.down_proj", &[8, 64, 128]),
        ("model.decoder.layers.0.router.per_expert_scale", &[9]),
        ("model.decoder.layers.0.layer_scalar", &[2]),
        ("model.decoder.norm.weight", &[128, 1]),
        ("model.encoder.language_model.layers.2.layer_scalar", &[]),
    ] {
        let error = change(&|tensors| drop(tensors.insert(name.to_owned(), zeros(shape))));
        assert!(error.contains(name), "{name} of {shape:?}: {error}");
    }
    // Tensors that nothing reads may be what makes it another model.
    for name in [
        "model.decoder.layers.0.self_attn.q_proj.bias",
        "model.decoder.layers.1.self_attn.v_proj.weight",
        "model.decoder.layers.4.input_layernorm.weight",
        "unheard.of",
    ] {
        let error = change(&|tensors| drop(tensors.insert(name.to_owned(), zeros(&[4]))));
        assert!(error.contains(name), "{name}: {error}");
    }
}

#[test]
fn second_copies_and_the_vision_tower_are_passed_over() {
    let mut tensors = tiny();
    let table = tensors["model.decoder.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), table.clone());
    tensors.insert("model.encoder.language_model.embed_tokens.weight".to_owned(), table);
    let (_folder, path) = place(&tensors);
    load(&path).unwrap();
    // What is called a copy must be one.
    for name in ["lm_head.weight", "model.encoder.language_model.embed_tokens.weight"] {
        let changed = |change: &dyn Fn(&mut Raw)| {
            let mut tensors = tensors.clone();
            change(tensors.get_mut(name).unwrap());
            let (_folder, path) = place(&tensors);
            let error = load(&path).unwrap_err();
            let both = error.contains(name) && error.contains("`model.decoder.embed_tokens.weight`");
            assert!(both, "{name}: {error}");
            error
        };
        let error = changed(&|raw| raw.bytes[1000] ^= 1);
        assert!(error.contains("other bytes from byte 1000 on"), "{error}");
        assert!(changed(&|raw| raw.dtype = "F16").contains("type F16"));
        assert!(changed(&|raw| raw.shape.reverse()).contains("shape [128, 1536]"));
    }
    tensors.retain(|name, _| !name.contains("vision"));
    let (_folder, path) = place(&tensors);
    load(&path).unwrap();
}

#[test]
fn files_that_are_damaged_are_named() {
    let (_folder, path) = place(&tiny());
    for (name, content, words) in [
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "config.json"),
        ("generation_config.json", "nonsense", "generation_config.json"),
        ("generation_config.json", r#"{"t_max": "hot"}"#, "t_max is \"hot\""),
        ("generation_config.json", r#"{"max_denoising_steps": 0}"#, "max_denoising_steps is 0"),
        ("generation_config.json", r#"{"eos_token_id": [1, -5]}"#, "eos_token_id"),
    ] {
        let sound = std::fs::read(path.join(name)).unwrap();
        std::fs::write(path.join(name), content).unwrap();
        let error = load(&path).unwrap_err();
        assert!(error.contains(name) && error.contains(words), "{name} {content}: {error}");
        std::fs::write(path.join(name), sound).unwrap();
    }
    for name in ["config.json", "model.safetensors"] {
        let sound = std::fs::read(path.join(name)).unwrap();
        std::fs::remove_file(path.join(name)).unwrap();
        let error = load(&path).unwrap_err();
        assert!(error.contains(path.to_str().unwrap()), "{name} is missing: {error}");
        std::fs::write(path.join(name), &sound).unwrap();
    }
    let sound = std::fs::read(path.join("model.safetensors")).unwrap();
    std::fs::write(path.join("model.safetensors"), &sound[..sound.len() - 2]).unwrap();
    let error = load(&path).unwrap_err();
    assert!(error.contains("model.safetensors"), "{error}");
    // A context that no memory holds is refused with the plan.
    std::fs::write(path.join("model.safetensors"), &sound).unwrap();
    let checkpoint = DiffusionCheckpoint::open(&path).unwrap();
    let options =
        DiffusionOptions { rows: 32, experts: ExpertWeights::Quantised, ..DiffusionOptions::new(1 << 33) };
    let error = DiffusionGemma::load(device(), &checkpoint, &options, &mut |_| {}).err().unwrap().to_string();
    assert!(error.contains("MiB"), "{error}");
}

/// The random model's GGUF with some bytes replaced by others of the same length.
fn patched(from: &[u8], to: &[u8]) -> (TempDir, PathBuf) {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture("diffusion-random/model.gguf")).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    Bytes(bytes).save()
}

#[test]
fn gguf_keys_and_tensors_that_are_wrong_are_named() {
    let own = |name: &str| format!("diffusion-gemma.{name}");
    let count = |name: &str, value: u32| Bytes::default().key(name, U32).u32(value).0;
    let number = |name: &str, value: f32| Bytes::default().key(name, F32).raw(&value.to_le_bytes()).0;
    let text = |name: &str| Bytes::default().string(name).0;
    for (from, to, words) in [
        // Renamed: one is missing, and one is not known.
        (
            text(&own("expert_used_count")),
            text(&own("expert_used_kount")),
            "diffusion-gemma.expert_used_kount",
        ),
        (text("diffusion.eb_max_steps"), text("diffusion.eb_max_stops"), "diffusion.eb_max_stops"),
        (text("diffusion.canvas_length"), text("diffusionxcanvas_length"), "diffusion.canvas_length"),
        (
            count(&own("expert_used_count"), 2),
            count(&own("expert_used_count"), 9),
            "9 experts a token of only 8",
        ),
        (count(&own("expert_count"), 8), count(&own("expert_count"), 7), "ffn_gate_inp.weight"),
        (count(&own("block_count"), 4), count(&own("block_count"), 3), "sliding_window_pattern has 4 values"),
        (
            count(&own("attention.key_length"), 32),
            count(&own("attention.key_length"), 33),
            "value_length is 32, keys have 33",
        ),
        (count(&own("attention.head_count"), 4), count(&own("attention.head_count"), 0), "head_count is 0"),
        (
            count(&own("attention.shared_kv_layers"), 0),
            count(&own("attention.shared_kv_layers"), 2),
            "shared_kv_layers is 2",
        ),
        (
            number(&own("final_logit_softcapping"), 30.0),
            number(&own("final_logit_softcapping"), f32::NAN),
            "final_logit_softcapping is NaN",
        ),
        (number("diffusion.eb_t_min", 0.4), number("diffusion.eb_t_min", 0.9), "t_min is 0.9"),
        (text("blk.2.ffn_gate_inp.scale"), text("blk.2.ffn_gate_inp.scalf"), "blk.2.ffn_gate_inp.scale"),
        (text("self_cond_pre_norm.weight"), text("self_cond_pre_norm.height"), "self_cond_pre_norm.weight"),
        (
            Bytes::default().key("general.architecture", STRING).string("diffusion-gemma").0,
            Bytes::default().key("general.architecture", STRING).string("diffusion-gamma").0,
            "diffusion-gamma",
        ),
    ] {
        let (_folder, path) = patched(&from, &to);
        let error = load(&path).expect_err(words);
        assert!(error.contains("model.gguf") && error.contains(words), "no '{words}' in: {error}");
    }
}
