//! Several choices of one request: indices, seeds, usage, order, and the one place that they take in the queue.

use std::time::Duration;

use crate::stage::{CANVAS, Script, Server, Trouble, bytes, canvases, eventually, say, text_of};
use crate::with;
use axe::decode::choice_seed;
use futures::StreamExt;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}]}), more)
}

/// A script that says the seeds of its generations, as far as they are known: it says how many have begun.
fn counting() -> Script {
    let begun = std::sync::atomic::AtomicUsize::new(0);
    Script::new(move |_| say(&format!("no {}", begun.fetch_add(1, std::sync::atomic::Ordering::SeqCst))))
}

fn seeds(server: &Server) -> Vec<u64> {
    server.stage.script.started.lock().unwrap().iter().map(|(_, sampling)| sampling.seed).collect()
}

/// The chunks of a stream that ends well.
fn chunks(body: &str) -> Vec<Value> {
    let mut events: Vec<&str> =
        body.trim_end().split("\n\n").filter(|event| event.starts_with("data: ")).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect()
}

#[tokio::test]
async fn choices_have_their_indices_and_the_prompt_counts_once() {
    let server = Server::start(counting()).await;
    for (path, body) in [
        (CHAT, chat(json!({"n": 3, "seed": 5}))),
        (TEXT, json!({"prompt": "hi", "n": 3, "best_of": 3, "seed": 5})),
    ] {
        let before = seeds(&server).len();
        let answer = server.ask(path, &body).await;
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 3);
        for (index, choice) in choices.iter().enumerate() {
            assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(index), &json!("stop")));
            let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(*text, format!("no {}", before + index));
        }
        let prompt = server.stage.script.started.lock().unwrap()[before].0.len();
        assert_eq!(answer["usage"]["prompt_tokens"], prompt);
        assert_eq!(answer["usage"]["completion_tokens"], 3 * 5);
        assert_eq!(answer["usage"]["total_tokens"], prompt + 15);
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
        assert_eq!(answer["axe"]["passes"], 15);
        assert_eq!(answer["axe"]["seed"], 5);
        assert_eq!(seeds(&server)[before..], [5, choice_seed(5, 1), choice_seed(5, 2)]);
    }
}

#[tokio::test]
async fn all_choices_together_are_one_request_and_one_prompt_in_every_account() {
    let server = Server::configured(counting(), "[server]\napi_key = \"k\"\ntokens_per_minute = 1000").await;
    let asked = server.client.post(server.url(CHAT)).bearer_auth("k").json(&chat(json!({"n": 3})));
    let response = asked.send().await.unwrap();
    let left: u64 = response.headers()["x-ratelimit-remaining-tokens"].to_str().unwrap().parse().unwrap();
    let usage = response.json::<Value>().await.unwrap()["usage"].take();
    let total = usage["total_tokens"].as_u64().unwrap();
    // Some grows back while a slow machine answers.
    assert!((1000 - total..1000).contains(&left), "{left} of 1000 after {total}");
    let page = server.client.get(server.url("/metrics")).bearer_auth("k").send().await.unwrap();
    let page = page.text().await.unwrap();
    let (prompt, completion) = (&usage["prompt_tokens"], &usage["completion_tokens"]);
    for line in [
        "axe_requests_total{outcome=\"stop\"} 1\n".to_owned(),
        format!("axe_prompt_tokens_total {prompt}\n"),
        format!("axe_completion_tokens_total {completion}\n"),
        format!("axe_cached_tokens_total {}\n", usage["prompt_tokens_details"]["cached_tokens"]),
        format!("axe_key_prompt_tokens_total{{key=\"api_key\"}} {prompt}\n"),
        format!("axe_key_completion_tokens_total{{key=\"api_key\"}} {completion}\n"),
    ] {
        assert!(page.contains(&line), "{line} is missing in {page}");
    }
}

#[tokio::test]
async fn a_stream_tells_one_choice_after_the_other() {
    let server = Server::start(counting()).await;
    let usage = json!({"include_usage": true});
    let response = server.post(CHAT, &chat(json!({"n": 2, "stream": true, "stream_options": usage}))).await;
    let body = response.text().await.unwrap();
    let mut chunks = chunks(&body);
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 10);
    for index in 0..2 {
        let own: Vec<&Value> =
            chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == json!(index)).collect();
        assert_eq!(own[0]["delta"], json!({"role": "assistant", "content": ""}));
        let text: String = own.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
        assert_eq!(text, format!("no {index}"));
        let (end, others) = own.split_last().unwrap();
        assert_eq!((&end["delta"], &end["finish_reason"]), (&json!({}), &json!("stop")));
        assert!(others.iter().all(|choice| choice["finish_reason"].is_null()));
    }
    let order: Vec<i64> = chunks.iter().map(|c| c["choices"][0]["index"].as_i64().unwrap()).collect();
    assert!(order.is_sorted(), "{order:?}");
    let ids: Vec<&Value> = chunks.iter().map(|c| &c["id"]).collect();
    assert!(ids.iter().all(|id| **id == last["id"]));

    let response = server.post(TEXT, &json!({"prompt": "hi", "n": 2, "stream": true})).await;
    let body = response.text().await.unwrap();
    for (index, said) in [(0, "no 2"), (1, "no 3")] {
        let own = self::chunks(&body).into_iter().filter(|c| c["choices"][0]["index"] == json!(index));
        let text: String = own.map(|c| c["choices"][0]["text"].as_str().unwrap().to_owned()).collect();
        assert_eq!(text, said);
    }
}

#[tokio::test]
async fn too_many_choices_and_comparisons_are_refused() {
    let server = Server::configured(Script::saying("x"), "[server]\nmax_choices = 4").await;
    for (more, param) in [
        (json!({"n": 0}), "n"),
        (json!({"n": 5}), "n"),
        (json!({"n": 1.5}), "n"),
        (json!({"n": "2"}), "n"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"n": 2, "best_of": 3}), "best_of"),
        (json!({"n": 2, "best_of": 1}), "best_of"),
    ] {
        assert_eq!(server.refusal(CHAT, &chat(more.clone()), 400).await["param"], param, "{more}");
        let mut text = json!({"prompt": "hi"});
        text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(server.refusal(TEXT, &text, 400).await["param"], param, "{more}");
    }
    assert_eq!(server.ask(CHAT, &chat(json!({"n": 4}))).await["choices"].as_array().unwrap().len(), 4);
    assert_eq!(
        server.ask(CHAT, &chat(json!({"n": null, "best_of": null}))).await["choices"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 5);
}

#[tokio::test]
async fn choices_take_one_place_and_let_others_between_them() {
    let server = Server::configured(Script::echo().gated(), "[server]\nqueue_capacity = 1").await;
    let (url, client) = (server.url(TEXT), server.client.clone());
    let send = |prompt: &str, n: usize| {
        let body = json!({"prompt": prompt, "n": n});
        let request = client.post(&url).json(&body).send();
        tokio::spawn(async move { request.await.unwrap().json::<Value>().await.unwrap() })
    };
    let depth = || server.stage.engine.status().queue.depth;
    let several = send("s", 3);
    eventually("the first choice runs", || server.stage.engine.status().running.is_some()).await;
    eventually("the second waits", || server.stage.engine.status().queue.jobs.len() == 1).await;
    assert_eq!(depth(), 0, "a request that has begun takes nobody's place");
    let other = send("o", 1);
    eventually("another one waits", || depth() == 1).await;
    // The queue is full now.
    let error = server.refusal(TEXT, &json!({"prompt": "late", "n": 2}), 429).await;
    assert_eq!(error["code"], "queue_full");
    assert_eq!(server.stage.engine.status().queue.jobs.len(), 2);
    server.stage.script.permit(1000);
    assert_eq!(several.await.unwrap()["choices"].as_array().unwrap().len(), 3);
    assert_eq!(other.await.unwrap()["choices"].as_array().unwrap().len(), 1);
    let order: Vec<String> =
        server.stage.script.started.lock().unwrap().iter().map(|(prompt, _)| text_of(&prompt[1..])).collect();
    assert_eq!(order, ["s", "s", "o", "s"], "the second choice was in the queue when the other came");
    let counters = server.stage.engine.status().counters;
    assert_eq!((counters.requests.stop, counters.requests.rejected), (2, 1), "requests, not choices");
}

#[tokio::test]
async fn leaving_frees_all_choices() {
    let server = Server::start(Script::endless().pace(Duration::from_millis(1))).await;
    let response = server.post(CHAT, &chat(json!({"n": 4, "stream": true}))).await;
    let mut body = response.bytes_stream();
    assert!(body.next().await.unwrap().unwrap().starts_with(b"data: "));
    drop(body);
    let free = || {
        let status = server.stage.engine.status();
        status.running.is_none() && status.queue.depth == 0
    };
    eventually("all is free", free).await;
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 1);
    assert_eq!(server.stage.engine.status().counters.requests.cancelled, 1);
    // Those that wait go as well.
    let held = Server::start(Script::saying("x").gated()).await;
    let first = held.client.post(held.url(CHAT)).json(&chat(json!({}))).send();
    let first = tokio::spawn(first);
    eventually("one runs", || held.stage.engine.status().running.is_some()).await;
    let waiting = tokio::spawn(held.client.post(held.url(CHAT)).json(&chat(json!({"n": 3}))).send());
    eventually("one waits", || held.stage.engine.status().queue.depth == 1).await;
    waiting.abort();
    eventually("none waits", || held.stage.engine.status().queue.depth == 0).await;
    held.stage.script.permit(100);
    assert_eq!(first.await.unwrap().unwrap().status(), 200);
    assert_eq!(held.stage.engine.status().counters.requests.cancelled, 1);
    assert_eq!(held.stage.script.started.lock().unwrap().len(), 1);
}

/// The answer to a request for three choices, of which so many steps are made before its time is over, and one after.
async fn out_of_time(steps: usize, stream: bool) -> (u16, String) {
    let server = Server::configured(counting().gated(), "[server]\nrequest_timeout_s = 1").await;
    let mut body = chat(json!({"n": 3, "stream": stream}));
    if stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    let asked = tokio::spawn(server.client.post(server.url(CHAT)).json(&body).send());
    eventually("one runs", || server.stage.engine.status().running.is_some()).await;
    let over = tokio::time::Instant::now() + Duration::from_millis(1001);
    server.stage.script.permit(steps);
    eventually("the steps", || server.stage.script.steps_done() == steps).await;
    tokio::time::sleep_until(over).await;
    server.stage.script.permit(1);
    let response = asked.await.unwrap().unwrap();
    let answer = (response.status().as_u16(), response.text().await.unwrap());
    eventually("nothing is left", || {
        let status = server.stage.engine.status();
        status.running.is_none() && status.queue.jobs.is_empty()
    })
    .await;
    let counted = server.stage.engine.status().counters.requests;
    assert_eq!(counted.stop + counted.length + counted.error, 1, "{counted:?}");
    answer
}

#[tokio::test]
async fn a_request_whose_time_is_over_ends_with_what_its_choices_have() {
    // A choice takes a step for its prompt, four for its text, and one for its end.
    let cases = [
        (3, 3, [("no ", "length"), ("", "length"), ("", "length")]),
        (6, 5, [("no 0", "stop"), ("", "length"), ("", "length")]),
        (8, 7, [("no 0", "stop"), ("no", "length"), ("", "length")]),
    ];
    let all = cases.iter().map(|(steps, tokens, choices)| async move {
        let (whole, stream) = tokio::join!(out_of_time(*steps, false), out_of_time(*steps, true));
        assert_eq!((whole.0, stream.0), (200, 200), "{whole:?}");
        let whole: Value = serde_json::from_str(&whole.1).unwrap();
        let told = |choice: &Value| (choice["message"]["content"].clone(), choice["finish_reason"].clone());
        let told: Vec<_> = whole["choices"].as_array().unwrap().iter().map(told).collect();
        let expected: Vec<_> = choices.iter().map(|(text, reason)| (json!(text), json!(reason))).collect();
        assert_eq!(told, expected);
        assert_eq!(whole["usage"]["completion_tokens"], json!(tokens));

        let mut chunks = chunks(&stream.1);
        assert_eq!(chunks.pop().unwrap()["usage"]["completion_tokens"], json!(tokens));
        for (index, (text, reason)) in choices.iter().enumerate() {
            let own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == json!(index));
            let own: Vec<&Value> = own.collect();
            let said: String = own.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
            assert_eq!((said.as_str(), &own.last().unwrap()["finish_reason"]), (*text, &json!(reason)));
            assert_eq!(own[0]["delta"]["role"], "assistant");
        }
    });
    futures::future::join_all(all).await;
    for stream in [false, true] {
        let (status, body) = out_of_time(0, stream).await;
        assert!(status == 504 && body.contains("request_timeout"), "nothing was committed: {status} {body}");
    }
}

#[tokio::test]
async fn the_operator_cancels_all_choices_at_once() {
    let server = Server::start(Script::endless().pace(Duration::from_millis(1))).await;
    let asked = tokio::spawn(server.client.post(server.url(CHAT)).json(&chat(json!({"n": 3}))).send());
    eventually("one runs", || server.stage.engine.status().running.is_some()).await;
    let id = server.stage.engine.status().running.unwrap().id;
    assert!(server.stage.engine.cancel(&id));
    let response = asked.await.unwrap().unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "cancelled");
    eventually("nothing is left", || server.stage.engine.status().counters.requests.cancelled == 1).await;
    eventually("none waits", || server.stage.engine.status().queue.jobs.is_empty()).await;
    assert!(!server.stage.engine.cancel(&id));
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_choice_that_fails_fails_the_request() {
    // Each generation may take as many steps as it needs for prefill and one token, then fails.
    let failing = || Script::saying("xy").trouble(2, Trouble::Error);
    let server = Server::start(failing()).await;
    server.refusal(CHAT, &chat(json!({"n": 3})), 500).await;
    let body = server.post(CHAT, &chat(json!({"n": 3, "stream": true}))).await.text().await.unwrap();
    assert!(
        body.contains("\"error\"") && !body.contains("[DONE]") && !body.contains("\"index\":1"),
        "{body}"
    );
    eventually("the rest is not made", || {
        let status = server.stage.engine.status();
        status.running.is_none() && status.queue.depth == 0
    })
    .await;
}

#[tokio::test]
async fn canvases_have_choices_too() {
    let script = Script::new(|_| canvases(&bytes("yes"), CANVAS, &[2])).denoises();
    let server = Server::thinking(script, "").await;
    let answer = server.ask(CHAT, &chat(json!({"n": 2, "seed": 9}))).await;
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts, [&json!("yes"), &json!("yes")]);
    assert_eq!(answer["axe"]["denoising_steps"], 4);
    assert_eq!(answer["axe"]["steps_per_canvas"], json!([2, 2]));
    assert_eq!(seeds(&server), [9, choice_seed(9, 1)]);
}
