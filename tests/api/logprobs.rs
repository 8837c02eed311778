//! Log-probabilities as each API tells them: values, shapes, streams, and what of a reply they are told of.

use crate::block_support::{Hashed, auto, fixed};
use crate::forced;
use crate::stage::{self, CONTEXT, EOS, Script, Server, Stage, bytes, config, loaded, thinking};
use crate::with;
use axe::decode::block::BlockModel;
use axe::decode::{BlockOptions, CausalBackend};
use axe::model::Logits;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// Bytes, begin and end, the loud one and the markers of thoughts.
const TOKENS: usize = 264;

fn model() -> Hashed {
    Hashed { vocabulary: TOKENS, context: CONTEXT, rows: 64, habit: 0.8, ..Hashed::default() }
}

async fn server(options: BlockOptions, thinks: bool) -> Server {
    let load = move || match thinks {
        true => thinking(CausalBackend::new(model(), options)),
        false => loaded(CausalBackend::new(model(), options).with_vocabulary(260), Some(stage::TEMPLATE)),
    };
    let stage = tokio::task::spawn_blocking(move || Stage::of(load, 4)).await.unwrap();
    Server::over(stage, &config("[server]\nmax_choices = 8")).await
}

fn chat(more: Value) -> Value {
    with(
        json!({
            "messages": [{"role": "user", "content": "say something, say something"}],
            "max_tokens": 24, "seed": 3, "logprobs": true,
        }),
        more,
    )
}

fn bytes_of(entries: &Value) -> Vec<u8> {
    let entries = entries.as_array().unwrap().iter();
    entries.flat_map(|e| e["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect()
}

/// What the distribution of the model says at a place.
fn logprob(text: &[u32], token: u32) -> f64 {
    let mut model = Hashed { rows: CONTEXT, ..model() };
    model.limit(260);
    model.forward(text, 0, Logits::Last).unwrap();
    let logits = &model.logits[0][..260];
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    f64::from(logits[token as usize]) - sum.ln()
}

fn stream(body: &str) -> Vec<Value> {
    let mut events: Vec<&str> =
        body.trim_end().split("\n\n").filter(|event| event.starts_with("data: ")).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect()
}

/// Printable text only: the bytes of the hashed model are mostly none.
fn printable() -> Value {
    let biases = (b'a'..=b'z').chain(*b" .,").map(|byte| ((3 + u32::from(byte)).to_string(), json!(40)));
    biases.collect::<serde_json::Map<_, _>>().into()
}

#[tokio::test]
async fn values_are_those_of_the_distribution_whatever_is_chosen_from_it() {
    let server = server(fixed(4), false).await;
    for more in [
        json!({"temperature": 0, "top_logprobs": 3}),
        json!({"temperature": 0.9, "top_k": 5, "top_logprobs": 20, "repetition_penalty": 1.3}),
        json!({"temperature": 1.4, "logit_bias": printable(), "top_logprobs": 2}),
    ] {
        let answer = server.ask(CHAT, &chat(more.clone())).await;
        let most = more["top_logprobs"].as_u64().unwrap() as usize;
        let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
        assert!(answer["choices"][0]["logprobs"]["refusal"].is_null());
        let prompt =
            format!("[user]{}\n[assistant]", chat(json!({}))["messages"][0]["content"].as_str().unwrap());
        let mut text: Vec<u32> = std::iter::once(1).chain(bytes(&prompt)).collect();
        for entry in &entries {
            let token = 3 + entry["bytes"][0].as_u64().unwrap() as u32;
            let found = entry["logprob"].as_f64().unwrap();
            assert!((found - logprob(&text, token)).abs() < 1e-4, "{entry}");
            let top: Vec<f64> = entry["top_logprobs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|t| t["logprob"].as_f64().unwrap())
                .collect();
            assert_eq!(top.len(), most);
            assert!(top.is_sorted_by(|a, b| a >= b) && top[0] >= found, "{entry}");
            assert!(top.iter().map(|logprob| logprob.exp()).sum::<f64>() <= 1.0 + 1e-9);
            let own = entry["top_logprobs"].as_array().unwrap().iter().find(|t| t["bytes"] == entry["bytes"]);
            assert!(own.is_none_or(|own| own["logprob"] == entry["logprob"]), "{entry}");
            text.push(token);
        }
        assert!(entries.len() > 4, "{} tokens", entries.len());
    }
}

#[tokio::test]
async fn they_are_the_same_at_every_width_and_in_streams() {
    let alone = server(fixed(1), false).await;
    let others = [server(fixed(4), false).await, server(fixed(16), false).await, server(auto(), false).await];
    for seed in 0..4 {
        let body = chat(json!({
            "seed": seed, "temperature": 0.3 * f64::from(seed), "top_logprobs": 4, "logit_bias": printable(), "max_tokens": 60,
        }));
        let whole = alone.ask(CHAT, &body).await;
        let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
        let entries = &whole["choices"][0]["logprobs"]["content"];
        assert_eq!(String::from_utf8(bytes_of(entries)).unwrap(), content);
        for server in &others {
            let again = server.ask(CHAT, &body).await;
            assert_eq!(again["choices"][0], whole["choices"][0]);
            let mut streamed = body.clone();
            streamed["stream"] = true.into();
            let chunks = stream(&server.post(CHAT, &streamed).await.text().await.unwrap());
            let mut told = Vec::new();
            for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
                let delta = choice["delta"]["content"].as_str().unwrap_or_default();
                match &choice["logprobs"] {
                    Value::Null => assert_eq!(delta, ""),
                    logprobs => {
                        assert_eq!(bytes_of(&logprobs["content"]), delta.as_bytes());
                        told.extend(logprobs["content"].as_array().unwrap().clone());
                    }
                }
            }
            assert_eq!(Value::from(told), *entries);
        }
    }
}

#[tokio::test]
async fn tokens_that_a_stop_string_cuts_off_are_not_told() {
    let server = server(fixed(8), false).await;
    let (mut cut, mut held) = (0, 0);
    for seed in 0..8 {
        let body =
            chat(json!({"seed": seed, "temperature": 0.8, "logit_bias": printable(), "max_tokens": 60}));
        let whole = server.ask(CHAT, &body).await;
        let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
        for at in [0, 5, 20] {
            let Some(stop) = text.get(at..at + 3) else { continue };
            let mut stopping = body.clone();
            stopping["stop"] = json!([stop, "never said"]);
            let answer = server.ask(CHAT, &stopping).await;
            let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
            assert!(text.starts_with(content) && answer["choices"][0]["finish_reason"] == "stop");
            let told = &answer["choices"][0]["logprobs"]["content"];
            assert_eq!(bytes_of(told), content.as_bytes());
            let all = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
            assert_eq!(told.as_array().unwrap()[..], all[..content.len()]);
            cut += 1;
        }
        // What was held back for a stop string and then was none is told after all.
        let Some(last) = text.chars().last() else { continue };
        let mut holding = body.clone();
        holding["stop"] = json!([format!("{last}\n\n")]);
        let answer = server.ask(CHAT, &holding).await;
        assert_eq!(answer["choices"][0]["logprobs"], whole["choices"][0]["logprobs"]);
        held += 1;
    }
    assert!(cut > 12 && held > 4, "{cut} cut, {held} held");
}

#[tokio::test]
async fn thoughts_are_not_told_and_the_reply_is() {
    let server = server(fixed(6), true).await;
    let mut both = 0;
    for seed in 0..12 {
        let mut bias = printable();
        bias["260"] = json!(if seed % 2 == 0 { 43 } else { 30 });
        bias["261"] = json!(43);
        bias[EOS.to_string()] = json!(35);
        let body = chat(json!({"seed": seed, "temperature": 1.0, "logit_bias": bias, "max_tokens": 80,
            "chat_template_kwargs": {"enable_thinking": true}}));
        let answer = server.ask(CHAT, &body).await;
        let message = &answer["choices"][0]["message"];
        let told = bytes_of(&answer["choices"][0]["logprobs"]["content"]);
        assert_eq!(told, message["content"].as_str().unwrap().as_bytes(), "{message}");
        both += usize::from(!told.is_empty() && message["reasoning_content"].is_string());
        // Tokens that print nothing are shown by name among the alternatives.
        let mut more = body.clone();
        more["top_logprobs"] = json!(20);
        let shown = server.ask(CHAT, &more).await["choices"][0]["logprobs"]["content"].take();
        for top in
            shown.as_array().unwrap().iter().flat_map(|entry| entry["top_logprobs"].as_array().unwrap())
        {
            let control = top["token"].as_str().unwrap().starts_with("<|") || top["token"] == "</s>";
            assert!(!control || top["bytes"].is_null(), "{top}");
        }
    }
    assert!(both > 2, "{both} replies with thoughts and content");
}

#[tokio::test]
async fn the_older_api_has_columns_and_offsets() {
    let server = server(fixed(4), false).await;
    let mut bias = printable();
    // Parts of characters, and whole ones.
    for byte in "é👍".bytes() {
        bias[(3 + u32::from(byte)).to_string()] = json!(42);
    }
    let body = json!({"prompt": "one two one", "max_tokens": 50, "seed": 1, "temperature": 0.9, "logit_bias": bias, "logprobs": 2});
    let answer = server.ask(TEXT, &body).await;
    let choice = &answer["choices"][0];
    let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
    let columns = &choice["logprobs"];
    let column = |name: &str| columns[name].as_array().unwrap().clone();
    let (tokens, offsets) = (column("tokens"), column("text_offset"));
    assert_eq!((tokens.len(), column("token_logprobs").len()), (offsets.len(), column("top_logprobs").len()));
    let mut parts = 0;
    for (place, token) in tokens.iter().enumerate() {
        let token = token.as_str().unwrap();
        let offset = offsets[place].as_u64().unwrap() as usize;
        match token.strip_prefix("bytes:") {
            Some(_) => parts += 1,
            None => assert_eq!(token, text[offset].to_string()),
        }
        let top = columns["top_logprobs"][place].as_object().unwrap();
        assert!((2..=3).contains(&top.len()), "{top:?}");
        assert_eq!(top[token], columns["token_logprobs"][place], "the chosen one is always there");
    }
    assert!(offsets.iter().map(|o| o.as_u64().unwrap()).is_sorted() && parts > 3, "{parts} parts");

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = stream(&server.post(TEXT, &streamed).await.text().await.unwrap());
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let all: Vec<Value> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array())
            .flatten()
            .cloned()
            .collect();
        assert_eq!(Value::from(all), columns[name], "{name}");
    }
    let mut none = body.clone();
    none["logprobs"] = json!(0);
    let top = server.ask(TEXT, &none).await["choices"][0]["logprobs"]["top_logprobs"].take();
    assert!(top.as_array().unwrap().iter().all(|top| top.as_object().unwrap().len() == 1));
    none["logprobs"] = Value::Null;
    assert!(server.ask(TEXT, &none).await["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn each_of_several_choices_has_its_own() {
    let server = server(auto(), false).await;
    let answer =
        server.ask(CHAT, &chat(json!({"n": 3, "temperature": 1.0, "logit_bias": printable()}))).await;
    for choice in answer["choices"].as_array().unwrap() {
        let told = bytes_of(&choice["logprobs"]["content"]);
        assert_eq!(told, choice["message"]["content"].as_str().unwrap().as_bytes());
    }
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    let again = server.ask(CHAT, &chat(json!({"n": 3, "temperature": 1.0, "logit_bias": printable()}))).await;
    assert_eq!(again["choices"], answer["choices"], "the same request gives the same choices");
}

#[tokio::test]
async fn what_cannot_be_told_is_refused() {
    let server = server(auto(), false).await;
    for (more, param) in [
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": false, "top_logprobs": 2}), "top_logprobs"),
    ] {
        assert_eq!(server.refusal(CHAT, &chat(more.clone()), 400).await["param"], param, "{more}");
    }
    for logprobs in [json!(6), json!(-1), json!(true), json!("2")] {
        let error = server.refusal(TEXT, &json!({"prompt": "a", "logprobs": logprobs}), 400).await;
        assert_eq!(error["param"], "logprobs");
    }
    let denoising = Server::thinking(Script::saying("x").denoises(), "").await;
    let error = denoising.refusal(CHAT, &chat(json!({})), 400).await;
    assert_eq!((&error["param"], &error["code"]), (&json!("logprobs"), &json!("unsupported_parameter")));
    let error = denoising.refusal(TEXT, &json!({"prompt": "a", "logprobs": 1}), 400).await;
    assert_eq!(error["param"], "logprobs");
}

#[tokio::test]
async fn those_of_calls_are_left_out_and_white_space_around_them_is_in_step() {
    const CALL: &str = "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
    let clock = json!([{"type": "function", "function": {"name": "clock"}}]);
    let gemma = |text: &str| {
        let quoted = |text: &str| json!(text).to_string();
        let parts = text.split('|').map(|part| match part {
            "<" => "<[260]>".to_owned(),
            ">" => "<[261]>".to_owned(),
            text => quoted(text),
        });
        parts.collect::<Vec<_>>().join(" ")
    };
    let whole = |text: String| json!(text).to_string();
    let half = &CALL[..29];
    for (template, form, content) in [
        (forced::QWEN, whole(format!("hi {CALL} bye")), "hi  bye".to_owned()),
        (forced::QWEN, whole(format!("a b {CALL}\n\n{CALL} c d")), "a b \n\n c d".to_owned()),
        (forced::QWEN, whole(format!("{CALL}\n{half}\n  ")), format!("\n{half}")),
        (forced::QWEN, whole(format!("  {CALL}  ")), String::new()),
        (
            forced::QWEN,
            whole(format!(" x {}", CALL.replace("clock", "nobody"))),
            format!(" x {}", CALL.replace("clock", "nobody")),
        ),
        (forced::GEMMA, gemma("hi |<|call:clock{}|>| bye"), "hi  bye".to_owned()),
        (
            forced::GEMMA,
            gemma("hi|<|call:nobody{} |>| bye "),
            "hi<|tool_call>call:nobody{} <tool_call|> bye ".to_owned(),
        ),
        (
            forced::GEMMA,
            gemma("hi |<|call:clock{} |<|call:nobody{}"),
            "hi  <|tool_call>call:nobody{}".to_owned(),
        ),
    ] {
        for rows in [1, 8] {
            let server = forced::server(template, rows).await;
            let body = chat(json!({"tools": clock, "grammar": format!("start: {form}"), "max_tokens": 300}));
            let answer = server.ask(CHAT, &body).await;
            let choice = &answer["choices"][0];
            assert_eq!(choice["message"]["content"].as_str().unwrap_or_default(), content, "{form}");
            let entries = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
            let told: String = entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
            assert_eq!(told, content, "{form}");
        }
    }
}
