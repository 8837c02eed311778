//! Tokenizers of the supported families, cut to what some strings need: the ids of the published ones.
//!
//! tests/fixtures/tokenizers/subset.py and subset_spm.py say how the vocabularies were cut and why that suffices. The
//! ids are those of the `tokenizers` library (Qwen, Llama, DeepSeek), of `tiktoken` (tekken) and of SentencePiece.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test that calls them")]

mod text_support;

use std::time::{Duration, Instant};

use axe::text::{Specials, Strings, TokenKind, Tokenizer, Vocabulary};
use serde::Deserialize;
use text_support::{Case, fixture};

/// A byte-pair vocabulary that was cut.
#[derive(Deserialize)]
struct Subset {
    pre: String,
    /// Id in the whole vocabulary, and text.
    tokens: Vec<(u32, String)>,
    /// Id, text and kind.
    special: Vec<(u32, String, i64)>,
    merges: Vec<String>,
    cases: Vec<Case>,
}

/// A tokenizer and the ids that its tokens have in the whole vocabulary.
fn read(name: &str) -> (Tokenizer, Vec<u32>, Vec<Case>) {
    of(fixture(&format!("tokenizers/{name}.json")))
}

fn of(subset: Subset) -> (Tokenizer, Vec<u32>, Vec<Case>) {
    let mut kinds = vec![TokenKind::Normal; subset.tokens.len()];
    kinds.extend(subset.special.iter().map(|special| TokenKind::from_gguf(special.2).unwrap()));
    let special = || subset.special.iter().map(|(id, text, _)| (*id, text.as_str()));
    let all = || subset.tokens.iter().map(|(id, text)| (*id, text.as_str())).chain(special());
    let tokenizer = Tokenizer::new(Vocabulary {
        model: "gpt2".to_owned(),
        pre: Some(subset.pre),
        tokens: all().map(|(_, text)| text).collect(),
        kinds,
        merges: subset.merges.iter().collect::<Strings>(),
        ..Vocabulary::default()
    });
    (tokenizer.unwrap(), all().map(|(id, _)| id).collect(), subset.cases)
}

#[track_caller]
fn check(name: &str) {
    let (tokenizer, ids, cases) = read(name);
    assert!(cases.len() > 80, "{name}: {} cases", cases.len());
    for case in &cases {
        let found = tokenizer.encode(&case.text, Specials::Parse);
        let found: Vec<u32> = found.iter().map(|&id| ids[id as usize]).collect();
        assert_eq!(found, case.ids, "{name}: {:?}", case.text);
    }
}

#[test]
fn llama_3_gives_the_ids_of_the_published_tokenizer() {
    check("llama-3.1");
}

#[test]
fn qwen_3_gives_the_ids_of_the_published_tokenizer() {
    check("qwen3");
}

#[test]
fn deepseek_v3_gives_the_ids_of_the_published_tokenizer() {
    check("deepseek-v3");
}

#[test]
fn tekken_gives_the_ids_of_the_published_tokenizer() {
    check("tekken");
}

/// For a run over many more strings than a repository should hold.
#[test]
#[ignore = "needs AXE_TOKENIZERS, a folder of fixtures that subset.py made of any strings"]
fn other_strings_give_the_ids_of_the_published_tokenizers() {
    let folder = std::path::PathBuf::from(std::env::var_os("AXE_TOKENIZERS").unwrap());
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let (tokenizer, ids, cases) = of(serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap());
        let wrong: Vec<_> = cases
            .iter()
            .filter_map(|case| {
                let found = tokenizer.encode(&case.text, Specials::Parse);
                let found: Vec<u32> = found.iter().map(|&id| ids[id as usize]).collect();
                (found != case.ids).then_some((&case.text, found, &case.ids))
            })
            .collect();
        assert!(
            wrong.is_empty(),
            "{}: {} of {}: {:?}",
            path.display(),
            wrong.len(),
            cases.len(),
            &wrong[..1]
        );
        println!("{}: {} strings", path.display(), cases.len());
    }
}

#[derive(Deserialize)]
struct Pieces {
    /// Id, text, score, kind.
    tokens: Vec<(u32, String, f32, i64)>,
    cases: Vec<Case>,
}

/// Mistral 7B's, which has scores, byte fallback and a space before text, as Llama 2's does.
fn mistral() -> (Tokenizer, Vec<u32>, Vec<Case>) {
    let Pieces { tokens, cases } = fixture("tokenizers/mistral.json");
    let place = |id: u32| tokens.iter().position(|token| token.0 == id).map(|place| place as u32);
    let tokenizer = Tokenizer::new(Vocabulary {
        model: "llama".to_owned(),
        tokens: tokens.iter().map(|token| &token.1).collect(),
        kinds: tokens.iter().map(|token| TokenKind::from_gguf(token.3).unwrap()).collect(),
        scores: tokens.iter().map(|token| token.2).collect(),
        bos: place(1),
        eos: place(2),
        unk: place(0),
        ..Vocabulary::default()
    });
    (tokenizer.unwrap(), tokens.iter().map(|token| token.0).collect(), cases)
}

#[test]
fn mistral_gives_the_ids_of_sentence_piece() {
    let (tokenizer, ids, cases) = mistral();
    assert!(cases.len() > 80);
    for case in &cases {
        let found = tokenizer.encode(&case.text, Specials::Text);
        let whole: Vec<u32> = found.iter().map(|&id| ids[id as usize]).collect();
        assert_eq!(whole, case.ids, "{:?}", case.text);
        assert_eq!(tokenizer.decode(&found), case.text);
    }
    assert!(tokenizer.adds_bos() && tokenizer.strips_leading_space());
    assert_eq!(tokenizer.eos_ids(), [2]);
    // Control tokens are the template's to write.
    assert!(!tokenizer.encode("</s><s>[INST]", Specials::Text).iter().any(|&id| id < 3));
    assert_eq!(tokenizer.encode("<s></s>", Specials::Parse), [1, 2]);
}

/// Text that makes rules of words work hardest.
#[test]
fn no_text_takes_any_of_them_long() {
    let size = if cfg!(debug_assertions) { 1 << 15 } else { 1 << 19 };
    let units = [
        "a", "A", " ", "7", "'", "\n", " \n", "\r\n", "\u{301}", "e\u{301}", "世", "世A", "aA", "👍", "/",
        "_a", "\0", "\u{1161}", "\u{fdfa}", "x ", "\u{3000}", "!", "ſ'",
    ];
    for name in ["llama-3.1", "qwen3", "deepseek-v3", "tekken"] {
        let (tokenizer, ..) = read(name);
        for unit in units {
            let text = unit.repeat(size / unit.len()) + "x";
            let start = Instant::now();
            let count = tokenizer.encode(&text, Specials::Parse).len();
            let took = start.elapsed();
            assert!(took < Duration::from_secs(6), "{name}, {unit:?}: {count} tokens in {took:?}");
        }
    }
}
