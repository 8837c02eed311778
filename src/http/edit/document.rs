//! The text that is to be edited, and what is to be done with it.

use std::ops::Range;

use serde_json::Value;

use crate::http::error::ApiError;
use crate::http::fields::{Fields, quoted, wrong};

/// Longest name of a language.
const MOST_LANGUAGE: usize = 40;

/// Places in texts, in code points, are below this.
const MOST_PLACE: i64 = 1 << 40;

/// A text of which one part is to be written anew.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Document {
    code: String,
    /// The part, in bytes.
    part: Range<usize>,
    /// The part, in code points.
    points: Range<usize>,
}

/// What is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) document: Document,
    /// Whether a part is selected; otherwise all of the text is to be written anew.
    pub(super) selection: bool,
    /// What to do; empty: whatever fits.
    pub(super) instruction: String,
    /// What the text is written in, if that is said.
    pub(super) language: String,
}

impl Document {
    /// A text of which the code points from `start` to `end` are to be written anew; `None` past its end.
    fn new(code: String, start: usize, end: usize) -> Option<Self> {
        let mut places = code.char_indices().map(|(place, _)| place).chain([code.len()]);
        let first = places.nth(start)?;
        let last = if end == start { first } else { places.nth(end - start - 1)? };
        Some(Self { code, part: first..last, points: start..end })
    }

    fn whole(code: String) -> Self {
        Self { part: 0..code.len(), points: 0..code.chars().count(), code }
    }

    /// What stands before the part.
    pub(super) fn before(&self) -> &str {
        &self.code[..self.part.start]
    }

    /// The part as it is.
    pub(super) fn part(&self) -> &str {
        &self.code[self.part.clone()]
    }

    /// What stands behind it.
    pub(super) fn after(&self) -> &str {
        &self.code[self.part.end..]
    }

    /// Where the part is, in code points.
    pub(super) fn points(&self) -> Range<usize> {
        self.points.clone()
    }

    /// The text with `part` in place of the part.
    pub(super) fn with(&self, part: &str) -> String {
        [self.before(), part, self.after()].concat()
    }
}

impl Wish {
    /// Reads the fields that are an edit's own.
    pub(super) fn read(fields: &mut Fields) -> Result<Self, ApiError> {
        let Some(code) = fields.string("code")? else {
            return Err(ApiError::field("code", "`code` is missing; expected the text that is to be edited"));
        };
        let instruction = fields.string("instruction")?.unwrap_or_default().trim().to_owned();
        let language = language(fields)?;
        let range = fields.object("selection")?;
        let selection = match fields.string("mode")?.as_deref() {
            Some("selection") => true,
            Some("whole") => false,
            None => range.is_some(),
            Some(_) if range.is_none() => {
                return Err(ApiError::field("mode", "`mode`: expected \"selection\" or \"whole\""));
            }
            Some(other) => {
                return Err(wrong("mode", &Value::from(other), "\"selection\" or \"whole\""));
            }
        };
        let document = match (selection, range) {
            (false, None) if instruction.is_empty() => {
                let message = "`instruction` is missing; a whole text is not written anew without one";
                return Err(ApiError::field("instruction", message));
            }
            (false, None) => Document::whole(code),
            (false, Some(_)) => {
                return Err(ApiError::field(
                    "selection",
                    "`selection` is only allowed with `mode`: \"selection\"",
                ));
            }
            (true, None) => {
                let message = "`selection` is missing; expected {\"start\", \"end\"} in Unicode code points";
                return Err(ApiError::field("selection", message));
            }
            (true, Some(range)) => selected(code, Fields::new(range))?,
        };
        Ok(Self { document, selection, instruction, language })
    }
}

fn language(fields: &mut Fields) -> Result<String, ApiError> {
    let language = fields.string("language")?.unwrap_or_default().trim().to_owned();
    let odd = |c: char| c.is_control() || c.is_whitespace() || c == '`';
    if language.contains(odd) || language.chars().count() > MOST_LANGUAGE {
        let message = format!(
            "`language`: found {}, expected a name without spaces, at most {MOST_LANGUAGE} characters, e.g. \"rust\"",
            quoted(&language)
        );
        return Err(ApiError::field("language", message));
    }
    Ok(language)
}

fn selected(code: String, mut range: Fields) -> Result<Document, ApiError> {
    let mut place = |name: &str| {
        let param = format!("selection.{name}");
        let value = range.take(name).unwrap_or_default();
        range.put(&param, value.clone());
        let place = range.integer(&param, 0, MOST_PLACE)?.and_then(|place| usize::try_from(place).ok());
        place.ok_or_else(|| {
            let message =
                format!("`{param}` is missing; expected a place in the text, in Unicode code points");
            ApiError::field(param, message)
        })
    };
    let (start, end) = (place("start")?, place("end")?);
    if code.is_empty() {
        return Err(ApiError::field(
            "selection",
            "`selection`: `code` is empty, so there is nothing to select; use `mode`: \"whole\"",
        ));
    }
    if start > end {
        let message = format!("`selection.start` ({start}) is behind `selection.end` ({end})");
        return Err(ApiError::field("selection.start", message));
    }
    let length = code.chars().count();
    Document::new(code, start, end).ok_or_else(|| {
        let message =
            format!("`selection.end`: found {end}, but `code` has {length} Unicode code points; count code points, not bytes or UTF-16 units");
        ApiError::field("selection.end", message)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Wish, ApiError> {
        let Value::Object(body) = body else { panic!("a request is an object") };
        Wish::read(&mut Fields::new(body))
    }

    #[test]
    fn places_are_code_points() {
        let code = "a😀é\u{301}\nz";
        let points: Vec<char> = code.chars().collect();
        for start in 0..=points.len() {
            for end in start..=points.len() {
                let wish = read(json!({"code": code, "selection": {"start": start, "end": end}})).unwrap();
                let document = wish.document;
                assert_eq!(document.before(), points[..start].iter().collect::<String>());
                assert_eq!(document.part(), points[start..end].iter().collect::<String>());
                assert_eq!(document.after(), points[end..].iter().collect::<String>());
                assert_eq!(document.with(document.part()), code);
            }
            assert!(Document::new(code.to_owned(), start, points.len() + 1).is_none());
        }
        assert!(Document::new(code.to_owned(), points.len() + 1, points.len() + 1).is_none());
    }

    #[test]
    fn the_mode_follows_from_the_selection_if_it_is_not_said() {
        let wish = read(json!({"code": "a", "instruction": " x "})).unwrap();
        assert_eq!((wish.selection, wish.instruction.as_str(), wish.document.part()), (false, "x", "a"));
        assert!(read(json!({"code": "a", "selection": {"start": 0, "end": 0}})).unwrap().selection);
    }
}
