//! Filters and tests that Jinja has in another form than the template engine.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, Value};

use super::print::text;

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter("string", |value: &Value| match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ => text(value).map(Value::from),
    });
    environment.add_filter("join", join);
    environment.add_filter("replace", replace);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    // What Python's protocols make of strings, maps and truth values.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Undefined
        )
    });
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// `join(separator, attribute)`: items print as everywhere.
fn join(items: &Value, separator: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let separator = match separator {
        Some(separator) => separator,
        None => options.get::<Option<Value>>("d")?.unwrap_or_default(),
    };
    let (separator, attribute) = (text(&separator)?, options.get::<Option<&str>>("attribute")?);
    options.assert_all_used()?;
    let mut out = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        if index > 0 {
            out.push_str(&separator);
        }
        let item = match attribute {
            Some(path) => path.split('.').try_fold(item, |value, name| value.get_attr(name))?,
            None => item,
        };
        out.push_str(&text(&item)?);
    }
    Ok(out)
}

/// `replace(old, new, count)`.
fn replace(value: &Value, old: &Value, new: &Value, count: Option<usize>) -> Result<String, Error> {
    let (value, old, new) = (text(value)?, text(old)?, text(new)?);
    Ok(match count {
        Some(count) => value.replacen(&old, &new, count),
        None => value.replace(&old, &new),
    })
}

/// `int(default)`: what is no number is the default.
fn int(value: &Value, default: Option<Value>) -> Result<Value, Error> {
    let default = default.unwrap_or_else(|| Value::from(0));
    Ok(match value.kind() {
        ValueKind::Number if value.is_integer() => value.clone(),
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number => {
            f64::try_from(value.clone()).map_or(default, |number| Value::from(number as i64))
        }
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default().trim().replace('_', "");
            let whole = text.parse::<i128>().ok().map(Value::from);
            let cut = || text.parse::<f64>().ok().filter(|number| number.is_finite());
            whole.or_else(|| cut().map(|number| Value::from(number as i64))).unwrap_or(default)
        }
        _ => default,
    })
}

/// `float(default)`: what is no number is the default.
fn float(value: &Value, default: Option<f64>) -> Result<f64, Error> {
    let default = default.unwrap_or(0.0);
    Ok(match value.kind() {
        ValueKind::Number => f64::try_from(value.clone()).unwrap_or(default),
        ValueKind::Bool => f64::from(u8::from(value.is_true())),
        ValueKind::String => value.as_str().unwrap_or_default().trim().parse().unwrap_or(default),
        _ => default,
    })
}

/// HTML escapes in the spelling of Python's library.
fn escape(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    for letter in text(value)?.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            _ => out.push(letter),
        }
    }
    Ok(out)
}
