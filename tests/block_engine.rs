//! Blocks as the engine and the API see them: what ends a reply ends it at every width, drafts are for those who look,
//! figures add up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod block_support;
mod stage;

use std::sync::Arc;

use axe::decode::{BlockOptions, CausalBackend, Sampling};
use axe::engine::{Engine, Event, FinishReason, Options, Request, State, Stop};
use block_support::{Hashed, auto, fixed};
use serde_json::{Value, json};
use stage::{CONTEXT, EOS, Outcome, Script, Server, Stage, bytes, config, listen, loaded};

/// An engine over a model that repeats itself much.
fn stage(options: BlockOptions) -> Stage {
    let load = move |_: &_| {
        let model = Hashed { vocabulary: 130, context: CONTEXT, rows: 64, ..Hashed::default() };
        Ok(loaded(CausalBackend::new(model, options), Some(stage::TEMPLATE)))
    };
    let engine = Engine::spawn(load, Options { queue_capacity: 4, ..Options::default() }).unwrap().handle();
    let mut state = engine.watch();
    futures::executor::block_on(state.wait_for(|state| *state == State::Ready)).unwrap();
    Stage { engine, script: Arc::new(Script::saying("")) }
}

fn request(seed: u64, max_tokens: usize) -> Request {
    Request {
        id: "blocks".to_owned(),
        prompt: bytes(&"over and over and ".repeat(1 + seed as usize % 4)),
        sampling: Sampling { temperature: 0.3 * (seed % 3) as f32, seed, ..Sampling::default() },
        stop: Stop { max_tokens, ignore_eos: true, ..Stop::default() },
        channels: true,
        drafts: false,
        ..Request::default()
    }
}

async fn run(stage: &Stage, request: Request) -> Outcome {
    listen(stage.engine.submit(request).unwrap().events).await
}

#[tokio::test]
async fn what_ends_a_reply_ends_it_in_the_middle_of_a_block_too() {
    let stages = [fixed(1), fixed(4), fixed(16), auto()].map(stage);
    let (mut stopped, mut ended) = (0, 0);
    for seed in 0..24 {
        let whole = run(&stages[0], request(seed, 120)).await;
        assert_eq!(whole.tokens.len(), 120);
        let mut requests = vec![request(seed, 1), request(seed, 7), request(seed, 50)];
        for at in [3, 30, 60] {
            // A few characters out of the text, somewhere: they end it where they come first.
            let mut stopping = request(seed, 120);
            let text: String = whole.text.chars().skip(at).take(3).collect();
            stopping.stop.strings = vec![text, "never said".to_owned()];
            requests.push(stopping);
        }
        let mut ending = request(seed, 120);
        ending.stop.ignore_eos = false;
        requests.push(ending);
        for request in requests {
            let alone = run(&stages[0], request.clone()).await;
            stopped += usize::from(alone.reason == FinishReason::Stop);
            ended += usize::from(alone.tokens.contains(&EOS));
            for blocks in &stages[1..] {
                let found = run(blocks, request.clone()).await;
                assert_eq!(
                    (&found.text, &found.tokens, &found.reason),
                    (&alone.text, &alone.tokens, &alone.reason),
                    "{request:?}"
                );
                assert_eq!(found.usage.completion_tokens, alone.usage.completion_tokens);
                assert!(found.stats.passes <= alone.stats.passes);
            }
        }
    }
    assert!(stopped > 50 && ended > 2, "{stopped} stopped, {ended} ended");
}

#[tokio::test]
async fn guesses_are_shown_to_those_who_look_and_are_no_first_token() {
    let stage = stage(fixed(8));
    let silent = run(&stage, request(0, 100)).await;
    assert!(!silent.events.iter().any(|event| matches!(event, Event::Draft { .. })));
    let drafts = |outcome: &Outcome| outcome.events.iter().any(|event| matches!(event, Event::Draft { .. }));
    // A draft that nobody has read when its pass is over is dropped: on a busy machine that may be all of one answer.
    let mut shown = run(&stage, Request { drafts: true, ..request(0, 100) }).await;
    for _ in 0..50 {
        if drafts(&shown) {
            break;
        }
        shown = run(&stage, Request { drafts: true, ..request(0, 100) }).await;
    }
    assert!(drafts(&shown));
    assert_eq!((shown.text, shown.tokens), (silent.text, silent.tokens));
    // A draft is no pass.
    let blocks = shown.stats.blocks.unwrap();
    assert_eq!(shown.stats.passes, blocks.passes);
    assert!(blocks.passes < 100 && blocks.evaluated > blocks.passes);
    assert!((shown.stats.tokens_per_pass - 100.0 / blocks.passes as f64).abs() < 1e-9);
}

#[tokio::test]
async fn figures_come_with_the_answer_and_in_the_metrics() {
    let over = tokio::task::spawn_blocking(|| stage(fixed(8))).await.unwrap();
    let server = Server::over(over, &config("")).await;
    let body = json!({
        "model": "scripted", "prompt": "over and over and over and ", "max_tokens": 90, "temperature": 0,
        "ignore_eos": true
    });
    let answer: Value = server
        .client
        .post(server.url("/v1/completions"))
        .json(&body)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let axe = &answer["axe"];
    assert_eq!(answer["usage"]["completion_tokens"], 90, "{answer}");
    let (passes, rows) = (axe["passes"].as_u64().unwrap(), axe["rows"].as_u64().unwrap());
    let sum = |what: &str| -> u64 {
        axe["guesses"].as_object().unwrap().values().map(|made| made[what].as_u64().unwrap()).sum()
    };
    assert_eq!((passes + sum("offered"), passes + sum("accepted")), (rows, 90), "{axe}");
    assert!(sum("accepted") > 10, "{axe}");
    let page = server.client.get(server.url("/metrics")).send().await.unwrap().text().await.unwrap();
    for line in [
        format!("axe_passes_total {passes}"),
        format!("axe_rows_total {rows}"),
        format!("axe_guesses_offered_total{{by=\"lookup\"}} {}", axe["guesses"]["lookup"]["offered"]),
        format!("axe_guesses_accepted_total{{by=\"recycled\"}} {}", axe["guesses"]["recycled"]["accepted"]),
    ] {
        assert!(page.lines().any(|found| found == line), "no `{line}` in:\n{page}");
    }
}
