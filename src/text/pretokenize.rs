//! How byte-pair tokenizers split text into words before they merge, as a table.
//!
//! Each pre-tokenizer is a list of stages; each stage splits what the stage before left, by alternatives of which the
//! first that matches at a place counts. The published rules need one look-ahead only: `\s+(?!\S)|\s+`, "spaces but
//! for the last one before a word". It is a property of the stage here, so that the rest is free of look-around and
//! runs in linear time on any text.

use std::borrow::Cow;

use regex_automata::meta::Regex;
use unicode_normalization::{UnicodeNormalization, is_nfc};

use super::TextError;
use super::error::shown;

/// One pass over the text.
struct Stage {
    /// Alternatives, best first.
    alternatives: &'static [&'static str],
    /// Whether the alternatives end with `\s+(?!\S)|\s+`.
    spaces: bool,
}

/// One row of the table.
struct Rules {
    /// Names that GGUF files use for these rules.
    names: &'static [&'static str],
    /// Passes, first to last.
    stages: &'static [Stage],
    /// Whether a word that is a token is taken as it is, without looking at the merges.
    whole_words: bool,
    /// Whether prompts begin with the begin-of-text token when the checkpoint does not say.
    adds_bos: bool,
    /// Whether characters are composed first (Unicode's form NFC).
    composes: bool,
}

/// What most rows are in what they do not name.
const PLAIN: Rules = Rules { names: &[], stages: &[], whole_words: false, adds_bos: false, composes: false };

/// GPT-2's own rules, which many later ones contain.
const GPT2: Stage = Stage {
    alternatives: &[r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+"],
    spaces: true,
};

/// Contractions, in either case.
const CONTRACTIONS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)";
/// A word and one character before it that is neither line break, letter nor number.
const WORD: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
/// Signs with a space before and line breaks behind them.
const SIGNS: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*";
/// Line breaks and the space before them.
const BREAKS: &str = r"\s*[\r\n]+";

/// A stage of DeepSeek's first tokenizers: what it finds, one after the other, and nothing about spaces.
const fn finds(alternatives: &'static [&'static str]) -> Stage {
    Stage { alternatives, spaces: false }
}

/// Chinese, Japanese and Korean letters as DeepSeek's first tokenizers count them, and what Unicode puts between.
const EAST_ASIAN: Stage = finds(&[r"[\u{0800}-\u{9fa5}\u{ac00}-\u{d7ff}]+"]);

/// Letters that DeepSeek LLM keeps together: Latin, Greek, Cyrillic and others that have cases. It is a list of its own,
/// older than today's Unicode and without some, so no class stands for it.
const CASED: &str = "\\s?[A-Za-z\\u{b5}\\u{c0}-\\u{d6}\\u{d8}-\\u{f6}\\u{f8}-\\u{1ba}\\u{1bc}-\\u{1bf}\\u{1c4}-\\u{293}\
\\u{295}-\\u{2af}\\u{370}-\\u{373}\\u{376}\\u{377}\\u{37b}-\\u{37d}\\u{37f}\\u{386}\\u{388}-\\u{38a}\\u{38c}\\u{38e}-\
\\u{3a1}\\u{3a3}-\\u{3f5}\\u{3f7}-\\u{481}\\u{48a}-\\u{52f}\\u{531}-\\u{556}\\u{10a0}-\\u{10c5}\\u{13a0}-\\u{13f5}\
\\u{13f8}-\\u{13fd}\\u{1c90}-\\u{1cba}\\u{1cbd}-\\u{1cbf}\\u{1d00}-\\u{1d2b}\\u{1d6b}-\\u{1d77}\\u{1d79}-\\u{1d9a}\
\\u{1e00}-\\u{1f15}\\u{1f18}-\\u{1f1d}\\u{1f20}-\\u{1f45}\\u{1f48}-\\u{1f4d}\\u{1f50}-\\u{1f57}\\u{1f59}\\u{1f5b}\
\\u{1f5d}\\u{1f5f}-\\u{1f7d}\\u{1f80}-\\u{1fb4}\\u{1fb6}-\\u{1fbc}\\u{1fbe}\\u{1fc2}-\\u{1fc4}\\u{1fc6}-\\u{1fcc}\
\\u{1fd0}-\\u{1fd3}\\u{1fd6}-\\u{1fdb}\\u{1fe0}-\\u{1fec}\\u{1ff2}-\\u{1ff4}\\u{1ff6}-\\u{1ffc}\\u{2102}\\u{2107}\
\\u{210a}-\\u{2113}\\u{2115}\\u{2119}-\\u{211d}\\u{2124}\\u{2126}\\u{2128}\\u{212a}-\\u{212d}\\u{212f}-\\u{2134}\
\\u{2139}\\u{213c}-\\u{213f}\\u{2145}-\\u{2149}\\u{214e}\\u{2183}\\u{2184}\\u{2c00}-\\u{2c7b}\\u{2c7e}-\\u{2ce4}\
\\u{2ceb}-\\u{2cee}\\u{2cf2}\\u{2cf3}\\u{a640}-\\u{a66d}\\u{a680}-\\u{a69b}\\u{a722}-\\u{a76f}\\u{a771}-\\u{a787}\
\\u{a78b}-\\u{a78e}\\u{ab70}-\\u{abbf}\\u{fb00}-\\u{fb06}\\u{fb13}-\\u{fb17}\\u{ff21}-\\u{ff3a}\\u{ff41}-\\u{ff5a}\
\\u{10400}-\\u{1044f}\\u{104b0}-\\u{104d3}\\u{104d8}-\\u{104fb}\\u{10c80}-\\u{10cb2}\\u{10cc0}-\\u{10cf2}\
\\u{118a0}-\\u{118df}\\u{1e900}-\\u{1e943}]+";

const TABLE: &[Rules] = &[
    Rules { names: &["gpt-2"], stages: &[GPT2], ..PLAIN },
    Rules {
        names: &["smollm"],
        // Every digit alone, then GPT-2's rules on what lies between.
        stages: &[finds(&[r"\p{N}"]), GPT2],
        ..PLAIN
    },
    Rules {
        names: &["llama-bpe", "llama3", "llama-v3"],
        stages: &[Stage { alternatives: &[CONTRACTIONS, WORD, r"\p{N}{1,3}", SIGNS, BREAKS], spaces: true }],
        whole_words: true,
        adds_bos: true,
        ..PLAIN
    },
    Rules {
        // Qwen 2 to 3, and what DeepSeek made of them.
        names: &["qwen2", "deepseek-r1-qwen"],
        stages: &[Stage { alternatives: &[CONTRACTIONS, WORD, r"\p{N}", SIGNS, BREAKS], spaces: true }],
        composes: true,
        ..PLAIN
    },
    Rules {
        // Mistral since Nemo. Words end where small letters are followed by a capital one.
        names: &["tekken"],
        stages: &[Stage {
            alternatives: &[
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                BREAKS,
            ],
            spaces: true,
        }],
        whole_words: true,
        adds_bos: true,
        ..PLAIN
    },
    Rules {
        // DeepSeek LLM, V2 and V2.5.
        names: &["deepseek-llm"],
        stages: &[
            finds(&[r"[\r\n]"]),
            finds(&[CASED]),
            finds(&[r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3000}-\u{3002}]+"]),
            finds(&[r"\s+$"]),
            EAST_ASIAN,
            finds(&[r"\p{N}"]),
        ],
        ..PLAIN
    },
    Rules {
        names: &["deepseek-coder"],
        stages: &[
            finds(&[r"[\r\n]"]),
            finds(&[r"\s?\p{L}+"]),
            finds(&[r"\s?\p{P}+"]),
            EAST_ASIAN,
            finds(&[r"\p{N}"]),
        ],
        ..PLAIN
    },
    Rules {
        // DeepSeek V3 and R1.
        names: &["deepseek-v3"],
        stages: &[
            finds(&[r"\p{N}{1,3}"]),
            finds(&[r"[\u{4e00}-\u{9fa5}\u{3040}-\u{30ff}]+"]),
            Stage {
                alternatives: &[
                    r"[!-/:-@\[-`{-~][A-Za-z]+",
                    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                    r" ?[\p{P}\p{S}]+[\r\n]*",
                    BREAKS,
                ],
                spaces: true,
            },
        ],
        ..PLAIN
    },
];

/// The rules of one pre-tokenizer, compiled.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    stages: Vec<Compiled>,
    /// Whether a word that is a token is taken as it is, without looking at the merges.
    pub whole_words: bool,
    /// Whether prompts begin with the begin-of-text token when the checkpoint does not say.
    pub adds_bos: bool,
    composes: bool,
}

#[derive(Debug)]
struct Compiled {
    regex: Regex,
    /// The alternative `\s+`, if the stage ends with `\s+(?!\S)|\s+`.
    spaces: Option<usize>,
}

impl PreTokenizer {
    /// The pre-tokenizer that GGUF calls `name`.
    ///
    /// # Errors
    /// An unknown name (or none) is refused, never guessed.
    pub fn named(name: Option<&str>) -> Result<Self, TextError> {
        let found = name.unwrap_or_default();
        let unknown = || TextError::UnknownPreTokenizer {
            found: shown(found),
            supported: TABLE.iter().map(|rules| rules.names[0]).collect::<Vec<_>>().join(", "),
        };
        let rules = TABLE.iter().find(|rules| rules.names.contains(&found)).ok_or_else(unknown)?;
        let mut stages = Vec::with_capacity(rules.stages.len());
        for stage in rules.stages {
            let mut alternatives = stage.alternatives.to_vec();
            let spaces = stage.spaces.then_some(alternatives.len());
            alternatives.extend(stage.spaces.then_some(r"\s+"));
            let regex = Regex::new_many(&alternatives).map_err(|error| TextError::BadVocabulary {
                what: format!("rules of pre-tokenizer `{found}` do not compile: {error}"),
            })?;
            stages.push(Compiled { regex, spaces });
        }
        let Rules { whole_words, adds_bos, composes, .. } = *rules;
        Ok(Self { stages, whole_words, adds_bos, composes })
    }

    /// The text that is to be split: `text`, its characters composed where the rules say so.
    pub fn normal<'t>(&self, text: &'t str) -> Cow<'t, str> {
        match self.composes && !is_nfc(text) {
            true => Cow::Owned(text.nfc().collect()),
            false => Cow::Borrowed(text),
        }
    }

    /// Hands every word of `text` to `word`, in order; together they are `text`.
    pub fn split<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) {
        split(&self.stages, text, word);
    }
}

fn split<'t>(stages: &[Compiled], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    let Some((stage, rest)) = stages.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let mut at = 0;
    while at < text.len() {
        let input = regex_automata::Input::new(text).range(at..);
        let Some(found) = stage.regex.search(&input).filter(|found| !found.is_empty()) else { break };
        let (start, mut end) = (found.start(), found.end());
        if stage.spaces == Some(found.pattern().as_usize()) && end < text.len() {
            // A word follows and takes the last space, unless there is only one.
            let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
            if end - last > start {
                end -= last;
            }
        }
        split(rest, &text[at..start], word);
        split(rest, &text[start..end], word);
        at = end;
    }
    split(rest, &text[at..], word);
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        words_of(&PreTokenizer::named(Some(name)).unwrap(), text)
    }

    fn words_of(pre: &PreTokenizer, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        pre.split(text, &mut |word| words.push(word.to_owned()));
        words
    }

    static ALL: LazyLock<Vec<PreTokenizer>> = LazyLock::new(|| {
        TABLE.iter().map(|rules| PreTokenizer::named(Some(rules.names[0])).unwrap()).collect()
    });

    #[test]
    fn gpt2_keeps_the_last_space_for_the_word() {
        assert_eq!(words("gpt-2", "a  b\n\n c "), ["a", " ", " b", "\n\n", " c", " "]);
        assert_eq!(words("gpt-2", "it's 12%\t\tx"), ["it", "'s", " 12", "%", "\t", "\t", "x"]);
        assert_eq!(words("gpt-2", "   "), ["   "]);
        assert_eq!(words("gpt-2", "a\u{3000}\u{3000}b"), ["a", "\u{3000}", "\u{3000}", "b"]);
    }

    #[test]
    fn smollm_takes_digits_one_by_one() {
        assert_eq!(words("smollm", "in 2024,  5"), ["in", " ", "2", "0", "2", "4", ",", "  ", "5"]);
    }

    #[test]
    fn llama_takes_three_digits_and_ends_symbols_with_line_breaks() {
        assert_eq!(
            words("llama-bpe", "12345 I'LL {\n\n  x"),
            ["123", "45", " I", "'LL", " {\n\n", " ", " x"]
        );
        assert_eq!(words("llama-bpe", "a \n \n  b"), ["a", " \n \n", " ", " b"]);
    }

    #[test]
    fn qwen_takes_digits_one_by_one_and_composes() {
        assert_eq!(words("qwen2", "12 I'LL {\n\n  x"), ["1", "2", " I", "'LL", " {\n\n", " ", " x"]);
        let pre = PreTokenizer::named(Some("deepseek-r1-qwen")).unwrap();
        assert_eq!(pre.normal("e\u{301} \u{1100}\u{1161}\u{212b}"), "\u{e9} \u{ac00}\u{c5}");
        assert!(matches!(pre.normal("\u{e9} \u{ac00}"), Cow::Borrowed(_)));
        let plain = PreTokenizer::named(Some("llama-bpe")).unwrap();
        assert_eq!(plain.normal("e\u{301}"), "e\u{301}");
    }

    #[test]
    fn tekken_ends_words_before_capitals() {
        assert_eq!(
            words("tekken", "fooBar HTTPServer ABC a/b ok//\n\n 12"),
            ["foo", "Bar", " HTTPServer", " ABC", " a", "/b", " ok", "//\n\n", " ", "1", "2"]
        );
        // Letters without case belong to either part.
        assert_eq!(words("tekken", "A世b世C"), ["A世b世", "C"]);
        assert_eq!(words("tekken", "it's"), ["it", "'s"]);
    }

    #[test]
    fn deepseek_splits_in_stages() {
        assert_eq!(
            words("deepseek-v3", "12345 世界x (foo) _bar\n\ny"),
            ["123", "45", " ", "世界", "x", " (", "foo", ")", " _", "bar", "\n\n", "y"]
        );
        assert_eq!(words("deepseek-v3", "#Def a.b かな한"), ["#Def", " a", ".b", " ", "かな", "한"]);
        assert_eq!(
            words("deepseek-llm", "Straße 12, 世界。\r\n ქარ  "),
            // Its third stage takes ASCII letters for signs, its fourth Georgian ones for Chinese.
            ["Stra", "ß", "e", " ", "1", "2", ",", " ", "世界", "。", "\r", "\n", " ", "ქარ", "  "]
        );
        // Only letters of its list are kept together with a space before them.
        assert_eq!(words("deepseek-llm", "a  b \u{561} \u{430}"), ["a", " ", " b", " \u{561}", " \u{430}"]);
        assert_eq!(words("deepseek-llm", "\u{561}\u{430}"), ["\u{561}", "\u{430}"]);
        assert_eq!(
            words("deepseek-coder", "let x1 = (a);\n\n世 +"),
            ["let", " x", "1", " =", " (", "a", ");", "\n", "\n", "世", " +"]
        );
    }

    #[test]
    fn unknown_names_are_refused() {
        for name in [None, Some("default"), Some("gpt-5")] {
            let error = PreTokenizer::named(name).unwrap_err().to_string();
            assert!(
                error.contains(name.unwrap_or("``"))
                    && error.contains("gpt-2, smollm, llama-bpe, qwen2, tekken"),
                "{error}"
            );
        }
    }

    proptest! {
        #[test]
        fn words_are_the_text(text in any::<String>()) {
            for pre in ALL.iter() {
                prop_assert_eq!(words_of(pre, &text).concat(), text.clone());
            }
        }
    }
}
