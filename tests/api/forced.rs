//! Calls that a request forces on a causal model: whatever the model would rather write, the reply calls.

use crate::block_support::{Hashed, auto, fixed};
use crate::stage::{self, Script, Server, Stage, config, speaker};
use axe::decode::CausalBackend;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

pub(crate) const QWEN: &str = include_str!("../fixtures/templates/qwen3.jinja");
pub(crate) const GEMMA: &str = include_str!("../fixtures/templates/gemma4-like.jinja");
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
pub(crate) async fn server(template: &'static str, rows: usize) -> Server {
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

/// A request for a call of a tool whose only argument, `a`, has this schema.
fn of(schema: &Value, seed: u64) -> Value {
    let parameters = json!({
        "type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": false,
        "$defs": {
            "flag": {"type": "boolean"},
            "chain": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/chain"}, {"type": "null"}]}},
                "required": ["next"], "additionalProperties": false},
        },
    });
    let mut body = chat(json!("required"), seed);
    body["parallel_tool_calls"] = false.into();
    body["max_tokens"] = 250.into();
    body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    body
}

#[tokio::test]
async fn gemmas_arguments_match_their_schemas() {
    let chain = |value: &Value| {
        let mut link = value;
        while let Some(next) = link.get("next") {
            link = next;
        }
        link.is_null()
    };
    let letters = |value: &Value| value.as_str().map_or(0, |text| text.chars().count());
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    type Check<'c> = &'c dyn Fn(&Value) -> bool;
    let cases: [(Value, Check); 24] = [
        (json!({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}), &|a| {
            a.as_array().is_some_and(|list| list.len() == 3 && list.iter().all(Value::is_i64))
        }),
        (json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}), &|a| {
            a.as_array().is_some_and(|list| (1..=4).contains(&list.len()))
        }),
        (json!({"type": "array", "maxItems": 0}), &|a| *a == json!([])),
        (json!({"anyOf": [{"type": "boolean"}]}), &Value::is_boolean),
        (json!({"anyOf": [{"const": "x"}, {"type": "null"}]}), &|a| a.is_null() || a == "x"),
        (json!({"$ref": "#/$defs/flag"}), &Value::is_boolean),
        (json!({"allOf": [{"$ref": "#/$defs/flag"}], "description": "yes or no"}), &Value::is_boolean),
        (json!({"$ref": "#/$defs/chain"}), &chain),
        (json!({"type": "string", "maxLength": 2}), &|a| a.is_string() && letters(a) <= 2),
        (json!({"type": "string", "minLength": 3, "maxLength": 5}), &|a| (3..=5).contains(&letters(a))),
        (json!({"type": "object", "properties": {}, "additionalProperties": false}), &|a| *a == json!({})),
        (json!({"type": ["boolean", "null"]}), &|a| a.is_boolean() || a.is_null()),
        (json!({"type": "integer", "minimum": 3, "maximum": 12}), &|a| {
            a.is_i64() && (3.0..=12.0).contains(&number(a))
        }),
        (json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1}), &|a| {
            number(a) > 0.0 && number(a) <= 1.0
        }),
        (json!({"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50}), &|a| {
            number(a) % 7.0 == 0.0
        }),
        (json!({"type": ["integer", "null"], "maximum": 9, "minimum": 8}), &|a| {
            a.is_null() || number(a) >= 8.0
        }),
        (json!({"enum": [{"k": 1}, [true, "x"]]}), &|a| *a == json!({"k": 1}) || *a == json!([true, "x"])),
        (json!({"enum": ["", 1, "b"], "type": "string"}), &|a| a == "" || a == "b"),
        (
            json!({"type": "object", "required": ["b"], "properties": {}, "additionalProperties": {"type": "null"}}),
            &|a| *a == json!({"b": null}),
        ),
        (
            json!({"type": "object", "properties": {"a b": {"const": 1}, "": {"const": 2}}, "required": ["a b", ""],
                "additionalProperties": false}),
            &|a| *a == json!({"": 2, "a b": 1}),
        ),
        // Those are written as JSON.
        (
            json!({"type": "object", "patternProperties": {"^x": {"const": 1}}, "additionalProperties": false}),
            &|a| {
                a.as_object()
                    .is_some_and(|map| map.iter().all(|(key, one)| key.starts_with('x') && *one == 1))
            },
        ),
        (json!({"type": "string", "pattern": "^(ab|c)+\\{$", "maxLength": 9}), &|a| {
            a.as_str().is_some_and(|text| text.ends_with('{') && "abc".contains(&text[..1]))
        }),
        (json!({"type": "array", "prefixItems": [{"const": 1}], "items": false, "minItems": 1}), &|a| {
            *a == json!([1])
        }),
        (
            json!({"type": "object", "properties": {"b": {"const": 1}, "c": {"const": "}"}}, "required": ["b", "c"],
                "minProperties": 2, "maxProperties": 2, "additionalProperties": false}),
            &|a| *a == json!({"b": 1, "c": "}"}),
        ),
    ];
    let server = server(GEMMA, 0).await;
    for (schema, check) in cases {
        let mut called = 0;
        for seed in 0..8 {
            let answer = server.ask(CHAT, &of(&schema, seed)).await;
            let choice = &answer["choices"][0];
            // What may be long may be cut.
            if choice["finish_reason"] == "length" {
                continue;
            }
            let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str();
            let arguments = arguments.unwrap_or_else(|| panic!("{schema}: {choice}"));
            let value: Value = serde_json::from_str(arguments).unwrap();
            assert!(check(&value["a"]) && value.as_object().unwrap().len() == 1, "{schema}: {arguments}");
            called += 1;
        }
        assert!(called > 2, "{schema}: {called} calls");
    }
}

#[tokio::test]
async fn schemas_that_cannot_be_kept_to_are_named() {
    for template in [GEMMA, QWEN] {
        let server = server(template, 0).await;
        for (schema, says) in [
            (json!({"not": {}}), "not"),
            (json!({"type": "any"}), "any"),
            (json!({"uniqueItems": true}), "uniqueItems"),
            (json!({"$ref": "#/$defs/none"}), "none"),
            (json!({"const": 9_007_199_254_740_993_u64, "minimum": 1}), "9007199254740993"),
            (json!({"type": "object", "minProperties": 2}), "`minProperties` 2"),
            (json!({"type": "string", "minLength": 3, "maxLength": 2}), "unsatisfiable"),
            (json!({"type": "array", "minItems": 3, "maxItems": 2}), "unsatisfiable"),
            (json!({"type": "object", "required": ["b"], "additionalProperties": false}), "unsatisfiable"),
        ] {
            let mut body = of(&schema, 1);
            let wrong = body["tools"][0].take();
            let right =
                json!({"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}});
            body["tools"] = json!([right, wrong]);
            let error = server.refusal(CHAT, &body, 400).await;
            assert_eq!(error["param"], "tools[1].function.parameters", "{schema}: {error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(says), "{schema}: {message}");
            assert!(!message.contains("call0") && !message.contains("arguments1"), "{message}");
            // Nobody is held to it who is not asked to call it.
            body["tool_choice"] = json!({"type": "function", "function": {"name": "g"}});
            server.ask(CHAT, &body).await;
        }
        // The same in the words of the other faces.
        let tool = |schema: &str| json!([{"type": "function", "name": "f", schema: {"not": {}}}]);
        let body = json!({"input": "hi", "tools": tool("parameters"), "tool_choice": "required"});
        assert_eq!(server.refusal("/v1/responses", &body, 400).await["param"], "tools[0].parameters");
        let mut tools = tool("input_schema");
        tools[0].as_object_mut().unwrap().remove("type");
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "tools": tools,
            "tool_choice": {"type": "any"}});
        let error = server.refusal("/v1/messages", &body, 400).await;
        assert!(error["message"].as_str().unwrap().starts_with("`tools[0].input_schema`: "), "{error}");
    }
}

#[tokio::test]
async fn calls_have_no_endless_white_space() {
    let server = server(QWEN, 0).await;
    let parameters = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "boolean"},
        "minItems": 2, "maxItems": 2}}, "required": ["a"], "additionalProperties": false});
    let mut body = chat(json!("required"), 1);
    body["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    body["parallel_tool_calls"] = false.into();
    // This one would rather write line breaks, blanks and tabs than anything else.
    body["logit_bias"] = json!({"13": 40, "35": 40, "12": 40});
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
    let arguments =
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
    assert!(
        arguments.contains('\n') && !arguments.contains("\n\n") && !arguments.contains(" \n"),
        "{arguments:?}"
    );
    let longest = arguments.split(|letter: char| !letter.is_ascii_whitespace()).map(str::len).max();
    assert!(longest.is_some_and(|longest| (2..=33).contains(&longest)), "{arguments:?}");
}
