//! `/v1/messages` as Anthropic's clients know it: what reaches the model, blocks, events, errors.

use crate::stage::{EOS, Script, Server, Trouble, bytes, marked, text_of};
use crate::with;
use axe::decode::Step;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";
const QWEN: &str = include_str!("../fixtures/templates/qwen3.jinja");

/// A request with the members of `more` in it.
fn request(more: Value) -> Value {
    with(
        json!({"model": "scripted", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}),
        more,
    )
}

fn tools() -> Value {
    json!([{
        "name": "weather",
        "description": "Tells the weather",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
    }])
}

fn last_prompt(server: &Server) -> String {
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    text_of(&prompt.into_iter().filter(|token| (3..259).contains(token)).collect::<Vec<_>>())
}

/// The error of a request that is refused with `status`.
async fn refusal(server: &Server, path: &str, body: &Value, status: u16) -> Value {
    let response = server.post(path, body).await;
    let found = response.status();
    let mut error: Value = response.json().await.unwrap();
    assert_eq!(found, status, "{body} -> {error}");
    assert_eq!(error["type"], "error");
    error["error"].take()
}

/// The events of a stream, names checked against types.
async fn events(server: &Server, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let response = server.post(PATH, &body).await;
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    let frames = text.trim_end().split("\n\n").filter(|frame| !frame.starts_with(':'));
    let event = |frame: &str| {
        let (name, data) = frame.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    frames.map(event).filter(|event| event["type"] != "ping").collect()
}

/// The message that a stream's events make.
fn accumulated(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    for event in events {
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(index, message["content"].as_array().unwrap().len());
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let (delta, block) = (&event["delta"], &mut message["content"][index]);
                let more = |member: &str, block: &mut Value| {
                    block[member] =
                        (block[member].as_str().unwrap().to_owned() + delta[member].as_str().unwrap()).into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => more("text", block),
                    "thinking_delta" => more("thinking", block),
                    "input_json_delta" => json.push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                if message["content"][index]["type"] == "tool_use" {
                    message["content"][index]["input"] = serde_json::from_str(&json).unwrap();
                    json.clear();
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    message
}

#[tokio::test]
async fn a_message_has_everything_clients_read() {
    let server = Server::start(Script::saying("Hello")).await;
    let message = server.ask(PATH, &request(json!({}))).await;
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["model"], "scripted");
    assert_eq!(message["content"], json!([{"type": "text", "text": "Hello"}]));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    let prompt = "[user]hi\n[assistant]".len() + 1;
    assert_eq!(
        message["usage"],
        json!({
            "input_tokens": prompt - 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1,
            "output_tokens": 6,
        })
    );
    let streamed = accumulated(&events(&server, &request(json!({}))).await);
    for member in ["type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"] {
        assert_eq!(streamed[member], message[member], "{member}");
    }
}

#[tokio::test]
async fn a_stream_begins_with_the_message_and_a_ping() {
    let server = Server::start(Script::saying("Hi")).await;
    let mut body = request(json!({}));
    body["stream"] = true.into();
    let text = server.post(PATH, &body).await.text().await.unwrap();
    let names: Vec<&str> =
        text.split("\n\n").filter_map(|frame| frame.strip_prefix("event: ")?.split('\n').next()).collect();
    assert_eq!(
        names,
        [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
}

#[tokio::test]
async fn why_a_message_ends_is_told() {
    let server = Server::start(Script::saying("one two three")).await;
    for (more, text, reason, stop) in [
        (json!({"max_tokens": 3}), "one", "max_tokens", Value::Null),
        (json!({"stop_sequences": ["x", "two"]}), "one ", "stop_sequence", json!("two")),
        (json!({"stop_sequences": []}), "one two three", "end_turn", Value::Null),
    ] {
        let message = server.ask(PATH, &request(more.clone())).await;
        assert_eq!(message["content"][0]["text"], text);
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &stop));
        let streamed = accumulated(&events(&server, &request(more)).await);
        assert_eq!((&streamed["stop_reason"], &streamed["stop_sequence"]), (&json!(reason), &stop));
    }
    // A stop sequence behind a call is not why the message ends.
    let reply = "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call> bye";
    let server = Server::speaking(Script::saying(reply), QWEN, &[]).await;
    let body = || request(json!({"tools": tools(), "stop_sequences": ["bye"]}));
    let message = server.ask(PATH, &body()).await;
    let streamed = accumulated(&events(&server, &body()).await);
    for told in [message, streamed] {
        assert_eq!((&told["stop_reason"], &told["stop_sequence"]), (&json!("tool_use"), &Value::Null));
    }
    // Nothing said is still a block.
    let server = Server::start(Script::saying("")).await;
    let message = server.ask(PATH, &request(json!({}))).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": ""}]));
    assert_eq!(accumulated(&events(&server, &request(json!({}))).await)["content"], message["content"]);
}

#[tokio::test]
async fn every_block_reaches_the_model() {
    let server = Server::speaking(Script::saying("No."), QWEN, &[]).await;
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Ra", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "in?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Bern"}},
            {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {"place": "Chur"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "wet", "is_error": false},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "dry"}]},
            {"type": "text", "text": "And now?"},
        ]},
    ]);
    let system = json!([{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]);
    let body =
        json!({"messages": messages, "system": system, "tools": tools(), "metadata": {"user_id": "u"}});
    server.ask(PATH, &request(body)).await;
    let prompt = last_prompt(&server);
    assert!(prompt.starts_with("<|im_start|>system\nBe\nbrief.\n\n# Tools"), "{prompt}");
    assert!(prompt.contains("\"parameters\": {\"type\": \"object\", \"properties\": {\"place\""), "{prompt}");
    let end = "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\nLet me see.\n\
               <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}\n</tool_call>\n\
               <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Chur\"}}\n</tool_call><|im_end|>\n\
               <|im_start|>user\n<tool_response>\ndry\n</tool_response>\n<tool_response>\nwet\n</tool_response><|im_end|>\n\
               <|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    assert!(prompt.ends_with(end), "{prompt}");
}

#[tokio::test]
async fn tools_are_called_in_blocks() {
    let reply = "So.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}</tool_call>\
                 <tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    let server = Server::speaking(Script::saying(reply), QWEN, &[]).await;
    let message = server.ask(PATH, &request(json!({"tools": tools()}))).await;
    let id = message["content"][1]["id"].clone();
    assert!(id.as_str().unwrap().starts_with("toolu_"));
    assert_eq!(message["content"][0], json!({"type": "text", "text": "So."}));
    assert_eq!(
        message["content"][1],
        json!({"type": "tool_use", "id": id, "name": "weather", "input": {"place": "Bern"}})
    );
    assert_ne!(message["content"][2]["id"], id);
    assert_eq!(
        (message["content"].as_array().unwrap().len(), &message["stop_reason"]),
        (3, &json!("tool_use"))
    );
    let mut streamed = accumulated(&events(&server, &request(json!({"tools": tools()}))).await);
    for place in [1, 2] {
        streamed["content"][place]["id"] = message["content"][place]["id"].clone();
    }
    assert_eq!((&streamed["content"], &streamed["stop_reason"]), (&message["content"], &json!("tool_use")));
    let one = json!({"tools": tools(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    assert_eq!(server.ask(PATH, &request(one)).await["content"].as_array().unwrap().len(), 2);
    let none = json!({"tools": tools(), "tool_choice": {"type": "none"}});
    assert_eq!(server.ask(PATH, &request(none)).await["content"][0]["text"], reply);
}

#[tokio::test]
async fn thoughts_are_a_block_where_they_are_asked_for() {
    let tokens = [marked("{thought\nI see.\n}Yes."), vec![EOS]].concat();
    let steps: Vec<Step> = tokens.chunks(3).map(|tokens| Step::Commit(tokens.to_vec())).collect();
    let server = Server::thinking(Script::new(move |_| steps.clone()), "").await;
    let on = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let message = server.ask(PATH, &request(on.clone())).await;
    let blocks = json!([
        {"type": "thinking", "thinking": "I see.\n", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]);
    assert_eq!(message["content"], blocks);
    assert!(last_prompt(&server).starts_with("[think]"), "{}", last_prompt(&server));
    assert_eq!(accumulated(&events(&server, &request(on)).await)["content"], blocks);
    for off in [json!({}), json!({"thinking": {"type": "disabled"}})] {
        server.ask(PATH, &request(off)).await;
        assert!(last_prompt(&server).starts_with("[user]"), "{}", last_prompt(&server));
    }
    server.ask(PATH, &request(json!({"thinking": {"type": "adaptive"}}))).await;
    assert!(last_prompt(&server).starts_with("[think]"));
    // A model that cannot be told.
    let server = Server::start(Script::saying("x")).await;
    let on = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    let error = refusal(&server, PATH, &request(on), 400).await;
    assert!(error["message"].as_str().unwrap().contains("`thinking`"), "{error}");
    server.ask(PATH, &request(json!({"thinking": {"type": "disabled"}}))).await;
}

#[tokio::test]
async fn tokens_are_counted_as_they_are_used() {
    let server = Server::start(Script::saying("x")).await;
    let mut body = request(json!({"system": "S", "tools": tools()}));
    let used = server.ask(PATH, &body).await["usage"].clone();
    body.as_object_mut().unwrap().remove("max_tokens");
    let count = server.ask("/v1/messages/count_tokens", &body).await;
    let used = used["input_tokens"].as_u64().unwrap() + used["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(count, json!({ "input_tokens": used }));
    let error = refusal(&server, "/v1/messages/count_tokens", &json!({"messages": []}), 400).await;
    assert_eq!(error["type"], "invalid_request_error");
}

#[tokio::test]
async fn what_is_wrong_is_told_in_the_words_of_the_request() {
    let server = Server::start(Script::saying("x")).await;
    let user = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    for (more, word) in [
        (json!({"messages": []}), "`messages`"),
        (json!({"messages": "x"}), "`messages`"),
        (json!({"messages": [{"role": "robot", "content": "x"}]}), "`messages[0].role`"),
        (json!({"messages": [{"role": "user", "content": 1}]}), "`messages[0].content`"),
        (user(json!({"type": "image", "source": {}})), "`messages[0].content[0].type`"),
        (user(json!({"type": "text"})), "`messages[0].content[0].text`"),
        (user(json!({"type": "tool_result"})), "`messages[0].content[0].tool_use_id`"),
        (user(json!({"type": "tool_result", "tool_use_id": "x"})), "`messages[0].content[0].tool_use_id`"),
        (
            json!({"system": "x", "messages": [{"role": "user", "content": [
                {"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "x"},
            ]}]}),
            "`messages[0].content[1].tool_use_id`",
        ),
        (json!({"chat_template_kwargs": {"messages": []}}), "`chat_template_kwargs.messages`"),
        (
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}),
            "`messages[1]`",
        ),
        (json!({"max_tokens": null}), "`max_tokens`"),
        (json!({"max_tokens": 0}), "`max_tokens`"),
        (json!({"temperature": 9}), "`temperature`"),
        (json!({"system": 1}), "`system`"),
        (json!({"stop_sequences": "x"}), "`stop_sequences`"),
        (json!({"stop_sequences": [""]}), "`stop_sequences`"),
        (json!({"tools": 1}), "`tools`"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "`tools[0].type`"),
        (json!({"tools": [{"name": "a b"}]}), "`tools[0].name`"),
        (json!({"tools": [{"name": "a", "input_schema": 1}]}), "`tools[0].input_schema`"),
        (json!({"tools": tools(), "tool_choice": {"type": "maybe"}}), "`tool_choice.type`"),
        (json!({"tools": tools(), "tool_choice": {"type": "tool"}}), "`tool_choice.name`"),
        (json!({"tools": tools(), "tool_choice": {"type": 1}}), "`tool_choice.type`"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "`thinking.budget_tokens`"),
        (json!({"tools": tools(), "tool_choice": {"type": "tool", "name": "x"}}), "`tool_choice`"),
        (json!({"thinking": {"type": "deep"}}), "`thinking.type`"),
        (json!({"container": "x"}), "`container`: nothing of the kind"),
        (json!({"messages": [{"role": "user", "content": []}]}), "`messages[0].content`: found no blocks"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}]}]}),
            "`messages[0].content[0].type`: found \"tool_use\", which stands in an assistant's message",
        ),
        (json!({"output_config": {"format": {"type": "xml"}}}), "`output_config.format`"),
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}),
            "`output_config.format.schema`",
        ),
        (
            json!({"output_config": {"format": {"type": "json_schema", "schema": 1}}}),
            "`output_config.format.schema`",
        ),
    ] {
        let error = refusal(&server, PATH, &request(more.clone()), 400).await;
        assert_eq!(error["type"], "invalid_request_error", "{more}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(word), "{more}: {error}");
        for inner in ["response_format", "tool_call_id", "function.", "assistant message", "`stop`"] {
            assert!(!message.contains(inner), "nothing of that was sent: {error}");
        }
    }
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
}

#[tokio::test]
async fn errors_have_the_shape_of_this_api() {
    let server =
        Server::configured(Script::saying("x"), "[server]\napi_key = \"secret\"\nmax_body_kib = 1").await;
    let error = refusal(&server, PATH, &request(json!({})), 401).await;
    assert_eq!(error["type"], "authentication_error");
    let post = |body: Value| {
        let request = server.client.post(server.url(PATH)).header("anthropic-version", "2023-06-01");
        request.header("x-api-key", "secret").json(&body).send()
    };
    assert_eq!(post(request(json!({}))).await.unwrap().status(), 200);
    for (body, status, kind) in [
        (request(json!({"model": "other"})), 404, "not_found_error"),
        (request(json!({"system": "x".repeat(2000)})), 413, "request_too_large"),
    ] {
        let response = post(body).await.unwrap();
        assert_eq!(response.status(), status);
        let error: Value = response.json().await.unwrap();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!(kind)));
    }
    let response = server.client.get(server.url(PATH)).header("x-api-key", "secret").send().await.unwrap();
    assert_eq!(response.status(), 405);
    assert!(response.headers()["allow"].to_str().unwrap().contains("POST"));
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["type"], "invalid_request_error");
    // Nor is it told as compressed when it is not.
    let asked = server.client.post(server.url(PATH)).header("accept-encoding", "gzip");
    let response = asked.header("x-api-key", "secret").json(&request(json!({"max_tokens": 0}))).send();
    let response = response.await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers().get("content-encoding")), (400, None));
    response.json::<Value>().await.unwrap();
    // The other APIs have theirs.
    let error = server.refusal("/v1/chat/completions", &request(json!({})), 401).await;
    assert_eq!(error["code"], "invalid_api_key");
}

#[tokio::test]
async fn a_failure_after_the_start_is_an_error_event() {
    let script = Script::new(|_| bytes("abcd").into_iter().map(|token| Step::Commit(vec![token])).collect());
    let server = Server::start(script.trouble(3, Trouble::Error)).await;
    let mut body = request(json!({}));
    body["stream"] = true.into();
    let text = server.post(PATH, &body).await.text().await.unwrap();
    let last = text.trim_end().split("\n\n").last().unwrap();
    let data = last.strip_prefix("event: error\ndata: ").unwrap();
    let error: Value = serde_json::from_str(data).unwrap();
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(!text.contains("message_stop"), "{text}");
}
