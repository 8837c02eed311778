//! Texts to tokens and back over HTTP, in llama.cpp's words and in vLLM's.

use crate::stage::{CONTEXT, EOS, OPEN, Script, Server, bytes};
use serde_json::{Value, json};

const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";

async fn tokens(server: &Server, body: Value) -> Vec<u32> {
    let answer = server.ask(TOKENIZE, &body).await;
    let tokens: Vec<u32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    assert_eq!(answer["count"], tokens.len(), "{answer}");
    assert_eq!(answer["max_model_len"], CONTEXT, "{answer}");
    tokens
}

#[tokio::test]
async fn both_conventions_and_their_defaults() {
    let server = Server::start(Script::saying("x")).await;
    let plain = bytes("héllo");
    let with_bos = [vec![1], plain.clone()].concat();
    for (body, wanted) in [
        (json!({"content": "héllo"}), &plain),
        (json!({"content": "héllo", "add_special": true}), &with_bos),
        (json!({"content": "héllo", "add_special_tokens": true, "model": "scripted"}), &with_bos),
        (json!({"prompt": "héllo"}), &with_bos),
        (json!({"prompt": "héllo", "add_special_tokens": false, "unknown": 1}), &plain),
        (json!({"prompt": "héllo", "add_special": false, "content": null}), &plain),
    ] {
        assert_eq!(&tokens(&server, body.clone()).await, wanted, "{body}");
    }
    assert_eq!(tokens(&server, json!({"content": ""})).await, Vec::<u32>::new());
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "no model runs for it");
}

#[tokio::test]
async fn special_tokens_are_found_unless_they_are_to_be_text() {
    let server = Server::start(Script::saying("x")).await;
    assert_eq!(tokens(&server, json!({"content": "a</s>"})).await, [bytes("a"), vec![EOS]].concat());
    assert_eq!(tokens(&server, json!({"content": "a</s>", "parse_special": false})).await, bytes("a</s>"));
}

#[tokio::test]
async fn messages_are_what_the_chat_route_reads() {
    let server = Server::thinking(Script::saying("x"), "").await;
    for more in [json!({}), json!({"chat_template_kwargs": {"enable_thinking": true}})] {
        let mut body = json!({"messages": [{"role": "user", "content": "hi </s>"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ask("/v1/chat/completions", &body).await;
        let read = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
        body["add_generation_prompt"] = true.into();
        assert_eq!(tokens(&server, body.clone()).await, read, "{body}");
        assert!(!read.contains(&EOS), "what users write is text");
    }
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false});
    assert_eq!(server.refusal(TOKENIZE, &body, 400).await["param"], "add_generation_prompt");
    let error = server.refusal(TOKENIZE, &json!({"messages": [{"role": "king"}]}), 400).await;
    assert!(error["param"].as_str().unwrap().starts_with("messages[0]"), "{error}");
}

#[tokio::test]
async fn pieces_are_text_or_the_bytes_of_a_part_of_a_character() {
    let server = Server::start(Script::saying("x")).await;
    let body = json!({"content": "aé</s>", "with_pieces": true, "return_token_strs": true});
    let answer = server.ask(TOKENIZE, &body).await;
    let id = |byte: u8| 3 + u32::from(byte);
    let wanted = json!([
        {"id": id(b'a'), "piece": "a"},
        {"id": id(0xc3), "piece": [0xc3]},
        {"id": id(0xa9), "piece": [0xa9]},
        {"id": EOS, "piece": "</s>"},
    ]);
    assert_eq!(answer["tokens"], wanted);
    assert_eq!(answer["token_strs"], json!(["a", "\u{fffd}", "\u{fffd}", "</s>"]));
}

#[tokio::test]
async fn tokens_become_the_text_they_came_from() {
    let server = Server::start(Script::saying("x")).await;
    for text in ["", "naïve 😀 text\n", "a</s>b", " two  spaces "] {
        for content in [json!({"content": text}), json!({"content": text, "add_special": true})] {
            let ids = tokens(&server, content.clone()).await;
            let answer = server.ask(DETOKENIZE, &json!({"tokens": ids})).await;
            let special = content["add_special"] == true;
            let wanted = if special { format!("<s>{text}") } else { text.to_owned() };
            assert_eq!(answer, json!({"content": wanted, "prompt": wanted}));
            let plain = json!({"tokens": ids, "skip_special_tokens": true});
            assert_eq!(server.ask(DETOKENIZE, &plain).await["content"], text.replace("</s>", ""));
        }
    }
    let half = server.ask(DETOKENIZE, &json!({"tokens": [3 + 0xc3]})).await;
    assert_eq!(half["content"], "\u{fffd}", "bytes that are no text are shown as such");
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let server = Server::start(Script::saying("x")).await;
    let size = 260;
    for (path, body, param) in [
        (TOKENIZE, json!({}), "content"),
        (TOKENIZE, json!({"content": 3}), "content"),
        (TOKENIZE, json!({"prompt": ["a", "b"]}), "prompt"),
        (TOKENIZE, json!({"content": "a", "prompt": "a"}), "content"),
        (TOKENIZE, json!({"prompt": "a", "messages": []}), "prompt"),
        (TOKENIZE, json!({"content": "a", "with_pieces": "yes"}), "with_pieces"),
        (TOKENIZE, json!({"content": "a", "parse_special": 1}), "parse_special"),
        (
            TOKENIZE,
            json!({"content": "a", "add_special": true, "add_special_tokens": false}),
            "add_special_tokens",
        ),
        (DETOKENIZE, json!({}), "tokens"),
        (DETOKENIZE, json!({"tokens": "abc"}), "tokens"),
        (DETOKENIZE, json!({"tokens": [5, size]}), "tokens[1]"),
        (DETOKENIZE, json!({"tokens": [-1]}), "tokens[0]"),
        (DETOKENIZE, json!({"tokens": [5.5]}), "tokens[0]"),
        (DETOKENIZE, json!({"tokens": ["5"]}), "tokens[0]"),
        (DETOKENIZE, json!({"tokens": [4_294_967_301_u64]}), "tokens[0]"),
        (DETOKENIZE, json!({"tokens": [5], "skip_special_tokens": 0}), "skip_special_tokens"),
    ] {
        let error = server.refusal(path, &body, 400).await;
        assert_eq!(error["param"], param, "{body}: {error}");
    }
    for path in [TOKENIZE, DETOKENIZE] {
        let error =
            server.refusal(path, &json!({"model": "other", "content": "a", "tokens": [5]}), 404).await;
        assert_eq!(error["code"], "model_not_found");
        assert_eq!(server.get(path).await.status(), 405);
    }
}

#[tokio::test]
async fn the_channels_marker_has_its_name() {
    let server = Server::thinking(Script::saying("x"), "").await;
    assert_eq!(server.ask(DETOKENIZE, &json!({"tokens": [OPEN]})).await["content"], "<|channel>");
}

#[tokio::test]
async fn a_key_is_needed_where_one_is_set() {
    let server = Server::configured(Script::saying("x"), "[server]\napi_key = \"secret-key\"").await;
    for (path, body) in [(TOKENIZE, json!({"content": "a"})), (DETOKENIZE, json!({"tokens": [5]}))] {
        server.refusal(path, &body, 401).await;
    }
}
