//! What a chat template may take: it is a program of somebody else's.
//!
//! The template engine's parser and compiler call themselves for each operator, and their work grows with the square
//! of a chain of operators. So sources are checked before they are parsed, and everything that the engine does
//! happens on a thread whose stack is large enough for the worst that passes.

use std::io::Write;

use minijinja::filters;
use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::{TextError, python};

/// Longest source in bytes; real ones have some ten thousands.
const MAX_SOURCE: usize = 128 << 10;

/// Most words and signs in one tag; real ones have some hundreds.
const MAX_TAG: usize = 2000;

/// Most `elif`s, each of which nests in the one before; real ones have some dozens.
const MAX_ELIF: usize = 2000;

/// Bytes of stack. Only what is used takes memory.
const STACK: usize = 256 << 20;

/// Longest prompt in bytes that a template may write.
const MAX_PROMPT: usize = 64 << 20;

/// Largest width that text is padded or indented to, and count that it is divided by.
const MAX_WIDTH: usize = 9999;

/// Runs `work`, which parses or renders, with a large stack.
///
/// # Errors
/// Those of `work`, and a thread that cannot be started or that panics.
pub(super) fn with_large_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TextError> + Send,
) -> Result<T, TextError> {
    let failed = |what: String| Err(TextError::Template { message: what });
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
        match builder.spawn_scoped(scope, work) {
            Ok(thread) => {
                thread.join().unwrap_or_else(|_| failed("the template engine failed inside".to_owned()))
            }
            Err(error) => failed(format!("cannot start a thread with a stack of {STACK} bytes: {error}")),
        }
    })
}

/// Refuses sources that would take the parser long.
///
/// # Errors
/// What is too much, where, and how much there may be.
pub(super) fn check_source(source: &str) -> Result<(), TextError> {
    let bad = |message: String| Err(TextError::TemplateSyntax { message });
    if source.len() > MAX_SOURCE {
        return bad(format!("it has {} bytes, expected at most {MAX_SOURCE}", source.len()));
    }
    let elifs = source.matches("elif").count();
    if elifs > MAX_ELIF {
        return bad(format!("it has {elifs} `elif`s, expected at most {MAX_ELIF}"));
    }
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        let (opening, inside) = rest[start..].split_at(2);
        if opening == "{#" {
            rest = inside.find("#}").map_or("", |end| &inside[end..]);
            continue;
        }
        let (tokens, length) = measure_tag(inside);
        if tokens > MAX_TAG {
            let line = source[..source.len() - inside.len()].matches('\n').count() + 1;
            return bad(format!(
                "the tag in line {line} has {tokens} words and signs, expected at most {MAX_TAG}"
            ));
        }
        let word =
            inside[..length].trim_matches(|letter: char| "-+%".contains(letter) || letter.is_whitespace());
        rest = &inside[length..];
        if word == "raw" {
            rest = rest.find("endraw").map_or("", |end| &rest[end..]);
        }
    }
    Ok(())
}

/// Words and signs, and bytes, from behind the opening of a tag to its closing.
fn measure_tag(inside: &str) -> (usize, usize) {
    let bytes = inside.as_bytes();
    let (mut tokens, mut depth, mut at) = (0, 0usize, 0);
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || !byte.is_ascii();
    while let Some(byte) = bytes.get(at) {
        if depth == 0 && matches!(bytes.get(at..at + 2), Some(b"}}" | b"%}")) {
            break;
        }
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => depth = depth.saturating_sub(1),
            b'"' | b'\'' => {
                at += 1;
                while bytes.get(at).is_some_and(|other| other != byte) {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            _ => {}
        }
        let goes_on = word(byte) && at > 0 && word(&bytes[at - 1]);
        if !goes_on && !byte.is_ascii_whitespace() {
            tokens += 1;
        }
        at += 1;
    }
    let end = (at.min(bytes.len())..=bytes.len()).find(|&end| inside.is_char_boundary(end));
    (tokens, end.unwrap_or(bytes.len()))
}

/// Replaces filters that allocate whatever number they are told.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter("indent", |state: &State, args: Rest<Value>| {
        let width = match args.last().cloned().and_then(|last| Kwargs::try_from(last).ok()) {
            Some(options) if options.has("width") => options.peek::<Value>("width")?,
            _ => args.get(1).cloned().unwrap_or_default(),
        };
        let width = checked("indent", &width)?;
        let lines = args.first().and_then(Value::as_str).map_or(0, |text| text.matches('\n').count() + 1);
        if lines.saturating_mul(width) > MAX_PROMPT {
            return Err(too_much(format!("indent: {lines} lines indented by {width} are too much text")));
        }
        Value::from_function(filters::indent).call(state, &args)
    });
    environment.add_filter("batch", |state: &State, args: Rest<Value>| {
        checked("batch", &args.get(1).cloned().unwrap_or_default())?;
        Value::from_function(filters::batch).call(state, &args)
    });
    environment.add_filter("slice", |state: &State, args: Rest<Value>| {
        checked("slice", &args.get(1).cloned().unwrap_or_default())?;
        Value::from_function(filters::slice).call(state, &args)
    });
    environment.add_filter("format", |state: &State, args: Rest<Value>| {
        let text = args.first().and_then(Value::as_str).unwrap_or_default();
        check_widths(text.split('%').skip(1).map(|spec| until(spec, char::is_alphabetic)))?;
        Value::from_function(filters::format).call(state, &args)
    });
    environment.set_unknown_method_callback(|state, value, method, args| {
        if let ("format", Some(text)) = (method, value.as_str()) {
            check_widths(text.split('{').skip(1).map(|spec| until(spec, |letter| letter == '}')))?;
        }
        if let Some(result) = value.as_str().and_then(|text| python::method(text, method, args)) {
            return result;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
}

fn until(text: &str, end: impl Fn(char) -> bool) -> &str {
    text.find(end).map_or(text, |end| &text[..end])
}

/// A number that is not too large; 0 for what is none, which the filter itself refuses.
fn checked(filter: &str, number: &Value) -> Result<usize, Error> {
    match number.as_usize().unwrap_or(0) {
        number if number <= MAX_WIDTH => Ok(number),
        number => Err(too_much(format!("{filter}: {number} is too much, expected at most {MAX_WIDTH}"))),
    }
}

/// Refuses format specifications with numbers above [`MAX_WIDTH`].
fn check_widths<'s>(mut specs: impl Iterator<Item = &'s str>) -> Result<(), Error> {
    let large = |number: &str| number.trim_start_matches('0').len() > 4;
    match specs.find(|spec| spec.split(|letter: char| !letter.is_ascii_digit()).any(large)) {
        Some(spec) => {
            Err(too_much(format!("format: `{spec}` asks for too much, expected at most {MAX_WIDTH}")))
        }
        None => Ok(()),
    }
}

fn too_much(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A writer that refuses more than a prompt can be.
#[derive(Default)]
pub(super) struct Limited(pub Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_PROMPT {
            return Err(std::io::Error::other(format!("the prompt grew past {MAX_PROMPT} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::super::testing::bytes_and;
    use super::super::{ChatInput, ChatTemplate};

    fn outcome(source: &str) -> String {
        let began = Instant::now();
        let input = ChatInput { messages: json!([]), ..ChatInput::default() };
        let outcome = ChatTemplate::new(source, &bytes_and(&[]))
            .and_then(|template| template.render(&input))
            .map_or_else(|error| error.to_string(), |rendered| rendered.text().into_owned());
        assert!(began.elapsed().as_secs() < 20, "took {:?}", began.elapsed());
        outcome
    }

    #[test]
    fn long_chains_of_operators_are_refused_and_shorter_ones_work() {
        for (before, link, after) in [
            ("", "not ", "1"),
            ("", "-", "x"),
            ("1", "+ 1", ""),
            ("a", ".b", ""),
            ("'a'", "|trim", ""),
            ("", "1 if 1 else ", "1"),
            ("'}}' ~ x", "()", ""),
            ("{'a': {}}", " or 1", ""),
        ] {
            for count in [8000, 50_000] {
                let long = outcome(&format!("{{# {{{{ ' #}}{{{{ {before}{}{after} }}}}", link.repeat(count)));
                assert!(long.contains("expected at most"), "{link}: {long}");
            }
            // Must end, in whatever way.
            outcome(&format!("{{{{ {before}{}{after} }}}}", link.repeat(450)));
        }
        assert_eq!(outcome(&format!("{{{{ {}1 }}}}", "- ".repeat(1900))), "1");
        let elifs = |count| format!("{{% if x %}}{}{{% else %}}y{{% endif %}}", "{%elif x%}".repeat(count));
        assert!(outcome(&elifs(8000)).contains("`elif`s"), "elif");
        assert_eq!(outcome(&elifs(2000)), "y");
    }

    #[test]
    fn text_is_no_tag() {
        assert_eq!(outcome(&"a.b|c ".repeat(5000)).len(), 30_000);
        let raw = format!("{{% raw %}}{{{{ ' {}{{% endraw %}}{{{{ 1 }}}}", "+ 1".repeat(5000));
        assert!(outcome(&raw).ends_with('1'));
        assert_eq!(outcome(&format!("{{{{ '{}' }}}}", "+.|é".repeat(5000))).chars().count(), 20_000);
    }

    #[test]
    fn large_widths_are_refused() {
        for source in [
            "{{ '{:>9999999999}'.format(1) }}",
            "{{ '{:.999999999f}'.format(1.5) }}",
            "{{ '%99999999999d'|format(1) }}",
            "{{ 'a\nb'|indent(9999999999) }}",
            "{{ 'a\nb'|indent(width=9999999999) }}",
            "{{ ('a\n' * 9999999)|indent(9999) }}",
            "{{ [1]|batch(9999999999, 2) }}",
            "{{ [1]|slice(9999999999) }}",
        ] {
            let error = outcome(source);
            assert!(error.contains("too much"), "{source}: {error}");
        }
        assert_eq!(
            outcome("{{ '20260101 {:>4}'.format(1) }}{{ '%03d 99999'|format(7) }}"),
            "20260101    1007 99999"
        );
        assert_eq!(outcome("{{ 'a\nb'|indent(2) }}{{ 'a\nb'|indent(width=1, first=true) }}"), "a\n  b a\n b");
        assert_eq!(
            outcome("{{ [1, 2, 3]|batch(2)|list }}{{ [1, 2]|slice(2)|list }}"),
            "[[1, 2], [3]][[1], [2]]"
        );
    }

    #[test]
    fn deeply_nested_values_overflow_no_stack() {
        let nest =
            "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}";
        for use_it in ["", "{{ ns.x }}", "{{ (ns.x|string)|length }}", "{{ ns.x|tojson }}"] {
            outcome(&format!("{nest}{use_it}"));
        }
    }
}
