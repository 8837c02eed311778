//! Fields that say what a reply must match: `response_format`, `json_schema` and `grammar`.

use std::sync::Arc;

use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use super::completions::off_thread;
use super::error::ApiError;
use super::fields::{Fields, wrong};
use crate::decode::{Constraint, ConstraintError, Format};
use crate::engine::{Model, ModelKind};

/// Most bytes of a schema or grammar.
const MOST_BYTES: usize = 128 << 10;

/// How many are compiled at one time: each may take a core for seconds.
static COMPILING: Semaphore = Semaphore::const_new(2);

/// Kinds of `response_format`.
const KINDS: &str = "text, json_object, json_schema, grammar or regex";

/// A form as it was asked for.
#[derive(Debug, PartialEq)]
pub(super) struct Form {
    pub(super) format: Format,
    /// The field that holds it.
    pub(super) param: String,
}

impl Form {
    /// The form that a request wants, if it wants one.
    pub(super) fn read(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let forms = [response_format(fields)?, json_schema(fields)?, grammar(fields)?];
        let mut forms = forms.into_iter().flatten();
        let (first, second) = (forms.next(), forms.next());
        if let (Some(first), Some(second)) = (&first, &second) {
            let message = format!(
                "`{}` and `{}` both say what the reply must match; send one of them",
                first.param, second.param
            );
            return Err(ApiError::field(&second.param, message));
        }
        Ok(first)
    }
}

/// Compiles a form for the loaded model, where it holds nobody up. In a chat, what the model thinks is left alone.
///
/// # Errors
/// 400 that names `param`: a form that is wrong or not supported, a model that cannot be constrained.
pub(super) async fn compile(
    model: &Arc<Model>,
    format: Format,
    param: &str,
    chat: bool,
) -> Result<Constraint, ApiError> {
    if model.kind != ModelKind::Causal {
        let why = "replies of a model that denoises cannot be constrained; leave it out";
        return Err(ApiError::unsupported(param, why));
    }
    let bytes = match &format {
        Format::JsonSchema(schema) => schema.to_string().len(),
        Format::Lark(text) | Format::Regex(text) => text.len(),
    };
    if bytes > MOST_BYTES {
        let message = format!("`{param}`: found {bytes} bytes, expected at most {MOST_BYTES}");
        return Err(ApiError::field(param, message));
    }
    // A semaphore that is never closed always gives its permit.
    let turn = COMPILING.acquire().await;
    let model = Arc::clone(model);
    let compiled = off_thread(move || {
        let _turn = turn;
        Ok(model.constraint(&format, chat))
    });
    compiled.await?.map_err(|error| match error {
        ConstraintError::Vocabulary(_) => ApiError::unsupported(param, &error.to_string()),
        _ => ApiError::field(param, format!("`{param}`: {error}")),
    })
}

fn response_format(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    const NAME: &str = "response_format";
    let Some(format) = fields.object(NAME)? else { return Ok(None) };
    let mut format = Fields::new(format);
    let path = |member: &str| format!("{NAME}.{member}");
    let kind = match format.take("type") {
        Some(Value::String(kind)) => kind,
        other => return Err(wrong(&path("type"), &other.unwrap_or_default(), KINDS)),
    };
    let (format, param) = match kind.as_str() {
        "text" => return Ok(None),
        "json_object" => match object(&mut format, NAME, "schema")? {
            Some(schema) => (Format::JsonSchema(schema.into()), path("schema")),
            None => (Format::JsonSchema(json!({ "type": "object" })), NAME.to_owned()),
        },
        "json_schema" => {
            let missing = |param: &str| wrong(param, &Value::Null, "an object with a JSON schema");
            let (mut named, outer) = match object(&mut format, NAME, "json_schema")? {
                Some(nested) => (Fields::new(nested), path("json_schema")),
                None if format.has("schema") => (format, NAME.to_owned()),
                None => return Err(missing(&path("json_schema"))),
            };
            named.string("name").map_err(|error| error.within(&outer))?;
            named.boolean("strict").map_err(|error| error.within(&outer))?;
            let param = format!("{outer}.schema");
            let schema = object(&mut named, &outer, "schema")?.ok_or_else(|| missing(&param))?;
            (Format::JsonSchema(schema.into()), param)
        }
        "grammar" => (Format::Lark(lark(text(&mut format, "grammar")?, &path("grammar"))?), path("grammar")),
        "regex" => {
            let member = if format.has("pattern") { "pattern" } else { "regex" };
            (Format::Regex(text(&mut format, member)?), path(member))
        }
        other => return Err(wrong(&path("type"), &other.into(), KINDS)),
    };
    Ok(Some(Form { format, param }))
}

/// A schema by itself, as llama.cpp's server takes it. An empty one asks for nothing.
fn json_schema(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    const NAME: &str = "json_schema";
    let schema = fields.object(NAME)?.filter(|schema| !schema.is_empty());
    Ok(schema.map(|schema| Form { format: Format::JsonSchema(schema.into()), param: NAME.to_owned() }))
}

fn grammar(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    const NAME: &str = "grammar";
    let Some(text) = fields.string(NAME)?.filter(|text| !text.is_empty()) else { return Ok(None) };
    Ok(Some(Form { format: Format::Lark(lark(text, NAME)?), param: NAME.to_owned() }))
}

/// A grammar that is not written in llama.cpp's notation.
fn lark(text: String, param: &str) -> Result<String, ApiError> {
    if text.contains("::=") {
        let why = "GBNF (`rule ::= …`) is not supported; write the grammar in Lark (`start: …`)";
        return Err(ApiError::unsupported(param, why));
    }
    Ok(text)
}

fn text(format: &mut Fields, member: &str) -> Result<String, ApiError> {
    let param = format!("response_format.{member}");
    match format.take(member) {
        Some(Value::String(text)) => Ok(text),
        other => Err(wrong(&param, &other.unwrap_or_default(), "a string")),
    }
}

fn object(fields: &mut Fields, path: &str, member: &str) -> Result<Option<Map<String, Value>>, ApiError> {
    match fields.take(member) {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(other) => Err(wrong(&format!("{path}.{member}"), &other, "an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Option<Form>, Value> {
        let Value::Object(map) = body else { panic!("no object") };
        Form::read(&mut Fields::new(map)).map_err(|error| error.to_json()["error"].clone())
    }

    #[test]
    fn every_way_to_ask_is_understood() {
        let schema = || json!({"type": "array"});
        let json =
            |param: &str| Ok(Some(Form { format: Format::JsonSchema(schema()), param: param.to_owned() }));
        let nested = json!({"name": "x", "schema": schema(), "strict": true, "description": "y"});
        for (body, expected) in [
            (json!({}), Ok(None)),
            (json!({"response_format": null, "grammar": null, "json_schema": null}), Ok(None)),
            (json!({"response_format": {"type": "text"}, "grammar": "", "json_schema": {}}), Ok(None)),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": nested}}),
                json("response_format.json_schema.schema"),
            ),
            (
                json!({"response_format": {"type": "json_schema", "schema": schema()}}),
                json("response_format.schema"),
            ),
            (
                json!({"response_format": {"type": "json_object", "schema": schema()}}),
                json("response_format.schema"),
            ),
            (json!({"json_schema": schema()}), json("json_schema")),
            (
                json!({"response_format": {"type": "json_object"}}),
                Ok(Some(Form {
                    format: Format::JsonSchema(json!({"type": "object"})),
                    param: "response_format".to_owned(),
                })),
            ),
            (
                json!({"response_format": {"type": "grammar", "grammar": "start: \"a\""}}),
                Ok(Some(Form {
                    format: Format::Lark("start: \"a\"".to_owned()),
                    param: "response_format.grammar".to_owned(),
                })),
            ),
            (
                json!({"response_format": {"type": "regex", "pattern": "a+"}}),
                Ok(Some(Form {
                    format: Format::Regex("a+".to_owned()),
                    param: "response_format.pattern".to_owned(),
                })),
            ),
            (
                json!({"grammar": "start: \"a\""}),
                Ok(Some(Form {
                    format: Format::Lark("start: \"a\"".to_owned()),
                    param: "grammar".to_owned(),
                })),
            ),
        ] {
            assert_eq!(read(body.clone()), expected, "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": 1}}),
                "response_format.json_schema",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
                "response_format.json_schema.schema",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}}),
                "response_format.json_schema.strict",
            ),
            (
                json!({"response_format": {"type": "json_schema", "schema": {}, "name": 1}}),
                "response_format.name",
            ),
            (json!({"response_format": {"type": "regex"}}), "response_format.regex"),
            (json!({"response_format": {"type": "grammar", "grammar": 1}}), "response_format.grammar"),
            (json!({"grammar": "root ::= \"a\""}), "grammar"),
            (json!({"grammar": 1}), "grammar"),
            (json!({"json_schema": "x"}), "json_schema"),
            (json!({"grammar": "start: \"a\"", "response_format": {"type": "json_object"}}), "grammar"),
        ] {
            assert_eq!(read(body.clone()).unwrap_err()["param"], param, "{body}");
        }
    }
}
