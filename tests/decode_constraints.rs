//! Replies under constraints on a scripted model: what they match, what is refused, and that widths change nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod block_support;

use axe::decode::{
    Backend, CausalBackend, Constraint, ConstraintError, Format, Grammars, Sampling, Step, Thoughts, Wanted,
    Word, Words,
};
use block_support::{Hashed, Told, auto, fixed, generate};
use serde_json::{Value, json};

/// Opens the thinking channel.
const OPEN: u32 = 110;
/// Closes it.
const CLOSE: u32 = 111;
/// End a reply.
const ENDS: [u32; 2] = [112, 113];
/// Tokens of some letters.
const LONGER: [&str; 15] = [
    "{\"", "\":", "\": ", ", ", "true", "false", "null", "name", "age", "\"name\"", "    ", "\n\n", "ab",
    "abc", "<call>",
];

/// A vocabulary of printable characters, the line break, some longer tokens, and four control tokens.
fn words() -> Vec<Word> {
    let mut words: Vec<Word> = (b' '..=b'~').filter(|b| *b != b'`').map(|b| Word::Text(vec![b])).collect();
    words.push(Word::Text(b"\n".to_vec()));
    words.extend(LONGER.iter().map(|text| Word::Text(text.as_bytes().to_vec())));
    words.extend(
        ["<think>", "</think>", "<end>", "<over>"].map(|name| Word::Control(name.as_bytes().to_vec())),
    );
    words
}

fn print(token: u32) -> String {
    match &words()[token as usize] {
        Word::Text(text) => String::from_utf8(text.clone()).unwrap(),
        _ => String::new(),
    }
}

fn printed(tokens: &[u32]) -> String {
    tokens.iter().map(|token| print(*token)).collect()
}

/// The longest token first, as a tokenizer might.
fn encode(mut text: &str) -> Vec<u32> {
    let words = words();
    let mut ids = Vec::new();
    while !text.is_empty() {
        let best = (0..)
            .zip(&words)
            .filter_map(|(id, word)| match word {
                Word::Text(piece) if text.as_bytes().starts_with(piece) => Some((piece.len(), id)),
                _ => None,
            })
            .max();
        let (length, id) = best.unwrap_or((1, 0));
        ids.push(id);
        text = &text[length..];
    }
    ids
}

fn grammars() -> Grammars {
    Grammars::new(Words { tokens: words(), ends: ENDS.to_vec(), encode: Box::new(encode) }).unwrap()
}

fn model() -> Hashed {
    Hashed { vocabulary: 114, habit: 0.7, ..Hashed::default() }
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["ab", "abc", "c d"]}, "maxItems": 3},
            "parent": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/name"}]}
        },
        "required": ["name", "age", "tags", "parent"],
        "additionalProperties": false,
        "$defs": {"name": {"type": "object", "properties": {"name": {"const": "abc\n"}}, "required": ["name"], "additionalProperties": false}}
    })
}

fn samplings(constraint: &Constraint) -> Vec<Sampling> {
    let neutral = Sampling { constraint: Some(constraint.clone()), ..Sampling::default() };
    vec![
        neutral.clone(),
        Sampling { temperature: 0.8, seed: 1, ..neutral.clone() },
        Sampling { temperature: 1.0, top_k: 5, top_p: 0.9, min_p: 0.05, seed: 2, ..neutral.clone() },
        Sampling { repetition_penalty: 1.3, ..neutral.clone() },
        Sampling { logit_bias: vec![(3, -100.0), (40, 5.0), (60, -2.5)], ..neutral.clone() },
        Sampling {
            temperature: 0.7,
            frequency_penalty: 0.4,
            logit_bias: vec![(12, 3.0)],
            seed: 3,
            ..neutral
        },
    ]
}

fn wanted(most: usize) -> Wanted {
    Wanted { ends: ENDS.to_vec(), ..block_support::most(most) }
}

fn tell(constraint: &Constraint, prompt: &[u32]) -> Told {
    let sampling =
        Sampling { constraint: Some(constraint.clone()), temperature: 0.8, seed: 4, ..Sampling::default() };
    generate(&mut CausalBackend::new(model(), auto()), prompt, &sampling, &wanted(250))
}

#[test]
fn every_width_gives_the_tokens_of_one_a_pass() {
    let grammars = grammars();
    let formats = [
        Format::JsonSchema(person()),
        Format::JsonSchema(json!({"type": "object"})),
        Format::Lark("start: \"ab\" list \"!\"\nlist: item (\", \" item)*\nitem: /[a-c]{2,5}/ | \"true\" | \"(\" list \")\"\n".to_owned()),
        Format::Regex("(abc|[0-9]{3}-){2,8}x?".to_owned()),
    ];
    let (mut passes, mut forced) = ([0; 2], 0);
    for (place, format) in formats.iter().enumerate() {
        let constraint = grammars.compile(format).unwrap();
        for thoughts in [false, true] {
            let constraint = match thoughts {
                true => {
                    constraint.clone().behind(Thoughts { open: OPEN, close: CLOSE, breaks: place % 2 == 0 })
                }
                false => constraint.clone(),
            };
            for (which, mut sampling) in samplings(&constraint).into_iter().enumerate() {
                let mut prompt: Vec<u32> = (0..20).map(|i| (i * 7 + which as u32 * 31) % 95).collect();
                if which % 2 == 1 {
                    prompt.push(OPEN);
                    sampling.logit_bias.push((CLOSE, 4.0));
                }
                let alone =
                    generate(&mut CausalBackend::new(model(), fixed(1)), &prompt, &sampling, &wanted(120));
                for options in [fixed(2), fixed(4), fixed(8), fixed(16), auto()] {
                    let mut backend = CausalBackend::new(model(), options);
                    let told = generate(&mut backend, &prompt, &sampling, &wanted(120));
                    assert_eq!(told.tokens, alone.tokens, "{format:?}, {options:?}, {sampling:?}");
                    let again = generate(&mut backend, &prompt, &sampling, &wanted(120));
                    assert_eq!(again.tokens, alone.tokens, "again: {format:?}, {options:?}, {sampling:?}");
                    if options == fixed(8) {
                        passes[0] += alone.stats.passes;
                        passes[1] += told.stats.passes;
                        let own = told.stats.proposers.iter().find(|made| made.name == "constraint").unwrap();
                        assert_eq!(own.offered, own.accepted, "what only can follow does");
                        forced += own.accepted;
                    }
                }
            }
        }
    }
    println!("{} passes alone, {} in blocks, {forced} forced", passes[0], passes[1]);
    assert!(passes[1] * 4 < passes[0] * 3 && forced > 50);
}

#[test]
fn replies_match_what_was_asked_for() {
    let grammars = grammars();
    let constraint = grammars.compile(&Format::JsonSchema(person())).unwrap();
    let mut ended = 0;
    for sampling in samplings(&constraint) {
        for start in 0..8 {
            let prompt: Vec<u32> = (0..9).map(|i| (i * 11 + start * 17) % 95).collect();
            let mut backend = CausalBackend::new(model(), fixed(6));
            let told = generate(&mut backend, &prompt, &sampling, &wanted(300));
            let Some((last, reply)) = told.tokens.split_last().filter(|(last, _)| ENDS.contains(last)) else {
                continue;
            };
            assert!(ENDS.contains(last));
            ended += 1;
            let text = printed(reply);
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(value["name"].as_str().unwrap().chars().count() <= 12, "{text}");
            assert!(value["age"].as_u64().unwrap() <= 130, "{text}");
            assert!(value["tags"].as_array().unwrap().len() <= 3, "{text}");
            assert!(value["parent"].is_null() || value["parent"]["name"] == "abc\n", "{text}");
        }
    }
    assert!(ended > 20, "only {ended} replies came to their end");
}

#[test]
fn thoughts_are_free_and_the_reply_is_not() {
    let format = Format::Regex("(abc|true)+".to_owned());
    let plain = grammars().compile(&format).unwrap();
    let constraint = plain.clone().behind(Thoughts { open: OPEN, close: CLOSE, breaks: true });
    let parted = |tokens: &[u32]| {
        let place = tokens.iter().position(|token| *token == CLOSE).expect("the channel is closed");
        (tokens[..place].to_vec(), tokens[place + 1..].to_vec())
    };
    let (mut thoughts, mut breaks) = (0, 0);
    for seed in 0..40 {
        // The prompt opens the channel, or the reply may.
        let prompt: Vec<u32> =
            (0..8).map(|i| (i * 13 + seed) % 80).chain((seed % 2 == 0).then_some(OPEN)).collect();
        let bias = vec![(OPEN, 6.0), (CLOSE, 4.0), (94, 2.0), (106, 1.0)];
        let sampling = Sampling {
            constraint: Some(constraint.clone()),
            temperature: 0.9,
            seed: u64::from(seed),
            logit_bias: bias,
            ..Sampling::default()
        };
        let told = generate(&mut CausalBackend::new(model(), fixed(4)), &prompt, &sampling, &wanted(200));
        let opened = seed % 2 == 0 || told.tokens[0] == OPEN;
        let reply = if opened {
            if !told.tokens.contains(&CLOSE) {
                assert_eq!(told.tokens.len(), 200, "nothing ends thoughts but their end");
                continue;
            }
            let (thought, reply) = parted(&told.tokens);
            assert!(!thought.iter().any(|token| ENDS.contains(token)));
            thoughts += usize::from(!printed(&thought).chars().all(|letter| "abctrue".contains(letter)));
            reply
        } else {
            told.tokens.clone()
        };
        let text = printed(&reply);
        let said = if opened { text.trim_start_matches('\n') } else { &text };
        breaks += text.len() - said.len();
        assert!(text.len() - said.len() <= 2, "{text:?}");
        let rest = said.replace("abc", "").replace("true", "");
        assert!(rest.is_empty() || reply.len() > 100, "{text:?} of {:?}", told.tokens);
    }
    assert!(thoughts > 10 && breaks > 3, "{thoughts} thoughts, {breaks} line breaks");
    // A channel that the prompt has closed is not opened again.
    let closed = [5, OPEN, 7, CLOSE];
    assert_eq!(
        print(tell(&constraint, &closed).tokens[0]).chars().next().map(|c| "at".contains(c)),
        Some(true)
    );
    // Without a channel, its markers are tokens like others.
    assert!(!tell(&plain, &[5, OPEN]).tokens.contains(&CLOSE));
}

#[test]
fn control_tokens_can_be_named() {
    let grammars = grammars();
    for text in ["start: <think> \"abc\" </think> \"true\"", "start: <[110]> \"abc\" <[111]> \"true\""] {
        let constraint = grammars.compile(&Format::Lark(text.to_owned())).unwrap();
        let told = tell(&constraint, &[1, 2, 3]);
        let (last, reply) = told.tokens.split_last().unwrap();
        assert_eq!((reply[0], printed(reply).as_str()), (OPEN, "abctrue"));
        assert!(reply.contains(&CLOSE) && ENDS.contains(last));
    }
    // What prints their names is text.
    let text = grammars.compile(&Format::Lark("start: \"<call>\"".to_owned())).unwrap();
    assert_eq!(tell(&text, &[1]).tokens[0], 109);
}

#[test]
fn what_cannot_be_asked_for_is_refused_with_the_reason() {
    let grammars = grammars();
    let refusal = |format: Format| match grammars.compile(&format) {
        Err(ConstraintError::Refused(why)) => why,
        other => panic!("{format:?}: {other:?}"),
    };
    for (format, says) in [
        (Format::JsonSchema(json!({"type": "objekt"})), "objekt"),
        (Format::JsonSchema(json!({"$ref": "#/$defs/none"})), "none"),
        (Format::JsonSchema(json!({"$ref": "https://example.org/schema.json"})), "example.org"),
        (Format::JsonSchema(json!([1])), "object"),
        (Format::JsonSchema(json!({"const": 9_007_199_254_740_993_u64})), "9007199254740993"),
        (Format::JsonSchema(json!({"type": "integer", "maximum": -1e19})), "exactly"),
        (Format::JsonSchema(json!({"oneOf": [{"type": "string"}, {"minLength": 1}]})), "`anyOf` is"),
        (Format::JsonSchema(json!(false)), "object"),
        // The same free name twice would do.
        (Format::JsonSchema(json!({"minProperties": 2})), "`minProperties` 2"),
        (
            Format::JsonSchema(json!({"type": "array", "items": {"anyOf": [
                {"minProperties": 2, "required": ["a"], "properties": {"a": {}}, "additionalProperties": {"const": 1}}]}})),
            "`minProperties` 2",
        ),
        (
            Format::JsonSchema(json!({"properties": {"const": {"$ref": "#/$defs/x"}}, "$defs": {"x": {
                "minProperties": 3, "patternProperties": {"^a": {}}, "additionalProperties": false}}})),
            "`minProperties` 3",
        ),
        (
            Format::Lark("start: arguments\narguments: %json {\"minProperties\": 2}".to_owned()),
            "`minProperties` 2",
        ),
        (Format::Lark("start: %json { \"const\": 1e300 }".to_owned()), "exactly"),
        (Format::JsonSchema(json!({"type": "string", "minLength": 5, "maxLength": 2})), "minLength"),
        (Format::JsonSchema(json!({"not": {"type": "string"}})), "not"),
        (Format::JsonSchema(json!({"type": "string", "pattern": "("})), "("),
        (Format::Lark("begin: \"a\"".to_owned()), "start"),
        (Format::Lark("start: other".to_owned()), "other"),
        (Format::Lark("root ::= \"a\"".to_owned()), "1"),
        (Format::Lark(String::new()), ""),
        (Format::Lark("start: <none>".to_owned()), "none"),
        (Format::Regex("a(".to_owned()), "a("),
        (Format::Regex("(?=a)b".to_owned()), "look"),
    ] {
        let why = refusal(format.clone());
        assert!(why.contains(says), "{format:?}: {why}");
        assert!(why.len() < 600 && !why.contains("backtrace") && !why.contains("<non-verbose"), "{why}");
    }
    // What the standard knows and forms do not is refused; what it does not know either is nothing to it.
    for (word, value) in [
        ("not", json!({"type": "null"})),
        ("if", json!({"type": "null"})),
        ("uniqueItems", json!(true)),
        ("contains", json!({"type": "null"})),
        ("propertyNames", json!({"maxLength": 3})),
        ("dependentRequired", json!({"a": ["b"]})),
        ("dependencies", json!({"a": ["b"]})),
        ("unevaluatedProperties", json!(false)),
    ] {
        let why = refusal(Format::JsonSchema(json!({"type": ["array", "object"], word: value})));
        assert!(why.contains(word), "{word}: {why}");
    }
    // Nor is what the crate behind it would take as a word of its own.
    let lenient = json!({"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}});
    assert!(refusal(Format::JsonSchema(lenient)).contains("uniqueItems"));
    let separated =
        json!({"type": "object", "x-guidance": {"item_separator": ";", "whitespace_pattern": "x"}});
    let bare = json!({"type": "object"});
    let [separated, bare] =
        [separated, bare].map(|schema| axe::decode::spaced(schema.as_object().unwrap().clone()));
    assert_eq!(separated, bare);
    // Names that come once can be counted, and nothing else is.
    for schema in [
        json!({"type": "integer", "minimun": 3, "foo": {"bar": 1}}),
        json!({"type": "string", "contentEncoding": "base64", "title": "t", "examples": [1e300_f64.to_string()]}),
        json!({"minProperties": 1}),
        json!({"maxProperties": 2}),
        json!({"minProperties": 2, "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}),
        json!({"minProperties": 2, "properties": {"minProperties": {}, "b": {}}, "required": ["minProperties", "b"],
            "additionalProperties": false}),
        json!({"properties": {"minProperties": {"const": 5}}}),
        json!({"const": {"minProperties": 5}}),
    ] {
        grammars.compile(&Format::JsonSchema(schema)).unwrap();
    }
    let none = Grammars::new(Words { tokens: words(), ends: vec![], encode: Box::new(encode) });
    assert!(matches!(none, Err(ConstraintError::Vocabulary(_))));
}

#[test]
fn hostile_forms_take_bounded_time() {
    let grammars = grammars();
    let nested = (0..120).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}));
    let wide: Value = (0..20_000)
        .map(|i| (format!("p{i}"), json!({"type": "string", "pattern": format!("a{i}.*b{i}")})))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let all_of: Vec<Value> = (0..60).map(|i| json!({"anyOf": (0..12).map(|j| json!({"properties": {format!("p{j}"): {"const": i}}})).collect::<Vec<_>>()})).collect();
    let hostile = [
        Format::Regex("(a{0,1000}){0,1000}b{5000}".to_owned()),
        Format::Regex("(.*a.{40}){20}".to_owned()),
        Format::Regex(format!("{}x{}", "(".repeat(5000), ")*".repeat(5000))),
        Format::JsonSchema(
            json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 100_000}),
        ),
        Format::JsonSchema(
            json!({"type": "array", "minItems": 100_000, "maxItems": 10_000_000, "items": {"type": "integer"}}),
        ),
        Format::JsonSchema(json!({"allOf": all_of})),
        Format::JsonSchema(json!({"type": "object", "properties": wide})),
        Format::JsonSchema(nested),
        Format::JsonSchema(json!({"$ref": "#"})),
        Format::JsonSchema(json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        Format::JsonSchema(json!({"type": "integer", "multipleOf": 1_000_003, "minimum": 7})),
        Format::Lark("start: start start | start | \"\"".to_owned()),
        Format::Lark(format!("start: {}", "(\"a\" | \"b\") ".repeat(20_000))),
        Format::Lark("start: a{100000}\na: b{100000}\nb: \"x\"?".to_owned()),
        Format::Lark(format!("start: A\nA: {}", "/[^a]*a/ & ".repeat(300) + "/.*/")),
    ];
    for format in hostile {
        println!("{}", format!("{format:?}").chars().take(40).collect::<String>());
        let began = std::time::Instant::now();
        let compiled = grammars.compile(&format);
        let seconds = began.elapsed().as_secs_f64();
        let shown: String = format!("{format:?}").chars().take(70).collect();
        let ended = compiled
            .as_ref()
            .map_or_else(|error| error.to_string().chars().take(90).collect(), |_| "ok".to_owned());
        println!("{seconds:6.2} s {shown}: {ended}");
        assert!(seconds < if cfg!(debug_assertions) { 30.0 } else { 2.0 }, "{shown} took {seconds} s");
    }
}

#[test]
fn a_form_that_takes_too_much_in_the_middle_ends_alike_at_every_width() {
    let names: Vec<String> = (0..3000).map(|place| format!("r{place}")).collect();
    let rules: String = names.iter().map(|name| format!("{name}: \"a{name}\" \"b\"\n")).collect();
    let text = format!("start: \"true\" /[0-9]{{6}}/ \"true\" big\nbig: {}\n{rules}", names.join(" | "));
    let sampling = Sampling {
        constraint: Some(grammars().compile(&Format::Lark(text)).unwrap()),
        ..Sampling::default()
    };
    let mut all = Vec::new();
    for options in [fixed(1), fixed(3), fixed(8), auto()] {
        let mut backend = CausalBackend::new(model(), options);
        let mut generation = backend.start(&[1, 2, 3], &sampling).unwrap();
        generation.want(wanted(100));
        let mut tokens = Vec::new();
        let error = loop {
            match generation.step() {
                Ok(Step::Commit(new)) => tokens.extend(new),
                Ok(_) => {}
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.contains("simpler"), "{error}");
        assert!(generation.step().is_err(), "what has failed stays so");
        all.push((tokens, error));
    }
    assert!(printed(&all[0].0).starts_with("true") && all[0].0.len() >= 5, "{:?}", all[0]);
    assert!(all.iter().all(|told| *told == all[0]), "{all:?}");
}

#[test]
fn what_lies_behind_the_end_of_a_reply_counts_for_nothing() {
    // The text is known beforehand, so every guess is right.
    let format = Format::Lark(format!("start: \"{}\"", "abc".repeat(20)));
    let sampling = Sampling { constraint: Some(grammars().compile(&format).unwrap()), ..Sampling::default() };
    let mut backend = CausalBackend::new(model(), fixed(8));
    let mut generation = backend.start(&[1, 2, 3], &sampling).unwrap();
    generation.want(wanted(100));
    let mut committed = 0;
    while committed < 16 {
        if let Step::Commit(new) = generation.step().unwrap() {
            committed += new.len();
        }
    }
    let before = generation.blocks().unwrap();
    // The last pass gave eight tokens, seven of them guessed; three of them are part of the reply.
    generation.kept(3);
    let after = generation.blocks().unwrap();
    assert_eq!((before.committed - after.committed, before.evaluated), (5, after.evaluated));
    let accepted =
        |stats: &axe::decode::BlockStats| stats.proposers.iter().map(|made| made.accepted).sum::<usize>();
    assert_eq!(accepted(&before) - accepted(&after), 4, "the last one was no guess");
}
