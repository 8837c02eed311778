//! Tools in `/v1/chat/completions`: what templates are given, what of a reply is a call, how calls are streamed, and what
//! a request can force.

use crate::stage::{EOS, Script, Server, Stage, bytes, canvases, config, say, speaker, text_of};
use crate::with;
use axe::decode::Step;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

const QWEN: &str = include_str!("../fixtures/templates/qwen3.jinja");
const GEMMA: &str = include_str!("../fixtures/templates/gemma4-like.jinja");
const LLAMA: &str = include_str!("../fixtures/templates/llama-like.jinja");
const MISTRAL: &str = include_str!("../fixtures/templates/mistral-like.jinja");

/// Control tokens of Gemma, the first of which is token 260.
const GEMMA_TOKENS: [&str; 8] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|tool_response>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
];
const HAND_OVER: u32 = 263;

fn tools() -> Value {
    let place = json!({"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]});
    json!([
        {"type": "function", "function": {"name": "weather", "description": "Tells the weather", "parameters": place}},
        {"type": "function", "function": {"name": "clock"}},
    ])
}

/// A chat request with tools and the members of `more` in it.
fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "hi"}], "tools": tools()}), more)
}

/// The tokens of a text in which `«` and `»` are Gemma's markers of calls and `'` is its quote.
fn gemma(text: &str) -> Vec<u32> {
    let letters = text.chars().flat_map(|letter| match letter {
        '«' => vec![260],
        '»' => vec![261],
        '\'' => vec![262],
        letter => bytes(&letter.to_string()),
    });
    letters.collect()
}

/// Commits of `width` tokens each.
fn commits(tokens: &[u32], width: usize) -> Vec<Step> {
    tokens.chunks(width).map(|tokens| Step::Commit(tokens.to_vec())).collect()
}

async fn qwen(reply: &'static str) -> Server {
    Server::speaking(Script::saying(reply), QWEN, &[]).await
}

/// A causal model of Gemma's that says `reply` and then the token `end`.
async fn gemma_saying(reply: &str, end: u32) -> Server {
    let tokens = [gemma(reply), vec![end]].concat();
    Server::speaking(Script::new(move |_| commits(&tokens, 3)), GEMMA, &GEMMA_TOKENS).await
}

/// The last prompt, its control tokens by their names.
fn last_prompt(server: &Server) -> String {
    let prompt = server.stage.script.started.lock().unwrap().last().unwrap().0.clone();
    let names = |token: u32| match token.checked_sub(260) {
        Some(place) => GEMMA_TOKENS[place as usize].to_owned(),
        None => text_of(&[token]),
    };
    // Bytes make characters only together.
    let mut text = String::new();
    let mut run = Vec::new();
    for token in prompt {
        if token < 260 {
            run.push(token);
        } else {
            text.push_str(&text_of(&std::mem::take(&mut run)));
            text.push_str(&names(token));
        }
    }
    text + &text_of(&run)
}

/// The choice of an answer in one piece.
async fn answer(server: &Server, more: Value) -> Value {
    server.ask(CHAT, &chat(more)).await["choices"][0].take()
}

/// Name and arguments of each call of a message.
fn calls(message: &Value) -> Vec<(String, Value)> {
    let list = message["tool_calls"].as_array().cloned().unwrap_or_default();
    let call = |call: &Value| {
        assert_eq!(call["type"], "function");
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let name = call["function"]["name"].as_str().unwrap().to_owned();
        (name, serde_json::from_str(arguments).unwrap())
    };
    list.iter().map(call).collect()
}

/// A streamed answer put together: content, calls as the message shows them, and the reason.
async fn streamed(server: &Server, more: Value) -> (String, Value, String) {
    let mut body = chat(more);
    body["stream"] = true.into();
    let response = server.post(CHAT, &body).await;
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let mut events: Vec<&str> = text.trim_end().split("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]"));
    let (mut content, mut calls, mut reason) = (String::new(), Vec::<Value>::new(), Value::Null);
    for event in events {
        let chunk: Value = serde_json::from_str(&event["data: ".len()..]).unwrap();
        let choice = &chunk["choices"][0];
        assert_eq!(reason, Value::Null, "nothing follows the reason");
        reason = choice["finish_reason"].clone();
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        for piece in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = piece["index"].as_u64().unwrap() as usize;
            if let Some(call) = calls.get_mut(index) {
                assert_eq!(piece.get("id"), None, "an id comes once");
                assert_eq!(piece["function"].get("name"), None, "a name comes once");
                let arguments = call["function"]["arguments"].as_str().unwrap().to_owned();
                call["function"]["arguments"] =
                    (arguments + piece["function"]["arguments"].as_str().unwrap()).into();
            } else {
                assert_eq!(index, calls.len());
                calls.push(json!({"id": piece["id"], "type": piece["type"], "function": piece["function"]}));
            }
        }
    }
    (content, calls.into(), reason.as_str().unwrap().to_owned())
}

const TWO: &str = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\"}}\n\
                   </tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";

#[tokio::test]
async fn calls_are_told_apart_from_content() {
    let server = qwen(TWO).await;
    let choice = answer(&server, json!({})).await;
    let message = &choice["message"];
    assert_eq!(
        (&message["content"], &choice["finish_reason"]),
        (&json!("Let me see."), &json!("tool_calls"))
    );
    let two = [("weather".to_owned(), json!({"place": "Zürich"})), ("clock".to_owned(), json!({}))];
    assert_eq!(calls(message), two);
    assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
    let (content, streamed, reason) = streamed(&server, json!({})).await;
    assert_eq!((content.as_str(), reason.as_str()), ("Let me see.", "tool_calls"));
    assert_eq!(calls(&json!({ "tool_calls": streamed })), two);
    // Another answer's calls have other identifiers.
    assert_ne!(message["tool_calls"][0]["id"], streamed[0]["id"]);
}

#[tokio::test]
async fn a_reply_of_calls_only_has_no_content() {
    let server = qwen("<tool_call>{\"name\": \"clock\", \"arguments\": {}}</tool_call>").await;
    let choice = answer(&server, json!({})).await;
    assert_eq!(choice["message"]["content"], Value::Null);
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    let server = qwen("No.").await;
    let choice = answer(&server, json!({})).await;
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("No."), &json!("stop")));
    assert_eq!(choice["message"].get("tool_calls"), None);
}

#[tokio::test]
async fn what_is_no_call_is_content_whole() {
    for text in [
        "a <tool_call>{\"name\": \"nobody\", \"arguments\": {}}</tool_call> b",
        "<tool_call>{\"name\": \"weather\", oops}</tool_call>",
        "Write <tool_call> to call.",
    ] {
        let server = qwen(text).await;
        let choice = answer(&server, json!({})).await;
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(text), &json!("stop")));
        let (content, calls, reason) = streamed(&server, json!({})).await;
        assert_eq!((content.as_str(), calls, reason.as_str()), (text, json!([]), "stop"));
    }
    // Nobody asked for calls.
    let server = qwen(TWO).await;
    for more in [json!({"tools": []}), json!({"tool_choice": "none"})] {
        let choice = answer(&server, more).await;
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(TWO), &json!("stop")));
    }
}

#[tokio::test]
async fn a_call_that_is_cut_is_no_call() {
    let server = qwen(TWO).await;
    let cut = TWO.find("Zür").unwrap();
    let choice = answer(&server, json!({"max_tokens": cut})).await;
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(TWO[..cut]), &json!("length"))
    );
    // Behind the first call.
    let cut = TWO.find("{\"name\": \"clock").unwrap();
    let choice = answer(&server, json!({"max_tokens": cut})).await;
    assert_eq!((calls(&choice["message"]).len(), &choice["finish_reason"]), (1, &json!("length")));
    // A model that ends in the middle of a call leaves it unfinished, too.
    let server = gemma_saying("«call:weather{place:'Be", EOS).await;
    let choice = answer(&server, json!({})).await;
    let whole = "<|tool_call>call:weather{place:<|\"|>Be";
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(whole), &json!("length")));
}

#[tokio::test]
async fn stop_strings_do_not_end_calls() {
    let server = qwen(TWO).await;
    let choice = answer(&server, json!({"stop": ["Zürich", ", \"arg"]})).await;
    assert_eq!(choice["message"]["content"], "Let me see.");
    assert_eq!((calls(&choice["message"]).len(), &choice["finish_reason"]), (2, &json!("tool_calls")));
    let choice = answer(&server, json!({"stop": "see"})).await;
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!("Let me "), &json!("stop"))
    );
}

#[tokio::test]
async fn stop_strings_are_not_looked_for_in_calls_that_are_cut() {
    // Wherever the limit cuts the second call, and where the model itself ends in it.
    for from in ["{\"name\": \"clock", "ock\", \"arg"] {
        let cut = TWO.find(from).unwrap();
        for (server, more) in [
            (qwen(TWO).await, json!({"max_tokens": cut})),
            (qwen(Box::leak(TWO[..cut].to_owned().into_boxed_str())).await, json!({})),
        ] {
            let plain = answer(&server, more.clone()).await;
            assert_eq!((calls(&plain["message"]).len(), &plain["finish_reason"]), (1, &json!("length")));
            for stop in [json!(["{"]), json!("tool_call"), json!(["<", ">", "\"name"])] {
                let mut stopped = more.clone();
                stopped["stop"] = stop;
                let choice = answer(&server, stopped.clone()).await;
                assert_eq!(
                    (&choice["message"]["content"], &choice["finish_reason"]),
                    (&plain["message"]["content"], &json!("length")),
                    "{stopped}"
                );
                assert_eq!(calls(&choice["message"]).len(), 1, "{stopped}");
                let (text, _, reason) = streamed(&server, stopped).await;
                assert_eq!((json!(text), reason.as_str()), (plain["message"]["content"].clone(), "length"));
            }
        }
    }
}

#[tokio::test]
async fn a_stop_string_in_what_only_began_like_a_call_ends_the_reply() {
    // No call could go on like this.
    const NONE: &str = "Let me see. <tool_call>{\"name\": weather, \"arg";
    let before = &NONE[..NONE.find(", \"arg").unwrap()];
    let server = qwen(NONE).await;
    // Ended by its limit, and by the model itself.
    for mut more in [json!({"max_tokens": NONE.len()}), json!({})] {
        more["stop"] = json!(["Zug", ", \"arg"]);
        let choice = answer(&server, more).await;
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(before), &json!("stop"))
        );
    }
}

#[tokio::test]
async fn white_space_before_a_call_may_hold_a_stop_string() {
    let server =
        qwen("One two \n\n<tool_call>{\"name\": \"clock\", \"arguments\": {}}</tool_call>\n\nbye").await;
    for (stop, content) in [("\n\n", "One two "), (" \n", "One two"), ("two ", "One "), (" \n\n", "One two")]
    {
        let choice = answer(&server, json!({"tools": tools(), "stop": [stop]})).await;
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(content), &json!("stop"))
        );
        assert!(choice["message"].get("tool_calls").is_none_or(Value::is_null), "{choice}");
        let (text, calls, reason) = streamed(&server, json!({"tools": tools(), "stop": [stop]})).await;
        assert_eq!((text.as_str(), reason.as_str()), (content, "stop"));
        assert!(calls.as_array().is_none_or(Vec::is_empty), "{calls}");
    }
    // One that only the text behind it would complete ends nothing.
    let choice = answer(&server, json!({"tools": tools(), "stop": ["\n\n\n", "\nx"]})).await;
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn one_call_at_a_time_ends_the_reply_with_the_first() {
    let server = qwen(TWO).await;
    let answer = server.ask(CHAT, &chat(json!({"parallel_tool_calls": false}))).await;
    let choice = &answer["choices"][0];
    assert_eq!((calls(&choice["message"]).len(), &choice["finish_reason"]), (1, &json!("tool_calls")));
    let first = TWO.find("</tool_call>").unwrap() + "</tool_call>".len();
    assert_eq!(answer["usage"]["completion_tokens"], first, "nothing is generated behind it");
}

#[tokio::test]
async fn gemmas_calls_are_tokens_and_hand_over() {
    let reply = "Hm.\n«call:weather{place:'Bern \"x\" {y}',days:[1,2]}»«call:clock{}»";
    let two = [
        ("weather".to_owned(), json!({"place": "Bern \"x\" {y}", "days": [1, 2]})),
        ("clock".to_owned(), json!({})),
    ];
    for end in [HAND_OVER, EOS] {
        let server = gemma_saying(reply, end).await;
        let choice = answer(&server, json!({})).await;
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!("Hm."), &json!("tool_calls"))
        );
        assert_eq!(calls(&choice["message"]), two);
        let (content, streamed, reason) = streamed(&server, json!({})).await;
        assert_eq!((content.as_str(), reason.as_str()), ("Hm.", "tool_calls"));
        assert_eq!(calls(&json!({ "tool_calls": streamed })), two);
    }
    // As a canvas, in one piece.
    let tokens = gemma(reply);
    let script = Script::new(move |_| canvases(&tokens, 256, &[2])).denoises();
    let server = Server::speaking(script, GEMMA, &GEMMA_TOKENS).await;
    let choice = answer(&server, json!({})).await;
    assert_eq!((calls(&choice["message"]), &choice["finish_reason"]), (two.to_vec(), &json!("tool_calls")));
    // Typed, it is text.
    let typed = "<|tool_call>call:clock{}<tool_call|>";
    let server = Server::speaking(Script::saying(typed), GEMMA, &GEMMA_TOKENS).await;
    let choice = answer(&server, json!({})).await;
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(typed), &json!("stop")));
}

#[tokio::test]
async fn gemmas_thoughts_come_before_its_calls() {
    let mut tokens = vec![264];
    tokens.extend(bytes("thought\nWhich one?"));
    tokens.push(265);
    tokens.extend(gemma("«call:clock{}»"));
    tokens.push(HAND_OVER);
    let server = Server::speaking(Script::new(move |_| commits(&tokens, 4)), GEMMA, &GEMMA_TOKENS).await;
    let choice = answer(&server, json!({"chat_template_kwargs": {"enable_thinking": true}})).await;
    let message = &choice["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Which one?"), &Value::Null));
    assert_eq!((calls(message).len(), &choice["finish_reason"]), (1, &json!("tool_calls")));
}

#[tokio::test]
async fn llamas_call_is_the_whole_reply() {
    let object = "{\"name\": \"weather\", \"parameters\": {\"place\": \"Bern\"}}";
    let server = Server::speaking(Script::saying(object), LLAMA, &["<|python_tag|>"]).await;
    let choice = answer(&server, json!({})).await;
    assert_eq!(calls(&choice["message"]), [("weather".to_owned(), json!({"place": "Bern"}))]);
    let json = "{\"place\": \"Bern\"}";
    let server = Server::speaking(Script::saying(json), LLAMA, &["<|python_tag|>"]).await;
    let choice = answer(&server, json!({})).await;
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!(json), &json!("stop")));
}

/// A conversation with two calls, whose results come in the other order.
fn history() -> Value {
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    json!([
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": null, "tool_calls": [
            call("call_aaaaaaaaaaaa", "weather", "{\"place\":\"Bern\"}"),
            call("call_bbbbbbbbbbbb", "clock", "{}"),
        ]},
        {"role": "tool", "tool_call_id": "call_bbbbbbbbbbbb", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_aaaaaaaaaaaa", "content": [{"type": "text", "text": "dry"}]},
    ])
}

#[tokio::test]
async fn calls_and_results_come_back_in_the_templates_own_form() {
    let server = qwen("No.").await;
    server.ask(CHAT, &chat(json!({ "messages": history() }))).await;
    let prompt = last_prompt(&server);
    assert!(
        prompt.contains("<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"weather\""),
        "{prompt}"
    );
    let end = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}}\n</tool_call>\n\
               <tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call><|im_end|>\n\
               <|im_start|>user\n<tool_response>\ndry\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\
               <|im_end|>\n<|im_start|>assistant\n";
    assert!(prompt.ends_with(end), "{prompt}");
    let server = gemma_saying("No.", EOS).await;
    server.ask(CHAT, &chat(json!({ "messages": history() }))).await;
    let prompt = last_prompt(&server);
    assert!(
        prompt.contains("<|tool>declaration:weather{description:<|\"|>Tells the weather<|\"|>"),
        "{prompt}"
    );
    assert!(
        prompt.contains(
            "<|tool_call>call:weather{place:<|\"|>Bern<|\"|>}<tool_call|><|tool_call>call:clock{}<tool_call|>"
        ),
        "{prompt}"
    );
    // One call a message, and no long identifiers.
    let server = Server::speaking(Script::saying("No."), LLAMA, &["<|python_tag|>"]).await;
    server.ask(CHAT, &chat(json!({ "messages": history() }))).await;
    let prompt = last_prompt(&server);
    let (weather, clock) =
        (prompt.find("\"name\": \"weather\", \"parameters\": {"), prompt.find("\"name\": \"clock\", \"p"));
    let (dry, noon) = (prompt.find("\"dry\""), prompt.find("\"noon\""));
    assert!(weather < dry && dry < clock && clock < noon && weather.is_some(), "{prompt}");
    let server = Server::speaking(Script::saying("No."), MISTRAL, &[]).await;
    server.ask(CHAT, &chat(json!({ "messages": history() }))).await;
    let prompt = last_prompt(&server);
    assert!(
        prompt.contains("[TOOL_CALLS] [{\"name\": \"weather\"") && prompt.contains("[TOOL_RESULTS]"),
        "{prompt}"
    );
}

#[tokio::test]
async fn results_without_a_call_are_refused_by_message() {
    let server = qwen("x").await;
    let mut messages = history();
    messages[3]["tool_call_id"] = "call_cccccccccccc".into();
    let error = server.refusal(CHAT, &chat(json!({ "messages": messages })), 400).await;
    assert_eq!(error["param"], "messages[3].tool_call_id");
    assert!(error["message"].as_str().unwrap().contains("call_cccccccccccc"), "{error}");
    let alone = json!([{"role": "tool", "content": "x"}]);
    let error = server.refusal(CHAT, &chat(json!({ "messages": alone })), 400).await;
    assert_eq!(error["param"], "messages[0].tool_call_id");
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn a_template_that_knows_no_tools_gets_them_as_text() {
    let script = Script::saying("Hm. <tool_call>{\"name\": \"clock\"}</tool_call>");
    let server = Server::start(script).await;
    let body =
        chat(json!({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]}));
    let choice = server.ask(CHAT, &body).await["choices"][0].take();
    assert_eq!(calls(&choice["message"]), [("clock".to_owned(), json!({}))]);
    let prompt = last_prompt(&server);
    assert!(prompt.starts_with("[system]S\n[system]"), "{prompt}");
    assert!(prompt.contains("{\"name\": \"weather\", \"description\": \"Tells the weather\""), "{prompt}");
    assert!(prompt.contains("<tool_call>\n{\"name\": \"NAME\""), "{prompt}");
    server.ask(CHAT, &chat(json!({ "messages": history() }))).await;
    let end =
        "[user]<tool_response>\ndry\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n[assistant]";
    assert!(last_prompt(&server).ends_with(end), "{}", last_prompt(&server));
}

#[tokio::test]
async fn tools_can_be_switched_off() {
    let load = |backend| {
        let mut loaded = speaker(backend, QWEN, &[]);
        loaded.model.template.as_mut().unwrap().set_calls(None);
        loaded
    };
    let stage = tokio::task::spawn_blocking(move || Stage::with(Script::saying("x"), 4, load));
    let server = Server::over(stage.await.unwrap(), &config("")).await;
    let error = server.refusal(CHAT, &chat(json!({})), 400).await;
    assert_eq!((&error["param"], &error["code"]), (&json!("tools"), &json!("unsupported_parameter")));
    server.ask(CHAT, &chat(json!({"tool_choice": "none"}))).await;
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

#[tokio::test]
async fn a_canvas_gets_the_call_that_is_forced_begun() {
    let rest = gemma("place:'Bern'}»«call:clock{}»");
    let script = Script::new(move |_| canvases(&rest, 256, &[2])).denoises();
    let server = Server::speaking(script, GEMMA, &GEMMA_TOKENS).await;
    let body = json!({"tool_choice": named("weather")});
    let choice = answer(&server, body.clone()).await;
    assert!(last_prompt(&server).ends_with("<|channel>thought\n<channel|><|tool_call>call:weather{"));
    // That call and no other.
    assert_eq!(calls(&choice["message"]), [("weather".to_owned(), json!({"place": "Bern"}))]);
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&Value::Null, &json!("tool_calls"))
    );
    let (content, streamed, _) = streamed(&server, body).await;
    assert_eq!((content.as_str(), calls(&json!({ "tool_calls": streamed })).len()), ("", 1));
    // "required" is as good where there is one tool only.
    let one = json!({"tools": [tools()[0]], "tool_choice": "required"});
    assert_eq!(calls(&answer(&server, one).await["message"]).len(), 1);
    let several = server.refusal(CHAT, &chat(json!({"tool_choice": "required"})), 400).await;
    assert_eq!(
        (&several["param"], &several["code"]),
        (&json!("tool_choice"), &json!("unsupported_parameter"))
    );
    let thinking =
        json!({"tool_choice": named("weather"), "chat_template_kwargs": {"enable_thinking": true}});
    let error = server.refusal(CHAT, &chat(thinking), 400).await;
    assert_eq!(error["param"], "tool_choice");
}

#[tokio::test]
async fn what_is_wrong_with_tools_is_refused_by_name() {
    let server = qwen("x").await;
    for (more, param) in [
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tools": [null]}), "tools[0]"),
        (json!({"tools": [[]]}), "tools[0]"),
        (json!({"tools": "x"}), "tools"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": named("nobody")}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"parallel_tool_calls": "no"}), "parallel_tool_calls"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"function_call": {"name": "f"}}), "function_call"),
    ] {
        let error = server.refusal(CHAT, &chat(more.clone()), 400).await;
        assert_eq!(error["param"], param, "{more}");
    }
    let error = server.refusal("/v1/completions", &json!({"prompt": "a", "tools": tools()}), 400).await;
    assert_eq!(error["param"], "tools");
    assert_eq!(server.stage.script.started.lock().unwrap().len(), 0, "nothing of this may reach the model");
}

/// However a reply is committed, the answer is the same.
#[tokio::test]
async fn widths_of_commits_do_not_matter() {
    let texts = [TWO, "Hm <tool_call>{\"name\": \"clock\"}</tool_call> and <tool_call>x</tool_call>\n\n"];
    for text in texts {
        let mut whole = None;
        for width in 1..40 {
            let steps = match width {
                1 => say(text),
                width => commits(&[bytes(text), vec![EOS]].concat(), width),
            };
            let server = Server::speaking(Script::new(move |_| steps.clone()), QWEN, &[]).await;
            let choice = answer(&server, json!({})).await;
            let found = (choice["message"]["content"].clone(), calls(&choice["message"]));
            assert_eq!(*whole.get_or_insert_with(|| found.clone()), found, "width {width}");
        }
    }
}
