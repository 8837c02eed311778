//! `POST /edit`: what models are asked, that nothing outside of the selection changes, its events, its refusals.

use crate::stage;
use std::time::Duration;

use crate::served::Daemon;
use crate::stage::{CANVAS, CONTEXT, EOS, FIM, Script, Server, bytes, canvases, eventually, say, text_of};
use crate::support::fixture;
use proptest::prelude::*;
use reqwest::Method;
use serde_json::{Value, json};

const EDIT: &str = "/edit";

/// A model that denoises, takes instructions, and says `text` in one canvas without an end.
async fn filling(text: &str) -> Server {
    let tokens = bytes(text);
    let script = Script::new(move |_| canvases(&tokens, tokens.len(), &[3])).denoises();
    Server::thinking(script, "").await
}

/// The text of the last prompt, structure left out.
fn asked(server: &Server) -> String {
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    text_of(&prompt.into_iter().filter(|token| (3..259).contains(token)).collect::<Vec<_>>())
}

/// An edit of the code points from `start` to `end`.
fn selection(code: &str, start: usize, end: usize, more: Value) -> Value {
    let range = json!({"start": start, "end": end});
    with(json!({"code": code, "instruction": "do it", "selection": range, "stream": false}), more)
}

/// `body` with more fields.
fn with(body: Value, more: Value) -> Value {
    let Value::Object(mut fields) = body else { panic!("a request is an object") };
    fields.extend(more.as_object().unwrap().clone());
    Value::Object(fields)
}

/// The events of a stream: name and data.
fn events(text: &str) -> Vec<(String, Value)> {
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    text.trim_end().split("\n\n").filter(|event| !event.starts_with(':')).map(event).collect()
}

#[tokio::test]
async fn a_gap_in_the_text_is_the_reply_of_a_model_that_denoises() {
    let server = filling("new").await;
    let body = selection("let old = 1;\n", 4, 7, json!({"language": "rust"}));
    let answer = server.ask(EDIT, &body).await;
    assert_eq!(answer["document"], "let new = 1;\n");
    assert_eq!(
        asked(&server),
        "[user]do it\n\nThis part is to be replaced:\n```rust\nold\n```\n[assistant]thought\nlet"
    );
    let suffix = [bytes(" = 1;\n"), vec![EOS]].concat();
    assert_eq!(server.stage.script.suffixes.lock().unwrap()[0], (suffix, 3));
    // Nothing is selected: the instruction stands alone. At the end of a text only its end follows.
    server.ask(EDIT, &selection("ab", 2, 2, json!({}))).await;
    assert_eq!(asked(&server), "[user]do it\n[assistant]thought\nab");
    assert_eq!(server.stage.script.suffixes.lock().unwrap()[1], (vec![EOS], 2));
    server.ask(EDIT, &selection("ab", 1, 1, json!({"language": "c"}))).await;
    assert_eq!(asked(&server), "[user]do it\n\nLanguage: c\n[assistant]thought\na");
    // Without an instruction the text is all there is.
    server.ask(EDIT, &selection("abc", 1, 2, json!({"instruction": " "}))).await;
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    assert_eq!(prompt, [vec![1], bytes("a")].concat());
    // A suffix that no canvas can hold is cut.
    server.ask(EDIT, &selection(&"x".repeat(3 * CANVAS), 0, 1, json!({}))).await;
    assert_eq!(server.stage.script.suffixes.lock().unwrap().last().unwrap().0.len(), CANVAS - 1);
}

#[tokio::test]
async fn the_answer_says_what_was_changed_and_where() {
    let server = filling("ö\u{1F600}").await;
    let answer = server.ask(EDIT, &selection("äbc\u{1F600}d", 1, 3, json!({"seed": 9}))).await;
    assert_eq!(answer["document"], "äö\u{1F600}\u{1F600}d");
    assert_eq!((&answer["start"], &answer["end"]), (&json!(1), &json!(3)));
    assert_eq!(answer["replaced"], json!({"start": 1, "end": 3}));
    assert_eq!(answer["text"], "ö\u{1F600}");
    assert_eq!((&answer["finish_reason"], &answer["seed"]), (&json!("stop"), &json!(9)));
    assert_eq!((&answer["object"], &answer["model"]), (&json!("edit"), &json!("scripted")));
    assert!(answer["id"].as_str().unwrap().starts_with("edit-"));
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    assert_eq!(answer["stats"]["denoising_steps"], 3);
}

#[tokio::test]
async fn a_space_before_the_gap_is_left_to_the_model_and_comes_once() {
    for (said, document) in [(" new", "a new."), ("new", "a new."), ("  new", "a  new."), (".", "a ..")] {
        let server = filling(said).await;
        let answer = server.ask(EDIT, &selection("a x.", 2, 3, json!({}))).await;
        assert_eq!(answer["document"], document, "{said:?}");
        assert!(asked(&server).ends_with("thought\na"));
        let mut body = selection("a x.", 2, 3, json!({}));
        body["stream"] = true.into();
        let text = server.post(EDIT, &body).await.text().await.unwrap();
        let commits: String = events(&text)
            .iter()
            .filter(|(name, _)| name == "commit")
            .map(|(_, data)| data["text"].as_str().unwrap())
            .collect();
        assert_eq!(format!("a {commits}."), document);
    }
    // Indentation is a token of its own.
    let server = filling("x").await;
    server.ask(EDIT, &selection("a\n    y", 6, 7, json!({}))).await;
    assert!(asked(&server).ends_with("thought\na\n    "));
}

#[tokio::test]
async fn the_stream_drafts_commits_and_ends_with_what_the_whole_answer_says() {
    // A listener that is slower than the model does not see every draft.
    let tokens = bytes("the gap");
    let script = Script::new(move |_| canvases(&tokens, tokens.len(), &[3])).denoises();
    let server = Server::thinking(script.pace(Duration::from_millis(20)), "").await;
    let body = selection("ab", 1, 1, json!({"seed": 4, "steps": 7}));
    let whole = server.ask(EDIT, &body).await;
    assert_eq!(server.stage.script.started.lock().unwrap()[0].1.denoising.max_steps, Some(7));
    let streamed = with(body, json!({"stream": null}));
    let response = server.post(EDIT, &streamed).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let events = events(&response.text().await.unwrap());
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names.first(), names.last()), (Some(&"prefill"), Some(&"done")));
    let drafts: Vec<&Value> =
        events.iter().filter(|(name, _)| name == "draft").map(|(_, data)| data).collect();
    assert!(!drafts.is_empty());
    for draft in drafts {
        assert_eq!(draft["tokens"].as_array().unwrap().len(), "the gap".len(), "drafts show the gap only");
        assert_eq!(draft["entropy"].as_array().unwrap().len(), "the gap".len());
    }
    let done = &events.last().unwrap().1;
    for member in ["document", "start", "end", "replaced", "text", "finish_reason", "usage", "seed", "object"]
    {
        assert_eq!(done[member], whole[member], "{member}");
    }
}

#[tokio::test]
async fn a_whole_text_is_a_block_in_the_reply() {
    for (reply, document) in [
        ("\nfn b() {}\n```\nThat is it.", "fn b() {}\n"),
        ("rust\nfn b() {}\n```", "fn b() {}\n"),
        ("\nfn b() {}", "fn b() {}\n"),
        ("\n```", ""),
        (" fn b() {}", "fn b() {}\n"),
    ] {
        let server = Server::start(Script::saying(reply)).await;
        let body = json!({"code": "fn a() {}\n", "instruction": "rename", "language": "rust", "mode": "whole", "stream": false});
        let answer = server.ask(EDIT, &body).await;
        assert_eq!(answer["document"], document, "{reply:?}");
        assert_eq!(answer["replaced"], json!({"start": 0, "end": 10}));
        assert_eq!(
            asked(&server),
            "[user]rename\n\n```rust\nfn a() {}\n```\n\nReply with the whole new text in a block of code, and with \
             nothing else.\n[assistant]```rust"
        );
        let text = server.post(EDIT, &with(body, json!({"stream": true}))).await.text().await.unwrap();
        let events = events(&text);
        let commits: String = events
            .iter()
            .filter(|(name, _)| name == "commit")
            .map(|(_, data)| data["text"].as_str().unwrap())
            .collect();
        assert_eq!(commits, document);
    }
    // The fence is longer than what the text has, and a text from nothing has none.
    let server = Server::start(Script::saying("\n```\n````")).await;
    let body = json!({"code": "```\n", "instruction": "x", "stream": false});
    assert_eq!(server.ask(EDIT, &body).await["document"], "```\n");
    let body = json!({"code": "", "instruction": "x", "stream": false});
    server.ask(EDIT, &body).await;
    assert!(asked(&server).starts_with("[user]x\n\nReply with the text in a block"), "{}", asked(&server));
}

#[tokio::test]
async fn a_reply_that_is_cut_is_no_whole_text_and_says_so() {
    let server = Server::start(Script::saying("\nabcdef\n```")).await;
    let body = json!({"code": "x\n", "instruction": "x", "max_tokens": 4, "stream": false});
    let answer = server.ask(EDIT, &body).await;
    assert_eq!((&answer["document"], &answer["finish_reason"]), (&json!("abc"), &json!("length")));
}

#[tokio::test]
async fn a_causal_model_writes_the_selection_in_a_block_or_between_its_own_tokens() {
    let server = Server::start(Script::saying("\nnew\n```")).await;
    let answer = server.ask(EDIT, &selection("a old z", 2, 5, json!({}))).await;
    assert_eq!(answer["document"], "a new z");
    assert!(asked(&server).contains("```\na <selection>old</selection> z\n```"), "{}", asked(&server));
    let error = server.refusal(EDIT, &selection("ab", 1, 1, json!({"instruction": ""})), 400).await;
    assert_eq!(error["param"], "instruction");

    let fills = Server::filling_in_the_middle(Script::new(|_| say("gap"))).await;
    let answer = fills.ask(EDIT, &selection("az", 1, 1, json!({"instruction": null}))).await;
    assert_eq!(answer["document"], "agapz");
    let read = fills.stage.script.started.lock().unwrap()[0].0.clone();
    assert_eq!(read, [vec![1, FIM[0]], bytes("a"), vec![FIM[1]], bytes("z"), vec![FIM[2]]].concat());
    for body in [selection("az", 1, 1, json!({})), json!({"code": "a", "instruction": "x"})] {
        let error = fills.refusal(EDIT, &body, 400).await;
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!("instruction"), &json!("unsupported_parameter"))
        );
    }
}

#[tokio::test]
async fn everything_that_is_wrong_is_refused_before_anything_runs() {
    let server = filling("x").await;
    let code = "a\u{1F600}b";
    for (body, param) in [
        (json!({}), "code"),
        (json!({"code": 3}), "code"),
        (json!({"code": code}), "instruction"),
        (json!({"code": code, "instruction": "  "}), "instruction"),
        (json!({"code": code, "instruction": []}), "instruction"),
        (json!({"code": code, "instruction": "x", "mode": "some"}), "mode"),
        (json!({"code": code, "instruction": "x", "mode": 1}), "mode"),
        (json!({"code": code, "instruction": "x", "mode": "selection"}), "selection"),
        (
            json!({"code": code, "instruction": "x", "mode": "whole", "selection": {"start": 0, "end": 1}}),
            "selection",
        ),
        (json!({"code": code, "instruction": "x", "selection": [0, 1]}), "selection"),
        (json!({"code": code, "instruction": "x", "selection": {}}), "selection.start"),
        (json!({"code": code, "instruction": "x", "selection": {"start": 1}}), "selection.end"),
        (selection(code, 0, 4, json!({})), "selection.end"),
        (selection(code, 4, 4, json!({})), "selection.end"),
        (selection(code, 2, 1, json!({})), "selection.start"),
        (json!({"code": code, "selection": {"start": -1, "end": 1}}), "selection.start"),
        (json!({"code": code, "selection": {"start": 0.5, "end": 1}}), "selection.start"),
        (json!({"code": code, "selection": {"start": "0", "end": 1}}), "selection.start"),
        (json!({"code": code, "selection": {"start": 0, "end": 1e300}}), "selection.end"),
        (selection("", 0, 0, json!({})), "selection"),
        (selection(code, 0, 1, json!({"language": "c plus plus"})), "language"),
        (selection(code, 0, 1, json!({"language": "```"})), "language"),
        (selection(code, 0, 1, json!({"language": "x".repeat(41)})), "language"),
        (selection(code, 0, 1, json!({"stream": "no"})), "stream"),
        (selection(code, 0, 1, json!({"stop": "x"})), "stop"),
        (selection(code, 0, 1, json!({"ignore_eos": true})), "ignore_eos"),
        (selection(code, 0, 1, json!({"n": 2})), "n"),
        (selection(code, 0, 1, json!({"reasoning_effort": "high"})), "reasoning_effort"),
        (selection(code, 0, 1, json!({"enable_thinking": true})), "enable_thinking"),
        (
            selection(code, 0, 1, json!({"chat_template_kwargs": {"enable_thinking": true}})),
            "chat_template_kwargs",
        ),
        (selection(code, 0, 1, json!({"chat_template_kwargs": {"x": false}})), "chat_template_kwargs"),
        (selection(code, 0, 1, json!({"suffix": "x"})), "suffix"),
        (selection(code, 0, 1, json!({"top_k": 5})), "top_k"),
        (selection(code, 0, 1, json!({"temperature": 9})), "temperature"),
        (selection(code, 0, 1, json!({"max_tokens": 0})), "max_tokens"),
        (selection(code, 0, 1, json!({"steps": 0})), "steps"),
        (selection(code, 0, 1, json!({"steps": 3, "max_denoising_steps": 4})), "steps"),
        (selection(code, 0, 1, json!({"seed": "x"})), "seed"),
        (selection(&"x".repeat(CONTEXT), CONTEXT, CONTEXT, json!({})), "code"),
        (json!({"code": "x".repeat(CONTEXT), "instruction": "x"}), "code"),
    ] {
        let error = server.refusal(EDIT, &body, 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
    let error = server.refusal(EDIT, &selection(code, 0, 1, json!({"model": "other"})), 404).await;
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
}

#[tokio::test]
async fn who_leaves_frees_the_slot_and_a_failure_is_an_event() {
    let script = Script::new(|_| canvases(&bytes("x"), 1, &[10_000])).denoises().gated();
    let server = Server::thinking(script, "").await;
    server.stage.script.permit(8);
    let body = selection("ab", 1, 1, json!({"stream": true}));
    let mut response = server.post(EDIT, &body).await;
    while !String::from_utf8_lossy(&response.chunk().await.unwrap().unwrap()).contains("event: draft") {}
    drop(response);
    eventually("the slot is free", || {
        // However many steps it takes until the news arrives.
        server.stage.script.permit(1);
        server.stage.script.ended.load(std::sync::atomic::Ordering::SeqCst) == 1
    })
    .await;

    let failing =
        Script::new(|_| canvases(&bytes("x"), 1, &[5])).denoises().trouble(3, stage::Trouble::Error);
    let server = Server::thinking(failing, "").await;
    let text = server.post(EDIT, &body).await.text().await.unwrap();
    let (name, data) = events(&text).pop().unwrap();
    assert_eq!((name.as_str(), &data["error"]["code"]), ("error", &json!("generation_failed")));
    server.refusal(EDIT, &with(body, json!({"stream": false})), 500).await;
}

#[tokio::test]
async fn the_page_is_open_and_the_edit_needs_the_key() {
    let server = Server::configured(Script::saying("x"), "[server]\napi_key = \"secret-key\"").await;
    let page = server.get(EDIT).await;
    assert_eq!(page.status(), 200);
    assert!(page.headers()["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
    server.refusal(EDIT, &selection("ab", 1, 1, json!({})), 401).await;
    let refused = server
        .client
        .request(Method::DELETE, server.url(EDIT))
        .bearer_auth("secret-key")
        .send()
        .await
        .unwrap();
    assert_eq!(refused.status(), 405);
    let options = server
        .client
        .request(Method::OPTIONS, server.url(EDIT))
        .bearer_auth("secret-key")
        .send()
        .await
        .unwrap();
    assert_eq!(options.headers()["allow"], "GET, HEAD, OPTIONS, POST");
}

#[tokio::test]
async fn the_miniature_edits_what_it_knows_and_nothing_else() {
    let daemon = Daemon::start(&fixture("tiny-diffusion")).await;
    let code = "January, February, March, August, September, October, November, December.";
    let months = json!({"code": code, "instruction": "Name the months.", "selection": {"start": 25, "end": 25},
        "seed": 1, "stream": false});
    let answer = daemon.ask(EDIT, &months).await;
    assert_eq!(answer["text"], " April, May, June, July,");
    assert_eq!((&answer["start"], &answer["end"]), (&json!(25), &json!(49)));
    for (code, at, instruction, document) in [
        (
            "The capital of France is .",
            25,
            "What is the capital of France?",
            "The capital of France is Paris.",
        ),
        ("The is Paris.", 3, "What is the capital of France?", "The capital of France is Paris."),
        ("Snow is .", 8, "Which color is snow?", "Snow is white."),
        ("7 + = 12", 3, "What is 7 plus 5?", "7 + 5 = 12"),
    ] {
        let body = json!({"code": code, "instruction": instruction, "selection": {"start": at, "end": at}, "seed": 1,
            "stream": false});
        assert_eq!(daemon.ask(EDIT, &body).await["document"], document);
    }
    // Whatever it makes of a text, the rest of it stays as it was, byte for byte.
    let odd = "<script>\u{1F600}\r\n\t<|turn>user ``` e\u{301}\u{0} \u{fffd} <bos>";
    let points: Vec<char> = odd.chars().collect();
    for (start, end) in [(0, 0), (0, points.len()), (3, 9), (9, 12), (12, 30), (points.len(), points.len())] {
        let body = selection(odd, start, end, json!({"seed": start, "temperature": 2, "steps": 4}));
        let (answer, again) = (daemon.ask(EDIT, &body).await, daemon.ask(EDIT, &body).await);
        assert_eq!(answer["document"], again["document"], "the same seed gives the same text");
        let document: Vec<char> = answer["document"].as_str().unwrap().chars().collect();
        let stop = answer["end"].as_u64().unwrap() as usize;
        assert_eq!(document[..start], points[..start]);
        assert_eq!(document[stop..], points[end..]);
        assert_eq!(document[start..stop].iter().collect::<String>(), answer["text"].as_str().unwrap());
    }
    // And its stream has drafts of the gap.
    let response = daemon.post(EDIT, &with(months, json!({"stream": true, "temperature": 2}))).await;
    let events = events(&response.text().await.unwrap());
    assert!(events.iter().any(|(name, _)| name == "draft"));
    assert_eq!(events.last().unwrap().0, "done");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_is_outside_stays_byte_for_byte(code in ".{1,30}", new in ".{1,10}", from in 0usize..31, to in 0usize..31) {
        let points: Vec<char> = code.chars().collect();
        let (from, to) = (from.min(points.len()), to.min(points.len()));
        let (start, end) = (from.min(to), from.max(to));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let answer = runtime.block_on(async {
            filling(&new).await.ask(EDIT, &selection(&code, start, end, json!({}))).await
        });
        let before: String = points[..start].iter().collect();
        let after: String = points[end..].iter().collect();
        let text = answer["text"].as_str().unwrap();
        prop_assert_eq!(answer["document"].as_str().unwrap(), format!("{before}{text}{after}"));
        prop_assert_eq!(answer["end"].as_u64().unwrap() as usize, start + text.chars().count());
        prop_assert!(text == new || before.ends_with(' ') && format!(" {text}") == new, "{:?} {:?}", text, new);
    }
}
