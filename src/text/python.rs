//! What chat templates expect of Python: methods, functions, how values print, how JSON is written.

mod filters;
mod json;
mod print;
mod strings;

use std::fmt::Write;

use minijinja::{Environment, Error, ErrorKind, Value};

pub(super) use json::dumps;
pub(super) use strings::method;

/// An exception that a template raised by itself.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

/// Gives the environment what Hugging Face's libraries give theirs.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(print::print);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        let mut now = String::new();
        write!(now, "{}", chrono::Local::now().format(&format)).map_err(|_| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: `{format}` is no time format"))
        })?;
        Ok(now)
    });
    environment.add_filter("tojson", json::to_json);
    filters::install(environment);
}

/// What to tell about a failed rendering: the template's own words if it raised them.
pub(super) fn message(error: &Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut last = error.to_string();
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return message.clone();
        }
        last = match current.downcast_ref::<std::io::Error>() {
            Some(error) => error.to_string(),
            None => last,
        };
        cause = current.source();
    }
    last
}

/// Whether Unicode reserves a character for no text at all.
pub(super) fn is_noncharacter(letter: char) -> bool {
    let code = u32::from(letter);
    (0xfdd0..=0xfdef).contains(&code) || code & 0xfffe == 0xfffe
}
