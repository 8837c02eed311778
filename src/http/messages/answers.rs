//! What tools returned, matched with the calls that asked for it.

use std::collections::HashMap;

use serde_json::Value;

use super::wrong;
use crate::http::error::ApiError;
use crate::http::fields::quoted;

/// A call of the conversation.
struct Asked {
    id: Value,
    name: Value,
    /// Place of the assistant's message, and in its calls.
    place: (usize, usize),
    answered: bool,
}

/// Gives each message of a tool the name of the tool that it belongs to, and puts those that stand together into the
/// order of their calls: many templates write neither names nor identifiers. A message without an identifier belongs to
/// the first call that has no answer yet.
pub(super) fn link(mut messages: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    let mut asked: Vec<Asked> = Vec::new();
    // The last call with each identifier, and how far all are answered: there may be very many of both.
    let mut last: HashMap<String, usize> = HashMap::new();
    let mut first_open = 0;
    // Of each answer the place of its call.
    let mut places = vec![None; messages.len()];
    for (at, message) in messages.iter_mut().enumerate() {
        for (which, call) in
            message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten().enumerate()
        {
            if call.get("id").is_none_or(Value::is_null) {
                call["id"] = format!("call_{at}_{which}").into();
            }
            let (id, name) = (call["id"].clone(), call["function"]["name"].clone());
            last.insert(id.as_str().unwrap_or_default().to_owned(), asked.len());
            asked.push(Asked { id, name, place: (at, which), answered: false });
        }
        if message.get("role").is_none_or(|role| role != "tool") {
            continue;
        }
        let path = format!("messages[{at}]");
        let call = match message.get("tool_call_id") {
            Some(id) => {
                let call = id.as_str().and_then(|id| last.get(id));
                call.and_then(|&call| asked.get_mut(call)).ok_or_else(|| {
                    let found = id.as_str().map(quoted).unwrap_or_default();
                    let param = format!("{path}.tool_call_id");
                    let message =
                        format!("`{param}`: found {found}, expected the `id` of a call in an assistant message before it");
                    ApiError::field(param, message)
                })?
            }
            None => {
                while asked.get(first_open).is_some_and(|call| call.answered) {
                    first_open += 1;
                }
                asked.get_mut(first_open).ok_or_else(|| {
                    let expected = "the `id` of a call in an assistant message before it";
                    wrong(&path, ".tool_call_id", &Value::Null, expected)
                })?
            }
        };
        call.answered = true;
        places[at] = Some(call.place);
        message["tool_call_id"] = call.id.clone();
        if message.get("name").is_none() {
            message["name"] = call.name.clone();
        }
    }
    let mut answers: Vec<(Option<(usize, usize)>, Value)> = places.into_iter().zip(messages).collect();
    for run in answers.chunk_by_mut(|(a, _), (b, _)| a.is_some() && b.is_some()) {
        run.sort_by_key(|(place, _)| *place);
    }
    Ok(answers.into_iter().map(|(_, message)| message).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn calls(ids: &[&str]) -> Value {
        let call = |id: &&str| json!({"id": id, "function": {"name": format!("f{id}"), "arguments": {}}});
        json!({"role": "assistant", "content": "", "tool_calls": ids.iter().map(call).collect::<Vec<_>>()})
    }

    fn linked(messages: Value) -> Vec<(String, String)> {
        let Value::Array(messages) = messages else { panic!("{messages}") };
        let linked = link(messages).unwrap().into_iter().filter(|message| message["role"] == "tool");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        linked.map(|message| (text(&message["content"]), text(&message["name"]))).collect()
    }

    #[test]
    fn answers_come_in_the_order_of_calls_and_have_names() {
        let tool = |id: &str| json!({"role": "tool", "content": id, "tool_call_id": id});
        let found = linked(json!([
            calls(&["a", "b"]), tool("b"), tool("a"), {"role": "user", "content": "x"},
            calls(&["a", "c"]), tool("c"), {"role": "tool", "content": "?"},
        ]));
        let expected = [("a", "fa"), ("b", "fb"), ("?", "fa"), ("c", "fc")];
        let expected = expected.map(|(content, name)| (content.to_owned(), name.to_owned()));
        assert_eq!(found, expected);
        let own =
            json!([calls(&["a"]), {"role": "tool", "content": "", "tool_call_id": "a", "name": "mine"}]);
        assert_eq!(linked(own)[0].1, "mine");
    }

    #[test]
    fn the_last_call_of_an_identifier_is_answered_however_many_there_are() {
        const CALLS: usize = 50_000;
        let many: Vec<String> = (0..CALLS).map(|which| which.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let mut messages = vec![calls(&many), calls(&["0"])];
        messages.extend((0..4000).map(|_| json!({"role": "tool", "content": "x", "tool_call_id": "0"})));
        messages.extend((0..4000).map(|_| json!({"role": "tool", "content": "y"})));
        let linked = link(messages).unwrap();
        assert_eq!((&linked[2]["name"], &linked[4002]["name"]), (&json!("f0"), &json!("f0")));
        assert_eq!(linked[2]["content"], "y", "the first 0 was still open");
        assert_eq!(linked.last().unwrap()["content"], "x", "the second 0 stands behind all others");
    }

    #[test]
    fn answers_without_a_call_are_named() {
        for messages in [
            json!([{"role": "tool", "content": "", "tool_call_id": "a"}]),
            json!([{"role": "tool", "content": ""}]),
            json!([{"role": "tool", "content": "", "tool_call_id": "a"}, calls(&["a"])]),
        ] {
            let Value::Array(messages) = messages else { panic!("{messages}") };
            let error = link(messages).unwrap_err().to_json();
            assert_eq!(error["error"]["param"], "messages[0].tool_call_id");
            let message = error["error"]["message"].as_str().unwrap();
            assert!(message.contains("messages[0]"), "{message}");
        }
        let twice =
            [calls(&["a"]), json!({"role": "tool", "content": ""}), json!({"role": "tool", "content": ""})];
        let error = link(twice.to_vec()).unwrap_err().to_json();
        assert_eq!(error["error"]["param"], "messages[2].tool_call_id");
    }
}
