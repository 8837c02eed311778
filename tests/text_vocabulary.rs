//! From a GGUF file's metadata to a vocabulary.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test that calls them")]

#[allow(dead_code, reason = "shared with the tests of the checkpoint room")]
mod checkpoint_support;

use axe::checkpoint::gguf::Gguf;
use axe::load::text::tokenizer;
use axe::load::vocabulary;
use axe::text::{Fim, Specials, TokenKind, Tokenizer};
use checkpoint_support::{ARRAY, BOOL, Bytes, I32, STRING, U32};

fn strings(bytes: Bytes, key: &str, list: &[&str]) -> Bytes {
    list.iter().fold(bytes.array(key, STRING, list.len() as u64), |bytes, text| bytes.string(text))
}

fn types(bytes: Bytes, list: &[u32]) -> Bytes {
    list.iter()
        .fold(bytes.array("tokenizer.ggml.token_type", I32, list.len() as u64), |bytes, &ty| bytes.u32(ty))
}

/// The keys every file here has: three of them.
fn begin(keys: u64) -> Bytes {
    let bytes = Bytes::header(3, 0, keys).key("tokenizer.ggml.model", STRING).string("gpt2");
    let bytes = bytes.key("tokenizer.ggml.pre", STRING).string("gpt-2");
    strings(bytes, "tokenizer.ggml.tokens", &["a", "b", "ab", "<s>", "<e>"])
}

fn read(bytes: &Bytes) -> Result<axe::text::Vocabulary, String> {
    let (_folder, path) = bytes.save();
    vocabulary(&Gguf::open(&path).unwrap()).map_err(|error| error.to_string())
}

#[test]
fn every_key_reaches_the_tokenizer() {
    let bytes = types(begin(9), &[1, 1, 1, 3, 3]);
    let bytes = strings(bytes, "tokenizer.ggml.merges", &["a b"]);
    let bytes = bytes.key("tokenizer.ggml.bos_token_id", U32).u32(3);
    let bytes = bytes.key("tokenizer.ggml.eos_token_id", U32).u32(1);
    let bytes = bytes.key("tokenizer.ggml.eot_token_id", U32).u32(4);
    let bytes = bytes.key("tokenizer.ggml.add_bos_token", BOOL).raw(&[1]);
    let vocabulary = read(&bytes).unwrap();
    assert_eq!(vocabulary.kinds[3], TokenKind::Control);
    let tokenizer = Tokenizer::new(vocabulary).unwrap();
    assert_eq!(tokenizer.encode("ab<s>", Specials::Parse), [2, 3]);
    assert_eq!(tokenizer.eos_ids(), [1, 4]);
    assert!(tokenizer.adds_bos());
}

#[test]
fn the_tokens_around_a_gap_are_known_by_either_name_and_only_together() {
    let named = |bytes: Bytes, names: &[&str]| {
        names.iter().zip(2..).fold(bytes, |bytes, (name, id)| {
            bytes.key(&format!("tokenizer.ggml.{name}_token_id"), U32).u32(id)
        })
    };
    let wanted = Some(Fim { prefix: 2, suffix: 3, middle: 4 });
    for names in [["fim_pre", "fim_suf", "fim_mid"], ["prefix", "suffix", "middle"]] {
        let vocabulary = read(&named(types(begin(7), &[1, 1, 3, 3, 3]), &names)).unwrap();
        assert_eq!(Tokenizer::new(vocabulary).unwrap().fim(), wanted, "{names:?}");
        assert_eq!(read(&named(types(begin(6), &[1, 1, 3, 3, 3]), &names[..2])).unwrap().fim, None);
    }
    let past = types(begin(7), &[1, 1, 3, 3, 3]);
    let past = named(past, &["fim_pre", "fim_suf"]).key("tokenizer.ggml.fim_mid_token_id", U32).u32(5);
    let error = Tokenizer::new(read(&past).unwrap()).unwrap_err().to_string();
    assert!(error.contains("fill in the middle token id 5"), "{error}");
}

#[test]
fn what_is_missing_or_not_understood_is_named() {
    let error = read(&Bytes::header(3, 0, 0)).unwrap_err();
    assert!(error.contains("tokenizer.ggml.tokens"), "{error}");
    let error = read(&types(begin(4), &[1, 1, 1, 9, 3])).unwrap_err();
    assert!(error.contains("tokenizer.ggml.token_type") && error.contains("type 9 of token 3"), "{error}");
    let error = read(&begin(4).key("tokenizer.ggml.bos_token_id", STRING).string("x")).unwrap_err();
    assert!(error.contains("tokenizer.ggml.bos_token_id"), "{error}");
    let error = read(&begin(4).key("tokenizer.ggml.merges", ARRAY).u32(I32).u64(0)).unwrap_err();
    assert!(error.contains("tokenizer.ggml.merges"), "{error}");
}

/// What is wrong with a vocabulary is told with the file that holds it.
#[test]
fn the_file_is_named() {
    let bytes = Bytes::header(3, 0, 3).key("tokenizer.ggml.model", STRING).string("gpt2");
    let bytes =
        strings(bytes.key("tokenizer.ggml.pre", STRING).string("gpt-9"), "tokenizer.ggml.tokens", &["a"]);
    let (_folder, path) = bytes.save();
    let error = tokenizer(&path).unwrap_err().to_string();
    assert_eq!(
        error.strip_prefix(&format!("{}: ", path.display())).map(|rest| &rest[..22]),
        Some("pre-tokenizer `gpt-9` ")
    );
}

/// Files made for other servers let the markers of chats print; they are control tokens all the same.
#[test]
fn gemmas_own_kind_is_read_and_its_markers_are_nobodys_to_write() {
    let tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "a",
        "b",
        "ab",
        "\u{2581}",
        "\u{2581}ab",
        "<|channel>",
        "<channel|>",
        "<turn|>",
    ];
    let bytes = Bytes::header(3, 0, 7).key("tokenizer.ggml.model", STRING).string("gemma4");
    let bytes = types(strings(bytes, "tokenizer.ggml.tokens", &tokens), &[3, 3, 3, 1, 1, 1, 1, 1, 4, 4, 3]);
    let bytes = strings(bytes, "tokenizer.ggml.merges", &["a b", "\u{2581} ab"]);
    let bytes = bytes.key("tokenizer.ggml.bos_token_id", U32).u32(2);
    let bytes = bytes.key("tokenizer.ggml.eos_token_id", U32).u32(1);
    let bytes = bytes.key("tokenizer.ggml.add_space_prefix", BOOL).raw(&[0]);
    let tokenizer = Tokenizer::new(read(&bytes).unwrap()).unwrap();
    assert_eq!(tokenizer.encode("ab ab", Specials::Text), [5, 7]);
    assert_eq!(tokenizer.encode("<|channel>ab", Specials::Parse), [8, 5]);
    assert!(!tokenizer.encode("<|channel>ab", Specials::Text).contains(&8));
    assert_eq!(tokenizer.decode(&[8, 5, 7, 9]), "ab ab");
    assert_eq!(tokenizer.channel().map(|channel| (channel.open, channel.close)), Some((8, 9)));
    assert_eq!(tokenizer.eos_ids(), [1, 10]);
    assert!(tokenizer.adds_bos());
}
