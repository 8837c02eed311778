//! Arguments as Gemma writes them, as a grammar: of those schemas that this grammar holds to the letter. It makes nothing
//! that its schema forbids, but not everything that it allows: members come in order, and free ones only where none are
//! listed.

use std::collections::BTreeMap;
use std::slice;

use serde_json::{Map, Value};

use super::GEMMA_QUOTE;
use super::grammar::Lark;

/// Words that say nothing of values, or what others refer to.
const NOTES: [&str; 12] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$defs",
    "definitions",
    // Of JSON's white space, which there is none of here.
    "x-guidance",
];

/// Words that say by themselves what a value is.
const WHOLE: [&str; 6] = ["enum", "const", "$ref", "anyOf", "allOf", "oneOf"];

/// Words that say more of values of a type.
const TYPED: [(&str, &[&str]); 5] = [
    ("string", &["minLength", "maxLength"]),
    ("number", NUMBERS),
    ("integer", NUMBERS),
    ("array", &["items", "minItems", "maxItems"]),
    ("object", &["properties", "required", "additionalProperties", "minProperties", "maxProperties"]),
];

const NUMBERS: &[&str] = &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];

/// All types, of which whole numbers are numbers.
const TYPES: [&str; 6] = ["string", "number", "boolean", "null", "array", "object"];

/// Most characters or items that are counted.
const COUNTED: u64 = 10_000;

/// A schema says what the grammar cannot hold, or is none.
struct Beyond;

/// The rule of an object with its braces; none where the schema says what this grammar cannot hold.
pub(super) fn object(lark: &mut Lark, schema: &Value) -> Option<String> {
    lark.try_to(|lark| {
        let mut notation = Notation { lark, root: schema, referred: BTreeMap::new(), waiting: Vec::new() };
        let rule = notation.value(schema).ok()?;
        // One after the other, not one inside the other: there may be a long chain of them.
        while let Some(pointer) = notation.waiting.pop() {
            let value = notation.value(schema.pointer(&pointer)?).ok()?;
            let name = notation.referred.get(&pointer)?;
            notation.lark.rule(name, &value);
        }
        Some(rule)
    })
}

/// The rules that those of schemas are made of.
pub(super) fn rules(lark: &mut Lark) {
    let quote = lark.marker(GEMMA_QUOTE);
    lark.rule("string", &format!("{quote} TEXT {quote}"));
    lark.rule("TEXT", "/(.|\\n)*/");
    lark.rule("KEY", "/[A-Za-z_][A-Za-z0-9_]*/");
    lark.rule("number", "/-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,10})?/");
    lark.rule("integer", "/-?(0|[1-9][0-9]{0,15})/");
    lark.rule("boolean", "\"true\" | \"false\"");
    lark.rule("value", "string | number | boolean | \"null\" | list | object");
    lark.rule("list", "\"[\" (value (\",\" value)*)? \"]\"");
    lark.rule("object", "\"{\" (KEY \":\" value (\",\" KEY \":\" value)*)? \"}\"");
}

struct Notation<'l, 't, 's> {
    lark: &'l mut Lark<'t>,
    /// What references point into.
    root: &'s Value,
    /// Rules of what was referred to.
    referred: BTreeMap<String, String>,
    /// Those of them that are not written yet.
    waiting: Vec<String>,
}

impl Notation<'_, '_, '_> {
    /// The name of the rule of a value.
    fn value(&mut self, schema: &Value) -> Result<String, Beyond> {
        let schema = match schema {
            Value::Object(schema) => schema,
            Value::Bool(true) => return Ok("value".to_owned()),
            _ => return Err(Beyond),
        };
        let mut whole = None;
        for word in schema.keys().map(String::as_str).filter(|word| !NOTES.contains(word)) {
            if WHOLE.contains(&word) {
                if whole.replace(word).is_some() {
                    return Err(Beyond);
                }
            } else if word != "type" && !TYPED.iter().any(|(_, words)| words.contains(&word)) {
                return Err(Beyond);
            }
        }
        let Some(word) = whole else { return self.typed(schema) };
        let beside = |other: &&String| *other != word && !NOTES.contains(&other.as_str());
        let beside: Vec<&String> = schema.keys().filter(beside).collect();
        match (word, &schema[word], beside.as_slice()) {
            ("const", value, []) => self.listed(slice::from_ref(value), None),
            ("const", value, [kind]) if *kind == "type" => {
                self.listed(slice::from_ref(value), Some(&kinds(schema)?))
            }
            ("enum", Value::Array(list), []) => self.listed(list, None),
            ("enum", Value::Array(list), [kind]) if *kind == "type" => {
                self.listed(list, Some(&kinds(schema)?))
            }
            ("$ref", Value::String(pointer), []) => self.referred(pointer),
            ("anyOf", Value::Array(parts), []) if !parts.is_empty() => {
                let parts: Result<Vec<_>, _> = parts.iter().map(|part| self.value(part)).collect();
                Ok(self.ruled(&parts?.join(" | ")))
            }
            ("allOf" | "oneOf", Value::Array(parts), []) if parts.len() == 1 => self.value(&parts[0]),
            _ => Err(Beyond),
        }
    }

    /// A rule of its own.
    fn ruled(&mut self, body: &str) -> String {
        let name = self.lark.name();
        self.lark.rule(&name, body);
        name
    }

    /// What a schema of this document is at another place of it.
    fn referred(&mut self, reference: &str) -> Result<String, Beyond> {
        let pointer = reference.strip_prefix('#').filter(|pointer| !pointer.contains('%')).ok_or(Beyond)?;
        if let Some(name) = self.referred.get(pointer) {
            return Ok(name.clone());
        }
        if self.root.pointer(pointer).is_none_or(refers) {
            return Err(Beyond);
        }
        let name = self.lark.name();
        self.referred.insert(pointer.to_owned(), name.clone());
        self.waiting.push(pointer.to_owned());
        Ok(name)
    }

    /// One of some values, as far as they are of the right types.
    fn listed(&mut self, values: &[Value], kinds: Option<&[&str]>) -> Result<String, Beyond> {
        let right =
            |value: &&Value| kinds.is_none_or(|kinds| kinds.iter().any(|kind| is_of_type(value, kind)));
        let ways: Vec<String> = values.iter().filter(right).map(|value| self.literal(value)).collect();
        if ways.is_empty() {
            return Err(Beyond);
        }
        Ok(self.ruled(&ways.join(" | ")))
    }

    /// A value by its types and what is said of each.
    fn typed(&mut self, schema: &Map<String, Value>) -> Result<String, Beyond> {
        let kinds = kinds(schema)?;
        let mut ways = Vec::with_capacity(kinds.len());
        for &kind in &kinds {
            let words = TYPED.iter().find(|(name, _)| *name == kind).map_or(&[][..], |(_, words)| *words);
            let plain = !words.iter().any(|word| schema.contains_key(*word));
            let way = match kind {
                "null" => "\"null\"".to_owned(),
                "array" if plain => "list".to_owned(),
                _ if plain => kind.to_owned(),
                "string" => self.string(schema)?,
                "array" => self.list(schema)?,
                "object" => self.members(schema)?,
                _ => self.number(schema, kind)?,
            };
            ways.push(way);
        }
        Ok(self.ruled(&ways.join(" | ")))
    }

    /// A text of so many characters.
    fn string(&mut self, schema: &Map<String, Value>) -> Result<String, Beyond> {
        let (least, most) = range(schema, "minLength", "maxLength")?;
        let quote = self.lark.marker(GEMMA_QUOTE);
        let most = most.map(|most| most.to_string()).unwrap_or_default();
        let text = self.lark.name().to_uppercase();
        self.lark.rule(&text, &format!("/(.|\\n){{{least},{most}}}/"));
        Ok(format!("{quote} {text} {quote}"))
    }

    /// Numbers are written as in JSON.
    fn number(&mut self, schema: &Map<String, Value>, kind: &str) -> Result<String, Beyond> {
        let mut number = Map::new();
        number.insert("type".to_owned(), kind.into());
        for &word in NUMBERS {
            match schema.get(word) {
                None => {}
                Some(bound @ Value::Number(_)) => drop(number.insert(word.to_owned(), bound.clone())),
                Some(_) => return Err(Beyond),
            }
        }
        number.insert("x-guidance".to_owned(), serde_json::json!({ "whitespace_flexible": false }));
        Ok(self.ruled(&format!("%json {}", Value::from(number))))
    }

    fn list(&mut self, schema: &Map<String, Value>) -> Result<String, Beyond> {
        let (least, most) = range(schema, "minItems", "maxItems")?;
        if most == Some(0) {
            return Ok("\"[\" \"]\"".to_owned());
        }
        let item = self.value(schema.get("items").unwrap_or(&Value::Bool(true)))?;
        let more = least.saturating_sub(1);
        let mut items = item.clone();
        if more > 0 {
            items += &format!(" (\",\" {item}){{{more}}}");
        }
        items += &match most {
            None => format!(" (\",\" {item})*"),
            Some(most) if most > more + 1 => format!(" (\",\" {item}){{0,{}}}", most - more - 1),
            Some(_) => String::new(),
        };
        Ok(if least == 0 { format!("\"[\" ({items})? \"]\"") } else { format!("\"[\" {items} \"]\"") })
    }

    /// An object with its members in order, those that are required always.
    fn members(&mut self, schema: &Map<String, Value>) -> Result<String, Beyond> {
        let (no_properties, no_names, anything) = (Map::new(), Vec::new(), Value::Bool(true));
        let properties = schema.get("properties").unwrap_or(&Value::Null);
        let properties = match properties {
            Value::Null => &no_properties,
            other => other.as_object().ok_or(Beyond)?,
        };
        let required = match schema.get("required") {
            None => &no_names,
            Some(names) => names.as_array().ok_or(Beyond)?,
        };
        let others = schema.get("additionalProperties").unwrap_or(&anything);
        // Each name with its schema and whether it must come.
        let mut members: BTreeMap<(String, &str), (&Value, bool)> = BTreeMap::new();
        let place = |name: &str| name.to_lowercase();
        for (name, schema) in properties {
            members.insert((place(name), name.as_str()), (schema, false));
        }
        for name in required {
            let name = name.as_str().ok_or(Beyond)?;
            members.entry((place(name), name)).or_insert((others, true)).1 = true;
        }
        let needed = members.values().filter(|(_, required)| *required).count() as u64;
        let free = members.is_empty() && *others != Value::Bool(false);
        let (least, most) = (count(schema, "minProperties")?, count(schema, "maxProperties")?);
        // Numbers of members are held where they hold by themselves.
        if least.is_some_and(|least| least > needed)
            || most.is_some_and(|most| free || most < members.len() as u64)
        {
            return Err(Beyond);
        }
        if free {
            let value = self.value(others)?;
            return Ok(format!("\"{{\" (KEY \":\" {value} (\",\" KEY \":\" {value})*)? \"}}\""));
        }
        // `…f3` is what may stand from the third member on if nothing stands before it, `…s3` if something does.
        let rule = self.lark.name();
        for (place, ((_, name), (schema, required))) in members.iter().enumerate() {
            let value = self.value(schema)?;
            let pair = format!("{} {value}", self.key(name));
            let next = place + 1;
            let [mut first, mut later] =
                [format!("{pair} {rule}s{next}"), format!("\",\" {pair} {rule}s{next}")];
            if !required {
                first += &format!(" | {rule}f{next}");
                later += &format!(" | {rule}s{next}");
            }
            self.lark.rule(&format!("{rule}f{place}"), &first);
            self.lark.rule(&format!("{rule}s{place}"), &later);
        }
        let end = members.len();
        self.lark.rule(&format!("{rule}f{end}"), "\"\"");
        self.lark.rule(&format!("{rule}s{end}"), "\"\"");
        Ok(format!("\"{{\" {rule}f0 \"}}\""))
    }

    /// A name and its colon: in quotes where it would be read as something else without.
    fn key(&self, name: &str) -> String {
        let plain = |letter: char| letter.is_alphanumeric() || "_-.$@/".contains(letter);
        match !name.is_empty() && name.chars().all(plain) {
            true => self.lark.text(&format!("{name}:")),
            false => self.lark.text(&format!("{}:", Value::from(name))),
        }
    }

    /// One value.
    fn literal(&self, value: &Value) -> String {
        let joined = |parts: Vec<String>| parts.join(" \",\" ");
        match value {
            Value::String(text) => {
                let quote = self.lark.marker(GEMMA_QUOTE);
                format!("{quote} {} {quote}", self.lark.text(text))
            }
            Value::Array(items) => {
                let items = items.iter().map(|item| self.literal(item)).collect();
                format!("\"[\" {} \"]\"", joined(items))
            }
            Value::Object(members) => {
                let member =
                    |(name, value): (&String, &Value)| format!("{} {}", self.key(name), self.literal(value));
                format!("\"{{\" {} \"}}\"", joined(members.iter().map(member).collect()))
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => self.lark.text(&value.to_string()),
        }
    }
}

/// The types that a schema names: all of them if it names none.
fn kinds(schema: &Map<String, Value>) -> Result<Vec<&str>, Beyond> {
    let known = |kind: &&str| TYPES.contains(kind) || *kind == "integer";
    let one = |kind: &Value| kind.as_str().filter(known).is_some();
    match schema.get("type") {
        None => Ok(TYPES.to_vec()),
        Some(Value::Array(list)) if !list.is_empty() && list.iter().all(one) => {
            Ok(list.iter().filter_map(Value::as_str).collect())
        }
        Some(kind) if one(kind) => Ok(kind.as_str().into_iter().collect()),
        Some(_) => Err(Beyond),
    }
}

/// Whether a schema is, or may be, what it refers to: such references may go round in circles.
fn refers(schema: &Value) -> bool {
    let parts = ["anyOf", "allOf", "oneOf"].iter().filter_map(|word| schema.get(word)?.as_array());
    schema.get("$ref").is_some() || parts.flatten().any(refers)
}

fn is_of_type(value: &Value, kind: &str) -> bool {
    match value {
        Value::Null => kind == "null",
        Value::Bool(_) => kind == "boolean",
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
        Value::Number(number) => {
            let whole = || number.as_f64().is_some_and(|number| number.fract() == 0.0);
            kind == "number" || (kind == "integer" && whole())
        }
    }
}

/// The least and the largest number of characters or items.
fn range(schema: &Map<String, Value>, least: &str, most: &str) -> Result<(u64, Option<u64>), Beyond> {
    let (least, most) = (count(schema, least)?.unwrap_or(0), count(schema, most)?);
    match most.unwrap_or(least) {
        largest if least <= largest && largest <= COUNTED => Ok((least, most)),
        _ => Err(Beyond),
    }
}

/// A number of characters, items or members.
fn count(schema: &Map<String, Value>, word: &str) -> Result<Option<u64>, Beyond> {
    schema.get(word).map(|count| count.as_u64().ok_or(Beyond)).transpose()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Syntax, grammar};
    use super::*;
    use crate::text::testing::bytes_and;

    #[test]
    fn what_the_notation_cannot_hold_is_written_as_json() {
        let tokenizer = bytes_and(&["<|tool_call>", "<tool_call|>", "<|\"|>"]);
        let held = |schema: Value| {
            let tool = json!({"function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema},
                "$defs": {"x": {"pattern": "a"}, "y": {"type": "null"},
                    "w": {"$ref": "#/$defs/y"}, "v": {"anyOf": [{"type": "null"}, {"oneOf": [{"$ref": "#/$defs/v"}]}]}}}}});
            !grammar(Syntax::Gemma, &[tool], false, &tokenizer).contains("arguments0: %json")
        };
        for schema in [
            json!({}),
            json!(true),
            json!({"type": "string", "title": "t", "default": 1, "minLength": 2}),
            json!({"type": ["string", "null"], "maximum": 2, "maxItems": 3}),
            json!({"type": "array", "items": {"$ref": "#/$defs/y"}}),
            json!({"oneOf": [{"type": "integer", "exclusiveMaximum": 3}]}),
            json!({"properties": {"pattern": {"const": {"pattern": 1}}}, "minProperties": 0}),
        ] {
            assert!(held(schema.clone()), "{schema}");
        }
        for schema in [
            json!(false),
            json!(1),
            json!({"type": "text"}),
            json!({"type": []}),
            json!({"enum": []}),
            json!({"enum": [1], "type": "string"}),
            json!({"const": 1, "maximum": 2}),
            json!({"anyOf": [{"type": "null"}], "type": "null"}),
            json!({"anyOf": [{"type": "null"}], "const": null}),
            json!({"oneOf": [{}, {}]}),
            json!({"$ref": "#/$defs/x"}),
            json!({"$ref": "#/$defs/z"}),
            json!({"$ref": "#/$defs/w"}),
            json!({"$ref": "#/$defs/v"}),
            json!({"$ref": "other.json"}),
            json!({"$id": "a", "type": "null"}),
            json!({"not": {}}),
            json!({"format": "date"}),
            json!({"items": [{}]}),
            json!({"uniqueItems": true}),
            json!({"propertyNames": {"maxLength": 2}}),
            json!({"patternProperties": {"a": {}}}),
            json!({"type": "object", "minProperties": 1}),
            json!({"type": "object", "maxProperties": 1}),
            json!({"type": "string", "minLength": 3, "maxLength": 1}),
            json!({"type": "string", "maxLength": 1_000_000}),
            json!({"type": "number", "exclusiveMinimum": true}),
            json!({"type": "array", "items": {"type": "object", "properties": {"b": {"if": {}}}}}),
        ] {
            assert!(!held(schema.clone()), "{schema}");
        }
    }
}
