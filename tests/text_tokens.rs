//! Tokenizers of real models: golden ids, round trips, hostile text, time.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test that calls them")]

mod text_support;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use axe::checkpoint::gguf::Gguf;
use axe::load::vocabulary;
use axe::text::{Assembler, Specials, Tokenizer};
use proptest::prelude::*;
use text_support::{Case, GEMMA3, Greedy, SMOLLM2, fixture, model};

static SMOLLM2_TOKENS: LazyLock<Tokenizer> = LazyLock::new(|| text_support::tokenizer(SMOLLM2));
static GEMMA3_TOKENS: LazyLock<Tokenizer> = LazyLock::new(|| text_support::tokenizer(GEMMA3));

fn check(tokenizer: &Tokenizer, cases: &[Case]) {
    assert!(!cases.is_empty());
    for case in cases {
        assert_eq!(tokenizer.encode(&case.text, Specials::Text), case.ids, "{:?}", case.text);
        if let Some(ids) = &case.ids_special {
            assert_eq!(
                &tokenizer.encode(&case.text, Specials::Parse),
                ids,
                "{:?}, specials parsed",
                case.text
            );
        }
    }
}

#[test]
fn smollm2_gives_the_golden_ids() {
    check(&SMOLLM2_TOKENS, &fixture::<Vec<Case>>("real-models/smollm2-135m-instruct-q4_1.tokens.json"));
}

#[test]
fn gemma3_gives_the_golden_ids() {
    check(&GEMMA3_TOKENS, &fixture::<Vec<Case>>("real-models/gemma-3-270m-q4_k_m.tokens.json"));
}

/// The same vocabulary as its maker published it; there special tokens are always parsed.
#[test]
fn gemma3_gives_the_ids_of_the_published_tokenizer() {
    for case in fixture::<Vec<Case>>("tokenizers/gemma-3.json") {
        assert_eq!(GEMMA3_TOKENS.encode(&case.text, Specials::Parse), case.ids, "{:?}", case.text);
    }
}

#[test]
fn greedy_prompts_and_replies_are_the_golden_ones() {
    let cases: Vec<Greedy> = fixture("real-models/gemma-3-270m-q4_k_m.greedy.json");
    assert!(!cases.is_empty());
    for case in cases {
        let ids = GEMMA3_TOKENS.with_bos(GEMMA3_TOKENS.encode(&case.text, Specials::Text));
        assert_eq!(ids, case.prompt_ids, "{:?}", case.text);
        assert_eq!(GEMMA3_TOKENS.decode(&case.tokens), case.reply);
    }
    for case in fixture::<Vec<Greedy>>("real-models/smollm2-135m-instruct-q4_1.greedy.json") {
        assert_eq!(SMOLLM2_TOKENS.decode(&case.tokens), case.reply);
        let (mut assembler, mut reply) = (Assembler::new([""; 0], false), String::new());
        for &id in &case.tokens {
            assembler.push(SMOLLM2_TOKENS.piece(id), &mut reply);
        }
        assembler.flush(&mut reply);
        assert_eq!(reply, case.reply);
    }
}

#[test]
fn real_vocabularies_say_what_their_files_say() {
    assert_eq!(SMOLLM2_TOKENS.vocab_size(), 49_152);
    assert_eq!(SMOLLM2_TOKENS.bos(), Some(1));
    assert_eq!(SMOLLM2_TOKENS.eos_ids(), [0, 2]);
    assert!(!SMOLLM2_TOKENS.adds_bos());
    assert_eq!(SMOLLM2_TOKENS.text(2), b"<|im_end|>");
    assert_eq!(SMOLLM2_TOKENS.piece(2), b"");
    assert_eq!(SMOLLM2_TOKENS.piece(253), b" a");
    assert_eq!(SMOLLM2_TOKENS.piece(u32::MAX), b"");

    assert_eq!(GEMMA3_TOKENS.vocab_size(), 262_144);
    assert_eq!(GEMMA3_TOKENS.bos(), Some(2));
    assert_eq!(GEMMA3_TOKENS.eos_ids(), [1, 106]);
    assert!(GEMMA3_TOKENS.adds_bos());
    assert!(!GEMMA3_TOKENS.strips_leading_space());
    assert_eq!(GEMMA3_TOKENS.piece(496), b" a");
    assert_eq!(GEMMA3_TOKENS.piece(251), b"\r");
    assert_eq!(GEMMA3_TOKENS.piece(109), b"\n\n\n");
    assert_eq!(GEMMA3_TOKENS.piece(106), b"");
}

proptest! {
    #[test]
    fn byte_pairs_round_trip(text in any::<String>()) {
        prop_assert_eq!(SMOLLM2_TOKENS.decode(&SMOLLM2_TOKENS.encode(&text, Specials::Text)), text);
    }

    #[test]
    fn sentence_pieces_round_trip(text in any::<String>().prop_filter("▁ stands for a space", |text| !text.contains('▁'))) {
        prop_assert_eq!(GEMMA3_TOKENS.decode(&GEMMA3_TOKENS.encode(&text, Specials::Text)), text);
    }

    #[test]
    fn prose_with_specials_round_trips(text in "([a-z]{1,8}| |\n|\t|<\\|im_end\\|>|<bos>|<0x0A>|<table>|é|世|👍|[0-9]){0,40}") {
        prop_assert_eq!(&SMOLLM2_TOKENS.decode(&SMOLLM2_TOKENS.encode(&text, Specials::Text)), &text);
        prop_assert_eq!(&GEMMA3_TOKENS.decode(&GEMMA3_TOKENS.encode(&text, Specials::Text)), &text);
        // Text that may not name special tokens never gives one.
        for (tokenizer, control) in [(&*SMOLLM2_TOKENS, 0..17), (&*GEMMA3_TOKENS, 0..5)] {
            prop_assert!(!tokenizer.encode(&text, Specials::Text).iter().any(|id| control.contains(id)));
        }
    }
}

/// `size` bytes of what breaks tokenizers: one word, no word, marks of all sorts.
fn hostile(size: usize) -> Vec<(&'static str, String)> {
    let fill = |unit: &str| unit.repeat(size / unit.len());
    vec![
        ("a", fill("a")),
        ("spaces", fill(" ")),
        ("spaces before a word", fill(" ") + "x"),
        ("digits", fill("7")),
        ("emoji", fill("👍")),
        ("joined emoji", fill("👨\u{200d}👩\u{200d}👧")),
        ("NUL", fill("\0")),
        ("line breaks", fill("\r\n")),
        ("spaced line breaks", fill(" \n")),
        ("tabs", fill("\t")),
        ("apostrophes", fill("'")),
        ("contractions", fill("'ll")),
        ("angle brackets", fill("<")),
        ("special tokens", fill("<|im_end|>")),
        ("broken special tokens", fill("<|im_end|")),
        ("bytes", fill("<0x0A>")),
        ("letters of all sorts", fill("aЖ世ß é")),
        ("combining marks", fill("e\u{301}")),
        ("noncharacters", fill("\u{fdd0}\u{ffff}")),
        ("lower blocks", fill("▁")),
        ("prose", fill("The quick brown fox jumps over the lazy dog, 12 times. ")),
    ]
}

/// A megabyte in an optimised build, less in one that is not. A quadratic loop would take far longer than the limit,
/// which leaves room for a slow and busy machine.
#[test]
fn hostile_text_is_encoded_in_time() {
    let size = if cfg!(debug_assertions) { 1 << 16 } else { 1 << 20 };
    let limit = Duration::from_secs(6);
    for (tokenizer, name) in [(&*SMOLLM2_TOKENS, "byte pairs"), (&*GEMMA3_TOKENS, "sentence pieces")] {
        for (what, text) in hostile(size) {
            for specials in [Specials::Text, Specials::Parse] {
                let start = Instant::now();
                let ids = tokenizer.encode(&text, specials);
                let took = start.elapsed();
                println!("{name}, {what}, {specials:?}: {} tokens in {took:?}", ids.len());
                assert!(took < limit, "{name}, {what}, {specials:?}: took {took:?}");
                if specials == Specials::Text && !text.contains('▁') {
                    assert!(tokenizer.decode(&ids) == text, "{name}, {what}: not the text again");
                }
            }
        }
    }
}

/// Time that this thread has computed, which other programs cannot stretch as they do the time on the clock.
fn computed() -> Duration {
    let schedule = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(schedule.split_whitespace().next().unwrap().parse().unwrap())
}

#[test]
fn vocabularies_are_read_in_time() {
    for (name, limit) in [(SMOLLM2, 60), (GEMMA3, 150)] {
        let gguf = Gguf::open(&model(name)).unwrap();
        let best = (0..5).map(|_| {
            let start = computed();
            let tokenizer = Tokenizer::new(vocabulary(&gguf).unwrap()).unwrap();
            let took = computed() - start;
            assert!(tokenizer.vocab_size() > 0);
            took
        });
        let best = best.min().unwrap();
        println!("{name}: {best:?}");
        let slow_build = if cfg!(debug_assertions) { 20 } else { 1 };
        assert!(best < Duration::from_millis(limit * slow_build), "{name}: took {best:?}");
    }
}
