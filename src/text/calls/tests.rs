//! Every syntax, every oddity, every cut.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::text::testing::{CONTROL, bytes_and};

/// Control tokens of every syntax; the first three are Gemma's.
const NAMES: [&str; 11] = [
    GEMMA_OPEN,
    GEMMA_CLOSE,
    GEMMA_QUOTE,
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

fn calling(syntax: Syntax) -> Calling {
    let tools = ["weather", "clock", "a.b-c_1"].map(str::to_owned);
    Calling { syntax, tools: tools.into(), one: false, begun: 0 }
}

/// The tokens of a text, in which `«»` are Gemma's markers, `'` is its quote, and other markers are written out.
fn tokens(text: &str, syntax: Syntax) -> Vec<(u32, Vec<u8>)> {
    let mut out = Vec::new();
    let mut rest = text;
    'text: while let Some(letter) = rest.chars().next() {
        if syntax == Syntax::Gemma
            && let Some(place) = ['«', '»', '\''].iter().position(|marker| *marker == letter)
        {
            out.push((CONTROL + place as u32, Vec::new()));
            rest = &rest[letter.len_utf8()..];
            continue;
        }
        for (place, name) in NAMES.iter().enumerate().skip(3) {
            if let Some(behind) = rest.strip_prefix(name) {
                out.push((CONTROL + place as u32, Vec::new()));
                rest = behind;
                continue 'text;
            }
        }
        out.extend(rest.bytes().take(letter.len_utf8()).map(|byte| (u32::from(byte), vec![byte])));
        rest = &rest[letter.len_utf8()..];
    }
    out
}

/// Content, calls, and whether the reply broke off. `cuts` are the bytes of each run of text.
fn run(
    calling: &Calling,
    tokens: &[(u32, Vec<u8>)],
    cuts: &[usize],
) -> (String, Vec<(String, String)>, bool) {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| bytes_and(&NAMES));
    let mut reader = Reader::new(calling, &TOKENIZER);
    let (mut out, mut written) = (Vec::new(), Vec::new());
    let (mut at, mut cuts) = (0, cuts.iter());
    while at < tokens.len() {
        let most = *cuts.next().unwrap_or(&1);
        let run = tokens[at..].iter().take(most).take_while(|(id, _)| *id < CONTROL).count();
        let piece: Vec<u8> = tokens[at..at + run].iter().flat_map(|(_, piece)| piece).copied().collect();
        // Id 7 stands for any ordinary token.
        reader.push(if run == 0 { tokens[at].0 } else { 7 }, &piece, &mut out);
        match run {
            // Not all markers stand for something in every syntax and place.
            0 => {
                let name = NAMES[(tokens[at].0 - CONTROL) as usize].as_bytes();
                let counted = reader.written() - written.len();
                assert!(counted == 0 || counted == name.len());
                written.extend(&name[..counted]);
            }
            _ => written.extend(piece),
        }
        assert_eq!(reader.written(), written.len());
        at += run.max(1);
    }
    reader.finish(&mut out);
    let (mut content, mut calls, mut seen) = (Vec::new(), Vec::new(), 0);
    for segment in out {
        match segment {
            Segment::Content(Said { from, bytes }) => {
                assert!(from >= seen, "content comes in order");
                seen = from + bytes.len();
                assert_eq!(written[from..seen], bytes, "and is what was written there");
                content.extend(bytes);
            }
            Segment::Call(Call { name, arguments }) => calls.push((name, arguments)),
        }
    }
    assert_eq!(calls.len(), reader.calls());
    (String::from_utf8_lossy(&content).into_owned(), calls, reader.unfinished())
}

fn read(syntax: Syntax, text: &str) -> (String, Vec<(String, Value)>, bool) {
    let (content, calls, unfinished) = run(&calling(syntax), &tokens(text, syntax), &[]);
    let calls = calls.into_iter().map(|(name, text)| (name, serde_json::from_str(&text).unwrap()));
    (content, calls.collect(), unfinished)
}

#[track_caller]
fn calls(syntax: Syntax, text: &str, content: &str, expected: &[(&str, Value)]) {
    let (said, found, unfinished) = read(syntax, text);
    let expected: Vec<(String, Value)> =
        expected.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    assert_eq!((said.as_str(), found, unfinished), (content, expected, false), "{text}");
}

/// Nothing of the text is a call.
#[track_caller]
fn no_call(syntax: Syntax, text: &str, unfinished: bool) {
    let shown = match syntax {
        Syntax::Gemma => text.replace('«', GEMMA_OPEN).replace('»', GEMMA_CLOSE).replace('\'', GEMMA_QUOTE),
        _ => text.to_owned(),
    };
    assert_eq!(read(syntax, text), (shown, Vec::new(), unfinished), "{text}");
}

#[test]
fn gemma_calls_as_the_template_writes_them() {
    let is = |text: &str, value: Value| calls(Syntax::Gemma, text, "", &[("weather", value)]);
    is("«call:weather{}»", json!({}));
    is("«call:weather{place:'Bern',days:2}»", json!({"place": "Bern", "days": 2}));
    is(
        "«call:weather{a:true,b:false,c:null,d:-1.5e3,e:[1,'x',[]],f:{g:{h:'i'}}}»",
        json!({"a": true, "b": false, "c": null, "d": -1500.0, "e": [1, "x", []], "f": {"g": {"h": "i"}}}),
    );
    // Strings are literal: whatever stands in them.
    is(
        "«call:weather{s:'a \"b\" {c} [d], e: \\n \n é👍 <|\"|> <tool_call|>'}»",
        json!({"s": "a \"b\" {c} [d], e: \\n \n é👍 <|\"|> <tool_call|>"}),
    );
    is("«call:weather{s:''}»", json!({"s": ""}));
    calls(
        Syntax::Gemma,
        "Let me see.\n«call:weather{place:'Bern'}»«call:a.b-c_1{}»\n",
        "Let me see.",
        &[("weather", json!({"place": "Bern"})), ("a.b-c_1", json!({}))],
    );
}

#[test]
fn gemma_calls_as_they_are_seen_in_the_wild() {
    let is = |text: &str, value: Value| calls(Syntax::Gemma, text, "", &[("weather", value)]);
    is("«call:weather{\"place\": \"Bern\"}»", json!({"place": "Bern"}));
    is("«call:weather{'place':'Bern'}»", json!({"place": "Bern"}));
    is("«call:weather{\"s\": \"a\\n\\\"b\\\" {\\u00e9}\"}»", json!({"s": "a\n\"b\" {é}"}));
    is("«call:weather{ place : 'Bern' , days : [ 1 , 2 ] }»", json!({"place": "Bern", "days": [1, 2]}));
    is("« call: weather {place:'Bern'} »", json!({"place": "Bern"}));
    is("«call:weather(place:'Bern')»", json!({"place": "Bern"}));
    is("«call:weather(place='Bern', o=(a: 1))»", json!({"place": "Bern", "o": {"a": 1}}));
    is("«call:weather\n{\n  place: 'Bern',\n  days: 2\n}\n»", json!({"place": "Bern", "days": 2}));
    // No end marker: at the end of the reply, before the next call, before text.
    is("«call:weather{place:'Bern'}", json!({"place": "Bern"}));
    let two = [("weather", json!({"a": 1})), ("clock", json!({}))];
    calls(Syntax::Gemma, "«call:weather{a:1}«call:clock{}", "", &two);
    calls(Syntax::Gemma, "«call:weather{a:1} call:clock{}»", "", &two);
    calls(Syntax::Gemma, "«call:weather{a:1}call:clock{}", "", &two);
    calls(Syntax::Gemma, "«call:weather{a:1}\nSo it is.", "\nSo it is.", &two[..1]);
    calls(Syntax::Gemma, "«call:weather{a:1} called»x", " calledx", &two[..1]);
    calls(Syntax::Gemma, "«call:weather{a:1}'»", "", &two[..1]);
    calls(Syntax::Gemma, "«call:weather{a:1}}»", "}", &two[..1]);
    // Numbers stay as they are written.
    let (_, exact, _) =
        run(&calling(Syntax::Gemma), &tokens("«call:clock{n:123456789012345678901}»", Syntax::Gemma), &[]);
    assert_eq!(exact[0].1, "{\"n\":123456789012345678901}");
}

#[test]
fn what_is_no_gemma_call_is_content_whole() {
    for text in [
        "«call:nobody{a:1}»",
        "«call:weather{a:Bern}»",
        "«call:weather{a:1]»",
        "«call:weather{a:.5}»",
        "«call:weather{:1}»",
        "«call:weather{a:1,}»",
        "«weather{a:1}»",
        "«call:weather»",
        "«»",
        "«call:weather{a:'x»",
    ] {
        no_call(Syntax::Gemma, text, false);
    }
    for text in ["«", "«call:wea", "«call:weather{a:", "«call:weather{a:'Bern", "«call:weather{a:[1,2]"]
    {
        no_call(Syntax::Gemma, text, true);
    }
    // The same characters as text begin nothing.
    let typed = "<|tool_call>call:weather{}<tool_call|>";
    assert_eq!(read(Syntax::Gemma, typed), (typed.to_owned(), vec![], false));
    // The others go on.
    let deep = format!("«call:weather{{a:{}1{}}}»", "[".repeat(80), "]".repeat(80));
    no_call(Syntax::Gemma, &deep, false);
    assert_eq!(
        read(Syntax::Gemma, "a «call:nobody{}» b «call:clock{}» c"),
        (
            "a <|tool_call>call:nobody{}<tool_call|> b  c".to_owned(),
            vec![("clock".to_owned(), json!({}))],
            false
        )
    );
}

#[test]
fn hermes_calls() {
    let is = |text: &str, value: Value| calls(Syntax::Hermes, text, "", &[("weather", value)]);
    let bern = json!({"place": "Bern"});
    is(
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}\n</tool_call>",
        bern.clone(),
    );
    is("<tool_call>{\"arguments\":{\"place\":\"Bern\"},\"name\":\"weather\"}</tool_call>", bern.clone());
    is("<tool_call>{\"name\": \"weather\", \"parameters\": {\"place\": \"Bern\"}}</tool_call>", bern.clone());
    is(
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"{\\\"place\\\": \\\"Bern\\\"}\"}</tool_call>",
        bern.clone(),
    );
    is(
        "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}}</tool_call>",
        bern.clone(),
    );
    is("<tool_call>{\"name\": \"weather\"}</tool_call>", json!({}));
    is("<tool_call>{\"name\": \"weather\", \"arguments\": null}</tool_call>", json!({}));
    // A string may hold what ends calls, and raw line breaks.
    is(
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"s\": \"a</tool_call>\n\\\"}\"}}</tool_call>",
        json!({"s": "a</tool_call>\n\"}"}),
    );
    // No end marker.
    is("<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}", bern.clone());
    let one = "<tool_call>{\"name\": \"weather\", \"arguments\": {}}";
    let two = [("weather", json!({})), ("weather", json!({}))];
    calls(Syntax::Hermes, &format!("{one}{one}</tool_call>"), "", &two);
    calls(Syntax::Hermes, &format!("Hm < {one}</tool_call>\n{one}</tool_call>\n"), "Hm <", &two);
    calls(Syntax::Hermes, &format!("{one}</tool_call> so."), " so.", &two[..1]);
    calls(
        Syntax::Hermes,
        "<tool_call>[{\"name\": \"weather\"}, {\"name\": \"weather\"}]</tool_call>",
        "",
        &two,
    );
    for text in [
        "<tool_call> begins a call",
        "<tool_call>{\"name\": \"nobody\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"a\": 1}</tool_call>",
        "<tool_call>{\"no\": \"weather\"}</tool_call> x",
        "<tool_call>weather</tool_call>",
        "a <tool_cal",
    ] {
        let unfinished = text.contains("{\"a\": 1}<");
        no_call(Syntax::Hermes, text, unfinished && !text.ends_with("</tool_call>"));
    }
    for text in ["<tool_call>", "<tool_call>\n{\"name\": \"wea", "<tool_call>{\"name\": \"weather\", "] {
        no_call(Syntax::Hermes, text, true);
    }
}

#[test]
fn llama_calls() {
    let bern = ("weather", json!({"place": "Bern"}));
    let is = |text: &str| calls(Syntax::Llama, text, "", std::slice::from_ref(&bern));
    let object = "{\"name\": \"weather\", \"parameters\": {\"place\": \"Bern\"}}";
    is(object);
    is(&format!("\n {object}"));
    is(&format!("<|python_tag|>{object}"));
    is(&format!("[{object}]"));
    is("{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {\"place\": \"Bern\"}}");
    is("{\"function\": \"weather\", \"parameters\": {\"place\": \"Bern\"}}");
    is("<|python_tag|>weather.call(place=\"Bern\")");
    let two = [bern.clone(), bern.clone()];
    for between in ["; ", "\n", ", ", ""] {
        calls(Syntax::Llama, &format!("{object}{between}{object}"), "", &two);
    }
    calls(Syntax::Llama, &format!("[{object}, {object}]"), "", &two);
    calls(Syntax::Llama, &format!("Well. <|python_tag|>{object}"), "Well.", &two[..1]);
    for text in [
        "{\"place\": \"Bern\"}",
        "{\"name\": \"nobody\", \"parameters\": {}}",
        "{ not json }",
        "[1, 2]",
        "{}",
        "Well, {\"name\": \"weather\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
    ] {
        no_call(Syntax::Llama, text, false);
    }
    no_call(Syntax::Llama, "{\"name\": \"weather\", \"para", true);
}

#[test]
fn other_calls() {
    let bern = [("weather", json!({"place": "Bern"}))];
    let is = |syntax: Syntax, text: &str| calls(syntax, text, "", &bern);
    let object = "{\"place\": \"Bern\"}";
    is(Syntax::Mistral, &format!("[TOOL_CALLS] [{{\"name\": \"weather\", \"arguments\": {object}}}]"));
    is(Syntax::Mistral, &format!("[TOOL_CALLS]weather[ARGS]{object}"));
    is(Syntax::Mistral, &format!("[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{object}"));
    let two = [bern[0].clone(), bern[0].clone()];
    let one = format!("[TOOL_CALLS]weather[ARGS]{object}");
    calls(Syntax::Mistral, &format!("Hm.{one}{one}"), "Hm.", &two);
    let sep = "<｜tool▁sep｜>";
    let (open, close) = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>");
    let old = format!("{open}function{sep}weather\n```json\n{object}\n```{close}");
    let new = format!("{open}weather{sep}{object}{close}");
    let all = |inside: &str| format!("<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>");
    is(Syntax::DeepSeek, &all(&old));
    is(Syntax::DeepSeek, &all(&new));
    calls(Syntax::DeepSeek, &format!("Hm.\n{}", all(&format!("{old}\n{new}"))), "Hm.", &two);
    no_call(Syntax::DeepSeek, &format!("{open}weather{sep}{{\"pla"), true);
    no_call(Syntax::Mistral, "[TOOL_CALLS]weather[ARGS]{\"pla", true);
    no_call(Syntax::Mistral, "[TOOL_CALLS]weather", false);
}

#[test]
fn one_call_may_be_enough() {
    for (syntax, text) in [
        (Syntax::Gemma, "a «call:clock{}»b«call:clock{}»c"),
        (Syntax::Hermes, "a <tool_call>{\"name\":\"clock\"}</tool_call>b"),
        (Syntax::Mistral, "a [TOOL_CALLS][{\"name\":\"clock\"},{\"name\":\"clock\"}]"),
    ] {
        let calling = Calling { one: true, ..calling(syntax) };
        let (content, calls, _) = run(&calling, &tokens(text, syntax), &[]);
        assert_eq!((content.as_str(), calls.len()), ("a", 1), "{text}");
    }
}

#[test]
fn what_is_written_is_read_again() {
    let arguments = json!({"s": "a\"b'c {}\n", "n": [1, -2.5, null], "o": {"t": true}});
    for syntax in Syntax::ALL {
        let text = write::call(syntax, "weather", &arguments);
        let mut written = tokens(&text, syntax);
        if syntax == Syntax::Gemma {
            let tokenizer = bytes_and(&NAMES);
            let ids = tokenizer.encode(&text, crate::text::Specials::Parse);
            written = ids.iter().map(|&id| (id, tokenizer.piece(id).to_vec())).collect();
        }
        let (content, calls, unfinished) = run(&calling(syntax), &written, &[]);
        assert_eq!((content.as_str(), calls.len(), unfinished), ("", 1, false), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap(), arguments, "{text}");
        assert!(text.starts_with(&begun(syntax, "weather")), "{text}");
        assert_eq!(Syntax::from_name(syntax.name()), Some(syntax));
    }
}

/// Pieces of calls, whole and broken, of every syntax.
fn parts() -> impl Strategy<Value = Vec<&'static str>> {
    let part = prop::sample::select(vec![
        "«",
        "»",
        "'",
        "call:weather{",
        "call:clock{}",
        "a:'b'",
        "a:1",
        ",",
        "}",
        ")",
        "(",
        "{",
        "[",
        "]",
        "\"",
        "\\",
        ":",
        " ",
        "\n",
        "é",
        "x",
        "call:",
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "{\"name\": \"clock\"",
        "{\"name\": \"clock\", \"arguments\": {}}",
        "\"arguments\": {\"a\": \"b\"}",
        ";",
        "<|python_tag|>",
        "clock.call(a=1)",
        "[TOOL_CALLS]",
        "clock[ARGS]{}",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "clock",
        "<｜tool▁sep｜>",
        "```json\n{}\n```",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ]);
    prop::collection::vec(part, 0..14)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn cuts_do_not_matter(
        parts in parts(),
        cuts in prop::collection::vec(1usize..12, 0..60),
        which in 0usize..5,
        one in any::<bool>(),
    ) {
        let syntax = Syntax::ALL[which];
        let calling = Calling { one, ..calling(syntax) };
        let tokens = tokens(&parts.concat(), syntax);
        let whole = run(&calling, &tokens, &[usize::MAX; 200]);
        let single = run(&calling, &tokens, &[]);
        let cut = run(&calling, &tokens, &cuts);
        prop_assert_eq!(&whole, &single);
        prop_assert_eq!(&cut, &single);
        for (name, arguments) in &single.1 {
            prop_assert!(calling.tools.contains(name));
            prop_assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object(), "{}", arguments);
        }
    }
}
