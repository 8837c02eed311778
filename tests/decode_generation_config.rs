//! How a checkpoint wants to be sampled: every key of generation_config.json, and the keys of a GGUF file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

#[allow(dead_code)] // arrays and tensors have their own tests
mod checkpoint_support;
mod support;

use std::path::Path;

use axe::checkpoint::gguf::Gguf;
use axe::model::diffusion_gemma::GenerationConfig;
use checkpoint_support::{BOOL, Bytes, F32, I32, STRING, U32};
use serde_json::{Value, json};

fn read(value: &Value) -> Result<GenerationConfig, String> {
    GenerationConfig::from_json(Path::new("dir/generation_config.json"), value).map_err(|e| e.to_string())
}

/// A sound file with one key set.
fn with(key: &str, value: Value) -> Value {
    let bytes = std::fs::read(support::fixture("diffusion-random/model/generation_config.json")).unwrap();
    let mut file: Value = serde_json::from_slice(&bytes).unwrap();
    file[key] = value;
    file
}

#[test]
fn every_key_is_read() {
    let said = json!({
        "max_new_tokens": 64, "max_length": 900, "max_denoising_steps": 12, "t_min": 0.25, "t_max": 1,
        "stability_threshold": 3, "confidence_threshold": 0.01,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.3},
        "eos_token_id": [1, 106, 50], "pad_token_id": 0, "bos_token_id": 2,
        "cache_implementation": "static", "cache_config": {"x": 1}, "disable_compile": true,
        "return_dict_in_generate": true, "transformers_version": "5.24.0", "_from_model_config": false,
        "_commit_hash": "abc",
    });
    let wanted = GenerationConfig {
        max_denoising_steps: 12,
        t_min: 0.25,
        t_max: 1.0,
        entropy_bound: 0.3,
        stability_threshold: Some(3),
        confidence_threshold: Some(0.01),
        eos: vec![1, 106, 50],
        pad: Some(0),
        bos: Some(2),
        max_new_tokens: 64,
    };
    assert_eq!(read(&said).unwrap(), wanted);
}

#[test]
fn what_is_absent_or_null_is_the_library_s_default() {
    let defaults = GenerationConfig {
        max_denoising_steps: 48,
        t_min: 0.4,
        t_max: 0.8,
        entropy_bound: 0.1,
        stability_threshold: Some(1),
        confidence_threshold: Some(0.005),
        eos: vec![],
        pad: None,
        bos: None,
        max_new_tokens: 256,
    };
    assert_eq!(read(&json!({})).unwrap(), defaults);
    let keys = [
        "max_new_tokens",
        "max_length",
        "max_denoising_steps",
        "t_min",
        "t_max",
        "stability_threshold",
        "confidence_threshold",
        "sampler_config",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "cache_implementation",
    ];
    let nulls: serde_json::Map<String, Value> =
        keys.map(|key| (key.to_owned(), Value::Null)).into_iter().collect();
    assert_eq!(read(&Value::Object(nulls)).unwrap(), defaults);
    let sampler =
        json!({"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": null}});
    assert_eq!(read(&sampler).unwrap(), defaults);
    assert_eq!(read(&json!({"eos_token_id": 7})).unwrap().eos, [7]);
}

#[test]
fn what_is_not_understood_is_refused_with_file_key_and_value() {
    let cases = [
        (
            "max_denoising_steps",
            json!(0),
            "max_denoising_steps is 0, expected a whole number from 1 to 65536",
        ),
        ("max_denoising_steps", json!(1_000_000), "max_denoising_steps is 1000000"),
        ("max_denoising_steps", json!(2.5), "max_denoising_steps is 2.5"),
        ("max_denoising_steps", json!("12"), "max_denoising_steps is \"12\""),
        ("t_min", json!(-0.1), "t_min is -0.1 and t_max is 0.8, expected 0 <= t_min < t_max"),
        ("t_min", json!(0.8), "t_min is 0.8 and t_max is 0.8"),
        ("t_min", json!(true), "t_min is true, expected a number"),
        ("t_max", json!(0.4), "t_min is 0.4 and t_max is 0.4"),
        ("t_max", json!(-1), "t_max is -1, expected a number above 0"),
        ("t_max", json!(1e39), "t_max is 1"),
        ("stability_threshold", json!(-1), "stability_threshold is -1"),
        ("stability_threshold", json!(1.0), "stability_threshold is 1.0"),
        ("confidence_threshold", json!(0), "confidence_threshold is 0, expected a number above 0"),
        ("confidence_threshold", json!(1e-60), "confidence_threshold is 0"),
        ("confidence_threshold", json!([1]), "confidence_threshold is [1]"),
        ("sampler_config", json!(0.1), "sampler_config is 0.1, expected an object"),
        ("sampler_config", json!({"entropy_bound": 0.1}), "sampler_config._cls_name is missing"),
        ("sampler_config", json!({"_cls_name": "Other"}), "sampler_config._cls_name is \"Other\""),
        (
            "sampler_config",
            json!({"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0}),
            "sampler_config.entropy_bound is 0, expected a number above 0",
        ),
        (
            "sampler_config",
            json!({"_cls_name": "EntropyBoundSamplerConfig", "top": 1}),
            "sampler_config.top is 1; this version does not know the key",
        ),
        ("eos_token_id", json!([1, -1]), "eos_token_id is -1, expected a token id"),
        ("eos_token_id", json!({}), "eos_token_id is {}"),
        ("pad_token_id", json!(1.5), "pad_token_id is 1.5"),
        ("bos_token_id", json!(4_294_967_296_u64), "bos_token_id is 4294967296"),
        ("max_new_tokens", json!(0), "max_new_tokens is 0"),
        ("max_length", json!(0), "max_length is 0"),
        ("repetition_penalty", json!(1.1), "repetition_penalty is 1.1; this version does not know the key"),
    ];
    for (key, value, words) in cases {
        let error = read(&with(key, value)).unwrap_err();
        assert!(error.starts_with("dir/generation_config.json: "), "{error}");
        assert!(error.contains(words), "{error} does not say: {words}");
    }
    assert!(read(&json!([1])).unwrap_err().contains("found a list, expected an object"));
}

fn gguf(keys: &[(&str, u32, u32)]) -> Result<GenerationConfig, String> {
    let mut bytes = Bytes::header(3, 0, keys.len() as u64);
    for &(name, ty, bits) in keys {
        bytes = bytes.key(name, ty);
        bytes = match ty {
            BOOL => bytes.raw(&[bits as u8]),
            STRING => bytes.string("text"),
            _ => bytes.u32(bits),
        };
    }
    let (_folder, path) = bytes.save();
    GenerationConfig::from_gguf(&Gguf::open(&path).unwrap()).map_err(|error| error.to_string())
}

fn f(value: f32) -> u32 {
    value.to_bits()
}

#[test]
fn a_gguf_file_says_the_same_under_either_spelling() {
    for prefix in ["diffusion.eb_", "diffusion-gemma.diffusion.eb_"] {
        let named = |name: &str| format!("{prefix}{name}");
        let names =
            ["max_steps", "t_min", "t_max", "entropy_bound", "stability_threshold", "confidence_threshold"]
                .map(named);
        let config = gguf(&[
            (&names[0], U32, 12),
            (&names[1], F32, f(0.3)),
            (&names[2], F32, f(0.9)),
            (&names[3], F32, f(0.2)),
            (&names[4], I32, 2),
            (&names[5], F32, f(0.007)),
            ("tokenizer.ggml.eos_token_id", U32, 1),
            ("tokenizer.ggml.eot_token_id", U32, 106),
            ("tokenizer.ggml.eom_token_id", U32, 1),
            ("tokenizer.ggml.bos_token_id", U32, 2),
            ("tokenizer.ggml.padding_token_id", U32, 0),
        ])
        .unwrap();
        // The decimals that were meant, not what is left of them in an f32.
        let wanted = GenerationConfig {
            max_denoising_steps: 12,
            t_min: 0.3,
            t_max: 0.9,
            entropy_bound: 0.2,
            stability_threshold: Some(2),
            confidence_threshold: Some(0.007),
            eos: vec![1, 106],
            pad: Some(0),
            bos: Some(2),
            max_new_tokens: 256,
        };
        assert_eq!(config, wanted);
    }
    assert_eq!(gguf(&[]).unwrap(), GenerationConfig::default());
}

#[test]
fn gguf_keys_that_are_wrong_are_refused_by_name() {
    let refused = |keys: &[(&str, u32, u32)], words: &str| {
        let error = gguf(keys).unwrap_err();
        assert!(error.contains("model.gguf") && error.contains(words), "{error}");
    };
    refused(&[("diffusion.eb_max_steps", U32, 0)], "max_denoising_steps is 0");
    refused(&[("diffusion.eb_max_steps", STRING, 0)], "diffusion.eb_max_steps");
    refused(&[("diffusion.eb_t_min", F32, f(f32::NAN))], "t_min is NaN");
    refused(&[("diffusion.eb_t_max", F32, f(f32::INFINITY))], "t_max is inf");
    refused(&[("diffusion.eb_entropy_bound", F32, f(-0.1))], "entropy_bound is -0.1");
    refused(&[("diffusion.eb_confidence_threshold", BOOL, 1)], "diffusion.eb_confidence_threshold");
    refused(&[("diffusion.eb_stability_threshold", I32, u32::MAX)], "diffusion.eb_stability_threshold");
    refused(
        &[("diffusion.eb_t_max", F32, f(0.8)), ("diffusion-gemma.diffusion.eb_t_max", F32, f(0.9))],
        "diffusion-gemma.diffusion.eb_t_max and diffusion.eb_t_max differ",
    );
}
