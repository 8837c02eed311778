//! The tokenizer files that checkpoints are published with: `tokenizer.json` and `tokenizer_config.json`.
//!
//! `tokenizer.json` describes a pipeline of parts, most of which could be anything. The one pipeline that is read is
//! Gemma's: spaces become `▁`, nothing is split, merges of characters with bytes for what has no token. Whatever else
//! a file asks for is refused by its key, since other rules would give other tokens.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

use super::spm::{self, SPACE};
use super::vocabulary::Strings;
use super::{TextError, TokenKind, Vocabulary};

/// Ids are smaller than this; the largest real vocabularies have 262,144 tokens.
const MOST_TOKENS: usize = 1 << 22;

/// The parts of `tokenizer.json` but for the long lists.
#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Kind,
}

#[derive(Deserialize)]
struct Kind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// A token that is found before anything else happens.
#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Whole {
    model: Bpe,
}

/// The part `model`.
#[derive(Deserialize)]
struct Bpe {
    #[serde(default)]
    dropout: Option<f64>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Ids,
    merges: Merges,
}

/// `{"text": id}`, in the file's order.
struct Ids(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Ids;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("an object from token texts to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ids, A::Error> {
                let mut ids = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    ids.push(entry);
                }
                Ok(Ids(ids))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Merges in the spelling of GGUF: two parts with one space between them.
struct Merges(Strings);

impl<'de> Deserialize<'de> for Merges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Merges;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("a list of merges")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merges, A::Error> {
                let mut merges = Strings::default();
                while let Some(Merge(merge)) = list.next_element()? {
                    merges.push(merge.as_bytes());
                }
                Ok(Merges(merges))
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// One merge: `"a b"` or `["a", "b"]`.
struct Merge(String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Merge;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("a merge, \"a b\" or [\"a\", \"b\"]")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
                Ok(Merge(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Merge, A::Error> {
                let missing = |place| serde::de::Error::invalid_length(place, &self);
                let mut merge: String = list.next_element()?.ok_or_else(|| missing(0))?;
                merge.push(' ');
                merge.push_str(&list.next_element::<String>()?.ok_or_else(|| missing(1))?);
                match list.next_element::<IgnoredAny>()? {
                    Some(_) => Err(missing(3)),
                    None => Ok(Merge(merge)),
                }
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Says what is wrong in which file.
struct Complaints<'f>(&'f str);

impl Complaints<'_> {
    fn syntax(&self, error: &serde_json::Error) -> TextError {
        TextError::PublishedSyntax { file: self.0.to_owned(), message: error.to_string() }
    }

    fn about(&self, key: &str, what: impl Into<String>) -> TextError {
        TextError::Published { file: self.0.to_owned(), key: key.to_owned(), what: what.into() }
    }

    /// The value `found` at `key` should be as described.
    fn unlike(&self, key: &str, found: &Value, expected: &str) -> TextError {
        /// Enough to recognise a part.
        const MOST: usize = 200;
        let mut shown = found.to_string();
        if let Some((end, _)) = shown.char_indices().nth(MOST) {
            shown.truncate(end);
            shown.push('…');
        }
        self.about(key, format!("found {shown}, expected {expected}"))
    }
}

impl Vocabulary {
    /// Reads a `tokenizer.json`; `file` is how messages call it.
    ///
    /// # Errors
    /// What is no such file, and every part of one that is not understood, by its key.
    pub fn from_tokenizer_json(file: &str, json: &[u8]) -> Result<Self, TextError> {
        let complain = Complaints(file);
        let outline: Outline = serde_json::from_slice(json).map_err(|error| complain.syntax(&error))?;
        if let Some(kind) = outline.model.kind.as_deref().filter(|kind| *kind != "BPE") {
            return Err(complain.about("model.type", format!("found `{kind}`, expected `BPE`")));
        }
        check_pipeline(&complain, &outline)?;
        let Whole { model } = serde_json::from_slice(json).map_err(|error| complain.syntax(&error))?;
        check_model(&complain, &model)?;
        let (tokens, kinds) = tokens(&complain, &model, &outline.added_tokens)?;
        let mut vocabulary = Self {
            model: "gemma4".to_owned(),
            tokens,
            kinds,
            merges: model.merges.0,
            whole_words: model.ignore_merges,
            add_space_prefix: Some(false),
            ..Self::default()
        };
        if let Some(unk) = &model.unk_token {
            vocabulary.unk = Some(vocabulary.id_of(&complain, "model.unk_token", unk)?);
        }
        if !model.fuse_unk && vocabulary.kinds.iter().filter(|kind| **kind == TokenKind::Byte).count() < 256 {
            let what = "found false and no tokens for some bytes, expected true or tokens <0x00> to <0xFF>";
            return Err(complain.about("model.fuse_unk", what));
        }
        (vocabulary.add_bos, vocabulary.add_eos) = added_around(&complain, &outline.post_processor)?;
        Ok(vocabulary)
    }

    /// Takes over what a `tokenizer_config.json` says of special tokens, and returns the chat template if it holds
    /// one.
    ///
    /// # Errors
    /// What is no such file, names that are no tokens, values of the wrong type, several templates without a default.
    pub fn read_tokenizer_config(&mut self, file: &str, json: &[u8]) -> Result<Option<String>, TextError> {
        let complain = Complaints(file);
        let mut config: Map<String, Value> =
            serde_json::from_slice(json).map_err(|error| complain.syntax(&error))?;
        for (key, place) in [("bos_token", 0), ("eos_token", 1), ("unk_token", 2), ("pad_token", 3)] {
            // A token is written as its text, or as an object that holds it.
            let text = match config.remove(key) {
                None | Some(Value::Null) => continue,
                Some(Value::Object(mut token)) => token.remove("content").unwrap_or_default(),
                Some(other) => other,
            };
            let Value::String(text) = text else {
                return Err(complain.unlike(key, &text, "a token's text"));
            };
            let id = Some(self.id_of(&complain, key, &text)?);
            match place {
                0 => self.bos = id,
                1 => self.eos = id,
                2 => self.unk = id,
                _ => self.pad = id,
            }
        }
        for (key, flag) in [("add_bos_token", &mut self.add_bos), ("add_eos_token", &mut self.add_eos)] {
            match config.remove(key) {
                None | Some(Value::Null) => {}
                Some(Value::Bool(adds)) => *flag = Some(adds),
                Some(other) => return Err(complain.unlike(key, &other, "true or false")),
            }
        }
        let key = "chat_template";
        match config.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(template)) => Ok(Some(template)),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) => {
                let one = list.len() == 1;
                let named =
                    list.iter().find(|entry| one || entry.get("name").is_some_and(|name| name == "default"));
                match named.and_then(|entry| entry.get("template")).and_then(Value::as_str) {
                    Some(template) => Ok(Some(template.to_owned())),
                    None => Err(complain.unlike(
                        key,
                        &Value::Array(list),
                        "a list with one template, or with one of name `default`",
                    )),
                }
            }
            Some(other) => Err(complain.unlike(key, &other, "a template or a list of them")),
        }
    }

    /// The id of the token `text`, named by `key`.
    fn id_of(&self, complain: &Complaints<'_>, key: &str, text: &str) -> Result<u32, TextError> {
        let place = self.tokens.iter().position(|token| token == text.as_bytes());
        place
            .map(|id| id as u32)
            .ok_or_else(|| complain.about(key, format!("`{text}` is none of the tokens of the vocabulary")))
    }
}

/// The normalizer, pre-tokenizer and decoder must be Gemma's.
fn check_pipeline(complain: &Complaints<'_>, outline: &Outline) -> Result<(), TextError> {
    let escape = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let unescape = json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "});
    let normalizers = match outline.normalizer.get("normalizers") {
        Some(Value::Array(list)) if outline.normalizer["type"] == "Sequence" => list.as_slice(),
        _ => std::slice::from_ref(&outline.normalizer),
    };
    if normalizers != [escape] {
        let expected = "Replace of \" \" by \"▁\" and nothing else";
        return Err(complain.unlike("normalizer", &outline.normalizer, expected));
    }
    // After that there is no space left to split at.
    let pre = &outline.pre_tokenizer;
    let at_spaces =
        pre["type"] == "Split" && pre["pattern"] == json!({"String": " "}) && pre["invert"] != true;
    if !pre.is_null() && !at_spaces {
        return Err(complain.unlike("pre_tokenizer", pre, "Split at \" \", or null"));
    }
    let decoder = &outline.decoder;
    let parts = decoder["decoders"].as_array().map(Vec::as_slice).unwrap_or_default();
    let [first, bytes, fuse] = parts else {
        return Err(complain.unlike("decoder", decoder, DECODER));
    };
    if decoder["type"] != "Sequence"
        || *first != unescape
        || bytes["type"] != "ByteFallback"
        || fuse["type"] != "Fuse"
    {
        return Err(complain.unlike("decoder", decoder, DECODER));
    }
    Ok(())
}

/// The one decoder that is read.
const DECODER: &str = "a Sequence of Replace (\"▁\" by \" \"), ByteFallback and Fuse";

fn check_model(complain: &Complaints<'_>, model: &Bpe) -> Result<(), TextError> {
    let refuse = |key: &str, what: String| Err(complain.about(&format!("model.{key}"), what));
    if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
        return refuse("dropout", format!("found {dropout}, expected null: tokens would be drawn at random"));
    }
    for (key, affix) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.as_deref().filter(|affix| !affix.is_empty()) {
            return refuse(key, format!("found `{affix}`, expected null"));
        }
    }
    if !model.byte_fallback {
        return refuse("byte_fallback", "found false, expected true".to_owned());
    }
    Ok(())
}

/// The tokens by id, and what each is. Ids that no token has are place holders.
fn tokens(
    complain: &Complaints<'_>,
    model: &Bpe,
    added: &[Added],
) -> Result<(Strings, Vec<TokenKind>), TextError> {
    let entries = || {
        let added = added.iter().map(|token| (token.content.as_str(), token.id));
        model.vocab.0.iter().map(|(text, id)| (text.as_str(), *id)).chain(added)
    };
    let count = entries().map(|(_, id)| id as usize + 1).max().unwrap_or(0);
    if count > MOST_TOKENS {
        let what = format!("found id {}, expected ids below {MOST_TOKENS}", count - 1);
        return Err(complain.about("model.vocab", what));
    }
    let mut texts: Vec<Option<&str>> = vec![None; count];
    for (text, id) in entries() {
        let place = &mut texts[id as usize];
        if let Some(other) = place.replace(text).filter(|other| *other != text) {
            return Err(complain.about("model.vocab", format!("id {id} is both `{other}` and `{text}`")));
        }
    }
    let byte = |text: &str| spm::byte_of(text.as_bytes()).is_some();
    let mut kinds: Vec<TokenKind> = texts
        .iter()
        .map(|text| match text {
            None => TokenKind::Unused,
            Some(text) if model.unk_token.as_deref() == Some(*text) => TokenKind::Unknown,
            Some(text) if byte(text) => TokenKind::Byte,
            Some(_) => TokenKind::Normal,
        })
        .collect();
    for (place, token) in added.iter().enumerate() {
        let key = |member: &str| format!("added_tokens[{place}].{member}");
        for (member, set) in
            [("single_word", token.single_word), ("lstrip", token.lstrip), ("rstrip", token.rstrip)]
        {
            if set {
                let what = format!("found true for `{}`, expected false", token.content);
                return Err(complain.about(&key(member), what));
            }
        }
        if token.normalized && token.content.contains([' ', '▁']) {
            let what = format!("found true for `{}`, which has spaces, expected false", token.content);
            return Err(complain.about(&key("normalized"), what));
        }
        let kind = &mut kinds[token.id as usize];
        if *kind == TokenKind::Normal {
            *kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
        }
    }
    let bytes = texts.iter().flatten().map(|text| text.len()).sum();
    let mut tokens = Strings::with_capacity(count, bytes);
    texts.iter().for_each(|text| tokens.push(text.unwrap_or_default().as_bytes()));
    Ok((tokens, kinds))
}

/// Whether a token is put before and behind a text, if the post-processor says so at all.
fn added_around(complain: &Complaints<'_>, post: &Value) -> Result<(Option<bool>, Option<bool>), TextError> {
    if post.is_null() {
        return Ok((None, None));
    }
    let single = post["single"].as_array().map(Vec::as_slice).unwrap_or_default();
    let is_text = |item: &Value| item.get("Sequence").is_some();
    let text = single.iter().position(is_text);
    match text {
        Some(text) if post["type"] == "TemplateProcessing" && text <= 1 && single.len() - text <= 2 => {
            Ok((Some(text == 1), Some(single.len() - text == 2)))
        }
        _ => Err(complain.unlike(
            "post_processor",
            post,
            "TemplateProcessing with at most one token before and behind the text, or null",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Specials, Tokenizer};
    use super::*;

    /// A small file of the kind that is read: `a`, `b`, `▁`, merges `a b` and `▁ ab`, all bytes.
    fn file() -> Value {
        let mut vocab =
            json!({"<unk>": 0, "<bos>": 1, "<eos>": 2, "a": 3, "b": 4, "ab": 5, "▁": 6, "▁ab": 7});
        for byte in 0..256 {
            vocab[format!("<0x{byte:02X}>")] = json!(8 + byte);
        }
        let special = |id: u32, content: &str| json!({"id": id, "content": content, "special": true});
        json!({
            "added_tokens": [special(0, "<unk>"), special(1, "<bos>"), special(2, "<eos>"), special(264, "<|channel>"),
                special(265, "<channel|>"), {"id": 266, "content": "▁▁", "special": false}],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                "ignore_merges": false, "vocab": vocab, "merges": [["a", "b"], "▁ ab"]},
        })
    }

    fn read(file: &Value) -> Result<Vocabulary, TextError> {
        Vocabulary::from_tokenizer_json("dir/tokenizer.json", file.to_string().as_bytes())
    }

    fn tokenizer(file: &Value) -> Tokenizer {
        Tokenizer::new(read(file).unwrap()).unwrap()
    }

    #[test]
    fn text_is_merged_and_what_has_no_token_is_bytes() {
        let tokenizer = tokenizer(&file());
        assert_eq!(tokenizer.encode("ab ab", Specials::Text), [5, 7]);
        assert_eq!(tokenizer.encode("ab▁ab", Specials::Text), [5, 7]);
        assert_eq!(tokenizer.encode("aéb", Specials::Text), [3, 8 + 0xc3, 8 + 0xa9, 4]);
        assert_eq!(tokenizer.decode(&[5, 7, 8 + 0xc3, 8 + 0xa9]), "ab abé");
        // Added tokens match as they are written, before spaces are escaped, and print as all others do.
        assert_eq!(tokenizer.encode("a  b", Specials::Text), [3, 6, 6, 4]);
        assert_eq!(tokenizer.encode("a▁▁b", Specials::Text), [3, 266, 4]);
        assert_eq!(tokenizer.decode(&[3, 266, 4]), "a  b");
        assert_eq!(tokenizer.encode("<bos>a", Specials::Parse), [1, 3]);
        assert_eq!(tokenizer.decode(&[1, 3, 264, 0]), "a");
        let channel = tokenizer.channel().unwrap();
        assert_eq!((channel.open, channel.close), (264, 265));
    }

    #[test]
    fn words_are_whole_where_the_file_says_so() {
        let mut file = file();
        file["model"]["vocab"]["aab"] = json!(267);
        assert_eq!(tokenizer(&file).encode("aab", Specials::Text), [3, 5]);
        file["model"]["ignore_merges"] = json!(true);
        assert_eq!(tokenizer(&file).encode("aab", Specials::Text), [267]);
    }

    #[test]
    fn without_all_bytes_unknown_characters_are_one_unknown_token() {
        let mut file = file();
        file["model"]["vocab"].as_object_mut().unwrap().remove("<0xC3>");
        let tokenizer = tokenizer(&file);
        assert_eq!(tokenizer.encode("aéébßc", Specials::Text), [3, 0, 4, 0, 8 + 0x63]);
        file["model"]["fuse_unk"] = json!(false);
        assert!(read(&file).unwrap_err().to_string().contains("model.fuse_unk"));
    }

    #[test]
    fn what_is_not_understood_is_named_by_file_and_key() {
        let cases = [
            ("/model/type", json!("Unigram"), "model.type"),
            ("/model/dropout", json!(0.1), "model.dropout"),
            ("/model/byte_fallback", json!(false), "model.byte_fallback"),
            ("/model/continuing_subword_prefix", json!("##"), "model.continuing_subword_prefix"),
            ("/model/end_of_word_suffix", json!("</w>"), "model.end_of_word_suffix"),
            ("/model/unk_token", json!("<x>"), "model.unk_token"),
            ("/model/vocab/a", json!(4), "model.vocab"),
            ("/model/vocab/a", json!(4_000_000_000_u32), "model.vocab"),
            ("/normalizer", json!({"type": "NFC"}), "normalizer"),
            ("/normalizer", json!(null), "normalizer"),
            ("/pre_tokenizer", json!({"type": "ByteLevel"}), "pre_tokenizer"),
            ("/pre_tokenizer/pattern", json!({"Regex": " "}), "pre_tokenizer"),
            ("/decoder", json!({"type": "ByteLevel"}), "decoder"),
            ("/decoder/decoders/2", json!({"type": "Strip"}), "decoder"),
            ("/post_processor", json!({"type": "BertProcessing"}), "post_processor"),
            ("/added_tokens/3/lstrip", json!(true), "added_tokens[3].lstrip"),
            ("/added_tokens/5/normalized", json!(true), "added_tokens[5].normalized"),
            ("/added_tokens/3/id", json!(3), "model.vocab"),
            ("/model/merges/0", json!(["a", "b", "c"]), "not understood"),
            ("/model/merges/0", json!(5), "not understood"),
            ("/model/vocab", json!([]), "not understood"),
        ];
        for (place, value, key) in cases {
            let mut file = file();
            let (parent, member) = place.rsplit_once('/').unwrap();
            match file.pointer_mut(parent).unwrap() {
                Value::Array(list) => list[member.parse::<usize>().unwrap()] = value,
                object => object[member] = value,
            }
            let error = read(&file).unwrap_err().to_string();
            assert!(error.contains("dir/tokenizer.json") && error.contains(key), "{place}: {error}");
        }
        assert!(Vocabulary::from_tokenizer_json("f", b"{").is_err());
    }

    #[test]
    fn the_post_processor_says_what_is_put_around_text() {
        let mut file = file();
        assert_eq!(read(&file).unwrap().add_bos, None);
        let (token, text) = (json!({"SpecialToken": {"id": "<bos>"}}), json!({"Sequence": {"id": "A"}}));
        for (single, bos, eos) in [
            (json!([token, text]), true, false),
            (json!([text]), false, false),
            (json!([token, text, token]), true, true),
        ] {
            file["post_processor"] = json!({"type": "TemplateProcessing", "single": single});
            let vocabulary = read(&file).unwrap();
            assert_eq!((vocabulary.add_bos, vocabulary.add_eos), (Some(bos), Some(eos)));
        }
        file["post_processor"] = json!({"type": "TemplateProcessing", "single": [token, token, text]});
        assert!(read(&file).is_err());
    }

    #[test]
    fn the_configuration_names_tokens_and_may_hold_the_template() {
        let mut vocabulary = read(&file()).unwrap();
        let mut configure = |config: Value| {
            let found = vocabulary.read_tokenizer_config("c.json", config.to_string().as_bytes());
            found.map(|template| (template, vocabulary.bos, vocabulary.eos, vocabulary.add_bos))
        };
        let tokens = json!({"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "pad_token": null,
            "add_bos_token": true, "chat_template": "hi"});
        let template = Some("hi".to_owned());
        assert_eq!(configure(tokens).unwrap(), (template, Some(1), Some(2), Some(true)));
        let named = |name: &str, template: &str| json!({"name": name, "template": template});
        let several = json!({"chat_template": [named("tools", "t"), named("default", "d")]});
        assert_eq!(configure(several).unwrap().0.as_deref(), Some("d"));
        let one = json!({"chat_template": [named("only", "o")]});
        assert_eq!(configure(one).unwrap().0.as_deref(), Some("o"));
        for (key, value) in [
            ("bos_token", json!("<s>")),
            ("eos_token", json!(5)),
            ("add_bos_token", json!("yes")),
            ("chat_template", json!(5)),
            ("chat_template", json!([named("a", "x"), named("b", "y")])),
        ] {
            let error = configure(json!({key: value})).unwrap_err().to_string();
            assert!(error.contains("c.json") && error.contains(key), "{error}");
        }
    }
}
