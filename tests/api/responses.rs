//! `/v1/responses` as OpenAI's clients know it: items, events, what is kept (nothing).

use crate::stage::{EOS, Script, Server, Trouble, bytes, marked, text_of};
use crate::with;
use axe::decode::Step;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const QWEN: &str = include_str!("../fixtures/templates/qwen3.jinja");

/// A request with the members of `more` in it.
fn request(more: Value) -> Value {
    with(json!({"model": "scripted", "input": "hi"}), more)
}

fn tools() -> Value {
    json!([{
        "type": "function",
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
        "strict": true,
    }])
}

fn last_prompt(server: &Server) -> String {
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    text_of(&prompt.into_iter().filter(|token| (3..259).contains(token)).collect::<Vec<_>>())
}

/// The events of a stream: names are types, numbers count up.
async fn events(server: &Server, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let response = server.post(PATH, &body).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let frames = text.trim_end().split("\n\n").filter(|frame| !frame.starts_with(':'));
    let event = |(number, frame): (usize, &str)| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(number)));
        data
    };
    frames.enumerate().map(event).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types
}

/// What the deltas of one type add up to.
fn deltas(events: &[Value], kind: &str) -> String {
    let deltas = events.iter().filter(|event| event["type"] == kind);
    deltas.map(|event| event["delta"].as_str().unwrap()).collect()
}

/// An output without its identifiers.
fn bare(output: &Value) -> Value {
    let mut output = output.clone();
    for item in output.as_array_mut().unwrap() {
        let item = item.as_object_mut().unwrap();
        assert!(item.remove("id").unwrap().is_string());
        item.remove("call_id");
    }
    output
}

#[tokio::test]
async fn a_response_has_everything_clients_read() {
    let server = Server::start(Script::saying("Hello")).await;
    let response =
        server.ask(PATH, &request(json!({"instructions": "Be brief.", "metadata": {"a": "b"}}))).await;
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert!(response["created_at"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(
        bare(&response["output"]),
        json!([{
            "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }])
    );
    let prompt = "[system]Be brief.\n[user]hi\n[assistant]";
    assert_eq!(last_prompt(&server), prompt);
    assert_eq!(
        response["usage"],
        json!({
            "input_tokens": prompt.len() + 1, "input_tokens_details": {"cached_tokens": 1},
            "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt.len() + 7,
        })
    );
    assert_eq!((&response["instructions"], &response["metadata"]), (&json!("Be brief."), &json!({"a": "b"})));
    assert_eq!((&response["error"], &response["incomplete_details"]), (&Value::Null, &Value::Null));
    assert_eq!((&response["store"], &response["tools"]), (&json!(false), &json!([])));
}

#[tokio::test]
async fn a_stream_tells_the_same_in_events() {
    let server = Server::start(Script::saying("Hello")).await;
    let whole = server.ask(PATH, &request(json!({}))).await;
    let events = events(&server, &request(json!({}))).await;
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(deltas(&events, "response.output_text.delta"), "Hello");
    let last = &events.last().unwrap()["response"];
    assert_eq!(bare(&last["output"]), bare(&whole["output"]));
    assert_eq!((&last["usage"], &last["status"]), (&whole["usage"], &json!("completed")));
    assert_eq!(events[0]["response"]["status"], "in_progress");
    let item = &last["output"][0]["id"];
    assert!(events[3..7].iter().all(|event| event["item_id"] == *item), "{events:?}");
    assert_eq!(events[2]["item"]["id"], *item);
}

#[tokio::test]
async fn a_response_that_is_cut_is_incomplete() {
    let server = Server::start(Script::saying("Hello")).await;
    let body = request(json!({"max_output_tokens": 3}));
    let response = server.ask(PATH, &body).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["content"][0]["text"], "Hel");
    let events = events(&server, &body).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(bare(&last["response"]["output"]), bare(&response["output"]));
}

#[tokio::test]
async fn every_item_reaches_the_model() {
    let server = Server::speaking(Script::saying("No."), QWEN, &[]).await;
    let input = json!([
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Ra"}, {"type": "input_text", "text": "in?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{\"place\":\"Bern\"}"},
        {"type": "function_call", "call_id": "call_2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "wet"}]},
        {"type": "function_call_output", "call_id": "call_1", "output": "dry"},
    ]);
    server
        .ask(PATH, &request(json!({"input": input, "tools": tools(), "reasoning": {"effort": "none"}})))
        .await;
    let prompt = last_prompt(&server);
    assert!(prompt.starts_with("<|im_start|>system\nBe brief.\n\n# Tools"), "{prompt}");
    let end = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nLet me see.\n\
               <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}\n</tool_call>\n\
               <tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call><|im_end|>\n\
               <|im_start|>user\n<tool_response>\ndry\n</tool_response>\n<tool_response>\nwet\n</tool_response><|im_end|>\n\
               <|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert!(prompt.ends_with(end), "{prompt}");
}

#[tokio::test]
async fn calls_are_items() {
    let reply = "So.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}</tool_call>";
    let server = Server::speaking(Script::saying(reply), QWEN, &[]).await;
    let response = server.ask(PATH, &request(json!({"tools": tools()}))).await;
    let call = &response["output"][1];
    assert!(
        call["call_id"].as_str().unwrap().starts_with("call_")
            && call["id"].as_str().unwrap().starts_with("fc_")
    );
    let expected = json!({
        "type": "function_call", "name": "weather", "arguments": "{\"place\": \"Bern\"}", "status": "completed",
    });
    assert_eq!((&bare(&response["output"])[1], &response["status"]), (&expected, &json!("completed")));
    assert_eq!(response["output"][0]["content"][0]["text"], "So.");
    assert_eq!(response["tools"], tools());
    let events = events(&server, &request(json!({"tools": tools()}))).await;
    assert_eq!(
        types(&events)[8..],
        [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    assert_eq!(deltas(&events, "response.function_call_arguments.delta"), "{\"place\": \"Bern\"}");
    assert_eq!(bare(&events.last().unwrap()["response"]["output"]), bare(&response["output"]));
    let none = json!({"tools": tools(), "tool_choice": "none"});
    assert_eq!(server.ask(PATH, &request(none)).await["output"][0]["content"][0]["text"], reply);
}

#[tokio::test]
async fn thoughts_are_an_item_of_their_own() {
    let tokens = [marked("{thought\nI see.\n}Yes."), vec![EOS]].concat();
    let steps: Vec<Step> = tokens.chunks(3).map(|tokens| Step::Commit(tokens.to_vec())).collect();
    let server = Server::thinking(Script::new(move |_| steps.clone()), "").await;
    let body = request(json!({"reasoning": {"effort": "high", "summary": "auto"}}));
    let response = server.ask(PATH, &body).await;
    assert_eq!(
        bare(&response["output"])[0],
        json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": "I see.\n"}], "status": "completed"})
    );
    assert_eq!(response["output"][1]["content"][0]["text"], "Yes.");
    assert!(response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 5);
    assert_eq!(response["reasoning"]["effort"], "high");
    assert!(last_prompt(&server).starts_with("[think]"));
    let events = events(&server, &body).await;
    assert_eq!(
        types(&events)[2..8],
        [
            "response.output_item.added",
            "response.reasoning_summary_part.added",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            "response.reasoning_summary_part.done",
            "response.output_item.done",
        ]
    );
    assert_eq!(deltas(&events, "response.reasoning_summary_text.delta"), "I see.\n");
    assert_eq!(bare(&events.last().unwrap()["response"]["output"]), bare(&response["output"]));
}

#[tokio::test]
async fn what_is_not_supported_or_wrong_is_named() {
    let server = Server::start(Script::saying("x")).await;
    let item = |item: Value| json!({ "input": [item] });
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"background": true}), "background"),
        (json!({"prompt": {"id": "p"}}), "prompt"),
        (json!({"max_tool_calls": 1}), "max_tool_calls"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 1}), "input"),
        (json!({"instructions": 1}), "instructions"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": "x"}), "temperature"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"metadata": 1}), "metadata"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0].type"),
        (item(json!({"role": "robot", "content": "x"})), "input[0].role"),
        (item(json!({"type": "function_call", "name": "f", "arguments": "{}"})), "input[0].call_id"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tools": [null]}), "tools[0]"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "function", "name": "a", "parameters": 1}]}), "tools[0].parameters"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "name": "x"}}), "tool_choice"),
        (
            json!({"instructions": "x", "input": [
                {"role": "user", "content": "x"}, {"type": "reasoning", "summary": []},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ]}),
            "input[2].call_id",
        ),
        (json!({"input": "x".repeat(5000)}), "input"),
        (json!({"chat_template_kwargs": {"tools": []}}), "chat_template_kwargs.tools"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_schema", "schema": 1}}}), "text.format.schema"),
        (json!({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}), "text.format.schema"),
        (
            json!({"text": {"format": {"type": "json_schema", "strict": 1, "schema": {}}}}),
            "text.format.strict",
        ),
        (json!({"text": {"format": {"type": "json_object"}}, "ignore_eos": true}), "ignore_eos"),
    ] {
        let error = server.refusal(PATH, &request(more.clone()), 400).await;
        assert_eq!(error["param"], param, "{more}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(&format!("`{param}`")) || error["code"] == "context_length_exceeded",
            "{error}"
        );
        for inner in ["messages", "response_format", "tool_call_id", "function.", "assistant message"] {
            assert!(!message.contains(inner), "nothing of that was sent: {error}");
        }
    }
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
    let accepted = json!({
        "store": true, "background": false, "truncation": "disabled", "include": ["reasoning.encrypted_content"],
        "user": "u", "service_tier": "auto", "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "previous_response_id": null, "tool_choice": "auto", "parallel_tool_calls": true,
    });
    assert_eq!(server.ask(PATH, &request(accepted)).await["store"], false);
    server.refusal(PATH, &request(json!({"model": "other"})), 404).await;
}

#[tokio::test]
async fn a_failure_after_the_start_is_a_failed_response() {
    let script = Script::new(|_| bytes("abcd").into_iter().map(|token| Step::Commit(vec![token])).collect());
    let server = Server::start(script.trouble(3, Trouble::Error)).await;
    let events = events(&server, &request(json!({}))).await;
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
    let server = Server::start(Script::saying("x").trouble(0, Trouble::Error)).await;
    server.refusal(PATH, &request(json!({"stream": true})), 500).await;
}
