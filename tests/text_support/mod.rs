//! What the tests of the `text` room share: the real models and the golden files.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::{Path, PathBuf};

use axe::checkpoint::gguf::Gguf;
use axe::load::vocabulary;
use axe::text::Tokenizer;
use serde::Deserialize;

/// The chat model, byte-pair tokens.
pub const SMOLLM2: &str = "smollm2-135m-instruct-q4_1.gguf";
/// The base model, SentencePiece tokens.
pub const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

/// The file of a real model. A missing one fails the test: without it nothing is shown.
pub fn model(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::var_os("AXE_TEST_MODELS").map_or_else(|| root.join(".axe/models"), PathBuf::from);
    let path = folder.join(name);
    assert!(path.exists(), "{} is missing: run scripts/setup.sh, or set AXE_TEST_MODELS", path.display());
    path
}

/// The tokenizer of a real model.
pub fn tokenizer(name: &str) -> Tokenizer {
    let gguf = Gguf::open(&model(name)).unwrap();
    Tokenizer::new(vocabulary(&gguf).unwrap()).unwrap()
}

/// The chat template of a real model.
pub fn template_source(name: &str) -> String {
    let gguf = Gguf::open(&model(name)).unwrap();
    gguf.metadata().require_str("tokenizer.chat_template").unwrap().to_owned()
}

/// Reads a golden file under `tests/fixtures`.
pub fn fixture<T: for<'de> Deserialize<'de>>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One golden string.
#[derive(Deserialize)]
pub struct Case {
    /// What to encode.
    pub text: String,
    /// Its tokens, special ones not parsed.
    pub ids: Vec<u32>,
    /// Its tokens, special ones parsed.
    pub ids_special: Option<Vec<u32>>,
}

/// One golden generation.
#[derive(Deserialize)]
pub struct Greedy {
    /// `{"messages": …}` or `{"text": …}`.
    pub prompt: serde_json::Value,
    /// The prompt as the model sees it.
    pub text: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// The tokens generated.
    pub tokens: Vec<u32>,
    /// Their text.
    pub reply: String,
}
