//! The compiler of forms for one vocabulary.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};

use super::{Compiled, Constraint, ConstraintError, Format, told};

/// Bytes of a longer token are none that a form is told about: it is never chosen under one.
const LONGEST: usize = 512;

/// Most tokens of a vocabulary, by the width of ids in the crate's tree.
const MOST_TOKENS: usize = 0xff_ffff;

/// Byte that stands before the names of control tokens, where no text can have it.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Bytes of stack for compiling; what is not used takes no memory.
const STACK: usize = 256 << 20;

/// Tokens that are tried before a form is accepted.
const TRIED: usize = 4;

/// White space of JSON that nobody asked to be otherwise: one space, or a line break with an indent. Without bounds a small
/// model may go on with it for ever.
const WHITE_SPACE: &str = r" |\n( {0,32}|\t{0,8})";

/// What one token is to a form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// Prints these bytes.
    Text(Vec<u8>),
    /// Prints nothing and can be named in a grammar.
    Control(Vec<u8>),
    /// Is never made.
    Nothing,
}

/// Makes tokens of a text.
pub type Encode = dyn Fn(&str) -> Vec<u32> + Send + Sync;

/// A vocabulary as forms see it.
pub struct Words {
    /// Each token, by id.
    pub tokens: Vec<Word>,
    /// Tokens that end a reply.
    pub ends: Vec<u32>,
    /// The tokens of a text that goes on behind other text; used where only one text can follow.
    pub encode: Box<Encode>,
}

/// Compiles forms.
pub struct Grammars {
    factory: ParserFactory,
    ends: Vec<u32>,
    breaks: Vec<(u32, u8)>,
}

impl Grammars {
    /// A compiler for a vocabulary; takes some 100 ms for a large one.
    ///
    /// # Errors
    /// A vocabulary without an end, or with more tokens than there can be.
    pub fn new(words: Words) -> Result<Self, ConstraintError> {
        let Words { tokens, ends, encode } = words;
        let bad = |what: String| Err(ConstraintError::Vocabulary(what));
        let count = tokens.len();
        if count == 0 || count >= MOST_TOKENS {
            return bad(format!("it has {count} tokens, expected 1 to {}", MOST_TOKENS - 1));
        }
        let ends: Vec<u32> = ends.into_iter().filter(|&end| (end as usize) < count).collect();
        let Some(&end) = ends.first() else {
            return bad("no token of its vocabulary ends a reply".to_owned());
        };
        let breaks = (0..)
            .zip(&tokens)
            .filter_map(|(token, word)| match word {
                Word::Text(text) if text.as_slice() == b"\n" => Some((token, 1)),
                Word::Text(text) if text.as_slice() == b"\n\n" => Some((token, 2)),
                _ => None,
            })
            .collect();
        let bytes: Vec<Vec<u8>> = tokens.into_iter().map(bytes_of).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count as u32, end), &bytes).with_eos_tokens(&ends);
        let words: TokEnv = Arc::new(Tree { trie, encode });
        let mut factory = ParserFactory::new(&words, InferenceCapabilities::default(), &slices())
            .map_err(|error| ConstraintError::Vocabulary(told(&error)))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, ends, breaks })
    }

    /// Compiles a form. Takes up to some 100 ms for a large one.
    ///
    /// # Errors
    /// A form that is none, is not supported, takes too much, or that no reply can have.
    pub fn compile(&self, format: &Format) -> Result<Constraint, ConstraintError> {
        let grammar = match format {
            Format::JsonSchema(schema) => {
                check(schema)?;
                let schema = match schema {
                    Value::Object(map) => spaced(map.clone()),
                    // Any JSON.
                    Value::Bool(true) => spaced(Map::new()),
                    _ => return Err(ConstraintError::Refused("a JSON schema is an object".to_owned())),
                };
                TopLevelGrammar::from_json_schema(schema)
            }
            Format::Lark(text) => {
                schemas_in(text).try_for_each(|schema| check(&schema))?;
                TopLevelGrammar::from_lark(text.clone())
            }
            Format::Regex(expression) => TopLevelGrammar::from_regex(expression),
        };
        let matcher = deep(|| {
            let matcher = Matcher::new(Ok(self.factory.create_parser(grammar)?));
            try_out(matcher.deep_clone())?;
            Ok(matcher)
        })?;
        let compiled = Compiled { matcher, ends: self.ends.clone(), breaks: self.breaks.clone() };
        Ok(Constraint { compiled: Arc::new(compiled), thoughts: None })
    }
}

/// Takes the first steps: whatever takes too much, or cannot begin at all, is to say so before a reply has begun.
fn try_out(mut matcher: Matcher) -> Result<(), anyhow::Error> {
    for _ in 0..TRIED {
        let allowed = matcher.compute_mask_or_eos()?;
        let Some(token) = allowed.first_bit_set().filter(|_| !matcher.is_stopped()) else { break };
        matcher.consume_token(token as u32)?;
    }
    Ok(())
}

/// Does work of the crate on a stack that is deep enough for all forms that are small enough: it calls itself for each
/// level of them.
fn deep<T: Send>(work: impl FnOnce() -> Result<T, anyhow::Error> + Send) -> Result<T, ConstraintError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(|error| {
            ConstraintError::Refused(format!("the system gives no thread to compile it: {error}"))
        })?;
        match thread.join() {
            Ok(done) => done.map_err(|error| ConstraintError::Refused(told(&error))),
            Err(_panic) => Err(ConstraintError::Refused("it cannot be compiled".to_owned())),
        }
    })
}

/// The bytes that the crate knows a token by.
fn bytes_of(word: Word) -> Vec<u8> {
    match word {
        Word::Text(text) if text.len() <= LONGEST && text.first() != Some(&CONTROL) => text,
        // The byte itself, in vocabularies of bytes.
        Word::Text(text) if text.len() == 1 => text,
        Word::Control(name) if !name.is_empty() && name.len() < LONGEST => [&[CONTROL], &name[..]].concat(),
        _ => Vec::new(),
    }
}

/// The schemas that stand in a grammar.
fn schemas_in(grammar: &str) -> impl Iterator<Item = Value> {
    let behind = |(at, mark): (usize, &str)| grammar.get(at + mark.len()..);
    let schema = |text| serde_json::Deserializer::from_str(text).into_iter().next()?.ok();
    grammar.match_indices("%json").filter_map(behind).filter_map(schema)
}

/// Refuses what the crate takes but does not keep to.
fn check(schema: &Value) -> Result<(), ConstraintError> {
    check_numbers(schema)?;
    check_counts(schema)
}

/// Refuses least numbers of members where names may come twice: the crate counts names that are free as often as they
/// come. Those that are required, or listed where no others may come, come once.
fn check_counts(schema: &Value) -> Result<(), ConstraintError> {
    let map = match schema {
        Value::Array(list) => return list.iter().try_for_each(check_counts),
        Value::Object(map) => map,
        _ => return Ok(()),
    };
    let least = map.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = map.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let patterns = map.get("patternProperties").and_then(Value::as_object).is_some_and(|map| !map.is_empty());
    let closed = !patterns && map.get("additionalProperties") == Some(&Value::Bool(false));
    // One member is one name, however often it comes.
    if least > required.max(1) && !closed {
        return Err(ConstraintError::Refused(format!(
            "`minProperties` {least} cannot be kept to where names are free, since one may come twice; list the \
             names in `properties`, and in `required` or with `additionalProperties`: false"
        )));
    }
    map.iter().try_for_each(|(word, value)| match (word.as_str(), value) {
        // Values, not schemas.
        ("const" | "enum" | "default" | "examples", _) => Ok(()),
        // Names, whatever they are, of schemas.
        ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
            named.values().try_for_each(check_counts)
        }
        (_, value) => check_counts(value),
    })
}

/// Refuses numbers that the crate would round: replies would be held to another schema than was sent.
fn check_numbers(schema: &Value) -> Result<(), ConstraintError> {
    /// Whole numbers up to here are told apart by the crate, which has them as f64.
    const MOST: f64 = 9_007_199_254_740_991.0;
    match schema {
        Value::Number(number) if number.as_f64().is_none_or(|value| value.abs() > MOST) => {
            Err(ConstraintError::Refused(format!(
                "numbers beyond ±{MOST} cannot be kept to exactly; found {number}"
            )))
        }
        Value::Array(list) => list.iter().try_for_each(check_numbers),
        Value::Object(map) => map.values().try_for_each(check_numbers),
        _ => Ok(()),
    }
}

/// A schema with our bounds on white space. What it says to the crate itself, in a word that is in no draft, is no part of
/// it: it could make replies that are no JSON.
#[must_use]
pub fn spaced(mut schema: Map<String, Value>) -> Value {
    schema.insert("x-guidance".to_owned(), json!({ "whitespace_pattern": WHITE_SPACE }));
    schema.into()
}

/// Kinds of text whose tokens are sorted beforehand, since JSON has much of them.
fn slices() -> Vec<String> {
    llguidance::earley::SlicedBiasComputer::json_slices()
}

/// Bounds on what a form may take: some 50 ms for compiling, some ten for each token, some ten MB.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// The vocabulary as the crate asks for it.
struct Tree {
    trie: TokTrie,
    encode: Box<Encode>,
}

impl TokenizerEnv for Tree {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let tokens = self.trie.tokenize_with_greedy_fallback(bytes, |text| (self.encode)(text));
        // A tokenizer may not have a token for everything, and may choose one that forms are not told about.
        let same = |tokens: &Vec<u32>| self.trie.decode_raw(tokens) == bytes;
        if same(&tokens) {
            return tokens;
        }
        // None at all where there are no tokens for it: then nothing is forced.
        Some(self.trie.greedy_tokenize(bytes)).filter(same).unwrap_or_default()
    }
}
