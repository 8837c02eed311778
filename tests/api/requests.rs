//! The OpenAI API, answers in one piece: shapes, limits, validation, models.

use crate::stage::{CONTEXT, Script, Server, Stage, Trouble, bytes, config, eventually, text_of};
use crate::with;
use axe::decode::{Denoising, Sampling};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A chat request with the members of `more` in it.
fn chat(more: Value) -> Value {
    with(json!({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}), more)
}

fn last_sampling(server: &Server) -> Sampling {
    server.stage.script.started.lock().unwrap().last().unwrap().1.clone()
}

fn last_prompt(server: &Server) -> Vec<u32> {
    server.stage.script.started.lock().unwrap().last().unwrap().0.clone()
}

#[tokio::test]
async fn a_chat_answer_has_everything_clients_read() {
    let server = Server::start(Script::saying("Hello")).await;
    let answer = server.ask(CHAT, &chat(json!({"seed": 7}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(answer["model"], "scripted");
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    assert_eq!(
        answer["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }])
    );
    let prompt = "[user]hi\n[assistant]";
    let prompt_tokens = prompt.len() + 1;
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        })
    );
    let axe = &answer["axe"];
    for seconds in ["elapsed_s", "queue_s", "prefill_s", "first_token_s", "tokens_per_s", "tokens_per_pass"] {
        assert!(axe[seconds].as_f64().unwrap() >= 0.0, "{seconds}: {axe}");
    }
    assert_eq!(
        (&axe["passes"], &axe["seed"], &axe["device"]),
        (&json!(6), &json!(7), &json!("a stage of boards"))
    );
    assert_eq!(last_prompt(&server), [vec![1], bytes(prompt)].concat());
}

#[tokio::test]
async fn identifiers_differ_and_the_fingerprint_does_not() {
    let server = Server::start(Script::saying("x")).await;
    let (a, b) = (server.ask(CHAT, &chat(json!({}))).await, server.ask(CHAT, &chat(json!({}))).await);
    assert_ne!(a["id"], b["id"]);
    assert_eq!(a["system_fingerprint"], b["system_fingerprint"]);
    assert_ne!(a["axe"]["seed"], b["axe"]["seed"], "without a seed each request draws one");
}

#[tokio::test]
async fn sampling_fields_reach_the_model() {
    let server = Server::start(Script::saying("x")).await;
    let body = chat(json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -0.5, "frequency_penalty": 0.25, "logit_bias": {"12": 2.5, "7": -100}, "seed": 18_446_744_073_709_551_615_u64,
    }));
    server.ask(CHAT, &body).await;
    let wanted = Sampling {
        temperature: 0.5,
        top_k: 7,
        top_p: 0.9,
        min_p: 0.1,
        repetition_penalty: 1.1,
        presence_penalty: -0.5,
        frequency_penalty: 0.25,
        logit_bias: vec![(7, -100.0), (12, 2.5)],
        constraint: None,
        seed: u64::MAX,
        denoising: Denoising::default(),
    };
    assert_eq!(last_sampling(&server), wanted);
    server
        .ask(CHAT, &chat(json!({"repeat_penalty": 1.2, "top_k": -1, "seed": -2.0, "temperature": 1e-30})))
        .await;
    let s = last_sampling(&server);
    assert_eq!((s.repetition_penalty, s.top_k, s.seed, s.temperature), (1.2, 0, u64::MAX - 1, 0.0));
}

#[tokio::test]
async fn unset_sampling_comes_from_the_configuration_and_null_is_unset() {
    let toml =
        "[sampling]\ntemperature = 0.25\ntop_k = 3\ntop_p = 0.5\nmin_p = 0.125\nrepetition_penalty = 1.5";
    let server = Server::configured(Script::saying("x"), toml).await;
    let nulls = json!({"temperature": null, "top_p": null, "top_k": null, "stop": null, "n": null, "seed": null,
        "max_tokens": null, "stream": null, "stream_options": null, "tools": null, "logit_bias": null});
    for body in [chat(json!({})), chat(nulls)] {
        server.ask(CHAT, &body).await;
        let s = last_sampling(&server);
        assert_eq!((s.temperature, s.top_k, s.top_p), (0.25, 3, 0.5));
        assert_eq!((s.min_p, s.repetition_penalty), (0.125, 1.5));
    }
}

#[tokio::test]
async fn values_out_of_range_and_of_wrong_types_are_named() {
    let server = Server::start(Script::saying("x")).await;
    let cases = [
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("top_p", json!([])),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("min_p", json!(-1)),
        ("repetition_penalty", json!(0)),
        ("repeat_penalty", json!("x")),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("seed", json!("x")),
        ("seed", json!(1.5)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_tokens", json!(1e15)),
        ("max_tokens", json!(1_048_577)),
        ("max_completion_tokens", json!(1 << 30)),
        ("max_tokens", json!("many")),
        ("max_tokens", json!(2.5)),
        ("max_completion_tokens", json!(0)),
        ("stop", json!(5)),
        ("stop", json!("")),
        ("stop", json!(["a", ""])),
        ("stop", json!(["a", 5])),
        ("stop", json!(vec!["s"; 17])),
        ("stream", json!("yes")),
        ("stream_options", json!({"include_usage": true})),
        ("ignore_eos", json!(1)),
        ("model", json!(5)),
        ("messages", json!([])),
        ("messages", json!(null)),
        ("messages", json!({})),
        ("chat_template_kwargs", json!([])),
    ];
    for (field, value) in cases {
        let mut body = chat(json!({}));
        body[field] = value;
        let error = server.refusal(CHAT, &body, 400).await;
        assert_eq!(error["param"], field, "{body}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(field), "{error}");
    }
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
    server.ask(CHAT, &chat(json!({}))).await;
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing() {
    let server = Server::start(Script::saying("x")).await;
    let cases = [
        ("functions", json!([{"name": "f"}]), json!([])),
        ("suffix", json!("x"), json!("")),
        ("best_of", json!(2), json!(1)),
        ("modalities", json!(["text", "audio"]), json!(["text"])),
        ("modalities", json!([]), json!(["text"])),
        ("audio", json!({"voice": "x"}), json!(null)),
        ("prediction", json!({"type": "content"}), json!(null)),
        ("reasoning_effort", json!("high"), json!(null)),
        ("web_search_options", json!({}), json!(null)),
    ];
    for (field, refused, accepted) in cases {
        for (path, mut body) in [(CHAT, chat(json!({}))), (TEXT, json!({"prompt": "a"}))] {
            body[field] = refused.clone();
            let error = server.refusal(path, &body, 400).await;
            assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("unsupported_parameter")));
            body[field] = accepted.clone();
            server.ask(path, &body).await;
        }
    }
}

#[tokio::test]
async fn members_of_fields_are_named_with_them() {
    let server = Server::start(Script::saying("x")).await;
    for path in [CHAT, TEXT] {
        let mut body = chat(json!({"prompt": "a", "stream": true, "stream_options": {"include_usage": "x"}}));
        let error = server.refusal(path, &body, 400).await;
        assert_eq!(error["param"], "stream_options.include_usage");
        assert!(
            error["message"].as_str().unwrap().starts_with("`stream_options.include_usage`: "),
            "{error}"
        );
        body["stream_options"] = json!({"include_usage": null});
        assert_eq!(server.post(path, &body).await.status(), 200);
    }
    for tools in [json!({}), json!([1])] {
        let error = server.refusal(TEXT, &json!({"prompt": "a", "tools": tools}), 400).await;
        assert_eq!(error["param"], "tools");
    }
}

#[tokio::test]
async fn fields_without_effect_and_unknown_fields_are_accepted() {
    let server = Server::start(Script::saying("x")).await;
    let body = chat(json!({"user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto",
        "parallel_tool_calls": true, "never_heard_of": {"x": [1]}, "stream_options": null}));
    server.ask(CHAT, &body).await;
}

#[tokio::test]
async fn both_spellings_of_the_token_limit_count_and_must_agree() {
    let server = Server::start(Script::endless()).await;
    for body in [
        json!({"max_tokens": 3}),
        json!({"max_completion_tokens": 3}),
        json!({"max_tokens": 3, "max_completion_tokens": 3}),
        json!({"max_tokens": 3.0}),
    ] {
        let answer = server.ask(CHAT, &chat(body)).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "xxx");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 3);
    }
    let error = server.refusal(CHAT, &chat(json!({"max_tokens": 3, "max_completion_tokens": 4})), 400).await;
    assert_eq!(error["param"], "max_completion_tokens");
}

#[tokio::test]
async fn the_server_caps_and_defaults_the_token_limit() {
    let toml = "[server]\nmax_tokens_cap = 5\ndefault_max_tokens = 2";
    let server = Server::configured(Script::endless(), toml).await;
    for (body, tokens) in [(json!({}), 2), (json!({"max_tokens": 4}), 4), (json!({"max_tokens": 500}), 5)] {
        assert_eq!(server.ask(CHAT, &chat(body)).await["usage"]["completion_tokens"], tokens);
    }
}

#[tokio::test]
async fn a_prompt_that_fills_the_context_is_refused_with_the_numbers() {
    let server = Server::start(Script::saying("x")).await;
    let long = json!({"messages": [{"role": "user", "content": "y".repeat(5000)}]});
    for stream in [false, true] {
        let mut body = long.clone();
        body["stream"] = stream.into();
        let error = server.refusal(CHAT, &body, 400).await;
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("context_length_exceeded"), &json!("messages"))
        );
        assert_eq!(error["n_ctx"], CONTEXT);
        assert_eq!(error["n_prompt_tokens"], 5000 + "[user]\n[assistant]".len() + 1);
    }
    let error = server.refusal(TEXT, &json!({"prompt": vec![5; CONTEXT]}), 400).await;
    assert_eq!((&error["n_prompt_tokens"], &error["n_ctx"]), (&json!(CONTEXT), &json!(CONTEXT)));
    assert_eq!(error["param"], "prompt");
}

#[tokio::test]
async fn stop_is_a_string_or_a_list_and_never_shows() {
    let server = Server::start(Script::saying("one two three")).await;
    for stop in [json!("two"), json!(["zebra", "two"])] {
        let answer = server.ask(CHAT, &chat(json!({"stop": stop}))).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "one ");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    let answer = server.ask(CHAT, &chat(json!({"stop": []}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "one two three");
}

#[tokio::test]
async fn every_role_and_shape_of_content_reaches_the_template() {
    let server = Server::start(Script::saying("x")).await;
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "T"}]},
        {"role": "user", "content": []},
        {"role": "user"},
    ]);
    server.ask(CHAT, &json!({"messages": messages})).await;
    // Calls and their results are text, since the template knows none.
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let result = "<tool_response>\nT\n</tool_response>";
    let prompt = format!("[system]S\n[user]ab\n[assistant]{call}\n[user]{result}\n\n\n[user]\n[assistant]");
    assert_eq!(text_of(&last_prompt(&server)[1..]), prompt);
}

#[tokio::test]
async fn a_message_cannot_speak_special_tokens() {
    let server = Server::start(Script::saying("x")).await;
    server.ask(CHAT, &json!({"messages": [{"role": "user", "content": "</s><s>"}]})).await;
    let prompt = last_prompt(&server);
    assert_eq!(prompt.iter().filter(|token| **token < 3).count(), 1, "only the begin token: {prompt:?}");
}

#[tokio::test]
async fn a_model_without_template_refuses_chats_and_continues_texts() {
    let stage = tokio::task::spawn_blocking(|| Stage::with_template(Script::saying(" on"), 4, None)).await;
    let server = Server::over(stage.unwrap(), &config("")).await;
    let error = server.refusal(CHAT, &chat(json!({})), 400).await;
    assert!(error["message"].as_str().unwrap().contains("no chat template"), "{error}");
    assert_eq!(server.ask(TEXT, &json!({"prompt": "go"})).await["choices"][0]["text"], " on");
}

#[tokio::test]
async fn a_template_that_raises_is_the_requests_fault() {
    let template = "{{ raise_exception('roles must alternate') }}";
    let stage =
        tokio::task::spawn_blocking(move || Stage::with_template(Script::saying("x"), 4, Some(template)))
            .await;
    let server = Server::over(stage.unwrap(), &config("")).await;
    let error = server.refusal(CHAT, &chat(json!({})), 400).await;
    assert!(error["message"].as_str().unwrap().contains("roles must alternate"), "{error}");
    assert_eq!(error["param"], "messages");
}

#[tokio::test]
async fn text_completions_take_a_string_or_token_ids() {
    let server = Server::start(Script::saying("on")).await;
    let prompts = [json!("go"), json!(["go"]), json!(bytes("go")), json!([bytes("go")])];
    for (prompt, bos) in prompts.into_iter().zip([true, true, false, false]) {
        let answer = server.ask(TEXT, &json!({"model": "scripted", "prompt": prompt})).await;
        assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!(answer["object"], "text_completion");
        let choice = json!([{"text": "on", "index": 0, "logprobs": null, "finish_reason": "stop"}]);
        assert_eq!(answer["choices"], choice);
        let begin = if bos { vec![1] } else { vec![] };
        assert_eq!(last_prompt(&server), [begin, bytes("go")].concat());
        assert_eq!(answer["usage"]["prompt_tokens"], 2 + usize::from(bos));
        assert!(answer["axe"].is_object());
    }
}

#[tokio::test]
async fn wrong_text_prompts_are_named() {
    let server = Server::start(Script::saying("on")).await;
    let cases = [
        (json!(null), "prompt"),
        (json!(5), "prompt"),
        (json!([]), "prompt"),
        (json!([true]), "prompt"),
        (json!([[[5]]]), "prompt"),
        (json!(["a", "b"]), "prompt"),
        (json!([[5], [6]]), "prompt"),
        (json!([5, 260]), "prompt[1]"),
        (json!([-1]), "prompt[0]"),
        (json!([1.5]), "prompt[0]"),
    ];
    for (prompt, param) in cases {
        let error = server.refusal(TEXT, &json!({"prompt": prompt}), 400).await;
        assert_eq!(error["param"], param, "{prompt}: {error}");
    }
    for (field, refused, accepted) in [("suffix", json!("x"), json!("")), ("best_of", json!(2), json!(1))] {
        assert_eq!(server.refusal(TEXT, &json!({"prompt": "a", field: refused}), 400).await["param"], field);
        server.ask(TEXT, &json!({"prompt": "a", field: accepted})).await;
    }
}

#[tokio::test]
async fn a_wrong_model_is_404_and_aliases_are_not() {
    let server = Server::configured(Script::saying("x"), "[model]\naliases = [\"gpt-4o\"]").await;
    for (path, body) in [(CHAT, chat(json!({"model": "other"}))), (TEXT, json!({"model": "", "prompt": "a"}))]
    {
        let error = server.refusal(path, &body, 404).await;
        assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    }
    for model in [json!("scripted"), json!("gpt-4o"), json!(null)] {
        assert_eq!(server.ask(CHAT, &chat(json!({"model": model}))).await["model"], "scripted");
    }
    let any = Server::configured(Script::saying("x"), "[model]\naliases = [\"*\"]").await;
    any.ask(CHAT, &chat(json!({"model": "whatever/you:like"}))).await;
}

#[tokio::test]
async fn models_are_listed_and_described() {
    let server = Server::configured(Script::saying("x"), "[model]\naliases = [\"org/name\", \"*\"]").await;
    let list: Value = server.get("/v1/models").await.json().await.unwrap();
    assert_eq!(list["object"], "list");
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["scripted", "org/name"]);
    let one: Value = server.get("/v1/models/org/name").await.json().await.unwrap();
    assert_eq!(
        (&one["id"], &one["object"], &one["context_length"]),
        (&json!("org/name"), &json!("model"), &json!(CONTEXT))
    );
    let plain = Server::start(Script::saying("x")).await;
    let response = plain.get("/v1/models/other").await;
    assert_eq!(response.status(), 404);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let server = Server::configured(Script::saying("x").gated(), "[server]\nqueue_capacity = 1").await;
    let ask = || {
        let (client, url) = (server.client.clone(), server.url(CHAT));
        tokio::spawn(async move { client.post(url).json(&chat(json!({}))).send().await.unwrap().status() })
    };
    let first = ask();
    eventually("the first request's start", || server.stage.engine.status().running.is_some()).await;
    let second = ask();
    eventually("the second request's wait", || server.stage.engine.status().queue.depth == 1).await;
    let response = server.post(CHAT, &chat(json!({}))).await;
    assert_eq!(response.status(), 429);
    let wait: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait));
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "queue_full");
    server.stage.script.permit(100);
    assert_eq!(
        (first.await.unwrap(), second.await.unwrap()),
        (reqwest::StatusCode::OK, reqwest::StatusCode::OK)
    );
}

#[tokio::test]
async fn a_failing_backend_is_500_and_the_next_request_is_served() {
    let server = Server::start(Script::saying("hello").trouble(2, Trouble::Error)).await;
    for _ in 0..2 {
        let error = server.refusal(CHAT, &chat(json!({})), 500).await;
        assert_eq!((&error["type"], &error["code"]), (&json!("server_error"), &json!("generation_failed")));
        assert!(error["message"].as_str().unwrap().contains("NaN in layer 3"));
    }
}

#[tokio::test]
async fn a_cancelled_request_and_a_draining_server_are_503() {
    let server = Server::start(Script::endless().gated()).await;
    let (client, url) = (server.client.clone(), server.url(CHAT));
    let asked = tokio::spawn(async move { client.post(url).json(&chat(json!({}))).send().await.unwrap() });
    eventually("the start", || server.stage.engine.status().running.is_some()).await;
    let id = server.stage.engine.status().running.unwrap().id;
    assert!(id.starts_with("chatcmpl-") && server.stage.engine.cancel(&id));
    server.stage.script.permit(1);
    let response = asked.await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "cancelled");
    server.stage.engine.drain();
    let error = server.refusal(CHAT, &chat(json!({})), 503).await;
    assert_eq!(error["code"], "shutting_down");
}

#[tokio::test]
async fn a_request_whose_time_is_over_is_504_and_one_cut_by_the_end_is_503() {
    let script = Script::endless().gated();
    let server = Server::configured(script, "[server]\nrequest_timeout_s = 0.2").await;
    let post = || {
        let (client, url) = (server.client.clone(), server.url(CHAT));
        tokio::spawn(async move { client.post(url).json(&chat(json!({}))).send().await.unwrap() })
    };
    let (one, other) = (post(), post());
    eventually("both accepted", || {
        let status = server.stage.engine.status();
        status.running.is_some() && status.queue.depth == 1
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    server.stage.script.permit(1);
    for asked in [one, other] {
        let response = asked.await.unwrap();
        assert_eq!(response.status(), 504);
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "request_timeout");
    }

    let server = Server::start(Script::endless().gated()).await;
    let (client, url) = (server.client.clone(), server.url(CHAT));
    let asked = tokio::spawn(async move { client.post(url).json(&chat(json!({}))).send().await.unwrap() });
    eventually("the start", || server.stage.engine.status().running.is_some()).await;
    server.stage.engine.shutdown();
    server.stage.script.permit(1);
    let response = asked.await.unwrap();
    assert_eq!(response.status(), 503);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "shutting_down");
}

#[tokio::test]
async fn what_a_request_says_is_repeated_in_errors_only_in_part() {
    let server = Server::start(Script::saying("x")).await;
    let long = "m".repeat(1 << 20);
    let role = json!([{"role": long, "content": "x"}]);
    let part = json!([{"role": "user", "content": [{"type": long}]}]);
    for (body, status) in [
        (chat(json!({"model": long})), 404),
        (chat(json!({"messages": role})), 400),
        (chat(json!({"messages": part})), 400),
        (chat(json!({"reasoning_effort": long})), 400),
        (chat(json!({"temperature": long})), 400),
    ] {
        let error = server.refusal(CHAT, &body, status).await;
        assert!(error["message"].as_str().unwrap().len() < 500, "{status}");
    }
    let response = server.get(&format!("/{}", "p".repeat(10_000))).await;
    assert!(response.text().await.unwrap().len() < 500);
}

#[tokio::test]
async fn a_path_that_is_no_text_gets_an_error_like_all_others() {
    let server = Server::start(Script::saying("x")).await;
    let response = server.get("/v1/models/%ff%00").await;
    assert_eq!(response.status(), 400);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn large_bodies_take_turns_and_are_answered() {
    let server = Server::start(Script::saying("x")).await;
    let large = chat(json!({"user": "u".repeat(1 << 20)}));
    let asked = (0..8).map(|_| server.ask(CHAT, &large));
    assert_eq!(futures::future::join_all(asked).await.len(), 8);
    let many = chat(json!({"messages": [{"role": "user", "content": vec![""; 500_000]}]}));
    for _ in 0..4 {
        assert_eq!(server.refusal(CHAT, &many, 400).await["param"], "messages[0].content");
    }
}
