//! Typed reading of a request's fields; what is wrong is named by field, found value and expectation.

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields of a request that were not read yet.
#[derive(Clone)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    pub(super) fn new(map: Map<String, Value>) -> Self {
        Self(map)
    }

    /// Takes a field out; null counts as absent, since clients send it for what they leave unset.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there, null or not.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A field that stays; null counts as absent.
    pub(super) fn peek(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Puts a field in, as if it had come so.
    pub(super) fn put(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_owned(), value.into());
    }

    pub(super) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(name, &other, "true or false")),
        }
    }

    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(name, &other, "a string")),
        }
    }

    pub(super) fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(name, &other, "an object")),
        }
    }

    /// A number from `low` to `high`.
    pub(super) fn number(&mut self, name: &str, low: f64, high: f64) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|n| (low..=high).contains(n)) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(wrong(name, &value, &format!("a number from {low} to {high}"))),
        }
    }

    /// A whole number from `low` to `high`.
    pub(super) fn integer(&mut self, name: &str, low: i64, high: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match integer(&value).filter(|n| (low..=high).contains(n)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, &value, &format!("an integer from {low} to {high}"))),
        }
    }

    /// Refuses a field of the API that is not supported, unless its value asks for nothing.
    pub(super) fn refuse(
        &mut self,
        name: &str,
        why: &str,
        asks_nothing: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !asks_nothing(&value) => Err(ApiError::unsupported(name, why)),
            _ => Ok(()),
        }
    }

    /// Names that nobody asked for, for the log.
    pub(super) fn rest(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

/// A JSON number without a fraction; `5.0` counts, as some clients know floats only.
pub(super) fn integer(value: &Value) -> Option<i64> {
    /// Up to here every whole f64 is one integer.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
    })
}

/// 400: the field `name` should be something else.
pub(super) fn wrong(name: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::field(name, format!("`{name}`: found {}, expected {expected}", shown(found)))
}

/// A text that came with a request, quoted for an error message, long ones cut.
pub(super) fn quoted(text: &str) -> String {
    /// Enough to recognise it.
    const MOST: usize = 100;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{:?}… ({} bytes)", &text[..end], text.len()),
        None => format!("{text:?}"),
    }
}

/// A value in an error message: numbers and flags as they are, long things by kind.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        other => kind(other).to_owned(),
    }
}

/// What a JSON value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
