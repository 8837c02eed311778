//! Replies held to schemas, grammars and expressions, and biased, over real sockets and a real block decoder.

use crate::stage;
use crate::with;
use std::time::{Duration, Instant};

use crate::block_support::{Hashed, auto, fixed};
use crate::stage::{CONTEXT, EOS, Script, Server, Stage, config, loaded, thinking};
use axe::decode::{BlockOptions, CausalBackend};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

async fn server(options: BlockOptions, thinks: bool) -> Server {
    let model = || Hashed { vocabulary: 264, context: CONTEXT, rows: 64, habit: 0.8, ..Hashed::default() };
    let load = move || match thinks {
        true => thinking(CausalBackend::new(model(), options)),
        false => loaded(CausalBackend::new(model(), options).with_vocabulary(260), Some(stage::TEMPLATE)),
    };
    let stage = tokio::task::spawn_blocking(move || Stage::of(load, 4)).await.unwrap();
    Server::over(stage, &config("")).await
}

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "who is it?"}], "seed": 1, "max_tokens": 300}), more)
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 18, "maximum": 120},
            "role": {"enum": ["cook", "cleaner", "captain"]},
        },
        "required": ["name", "age", "role"],
        "additionalProperties": false,
    })
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(value["name"].as_str().unwrap().chars().count() <= 8, "{text}");
    assert!((18..=120).contains(&value["age"].as_u64().unwrap()), "{text}");
    assert!(["cook", "cleaner", "captain"].contains(&value["role"].as_str().unwrap()), "{text}");
    assert_eq!(value.as_object().unwrap().len(), 3);
}

#[tokio::test]
async fn every_way_to_ask_for_a_schema_is_honoured() {
    let server = server(auto(), false).await;
    let nested =
        json!({"type": "json_schema", "json_schema": {"name": "who", "strict": true, "schema": schema()}});
    for (place, more) in [
        json!({"response_format": nested}),
        json!({"response_format": {"type": "json_schema", "schema": schema()}}),
        json!({"response_format": {"type": "json_object", "schema": schema()}}),
        json!({"json_schema": schema()}),
    ]
    .into_iter()
    .enumerate()
    {
        for temperature in [0.0, 0.9] {
            let mut body = chat(more.clone());
            body["temperature"] = temperature.into();
            let answer = server.ask(CHAT, &body).await;
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{place}: {choice}");
            check(choice["message"]["content"].as_str().unwrap());
            let forced = &answer["axe"]["guesses"]["constraint"];
            assert!(forced["accepted"].as_u64().unwrap() > 10, "{forced}");
            let mut text = more.clone();
            text["prompt"] = "who".into();
            text["seed"] = 4.into();
            text["max_tokens"] = 300.into();
            check(server.ask(TEXT, &text).await["choices"][0]["text"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn objects_grammars_and_expressions_are_honoured_in_streams_too() {
    let server = server(fixed(8), false).await;
    let lark = "start: \"yes\" more? | \"no\"\nmore: \", \" /[a-z]{3,6}/ more?\n";
    let text_of = async |more: Value| {
        let mut body = chat(more);
        let whole = server.ask(CHAT, &body).await["choices"][0]["message"]["content"].take();
        body["stream"] = true.into();
        let stream = server.post(CHAT, &body).await.text().await.unwrap();
        let streamed: String = stream
            .split("\n\n")
            .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok())
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(streamed, whole.as_str().unwrap());
        streamed
    };
    for more in [json!({"grammar": lark}), json!({"response_format": {"type": "grammar", "grammar": lark}})] {
        for seed in 0..4 {
            let mut more = more.clone();
            more["seed"] = seed.into();
            let text = text_of(more).await;
            let mut words = text.split(", ");
            assert!(["yes", "no"].contains(&words.next().unwrap()), "{text:?}");
            assert!(words.all(|word| (3..=6).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase())));
        }
    }
    for member in ["pattern", "regex"] {
        let text = text_of(json!({"response_format": {"type": "regex", member: "[0-9]{4}-[01][0-9]"}})).await;
        assert!(text.len() == 7 && text.as_bytes()[4] == b'-', "{text:?}");
    }
    // With nothing but "an object", a model that says nonsense fills it with nonsense; it is one as far as it goes.
    let text = text_of(json!({"response_format": {"type": "json_object"}, "logit_bias": {(3 + b'}' as u32).to_string(): 30}})).await;
    assert!(serde_json::from_str::<Value>(&text).unwrap().is_object(), "{text}");
    assert_ne!(text_of(json!({"response_format": {"type": "text"}, "grammar": ""})).await, "");
}

#[tokio::test]
async fn widths_change_nothing() {
    let servers = [server(fixed(1), false).await, server(fixed(5), false).await, server(auto(), false).await];
    for seed in 0..6 {
        let more = match seed % 3 {
            0 => json!({"json_schema": schema(), "temperature": 0}),
            1 => {
                json!({"json_schema": schema(), "temperature": 1.1, "top_k": 4, "logprobs": true, "top_logprobs": 2})
            }
            _ => {
                json!({"grammar": "start: /[a-f ]{5,40}/ \"!\"", "logit_bias": {"101": -100, "102": 4}, "temperature": 0.7})
            }
        };
        let mut body = chat(more);
        body["seed"] = seed.into();
        let alone = server_choice(&servers[0], &body).await;
        for server in &servers[1..] {
            assert_eq!(server_choice(server, &body).await, alone);
        }
    }
}

async fn server_choice(server: &Server, body: &Value) -> Value {
    server.ask(CHAT, body).await["choices"][0].take()
}

#[tokio::test]
async fn a_form_without_room_is_cut() {
    let server = server(auto(), false).await;
    let mut body = chat(json!({"json_schema": schema()}));
    body["max_tokens"] = 9.into();
    let answer = server.ask(CHAT, &body).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 9);
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'));
}

#[tokio::test]
async fn thoughts_stay_free() {
    let server = server(fixed(6), true).await;
    let mut thought = 0;
    for seed in 0..16 {
        // Thoughts of letters that come to an end; the template closes them where it is told not to think.
        let bias: Value = (b'a'..=b'z')
            .map(|byte| ((3 + u32::from(byte)).to_string(), json!(12)))
            .chain([("260".to_owned(), json!(10)), ("261".to_owned(), json!(12))])
            .collect::<serde_json::Map<_, _>>()
            .into();
        let body =
            chat(json!({"json_schema": schema(), "seed": seed, "temperature": 1.0, "logit_bias": bias,
            "chat_template_kwargs": {"enable_thinking": seed % 2 == 0}}));
        let answer = server.ask(CHAT, &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        check(choice["message"]["content"].as_str().unwrap());
        thought +=
            usize::from(choice["message"]["reasoning_content"].as_str().is_some_and(|text| text.len() > 1));
        if seed % 2 == 1 {
            assert!(choice["message"]["reasoning_content"].is_null(), "closed thoughts are not opened again");
        }
    }
    assert!(thought > 2, "{thought} replies with thoughts");
}

#[tokio::test]
async fn what_is_wrong_is_refused_before_a_stream_begins() {
    let server = server(auto(), false).await;
    let format = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    for (more, param, says) in [
        (format(json!({"type": "nothing"})), "response_format.json_schema.schema", "nothing"),
        (format(json!({"$ref": "#/$defs/absent"})), "response_format.json_schema.schema", "absent"),
        (
            format(json!({"type": "string", "format": "colour"})),
            "response_format.json_schema.schema",
            "colour",
        ),
        (json!({"json_schema": {"type": 5}}), "json_schema", "type"),
        (json!({"response_format": {"type": "regex", "pattern": "a("}}), "response_format.pattern", "a("),
        (json!({"grammar": "start: nowhere"}), "grammar", "nowhere"),
        (json!({"grammar": "root ::= \"a\""}), "grammar", "GBNF"),
        (
            json!({"response_format": {"type": "json_object"}, "ignore_eos": true}),
            "ignore_eos",
            "response_format",
        ),
        (
            json!({"response_format": {"type": "json_object"}, "json_schema": {"type": "object"}}),
            "json_schema",
            "both",
        ),
        (json!({"grammar": format!("start: \"{}\"", "a".repeat(200_000))}), "grammar", "bytes"),
        (json!({"logit_bias": {"100000": 1}}), "logit_bias.100000", "token id"),
        (json!({"logit_bias": {"5": 1000}}), "logit_bias.5", "-100 to 100"),
    ] {
        for stream in [false, true] {
            let mut body = chat(more.clone());
            body["stream"] = stream.into();
            let error = server.refusal(CHAT, &body, 400).await;
            assert_eq!(error["param"], param, "{error}");
            assert!(error["message"].as_str().unwrap().contains(says), "{error}");
        }
    }
    let denoising = Server::thinking(Script::saying("x").denoises(), "").await;
    for (more, param) in [
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"grammar": "start: \"a\""}), "grammar"),
        (json!({"json_schema": schema()}), "json_schema"),
        (json!({"logit_bias": {"5": 1}}), "logit_bias"),
    ] {
        let error = denoising.refusal(CHAT, &chat(more), 400).await;
        assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!("unsupported_parameter")));
    }
}

#[tokio::test]
async fn hostile_forms_hold_nobody_up() {
    let server = server(auto(), false).await;
    let wide: Value = (0..1500)
        .map(|i| (format!("p{i}"), json!({"type": "string", "pattern": format!("(a|b{i})*c{{1,50}}")})))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let hostile = [
        json!({"json_schema": {"type": "integer", "multipleOf": 1_000_003, "minimum": 7}}),
        json!({"json_schema": {"type": "object", "properties": wide}}),
        json!({"grammar": format!("start: {}", "(\"a\" | \"b\") ".repeat(8000))}),
        json!({"grammar": format!("start: {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000))}),
        json!({"response_format": {"type": "regex", "pattern": format!("{}a{}", "(".repeat(20_000), ")*".repeat(20_000))}}),
    ];
    let began = Instant::now();
    let asked = hostile.map(|more| {
        let mut body = chat(more);
        body["max_tokens"] = 2.into();
        tokio::spawn(
            server.client.post(server.url(CHAT)).timeout(Duration::from_secs(120)).json(&body).send(),
        )
    });
    let mut slowest = Duration::ZERO;
    while asked.iter().any(|request| !request.is_finished()) {
        let began = Instant::now();
        assert_eq!(server.get("/health").await.status(), 200);
        slowest = slowest.max(began.elapsed());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for request in asked {
        let response = request.await.unwrap().unwrap();
        let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
        assert!([200, 400].contains(&status), "{text}");
    }
    println!("{:?} in all, /health took {slowest:?} at most", began.elapsed());
    assert!(slowest < Duration::from_secs(2));
    check(
        server_choice(&server, &chat(json!({"json_schema": schema()}))).await["message"]["content"]
            .as_str()
            .unwrap(),
    );
}

#[tokio::test]
async fn biases_rule_tokens_out_and_in() {
    let server = server(fixed(4), false).await;
    let id = |letter: char| (3 + letter as u32).to_string();
    let all: Value = json!({id('a'): 100, id('b'): 100});
    for temperature in [0.0, 1.0] {
        let body = chat(json!({"logit_bias": all, "temperature": temperature, "max_tokens": 40}));
        let text = server_choice(&server, &body).await["message"]["content"].take();
        let text = text.as_str().unwrap();
        assert!(text.len() == 40 && text.chars().all(|letter| "ab".contains(letter)), "{text:?}");
        let mut body = body.clone();
        body["logit_bias"] = json!({id('a'): 100, id('b'): -100, EOS.to_string(): -100});
        let text = server_choice(&server, &body).await["message"]["content"].take();
        assert_eq!(text, "a".repeat(40));
    }
}

#[tokio::test]
async fn choices_share_a_form() {
    let server = server(auto(), false).await;
    let answer = server.ask(CHAT, &chat(json!({"json_schema": schema(), "n": 3, "temperature": 1.0}))).await;
    let choices = answer["choices"].as_array().unwrap();
    choices.iter().for_each(|choice| check(choice["message"]["content"].as_str().unwrap()));
    assert_ne!(choices[0]["message"], choices[1]["message"]);
}
