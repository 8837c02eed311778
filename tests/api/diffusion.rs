//! The OpenAI API over a model that denoises and thinks: its fields, its answers, its streams.

use crate::stage::{self, CANVAS, Script, Server, bytes, canvases, marked, text_of};
use axe::decode::{Denoising, Sampling, Step};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A chat request with the members of `more` in it.
fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A server whose model says `reply` (in the letters of [`marked`]), each canvas in three steps.
async fn server(reply: &str) -> Server {
    let tokens = marked(reply);
    Server::thinking(Script::new(move |_| canvases(&tokens, CANVAS, &[3])).denoises(), "").await
}

fn last_sampling(server: &Server) -> Sampling {
    server.stage.script.started.lock().unwrap().last().unwrap().1.clone()
}

/// The text of the last prompt, special tokens left out.
fn last_prompt(server: &Server) -> String {
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    text_of(&prompt.into_iter().filter(|token| (3..259).contains(token)).collect::<Vec<_>>())
}

/// The chunks of a stream that ends well.
async fn chunks(server: &Server, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let response = server.post(CHAT, &body).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let mut events: Vec<&str> =
        text.trim_end().split("\n\n").filter(|event| !event.starts_with(':')).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect()
}

#[tokio::test]
async fn fields_of_denoising_reach_the_model() {
    let server = server("x").await;
    let body = json!({"temperature": 0.5, "seed": 7, "max_denoising_steps": 12, "entropy_bound": 0.25,
        "confidence_threshold": 0.5});
    server.ask(CHAT, &chat(body)).await;
    let denoising =
        Denoising { max_steps: Some(12), entropy_bound: Some(0.25), confidence_threshold: Some(0.5) };
    let wanted = Sampling { temperature: 0.5, seed: 7, denoising, ..Sampling::default() };
    assert_eq!(last_sampling(&server), wanted);
    server.ask(TEXT, &json!({"prompt": "a", "max_denoising_steps": 256, "temperature": 0})).await;
    let sampling = last_sampling(&server);
    assert_eq!((sampling.denoising.max_steps, sampling.temperature), (Some(256), 0.0));
}

#[tokio::test]
async fn defaults_are_the_checkpoints_and_not_those_of_causal_models() {
    let toml =
        "[sampling]\ntemperature = 0.25\ntop_k = 3\ntop_p = 0.5\nmin_p = 0.125\nrepetition_penalty = 1.5";
    let script = Script::new(|_| canvases(&bytes("x"), CANVAS, &[1])).denoises();
    let server = Server::thinking(script, toml).await;
    for body in [
        chat(json!({"seed": 1})),
        chat(
            json!({"seed": 1, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1,
            "presence_penalty": 0, "frequency_penalty": 0, "max_denoising_steps": null}),
        ),
        chat(json!({"seed": 1, "top_k": -1, "repeat_penalty": 1.0})),
    ] {
        server.ask(CHAT, &body).await;
        assert_eq!(last_sampling(&server), Sampling { temperature: 1.0, seed: 1, ..Sampling::default() });
    }
}

#[tokio::test]
async fn what_denoising_cannot_honour_is_refused_by_name() {
    let server = server("x").await;
    for (field, value) in [
        ("top_k", json!(5)),
        ("top_p", json!(0.9)),
        ("min_p", json!(0.1)),
        ("repetition_penalty", json!(1.1)),
        ("repeat_penalty", json!(1.1)),
        ("presence_penalty", json!(0.5)),
        ("frequency_penalty", json!(-0.5)),
    ] {
        for (path, mut body) in [(CHAT, chat(json!({}))), (TEXT, json!({"prompt": "a"}))] {
            body[field] = value.clone();
            let error = server.refusal(path, &body, 400).await;
            assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("unsupported_parameter")));
        }
    }
    for (field, value) in [
        ("max_denoising_steps", json!(0)),
        ("max_denoising_steps", json!(257)),
        ("max_denoising_steps", json!(1.5)),
        ("max_denoising_steps", json!("many")),
        ("entropy_bound", json!(0)),
        ("entropy_bound", json!(-1)),
        ("entropy_bound", json!(1e9)),
        ("entropy_bound", json!([])),
        ("confidence_threshold", json!(0)),
        ("confidence_threshold", json!(1e9)),
        ("temperature", json!(2.5)),
    ] {
        let error = server.refusal(CHAT, &chat(json!({field: value})), 400).await;
        assert_eq!(error["param"], field);
        assert!(error["message"].as_str().unwrap().contains(field), "{error}");
    }
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
}

#[tokio::test]
async fn a_causal_model_refuses_fields_of_denoising() {
    let server = Server::start(Script::saying("x")).await;
    for (field, value) in [
        ("max_denoising_steps", json!(12)),
        ("entropy_bound", json!(0.1)),
        ("confidence_threshold", json!(0.1)),
    ] {
        for (path, mut body) in [(CHAT, chat(json!({}))), (TEXT, json!({"prompt": "a"}))] {
            body[field] = value.clone();
            let error = server.refusal(path, &body, 400).await;
            assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("unsupported_parameter")));
            body[field] = Value::Null;
            server.ask(path, &body).await;
        }
    }
}

#[tokio::test]
async fn an_answer_says_what_denoising_took() {
    let server = server(&"x".repeat(CANVAS + 10)).await;
    let answer = server.ask(CHAT, &chat(json!({}))).await;
    let axe = &answer["axe"];
    assert_eq!(
        (&axe["denoising_steps"], &axe["canvases"], &axe["passes"]),
        (&json!(6), &json!(2), &json!(6))
    );
    assert_eq!(axe["steps_per_canvas"], json!([3, 3]));
    assert_eq!(axe["accepted_per_step"], json!(vec![CANVAS; 6]));
    let (first, all) = (axe["first_draft_s"].as_f64().unwrap(), axe["elapsed_s"].as_f64().unwrap());
    assert!(0.0 < first && first <= all, "{axe}");
    let metrics = server.get("/metrics").await.text().await.unwrap();
    for line in [
        "axe_denoising_steps_total 6",
        "axe_canvases_total 2",
        "axe_canvas_steps_bucket{le=\"2\"} 0",
        "axe_canvas_steps_bucket{le=\"4\"} 2",
        "axe_canvas_steps_sum 6",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is missing in {metrics}");
    }
    let causal = Server::start(Script::saying("x")).await;
    let answer = causal.ask(CHAT, &chat(json!({}))).await;
    for member in ["denoising_steps", "canvases", "first_draft_s", "accepted_per_step"] {
        assert!(answer["axe"].get(member).is_none(), "{member}");
    }
}

#[tokio::test]
async fn the_models_say_how_they_make_tokens() {
    let (denoising, causal) = (server("x").await, Server::start(Script::saying("x")).await);
    for (server, kind) in [(&denoising, "block_diffusion"), (&causal, "causal")] {
        let list: Value = server.get("/v1/models").await.json().await.unwrap();
        assert_eq!(list["data"][0]["kind"], kind);
    }
}

#[tokio::test]
async fn thoughts_are_reasoning_content_and_counted() {
    let server = server("{thought\nI need 9 - 4.}9 - 4 = 5").await;
    let answer = server.ask(CHAT, &chat(json!({}))).await;
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "9 - 4 = 5", "refusal": null, "reasoning_content": "I need 9 - 4."})
    );
    let thought = "{thought\nI need 9 - 4.}".len();
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], thought);
    assert_eq!(usage["completion_tokens"], thought + "9 - 4 = 5".len() + 1);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn an_answer_without_thoughts_has_no_member_for_them() {
    for reply in ["yes", "{thought\n}yes"] {
        let server = server(reply).await;
        let answer = server.ask(CHAT, &chat(json!({}))).await;
        let message = json!({"role": "assistant", "content": "yes", "refusal": null});
        assert_eq!(answer["choices"][0]["message"], message);
        for chunk in chunks(&server, &chat(json!({}))).await {
            assert!(chunk["choices"][0]["delta"].get("reasoning_content").is_none(), "{chunk}");
        }
    }
}

#[tokio::test]
async fn a_budget_used_up_by_thinking_is_a_length() {
    let server = server("{thought\nand so on and on}yes").await;
    let answer = server.ask(CHAT, &chat(json!({"max_tokens": 15}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["message"]["content"], "");
    assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "and so");
}

#[tokio::test]
async fn the_deltas_are_the_answer_in_one_piece() {
    let reply = "{thought\nnaïve 😀 STOP}so {thought\nmore}it is 😀 STO STOP hidden";
    for width in [1, 3, 7, CANVAS] {
        let tokens = marked(reply);
        let script = Script::new(move |_| canvases(&tokens, width, &[2])).denoises();
        let server = Server::thinking(script, "").await;
        let body = chat(json!({"stop": "STOP", "stream_options": {"include_usage": true}}));
        let chunks = chunks(&server, &body).await;
        assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        let joined = |member: &str| -> String {
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][member].as_str()).collect()
        };
        let mut whole = chat(json!({"stop": "STOP"}));
        whole["stream"] = false.into();
        let whole = server.ask(CHAT, &whole).await;
        let message = &whole["choices"][0]["message"];
        assert_eq!(joined("reasoning_content"), "naïve 😀 STOPmore", "canvas of {width}");
        assert_eq!(joined("content"), "so it is 😀 STO ");
        assert_eq!(message["reasoning_content"], joined("reasoning_content"));
        assert_eq!(message["content"], joined("content"));
        let (usage, others) = chunks.split_last().unwrap();
        assert_eq!(usage["usage"], whole["usage"]);
        assert_eq!(others.last().unwrap()["choices"][0]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn a_stream_has_no_drafts_and_thoughts_before_content() {
    let server = server("{thought\nhm}yes").await;
    let chunks = chunks(&server, &chat(json!({}))).await;
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let wanted = [
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning_content": "hm"}),
        json!({"content": "yes"}),
        json!({}),
    ];
    assert_eq!(deltas, wanted.iter().collect::<Vec<_>>());
}

#[tokio::test]
async fn max_tokens_is_never_exceeded() {
    let server = server(&"x".repeat(3 * CANVAS)).await;
    for max_tokens in [1, 2, 255, 256, 257, 511] {
        let answer = server.ask(CHAT, &chat(json!({"max_tokens": max_tokens}))).await;
        assert_eq!(answer["usage"]["completion_tokens"], max_tokens);
        assert_eq!(answer["choices"][0]["message"]["content"], "x".repeat(max_tokens));
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn thinking_is_switched_by_the_templates_variable_and_by_effort() {
    let server = server("x").await;
    let thinks = |more: Value| {
        let server = &server;
        async move {
            server.ask(CHAT, &chat(more)).await;
            let prompt = last_prompt(server);
            let off = prompt.ends_with("[assistant]thought\n");
            assert_eq!(prompt.starts_with("[think]"), !off, "{prompt}");
            !off
        }
    };
    assert!(!thinks(json!({})).await);
    assert!(thinks(json!({"chat_template_kwargs": {"enable_thinking": true}})).await);
    assert!(!thinks(json!({"chat_template_kwargs": {"enable_thinking": false}})).await);
    assert!(!thinks(json!({"reasoning_effort": "none"})).await);
    for effort in ["minimal", "low", "medium", "high"] {
        assert!(thinks(json!({"reasoning_effort": effort})).await, "{effort}");
    }
    assert!(
        thinks(json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": true}})).await
    );

    let off = json!({"enable_thinking": false});
    for (body, param) in [
        (json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
        (json!({"reasoning_effort": 3}), "reasoning_effort"),
        (json!({"reasoning_effort": "high", "chat_template_kwargs": off}), "reasoning_effort"),
        (json!({"enable_thinking": true}), "enable_thinking"),
        (json!({"chat_template_kwargs": {"enable_thinking": "no"}}), "chat_template_kwargs.enable_thinking"),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
    ] {
        assert_eq!(server.refusal(CHAT, &chat(body.clone()), 400).await["param"], param, "{body}");
    }
    let error = server.refusal(TEXT, &json!({"prompt": "a", "reasoning_effort": "low"}), 400).await;
    assert_eq!(error["param"], "reasoning_effort");
}

#[tokio::test]
async fn a_template_that_knows_no_thinking_refuses_an_effort() {
    let server = Server::start(Script::saying("x")).await;
    for effort in ["none", "high"] {
        let error = server.refusal(CHAT, &chat(json!({"reasoning_effort": effort})), 400).await;
        let (param, code) = (json!("reasoning_effort"), json!("unsupported_parameter"));
        assert_eq!((&error["param"], &error["code"]), (&param, &code));
    }
}

#[tokio::test]
async fn a_causal_model_can_think_too() {
    let steps: Vec<Step> =
        marked("{thought\nhm}yes").into_iter().map(|token| Step::Commit(vec![token])).collect();
    let script = Script::new(move |_| steps.iter().cloned().chain(stage::say("")).collect());
    let server = Server::thinking(script, "").await;
    let message = server.ask(CHAT, &chat(json!({"top_k": 5}))).await["choices"][0]["message"].take();
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("yes"), &json!("hm")));
    assert_eq!(last_sampling(&server).top_k, 5);
}

#[tokio::test]
async fn a_text_is_continued_as_it_comes() {
    let server = server("{thought\nhm}yes").await;
    let answer = server.ask(TEXT, &json!({"prompt": "go"})).await;
    assert_eq!(answer["choices"][0]["text"], "thought\nhmyes");
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
}

#[tokio::test]
async fn pictures_are_refused() {
    let server = server("x").await;
    let picture = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}});
    let parts = json!([{"type": "text", "text": "what is this?"}, picture]);
    let body = json!({"messages": [{"role": "user", "content": parts}]});
    let error = server.refusal(CHAT, &body, 400).await;
    assert_eq!(error["param"], "messages[0].content[1].type");
    assert!(error["message"].as_str().unwrap().contains("takes text only"), "{error}");
}
