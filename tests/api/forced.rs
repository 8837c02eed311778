//! Calls that a request forces on a causal model: whatever the model would rather write, the reply calls.

use crate::block_support::{Hashed, auto, fixed};
use crate::stage::{self, Script, Server, Stage, config, speaker};
use axe::decode::CausalBackend;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

const QWEN: &str = include_str!("../fixtures/templates/qwen3.jinja");
const GEMMA: &str = include_str!("../fixtures/templates/gemma4-like.jinja");
const LLAMA: &str = include_str!("../fixtures/templates/llama-like.jinja");
const MISTRAL: &str = include_str!("../fixtures/templates/mistral-like.jinja");
const DEEPSEEK: &str = include_str!("../fixtures/templates/deepseek-v3.jinja");

const TOKENS: [&str; 9] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "[TOOL_CALLS]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

/// A server whose model writes what comes to its mind, in passes as wide as `rows` says; 0 adapts.
async fn server(template: &'static str, rows: usize) -> Server {
    let load = move |scripted| {
        let mut loaded = speaker(scripted, template, &TOKENS);
        let vocabulary = loaded.model.tokenizer.vocab_size();
        let model = Hashed { vocabulary, context: stage::CONTEXT, ..Hashed::default() };
        let options = if rows == 0 { auto() } else { fixed(rows) };
        loaded.backend = Box::new(CausalBackend::new(model, options));
        loaded
    };
    let stage = tokio::task::spawn_blocking(move || Stage::with(Script::saying("x"), 4, load));
    Server::over(stage.await.unwrap(), &config("")).await
}

fn tools() -> Value {
    let weather = json!({
        "type": "object",
        "properties": {
            "place": {"type": "string", "enum": ["Bern", "Chur"]},
            "days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "at": {"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"], "additionalProperties": false},
        },
        "required": ["place"],
        "additionalProperties": false,
    });
    let clock = json!({"type": "object", "properties": {"zone": {"enum": ["A", "B"]}}, "additionalProperties": false});
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": weather}},
        {"type": "function", "function": {"name": "clock", "parameters": clock}},
    ])
}

fn chat(choice: Value, seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools(), "tool_choice": choice, "seed": seed,
        "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 700,
    })
}

/// Names of the calls that an answer makes, whose arguments are checked.
fn calls(answer: &Value, template: &str) -> Vec<String> {
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(choice["finish_reason"], "tool_calls", "{template}: {choice}");
    assert_eq!(message["content"], Value::Null, "{message}");
    let call = |call: &Value| {
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        let name = call["function"]["name"].as_str().unwrap().to_owned();
        if name == "weather" {
            assert!(["Bern", "Chur"].contains(&arguments["place"].as_str().unwrap()), "{arguments}");
            assert!(arguments.get("days").is_none_or(|days| days.is_array()), "{arguments}");
            assert!(arguments.get("at").is_none_or(|at| at["hour"].is_number()), "{arguments}");
        } else {
            assert!(arguments.get("zone").is_none_or(|zone| zone.is_string()), "{arguments}");
        }
        name
    };
    message["tool_calls"].as_array().unwrap().iter().map(call).collect()
}

#[tokio::test]
async fn a_reply_that_must_call_calls() {
    for template in [QWEN, GEMMA, LLAMA, MISTRAL, DEEPSEEK] {
        let server = server(template, 0).await;
        let mut seen = Vec::new();
        for seed in 0..24 {
            for name in ["clock", "weather"] {
                let named = json!({"type": "function", "function": {"name": name}});
                assert_eq!(calls(&server.ask(CHAT, &chat(named, seed)).await, template), [name]);
            }
            let mut one = chat(json!("required"), seed);
            one["parallel_tool_calls"] = false.into();
            let called = calls(&server.ask(CHAT, &one).await, template);
            assert_eq!(called.len(), 1);
            seen.extend(called);
        }
        for name in ["weather", "clock"] {
            assert!(seen.iter().any(|seen| seen == name), "{}: {seen:?}", &template[..40]);
        }
        // This model may go on calling for ever.
        let answer = server.ask(CHAT, &chat(json!("required"), 1)).await;
        assert!(!answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().is_empty(), "{answer}");
    }
}

#[tokio::test]
async fn widths_of_passes_do_not_matter() {
    for template in [QWEN, GEMMA] {
        let (alone, wide) = (server(template, 1).await, server(template, 8).await);
        for seed in 0..4 {
            let body = chat(json!("required"), seed);
            let mut answers = [alone.ask(CHAT, &body).await, wide.ask(CHAT, &body).await];
            let bare = |answer: &mut Value| {
                for call in answer["choices"][0]["message"]["tool_calls"].as_array_mut().unwrap() {
                    call["id"] = Value::Null;
                }
                (answer["choices"].take(), answer["usage"]["completion_tokens"].take())
            };
            let [one, other] = answers.each_mut().map(bare);
            assert_eq!(one, other);
        }
    }
}

#[tokio::test]
async fn a_call_and_another_form_exclude_each_other() {
    let server = server(QWEN, 0).await;
    let mut body = chat(json!("required"), 1);
    body["response_format"] = json!({"type": "json_object"});
    let error = server.refusal(CHAT, &body, 400).await;
    assert_eq!(error["param"], "tool_choice");
}

#[tokio::test]
async fn arguments_that_could_be_no_object_are_refused() {
    let server = server(QWEN, 0).await;
    for kind in [json!("string"), json!("array"), json!(["object", "null"])] {
        let mut body = chat(json!("required"), 1);
        let last = body["tools"].as_array().unwrap().len() - 1;
        body["tools"][last]["function"]["parameters"] = json!({ "type": kind });
        let error = server.refusal(CHAT, &body, 400).await;
        let param = format!("tools[{last}].function.parameters");
        assert_eq!(error["param"], param.as_str());
        assert!(error["message"].as_str().unwrap().contains(&kind.to_string()), "{error}");
    }
}
