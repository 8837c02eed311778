//! Chat templates render as under Python's Jinja, set up as Hugging Face's libraries do it.
//!
//! tests/fixtures/templates/render.py made golden.json and says what is in it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test that calls them")]

mod text_support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use axe::text::{ChatInput, ChatTemplate, TokenKind, Tokenizer, Vocabulary};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Golden {
    conversations: BTreeMap<String, Map<String, Value>>,
    whole: Vec<Whole>,
    expressions: Vec<Expression>,
}

/// A template and what it writes for each conversation.
#[derive(Deserialize)]
struct Whole {
    template: String,
    cases: BTreeMap<String, Outcome>,
}

#[derive(Deserialize)]
struct Expression {
    name: String,
    source: String,
    x: Value,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Text, or a failure with the words that the template raised, if it did.
#[derive(Deserialize)]
struct Outcome {
    want: Option<String>,
    error: Option<String>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates")
}

fn golden(folder: &Path) -> Golden {
    let path = folder.join("golden.json");
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

/// Special tokens of every family, with its markers of thoughts.
fn tokenizer(markers: [&str; 2]) -> Tokenizer {
    use TokenKind::{Control, Normal, UserDefined};
    let names = ["a", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<｜User｜>", "<end_of_turn>"];
    let tokens = names.iter().chain(&markers).collect();
    let kinds = vec![Normal, Control, Control, Control, Control, Control, Control, UserDefined, UserDefined];
    let pre = Some("qwen2".to_owned());
    let (bos, eos) = (Some(1), Some(2));
    let model = "gpt2".to_owned();
    Tokenizer::new(Vocabulary { model, pre, tokens, kinds, bos, eos, ..Vocabulary::default() }).unwrap()
}

/// `text` with the time where its format stands.
fn with_time(text: &str) -> String {
    let mut parts = text.split('⟦');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (format, rest) = part.split_once('⟧').unwrap();
        out.push_str(&chrono::Local::now().format(format).to_string());
        out.push_str(rest);
    }
    out
}

/// What is wrong with what came out, if something is.
fn difference(found: Result<String, String>, outcome: &Outcome) -> Option<String> {
    match (&found, &outcome.want, &outcome.error) {
        (Ok(found), Some(want), _) if *found == with_time(want) => None,
        (Err(_), None, None) => None,
        (Err(found), None, Some(error)) if *found == format!("chat template: {error}") => None,
        (found, want, error) => Some(format!("found    {found:?}\n  expected {want:?} or {error:?}")),
    }
}

fn render(template: &ChatTemplate, variables: &Map<String, Value>) -> Result<String, String> {
    let mut extra = variables.clone();
    let mut take = |key: &str| extra.remove(key).filter(|value| !value.is_null());
    let input = ChatInput {
        messages: take("messages").unwrap_or_else(|| json!([])),
        tools: take("tools"),
        documents: take("documents"),
        add_generation_prompt: take("add_generation_prompt") != Some(Value::Bool(false)),
        extra,
    };
    template.render(&input).map(|rendered| rendered.text().into_owned()).map_err(|error| error.to_string())
}

/// Expressions that print otherwise here, and why that is left so.
const KNOWN: &[(&str, &str)] = &[
    ("tuples", "there are none: they are lists"),
    ("map_parts", "pairs are lists, not tuples"),
    ("sorted_map", "pairs are lists, not tuples"),
    ("percent", "the operator % does not format; the filter `format` does"),
    ("concatenated", "~ writes a list as JSON"),
    ("truncated", "there is no filter `truncate`"),
    ("rounded", "halves go up, not to the even number"),
    ("iterated_none", "there is nothing in none, so a loop over it does nothing"),
];

#[test]
fn expressions_print_what_python_prints() {
    let tokenizer = tokenizer(["<think>", "</think>"]);
    let mut wrong = Vec::new();
    let expressions = golden(&folder()).expressions;
    assert!(expressions.len() > 100);
    for Expression { name, source, x, outcome } in expressions {
        let found = ChatTemplate::new(&source, &tokenizer).map_err(|error| error.to_string());
        let found =
            found.and_then(|template| render(&template, &Map::from_iter([("x".to_owned(), x.clone())])));
        let known = KNOWN.iter().any(|(known, _)| *known == name);
        match difference(found, &outcome) {
            Some(difference) if !known => {
                wrong.push(format!("{name}: {source} with {x}\n  {difference}"));
            }
            None if known => wrong.push(format!("{name} no longer differs")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// Renders every template of a folder for every conversation. `adapted` are those that come out otherwise here, since
/// the conversation is first brought into a shape that the template takes: template, conversation and end of the text.
#[track_caller]
fn check(folder: &Path, adapted: &[(&str, &str, &str)]) {
    let golden = golden(folder);
    let mut wrong = Vec::new();
    for Whole { template: file, cases } in &golden.whole {
        let source = std::fs::read_to_string(folder.join(file)).unwrap();
        let gemma = source.contains("<|channel>");
        let tokenizer = tokenizer(if gemma { ["<|channel>", "<channel|>"] } else { ["<think>", "</think>"] });
        let template = ChatTemplate::new(&source, &tokenizer).unwrap();
        for (name, outcome) in cases {
            let found = render(&template, &golden.conversations[name]);
            let own =
                adapted.iter().find(|(template, conversation, _)| template == file && conversation == name);
            if let Some((.., end)) = own {
                assert!(difference(found.clone(), outcome).is_some(), "{file}, {name} no longer differs");
                assert!(found.as_ref().is_ok_and(|found| found.ends_with(end)), "{file}, {name}: {found:?}");
            } else if let Some(difference) = difference(found, outcome) {
                wrong.push(format!("{file}, {name}:\n  {difference}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn templates_of_the_families_write_what_they_write_under_python() {
    let golden = golden(&folder());
    assert!(golden.whole.len() >= 9 && golden.conversations.len() >= 18);
    let answer = "<end_of_turn>\n<start_of_turn>model\n";
    // A template that declares no tools gets text; one that knows no calls gets these as text, too.
    let told = "comes back between <tool_response> and </tool_response>.\n\nWill it rain?";
    let [rain, one] =
        ["{\"rain\": true}", "1"].map(|text| format!("<tool_response>\n{text}\n</tool_response>"));
    check(
        &folder(),
        &[
            // There is no system role, so that the text goes to the first user message.
            ("gemma2-like.jinja", "system", &format!("user\nBe brief. \n\nHi{answer}")),
            ("gemma2-like.jinja", "tools", &format!("{told}{answer}")),
            ("gemma2-like.jinja", "tools_system", &format!("{told}{answer}")),
            ("gemma2-like.jinja", "called", &format!("<start_of_turn>user\n{rain}{answer}")),
            ("gemma2-like.jinja", "called_twice", &format!("<start_of_turn>user\nThanks{answer}")),
            ("gemma2-like.jinja", "called_written", &format!("<start_of_turn>user\n{one}{answer}")),
            ("mistral-small-like.jinja", "tools", "[INST]Will it rain?[/INST]0"),
            ("mistral-small-like.jinja", "tools_system", "[INST]Will it rain?[/INST]0"),
            ("mistral-small-like.jinja", "called", &format!("[INST]{rain}[/INST]0")),
            ("mistral-small-like.jinja", "called_twice", "[INST]Thanks[/INST]0"),
            ("mistral-small-like.jinja", "called_written", &format!("[INST]{one}[/INST]0")),
            ("deepseek-v3.jinja", "tools", "<｜User｜>Will it rain?<｜Assistant｜>"),
            ("deepseek-v3.jinja", "tools_system", "<｜User｜>Will it rain?<｜Assistant｜>"),
            ("deepseek-v3.jinja", "called_twice", "Yes.<｜end▁of▁sentence｜><｜User｜>Thanks<｜Assistant｜>"),
            ("deepseek-r1-like.jinja", "tools", "<｜User｜>Will it rain?<｜Assistant｜><think>\n"),
            ("deepseek-r1-like.jinja", "tools_system", "<｜User｜>Will it rain?<｜Assistant｜><think>\n"),
            (
                "deepseek-r1-like.jinja",
                "called",
                "<｜tool▁output▁begin｜>{\"rain\": true}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
            ),
            ("deepseek-r1-like.jinja", "called_twice", "<｜User｜>Thanks<｜Assistant｜><think>\n"),
            // It takes one call a message.
            (
                "llama-like.jinja",
                "called_twice",
                "Thanks<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            ),
            // The variable that switches thinking has another name there.
            ("deepseek-r1-like.jinja", "thinking_off", "<｜Assistant｜></think>"),
            // It takes calls only beside no content and with arguments that are text.
            (
                "deepseek-v3.jinja",
                "called",
                "<｜tool▁sep｜>weather\n```json\n{\"place\": \"Bern\", \"days\": [1, 2]}\n```<｜tool▁call▁end｜>\
             <｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{\"rain\": true}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
            ),
            (
                "deepseek-v3.jinja",
                "called_written",
                "<｜tool▁sep｜>clock\n```json\n{\"zone\": \"é\"}\n```<｜tool▁call▁end｜>\
             <｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>1<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
            ),
        ],
    );
}

#[test]
#[ignore = "needs AXE_TEMPLATES, a folder with templates and what render.py made of them"]
fn other_templates_write_what_they_write_under_python() {
    check(&PathBuf::from(std::env::var_os("AXE_TEMPLATES").unwrap()), &[]);
}
