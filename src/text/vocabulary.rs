//! The plain data a tokenizer is built from.

use super::TextError;

/// Many strings in one arena: 262 144 tokens are two allocations.
#[derive(Debug, Clone, Default)]
pub struct Strings {
    bytes: Vec<u8>,
    /// End of each string in `bytes`; it begins where the one before ends.
    ends: Vec<usize>,
}

impl Strings {
    /// An empty list with room for `count` strings of `bytes` bytes together.
    pub fn with_capacity(count: usize, bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(count) }
    }

    /// Appends one string.
    pub fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }

    /// Appends one string made of parts.
    pub(super) fn push_bytes(&mut self, string: impl IntoIterator<Item = u8>) {
        self.bytes.extend(string);
        self.ends.push(self.bytes.len());
    }

    /// Forgets all strings and keeps the room.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    /// All strings, one after the other.
    pub(super) fn joined(&self) -> &[u8] {
        &self.bytes
    }

    /// How many strings there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of all strings together.
    pub fn total_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The string at `index`, or `None` past the end.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(&self.bytes[start..end])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let string = &self.bytes[start..end];
            start = end;
            string
        })
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut list = Self::default();
        for string in strings {
            list.push(string.as_ref());
        }
        list
    }
}

/// What a token is, as GGUF's `tokenizer.ggml.token_type` says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Stands for what the vocabulary cannot express; prints nothing.
    Unknown,
    /// Structure (begin of text, end of turn …); recognised only where special tokens are parsed, prints nothing.
    Control,
    /// Text that is always one token, wherever it occurs.
    UserDefined,
    /// A place holder that is never produced; prints nothing.
    Unused,
    /// One byte, written `<0xXX>`, for text that has no token of its own.
    Byte,
}

impl TokenKind {
    /// The kind with GGUF's number `id`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub fn from_gguf(id: i64) -> Option<Self> {
        Some(match id {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// The tokens for filling a gap: the model reads `prefix`, the text before, `suffix`, the text behind, `middle`, and
/// writes what stands between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fim {
    /// Before the text before the gap.
    pub prefix: u32,
    /// Before the text behind the gap.
    pub suffix: u32,
    /// Before what stands in the gap.
    pub middle: u32,
}

/// A vocabulary as a checkpoint holds it. Token ids are indices into `tokens`.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// Kind of tokenizer: `gpt2` (byte-pair merges), `llama` (SentencePiece scores) or `gemma4` (merges of whole
    /// characters, with bytes for those that have no token).
    pub model: String,
    /// Rules that split text before byte-pair merges, e.g. `smollm`; unused by the others.
    pub pre: Option<String>,
    /// Token texts as the checkpoint writes them: `gpt2` in its printable byte alphabet, the others with `▁` for space.
    pub tokens: Strings,
    /// Kind of each token; empty when the checkpoint has none, then all are normal.
    pub kinds: Vec<TokenKind>,
    /// Score of each token (`llama`): of two possible merges the one with the higher score is done first.
    pub scores: Vec<f32>,
    /// Merges (`gpt2`, `gemma4`), best first: left and right part with one space between them.
    pub merges: Strings,
    /// Begin of text.
    pub bos: Option<u32>,
    /// End of text.
    pub eos: Option<u32>,
    /// Stands for text that no token expresses.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// More tokens that end a reply, e.g. end of turn.
    pub ends: Vec<u32>,
    /// What stands around the texts before and behind a gap, if the model was trained to fill some.
    pub fim: Option<Fim>,
    /// Whether `ends` is the whole set of tokens that end a reply. Otherwise `eos` does, and control tokens whose
    /// names say so.
    pub ends_are_all: bool,
    /// Whether a prompt begins with `bos`; by default it does with `llama`, `gemma4` and some pre-tokenizers of `gpt2`.
    pub add_bos: Option<bool>,
    /// Whether a text ends with `eos`; by default not.
    pub add_eos: Option<bool>,
    /// Whether a space is put before text (`llama`); by default it is.
    pub add_space_prefix: Option<bool>,
    /// Whether text between special tokens that is a token as a whole is taken as that, whatever the merges say
    /// (`gemma4`).
    pub whole_words: bool,
}

impl Vocabulary {
    /// Checks that lists fit together and ids lie inside.
    pub(super) fn check(&self) -> Result<(), TextError> {
        let bad = |what: String| Err(TextError::BadVocabulary { what });
        let count = self.tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return bad(format!("{count} tokens, expected 1 to 4294967295"));
        }
        if !self.kinds.is_empty() && self.kinds.len() != count {
            return bad(format!("{} token types for {count} tokens", self.kinds.len()));
        }
        let named = [
            ("begin of text", self.bos),
            ("end of text", self.eos),
            ("unknown", self.unk),
            ("padding", self.pad),
        ];
        let ends = self.ends.iter().map(|&id| ("end of turn", Some(id)));
        let around = self.fim.iter().flat_map(|fim| [fim.prefix, fim.suffix, fim.middle]);
        let around = around.map(|id| ("fill in the middle", Some(id)));
        for (name, id) in named.into_iter().chain(ends).chain(around) {
            if let Some(id) = id.filter(|&id| id as usize >= count) {
                return bad(format!("{name} token id {id} is past the last of {count} tokens"));
            }
        }
        Ok(())
    }
}
