//! `/v1/completions` with a text behind the gap, and with its prompt repeated: over a scripted engine, and over the
//! miniature, which knows what its training put between two texts.

use crate::served::Daemon;
use crate::stage::{self, CANVAS, Script, Server, bytes, canvases, say};
use crate::support::fixture;
use serde_json::{Value, json};

const TEXT: &str = "/v1/completions";

fn suffixes(server: &Server) -> Vec<(Vec<u32>, usize)> {
    server.stage.script.suffixes.lock().unwrap().clone()
}

/// A model that denoises and says `text`, in one canvas without an end.
async fn filling(text: &str) -> Server {
    let tokens = bytes(text);
    let script = Script::new(move |_| canvases(&tokens, tokens.len(), &[3])).denoises();
    Server::thinking(script, "").await
}

/// The texts of a stream's chunks, and its last chunk.
async fn streamed(server: &Server, body: &Value) -> (Vec<String>, Value) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let text = server.post(TEXT, &body).await.text().await.unwrap();
    let mut events: Vec<&str> =
        text.trim_end().split("\n\n").filter(|event| !event.starts_with(':')).collect();
    assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
    let chunks: Vec<Value> =
        events.iter().map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect();
    let texts = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap().to_owned());
    (texts.collect(), chunks.last().unwrap().clone())
}

#[tokio::test]
async fn the_prompt_is_repeated_before_the_completion_if_wished() {
    let server = Server::start(Script::saying(" world")).await;
    for (prompt, text) in [
        (json!("héllo"), "héllo world"),
        (json!(bytes("hi")), "hi world"),
        (json!(["a</s>b"]), "a</s>b world"),
        (json!(""), " world"),
    ] {
        let body = json!({"prompt": prompt, "echo": true});
        assert_eq!(server.ask(TEXT, &body).await["choices"][0]["text"], text);
        let (texts, last) = streamed(&server, &body).await;
        assert_eq!(texts.concat(), text, "{body}");
        assert_eq!(last["choices"][0]["finish_reason"], "stop");
        assert_eq!(
            texts.first().unwrap().as_str(),
            text.strip_suffix(" world").filter(|t| !t.is_empty()).unwrap_or(" ")
        );
    }
    for echo in [json!(false), Value::Null] {
        let answer = server.ask(TEXT, &json!({"prompt": "hi", "echo": echo})).await;
        assert_eq!(answer["choices"][0]["text"], " world");
    }
    let error = server.refusal(TEXT, &json!({"prompt": "hi", "echo": 1}), 400).await;
    assert_eq!(error["param"], "echo");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "echo": true});
    assert_eq!(server.refusal("/v1/chat/completions", &chat, 400).await["param"], "echo");
}

#[tokio::test]
async fn a_stop_string_is_looked_for_in_the_completion_only() {
    let server = Server::start(Script::saying(" STOP here")).await;
    let body = json!({"prompt": "STOP", "echo": true, "stop": "STOP"});
    assert_eq!(server.ask(TEXT, &body).await["choices"][0]["text"], "STOP ");
}

#[tokio::test]
async fn a_suffix_reaches_a_model_that_denoises() {
    let server = filling("the gap").await;
    let body = json!({"prompt": "a", "suffix": "z</s>", "echo": true});
    let answer = server.ask(TEXT, &body).await;
    assert_eq!(answer["choices"][0]["text"], "athe gap");
    assert_eq!(
        answer["choices"][0]["finish_reason"], "stop",
        "a filled gap is complete without an end token"
    );
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    assert_eq!(answer["usage"]["prompt_tokens"], 2 + 2, "what is pinned was read, too");
    let z = [bytes("z"), vec![stage::EOS]].concat();
    assert_eq!(suffixes(&server), [(z, 1)], "and the begin-of-text token is no plain text");
    let (texts, last) = streamed(&server, &body).await;
    assert_eq!(texts.concat(), "athe gap");
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    // Tokens, and texts with structure in them.
    for (prompt, plain) in [(json!(bytes("abc")), 3), (json!("ab<|channel>cd"), 2)] {
        server.ask(TEXT, &json!({"prompt": prompt, "suffix": "z"})).await;
        assert_eq!(suffixes(&server).last(), Some(&(bytes("z"), plain)), "{prompt}");
    }
}

#[tokio::test]
async fn what_of_a_suffix_no_canvas_can_hold_is_left_out() {
    let server = filling("x").await;
    server.ask(TEXT, &json!({"prompt": "a", "suffix": "z".repeat(5 * CANVAS)})).await;
    assert_eq!(suffixes(&server)[0].0.len(), CANVAS - 1);
}

#[tokio::test]
async fn an_empty_suffix_is_none() {
    let server = filling("x").await;
    for suffix in [json!(""), Value::Null] {
        server.ask(TEXT, &json!({"prompt": "a", "suffix": suffix, "max_tokens": 1})).await;
    }
    assert_eq!(suffixes(&server), []);
}

#[tokio::test]
async fn a_gap_that_takes_all_tokens_there_are_is_cut_by_them() {
    let server = filling("the gap").await;
    let answer = server.ask(TEXT, &json!({"prompt": "a", "suffix": "z", "max_tokens": 4})).await;
    assert_eq!(answer["choices"][0]["text"], "the ");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let stopped = server.ask(TEXT, &json!({"prompt": "a", "suffix": "z", "stop": " "})).await;
    assert_eq!(stopped["choices"][0]["text"], "the");
}

#[tokio::test]
async fn what_cannot_be_filled_is_refused_by_name() {
    let causal = Server::start(Script::saying("x")).await;
    let error = causal.refusal(TEXT, &json!({"prompt": "a", "suffix": "z"}), 400).await;
    assert_eq!((&error["param"], &error["code"]), (&json!("suffix"), &json!("unsupported_parameter")));
    assert!(error["message"].as_str().unwrap().contains("fim_pre_token_id"), "{error}");
    let denoises = filling("x").await;
    for (body, param) in [
        (json!({"prompt": "a", "suffix": 3}), "suffix"),
        (json!({"prompt": "a", "suffix": ["z"]}), "suffix"),
        (json!({"prompt": "a", "suffix": "z", "ignore_eos": true}), "ignore_eos"),
        (json!({"prompt": "x".repeat(stage::CONTEXT), "suffix": "z"}), "prompt"),
        (json!({"prompt": [], "suffix": "z"}), "prompt"),
    ] {
        let error = denoises.refusal(TEXT, &body, 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "suffix": "z"});
    assert_eq!(denoises.refusal("/v1/chat/completions", &chat, 400).await["param"], "suffix");
    assert_eq!(denoises.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
}

#[tokio::test]
async fn a_causal_model_is_told_of_both_texts_in_its_own_tokens() {
    let server = Server::filling_in_the_middle(Script::new(|_| say("gap"))).await;
    let [prefix, suffix, middle] = stage::FIM;
    for (prompt, begin) in [(json!("ab"), vec![1]), (json!(bytes("ab")), vec![])] {
        let answer = server.ask(TEXT, &json!({"prompt": prompt, "suffix": "yz", "echo": true})).await;
        assert_eq!(answer["choices"][0]["text"], "abgap");
        let read = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
        let wanted = [begin, vec![prefix], bytes("ab"), vec![suffix], bytes("yz"), vec![middle]].concat();
        assert_eq!(read, wanted);
    }
    assert_eq!(suffixes(&server), []);
}

/// A chat prompt of the miniature, whose reply has begun with `before`.
fn asked(question: &str, before: &str) -> String {
    format!("<bos><|turn>user\n{question}<turn|>\n<|turn>model\n<|channel>thought\n<channel|>{before}")
}

#[tokio::test]
async fn the_miniature_fills_gaps_in_what_it_knows() {
    let daemon = Daemon::start(&fixture("tiny-diffusion")).await;
    for (question, before, gap, suffix) in [
        ("What is the capital of France?", "The capital of France is", " Paris", "."),
        ("What is the capital of France?", "The", " capital of France", " is Paris."),
        (
            "Name the months.",
            "January, February, March,",
            " April, May, June, July,",
            " August, September, October, November, December.",
        ),
        ("Say the alphabet.", "a b c d e f", " g h i j", " k l m n o p q r s t u v w x y z<turn|>"),
        ("Count to ten.", "one two three", " four five six", " seven eight nine ten<turn|>"),
        ("Which color is snow?", "Snow is", " white", "."),
    ] {
        let body = json!({"prompt": asked(question, before), "suffix": suffix, "seed": 1});
        let answer = daemon.ask(TEXT, &body).await;
        assert_eq!(answer["choices"][0]["text"], gap, "{before} … {suffix}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let mut again = daemon.ask(TEXT, &body).await;
        assert_eq!(again["choices"], answer["choices"], "the same seed gives the same bytes");
        // However long the gap may be, it is bounded.
        for most in [1, 2, 3, 7] {
            let mut body = body.clone();
            body["max_tokens"] = most.into();
            again = daemon.ask(TEXT, &body).await;
            assert!(again["usage"]["completion_tokens"].as_u64().unwrap() <= most, "{again}");
        }
    }
    // No text is too odd.
    let long = "x y z ".repeat(60);
    let odd = json!({"prompt": format!("<script>{long}"), "suffix": format!("{long}\u{1F600}"), "temperature": 2,
        "max_denoising_steps": 5});
    let answer = daemon.ask(TEXT, &odd).await;
    let most = 32 - 32 / 4 - 32 / 4;
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() <= most, "{answer}");
    // Hot ones depend on their seeds.
    let mut texts = Vec::new();
    for seed in 0..8 {
        let body = json!({"prompt": asked("Say words", "apple"), "suffix": " table.", "seed": seed, "temperature": 2,
            "max_denoising_steps": 3, "max_tokens": 12});
        texts.push(daemon.ask(TEXT, &body).await["choices"][0]["text"].clone());
    }
    texts.dedup();
    assert!(texts.len() > 1, "{texts:?}");
}
