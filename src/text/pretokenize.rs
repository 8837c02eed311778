//! How byte-pair tokenizers split text into words before they merge, as a table.
//!
//! Each pre-tokenizer is a list of stages; each stage splits what the stage before left, by alternatives of which the
//! first that matches at a place counts. The published rules need one look-ahead only: `\s+(?!\S)|\s+`, "spaces but
//! for the last one before a word". It is a property of the stage here, so that the rest is free of look-around and
//! runs in linear time on any text.

use regex_automata::meta::Regex;

use super::TextError;

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
}

/// GPT-2's own rules, which many later ones contain.
const GPT2: Stage = Stage {
    alternatives: &[r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+"],
    spaces: true,
};

const TABLE: &[Rules] = &[
    Rules { names: &["gpt-2"], stages: &[GPT2], whole_words: false, adds_bos: false },
    Rules {
        names: &["smollm"],
        // Every digit alone, then GPT-2's rules on what lies between.
        stages: &[Stage { alternatives: &[r"\p{N}"], spaces: false }, GPT2],
        whole_words: false,
        adds_bos: false,
    },
    Rules {
        names: &["llama-bpe", "llama3", "llama-v3"],
        stages: &[Stage {
            alternatives: &[
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                r"[^\r\n\p{L}\p{N}]?\p{L}+",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n]*",
                r"\s*[\r\n]+",
            ],
            spaces: true,
        }],
        whole_words: true,
        adds_bos: true,
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
            found: found.to_owned(),
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
        Ok(Self { stages, whole_words: rules.whole_words, adds_bos: rules.adds_bos })
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
    fn unknown_names_are_refused() {
        for name in [None, Some("default"), Some("gpt-5")] {
            let error = PreTokenizer::named(name).unwrap_err().to_string();
            assert!(
                error.contains(name.unwrap_or("``")) && error.contains("gpt-2, smollm, llama-bpe"),
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
