//! The tools of a chat request, and what it says about calling them.

use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::fields::{Fields, kind, quoted, wrong};

/// Most tools of a request.
const MOST_TOOLS: usize = 1024;

/// Longest name of a tool, in bytes.
const LONGEST_NAME: usize = 128;

/// What a request says about tools.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The declarations as templates get them; empty where the model is to see none.
    pub list: Vec<Value>,
    /// The tools' names, in the same order.
    pub names: Vec<String>,
    /// Whether one must be called.
    pub choice: Choice,
    /// At most one call.
    pub one: bool,
}

/// Whether tools may or must be called.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// The model decides.
    #[default]
    Auto,
    /// At least one of them.
    Required,
    /// This one.
    Named(String),
}

/// Members of a declaration that templates get.
const KEPT: [&str; 3] = ["name", "description", "parameters"];

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`; the older `functions` and `function_call` are refused.
    pub(super) fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let older = |name: &str| format!("is the older form; send `{name}`");
        let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        fields.refuse("functions", &older("tools"), empty)?;
        let idle = |value: &Value| value == "none" || value == "auto";
        fields.refuse("function_call", &older("tool_choice"), idle)?;
        let one = fields.boolean("parallel_tool_calls")? == Some(false);
        let mut tools = Self { one, ..Self::default() };
        match fields.take("tools") {
            None => {}
            Some(Value::Array(list)) if list.len() > MOST_TOOLS => {
                let message = format!("`tools`: found {} tools, expected at most {MOST_TOOLS}", list.len());
                return Err(ApiError::field("tools", message));
            }
            Some(Value::Array(list)) => {
                for (place, tool) in list.into_iter().enumerate() {
                    tools.declare(&format!("tools[{place}]"), tool)?;
                }
            }
            Some(other) => return Err(wrong("tools", &other, "a list of tools")),
        }
        match choice(fields.take("tool_choice"))? {
            None => (tools.list, tools.names) = (Vec::new(), Vec::new()),
            Some(choice) => tools.choice = choice,
        }
        match &tools.choice {
            Choice::Auto => {}
            Choice::Required if tools.list.is_empty() => {
                let message = "`tool_choice`: \"required\" needs `tools` to choose from";
                return Err(ApiError::field("tool_choice", message));
            }
            Choice::Required => {}
            Choice::Named(name) if tools.names.contains(name) => {}
            Choice::Named(name) => {
                let message = format!("`tool_choice`: there is no {} among `tools`", quoted(name));
                return Err(ApiError::field("tool_choice", message));
            }
        }
        Ok(tools)
    }

    fn declare(&mut self, path: &str, tool: Value) -> Result<(), ApiError> {
        let field = |member: &str, message: String| {
            let param = format!("{path}{member}");
            ApiError::field(&param, format!("`{param}`: {message}"))
        };
        let found = |value: Option<&Value>, expected: &str| {
            format!("found {}, expected {expected}", kind(value.unwrap_or(&Value::Null)))
        };
        if !tool.is_object() {
            return Err(wrong(path, &tool, "an object with `type` and `function`"));
        }
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {}
            Some(other) => {
                let why = format!("{} tools are not supported, only functions are", quoted(other));
                return Err(ApiError::unsupported(format!("{path}.type"), &why));
            }
            None => return Err(field(".type", found(tool.get("type"), "\"function\""))),
        }
        let Some(function) = tool.get("function").and_then(Value::as_object) else {
            return Err(field(".function", found(tool.get("function"), "an object with `name`")));
        };
        let name = match function.get("name").and_then(Value::as_str) {
            Some(name) if is_name(name) => name.to_owned(),
            Some(name) => {
                let message = format!(
                    "found {}, expected 1 to {LONGEST_NAME} letters, digits and signs of `_-.:/`",
                    quoted(name)
                );
                return Err(field(".function.name", message));
            }
            None => return Err(field(".function.name", found(function.get("name"), "a string"))),
        };
        if self.names.contains(&name) {
            return Err(field(".function.name", format!("there is another tool {}", quoted(&name))));
        }
        for (member, expected, right) in [
            ("description", "a string", Value::is_string as fn(&Value) -> bool),
            ("parameters", "an object, the arguments' JSON schema", Value::is_object),
            ("strict", "true or false", Value::is_boolean),
        ] {
            let value = function.get(member).filter(|value| !value.is_null());
            if let Some(other) = value.filter(|value| !right(value)) {
                return Err(field(&format!(".function.{member}"), found(Some(other), expected)));
            }
        }
        let kept = KEPT.iter().filter_map(|&member| {
            let value = function.get(member).filter(|value| !value.is_null())?;
            Some((member.to_owned(), value.clone()))
        });
        let mut kept: Map<String, Value> = kept.collect();
        // Templates count on there being a schema.
        kept.entry("parameters").or_insert_with(|| json!({ "type": "object", "properties": {} }));
        self.list.push(json!({ "type": "function", "function": kept }));
        self.names.push(name);
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(letter)
}

/// What `tool_choice` says; `None` is that no tool is to be called.
fn choice(value: Option<Value>) -> Result<Option<Choice>, ApiError> {
    let expected =
        "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
    let Some(value) = value else { return Ok(Some(Choice::Auto)) };
    match value.as_str() {
        Some("auto") => return Ok(Some(Choice::Auto)),
        Some("none") => return Ok(None),
        Some("required") => return Ok(Some(Choice::Required)),
        Some(_) => return Err(wrong("tool_choice", &value, expected)),
        None => {}
    }
    match (value.get("type").and_then(Value::as_str), value.pointer("/function/name")) {
        (Some("function"), Some(Value::String(name))) => Ok(Some(Choice::Named(name.clone()))),
        (Some(other), _) if other != "function" => {
            let why = format!("{} is not supported; expected {expected}", quoted(other));
            Err(ApiError::unsupported("tool_choice", &why))
        }
        _ => {
            let message = format!("`tool_choice`: found {}, expected {expected}", kind(&value));
            Err(ApiError::field("tool_choice", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Tools, Value> {
        let Value::Object(body) = body else { panic!("{body}") };
        Tools::read(&mut Fields::new(body)).map_err(|error| error.to_json()["error"].take())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name}})
    }

    #[test]
    fn tools_are_what_templates_expect() {
        let whole = json!({"type": "function", "function": {
            "parameters": {"type": "object"}, "strict": true, "name": "a", "description": "d",
        }});
        let tools = read(json!({"tools": [whole, tool("b")], "parallel_tool_calls": false})).unwrap();
        assert_eq!(
            tools.list,
            [
                json!({"type": "function", "function": {"name": "a", "description": "d", "parameters": {"type": "object"}}}),
                json!({"type": "function", "function": {"name": "b", "parameters": {"type": "object", "properties": {}}}}),
            ]
        );
        assert!(tools.one && tools.names == ["a", "b"] && tools.choice == Choice::Auto);
        let tools = read(json!({"tools": [tool("a")], "tool_choice": "none"})).unwrap();
        assert!(tools.list.is_empty() && tools.choice == Choice::Auto && !tools.one);
        let named = json!({"type": "function", "function": {"name": "a"}});
        let tools = read(json!({"tools": [tool("a")], "tool_choice": named})).unwrap();
        assert_eq!(tools.choice, Choice::Named("a".to_owned()));
        assert!(read(json!({"functions": [], "function_call": "auto", "tool_choice": "auto"})).is_ok());
    }

    #[test]
    fn what_is_wrong_with_tools_is_named() {
        for (body, param) in [
            (json!({"tools": {}}), "tools"),
            (json!({"tools": vec![tool("a"); 1025]}), "tools"),
            (json!({"tools": [1]}), "tools[0]"),
            (json!({"tools": [tool("a"), {"type": "web_search"}]}), "tools[1].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"type": "function", "function": {}}]}), "tools[0].function.name"),
            (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (json!({"tools": [tool("a"), tool("a")]}), "tools[1].function.name"),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}),
                "tools[0].function.description",
            ),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "always", "tools": [tool("a")]}), "tool_choice"),
            (json!({"tool_choice": tool("b"), "tools": [tool("a")]}), "tool_choice"),
            (json!({"tool_choice": {"type": "custom"}, "tools": [tool("a")]}), "tool_choice"),
            (json!({"tool_choice": {"type": "function"}, "tools": [tool("a")]}), "tool_choice"),
            (json!({"tool_choice": 1}), "tool_choice"),
            (json!({"parallel_tool_calls": 1}), "parallel_tool_calls"),
            (json!({"functions": [{"name": "a"}]}), "functions"),
            (json!({"function_call": {"name": "a"}}), "function_call"),
        ] {
            let error = read(body.clone()).unwrap_err();
            assert_eq!(error["param"], param, "{body}");
            assert!(error["message"].as_str().unwrap().contains(&format!("`{param}`")), "{error}");
        }
    }
}
