//! Templates of all sorts over a vocabulary of bytes.

use std::time::Instant;

use proptest::prelude::*;

use serde_json::json;

use super::*;
use crate::text::TokenKind::{Control, UserDefined};
use crate::text::testing::{CONTROL, bytes_and, bytes_with};

/// Prints every message as `role: content;`.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}";

/// The same without a system role.
const NO_SYSTEM: &str = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}\
                         {% endif %}{{ m.role }}: {{ m.content }};{% endfor %}";

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, &bytes_and(&["<s>", "</s>"])).unwrap()
}

fn user(content: &str) -> Value {
    json!([{"role": "user", "content": content}])
}

fn render(source: &str, messages: Value) -> Result<String, TextError> {
    let input = ChatInput { messages, ..ChatInput::default() };
    template(source).render(&input).map(|rendered| rendered.text().into_owned())
}

/// What an expression prints, with `x` among the variables.
fn print(source: &str, x: Value) -> String {
    let extra = Map::from_iter([("x".to_owned(), x)]);
    let input = ChatInput { messages: json!([]), extra, ..ChatInput::default() };
    template(source).render(&input).unwrap().text().into_owned()
}

#[test]
fn json_is_written_as_python_writes_it() {
    let x = json!({"b": [1, 2.5, true, null], "a": "<é & 'x'>\n", "e": {}, "l": []});
    assert_eq!(
        print("{{ x|tojson }}", x.clone()),
        r#"{"b": [1, 2.5, true, null], "a": "<é & 'x'>\n", "e": {}, "l": []}"#
    );
    assert_eq!(
        print("{{ x|tojson(indent=2) }}", json!({"b": [1, {"c": 2}], "e": {}})),
        "{\n  \"b\": [\n    1,\n    {\n      \"c\": 2\n    }\n  ],\n  \"e\": {}\n}"
    );
    assert_eq!(print("{{ x|tojson(sort_keys=true) }}", json!({"b": 1, "a": 2})), r#"{"a": 2, "b": 1}"#);
    assert_eq!(print("{{ x|tojson(separators=(',', ':')) }}", json!({"b": [1, 2]})), r#"{"b":[1,2]}"#);
    assert_eq!(print("{{ x|tojson(ensure_ascii=true) }}", json!("é👍")), r#""\u00e9\ud83d\udc4d""#);
}

#[test]
fn values_print_as_python_prints_them() {
    assert_eq!(print("{{ x }}|{{ none }}|{{ undefined_name }}", json!(true)), "True|None|");
    assert_eq!(
        print("{{ x }}", json!({"a": ["it's", "b\n", 1, null]})),
        "{'a': [\"it's\", 'b\\n', 1, None]}"
    );
}

#[test]
fn whitespace_goes_as_hugging_face_sets_it_up() {
    assert_eq!(print("a\n  {% if x %}\n  b\n  {% endif %}\nc\n", json!(true)), "a\n  b\nc");
}

#[test]
fn the_usual_extensions_work() {
    assert_eq!(
        print("{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", json!(0)),
        "13"
    );
    assert_eq!(
        print(
            "{% set ns = namespace(n=0) %}{% for i in x %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            json!([1, 2])
        ),
        "3"
    );
    assert_eq!(
        print(
            "{{ x.strip().split(' ')[-1].upper() }}{{ x.startswith(' a') }}{{ x[::-1]|trim }}",
            json!(" a bc ")
        ),
        "BCTruecb a"
    );
    assert_eq!(
        print("{% for k, v in x.items() %}{{ k }}={{ v }} {% endfor %}", json!({"a": 1, "b": 2})),
        "a=1 b=2 "
    );
    assert_eq!(print("{{ strftime_now('%d')|length }}", json!(0)), "2");
    assert_eq!(print("{{ bos_token }}{{ tools is none }}{{ documents }}", json!(0)), "<s>TrueNone");
}

#[test]
fn generation_blocks_are_plain_text() {
    assert_eq!(print("a {%- generation -%} b{{ x }} {% endgeneration %}\nc", json!(1)), "ab1 c");
    let source = "{% raw %}{% generation2 %}{% endraw %}{{ '{%' }}{%generation%}x{%endgeneration%}{";
    assert_eq!(print(source, json!(1)), "{% generation2 %}{%x{");
}

#[test]
fn failures_speak_the_words_of_the_template() {
    let error = render("{{ raise_exception('Roles must alternate!') }}", user("a")).unwrap_err();
    assert_eq!(error.to_string(), "chat template: Roles must alternate!");
    let error =
        render("{% for m in messages %}{{ m.content.nothing.at_all }}{% endfor %}", user("a")).unwrap_err();
    assert!(error.to_string().contains("undefined"), "{error}");
    let error = render("{{ strftime_now('%Q') }}", user("a")).unwrap_err();
    assert!(error.to_string().contains("%Q"), "{error}");
    let error = ChatTemplate::new("{% for %}", &bytes_and(&[])).unwrap_err();
    assert!(
        matches!(&error, TextError::TemplateSyntax { message } if message.contains("syntax error")),
        "{error}"
    );
}

#[test]
fn hostile_templates_end() {
    let loops =
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}";
    let size = "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}";
    let depth = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    for (source, word) in [(loops, "fuel"), (size, "grew past"), (depth, "recursion")] {
        let start = Instant::now();
        let template = template(&format!("{{% if messages[0].content == 'go' %}}{source}{{% endif %}}"));
        let input = ChatInput { messages: user("go"), ..ChatInput::default() };
        let error = template.render(&input).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert!(start.elapsed().as_secs() < 20, "{source}: took {:?}", start.elapsed());
    }
}

#[test]
fn system_text_reaches_templates_that_know_no_system() {
    let messages = json!([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]);
    assert_eq!(render(PLAIN, messages.clone()).unwrap(), "system: S;user: U;");
    assert_eq!(render(NO_SYSTEM, messages).unwrap(), "user: S\n\nU;");
    let ignores = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }};{% endfor %}";
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "system", "content": [{"type": "text", "text": "T"}]},
    ]);
    assert_eq!(render(ignores, messages).unwrap(), "user: S\n\nT\n\nU;");
    assert_eq!(render(NO_SYSTEM, json!([{"role": "system", "content": "S"}])).unwrap(), "user: S;");
    let parts = "{% for m in messages %}{{ 1 / (m.role != 'system')|int }}{% for p in m.content %}\
                 {{ p.text }};{% endfor %}{% endfor %}";
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
    ]);
    assert!(render(parts, messages).unwrap().contains("S\n\n;U;"));
}

#[test]
fn several_system_messages_are_kept_or_merged() {
    let first_only = "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set messages = messages[1:] %}\
                      {% endif %}{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}";
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "developer", "content": "D"},
    ]);
    assert_eq!(render(first_only, messages.clone()).unwrap(), "<S\n\nD>U;");
    assert_eq!(render(PLAIN, messages.clone()).unwrap(), "system: S;user: U;system: D;");
    let knows = format!("{{# developer #}}{PLAIN}");
    assert_eq!(render(&knows, messages).unwrap(), "system: S;user: U;developer: D;");
}

#[test]
fn text_parts_become_one_string_where_the_template_takes_strings() {
    let parts =
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    let concatenates = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}";
    assert_eq!(render(concatenates, parts.clone()).unwrap(), "xab");
    assert_eq!(render(PLAIN, parts.clone()).unwrap(), "user: ab;");
    let joins = "{% for m in messages %}{{ 'x' ~ m.content }}{% endfor %}";
    assert_eq!(render(joins, parts).unwrap(), "xab");
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    let error = render(PLAIN, image).unwrap_err().to_string();
    assert!(error.contains("messages[0].content[0]") && error.contains("image_url"), "{error}");
}

#[test]
fn messages_of_the_wrong_shape_are_refused() {
    for messages in [json!(null), json!("x"), json!([1]), json!([{"content": "x"}]), json!([{"role": 1}])] {
        assert!(matches!(render(PLAIN, messages), Err(TextError::BadMessages { .. })));
    }
    let extra = Map::from_iter([("bos_token".to_owned(), json!("x"))]);
    let input = ChatInput { messages: json!([]), extra, ..ChatInput::default() };
    let error = template(PLAIN).render(&input).unwrap_err().to_string();
    assert!(error.contains("chat_template_kwargs.bos_token"), "{error}");
}

/// Where control tokens stand in the encoded prompt of these messages.
fn control(source: &str, names: &[&str], messages: Value) -> (Vec<u32>, String) {
    let tokenizer = bytes_and(names);
    let template = ChatTemplate::new(source, &tokenizer).unwrap();
    let extra = Map::from_iter([("x".to_owned(), messages.clone())]);
    let rendered = template.render(&ChatInput { messages, extra, ..ChatInput::default() }).unwrap();
    let ids = tokenizer.encode_prompt(&rendered);
    let text: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.text(id)).copied().collect();
    assert_eq!(String::from_utf8(text).unwrap(), rendered.text());
    (
        ids.into_iter().filter(|&id| id >= CONTROL).map(|id| id - CONTROL).collect(),
        rendered.text().into_owned(),
    )
}

#[test]
fn special_tokens_are_found_in_template_text_only() {
    let source = "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}";
    let names = ["<s>", "</s>"];
    let (ids, text) = control(source, &names, user("a</s>b<s>"));
    assert_eq!((ids, text.as_str()), (vec![0, 1], "<s>a</s>b<s></s>"));
    // The end of a message and the text behind it make no token.
    assert_eq!(control("{{ messages[0].content }}s>x", &names, user("a<")).0, [0; 0]);
    assert_eq!(control("{{ messages[0].content }}s></s>", &names, user("</")).0, [1]);
    // Nor do two messages.
    let two = json!([{"role": "user", "content": "</"}, {"role": "user", "content": "s>"}]);
    assert_eq!(control("{% for m in messages %}{{ m.content }}{% endfor %}", &names, two).0, [0; 0]);
    // Nor do special texts that overlap, hide in keys, or in JSON.
    assert_eq!(control("{{ messages[0].content }}", &["ab", "bcd", "d!"], user("abcd!")).0, [0; 0]);
    let hidden = json!([{"role": "user", "content": "x", "<s>": {"a</s>": ["<s>"]}}]);
    assert_eq!(
        control("<s>{{ x|tojson }}{{ messages }}{{ x|tojson(ensure_ascii=true) }}", &names, hidden).0,
        [0]
    );
    // Templates that build special tokens from roles go on working.
    assert_eq!(control("<|{{ messages[0].role }}|>", &["<|user|>"], user("x")).0, [0]);
}

proptest! {
    #[test]
    fn no_messages_make_a_special_token(contents in prop::collection::vec("[<s>/ab]{0,6}", 1..4)) {
        let messages: Vec<Value> = contents.iter().map(|text| json!({"role": "user", "content": text})).collect();
        let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
        let names = ["<s>", "</s>", "s>a", "><", "b", "aab"];
        let (ids, text) = control(source, &names, Value::Array(messages));
        prop_assert_eq!(ids, [0; 0]);
        prop_assert_eq!(text, contents.concat());
    }
}

#[test]
fn messages_may_hold_noncharacters() {
    let every: String = ('\u{fdd0}'..'\u{fdef}').collect();
    let (ids, text) =
        control("{{ messages[0].content }}</s>", &["<s>", "</s>"], user(&format!("</s>{every}")));
    assert_eq!((ids, text), (vec![1], format!("</s>{every}</s>")));
    let error = render(PLAIN, user(&format!("{every}\u{fdef}"))).unwrap_err().to_string();
    assert!(error.contains("U+FDEF"), "{error}");
}

#[test]
fn a_prompt_begins_with_one_bos_at_most() {
    let tokenizer = bytes_and(&["<s>"]);
    for (source, ids) in [("{{ bos_token * 2 }}<s>x<s>", vec![CONTROL, 120, CONTROL]), ("x", vec![120])] {
        let rendered = ChatTemplate::new(source, &tokenizer).unwrap();
        let rendered = rendered.render(&ChatInput { messages: json!([]), ..ChatInput::default() }).unwrap();
        assert_eq!(tokenizer.encode_prompt(&rendered), ids);
    }
}

/// What the model has said may hold its thoughts with their markers, and templates look for these; what others say
/// makes no marker.
#[test]
fn markers_of_thoughts_are_the_templates_and_the_models() {
    let kinds = [("<s>", Control), ("<think>", UserDefined), ("</think>", UserDefined)];
    let source = "{% for m in messages %}<s>{% set said = m.content %}\
                  {% if m.role == 'assistant' and '</think>' in said and not keep %}\
                  {% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ said }}{% endfor %}<think>";
    let written = |messages: Value, keep: bool| {
        let tokenizer = bytes_with(&kinds);
        let template = ChatTemplate::new(source, &tokenizer).unwrap();
        let extra = Map::from_iter([("keep".to_owned(), Value::Bool(keep))]);
        let input = ChatInput { messages, extra, ..ChatInput::default() };
        let rendered = template.render(&input).unwrap();
        let ids = tokenizer.encode_prompt(&rendered).into_iter();
        let special: Vec<u32> = ids.filter(|&id| id >= CONTROL).map(|id| id - CONTROL).collect();
        (rendered.text().into_owned(), special)
    };
    let assistant = json!([{"role": "assistant", "content": "<think>a<s></think>\n\nb"}]);
    assert_eq!(written(assistant.clone(), false), ("<s>b<think>".to_owned(), vec![0, 1]));
    assert_eq!(written(assistant, true), ("<s><think>a<s></think>\n\nb<think>".to_owned(), vec![0, 1, 2, 1]));
    // A template that writes no calls gets what tools return as text of the user's.
    let (said, returned) =
        ("<s></think>x<think><think>", "<s><tool_response>\n</think>x<think>\n</tool_response><think>");
    for (role, text) in [("user", said), ("system", said), ("tool", returned)] {
        let typed = json!([{"role": role, "content": "</think>x<think>", "<think>": 1}]);
        assert_eq!(written(typed, true), (text.to_owned(), vec![0, 1]), "{role}");
    }
}

#[test]
fn thinking_is_switched_by_whatever_name_the_template_has_for_it() {
    let think = |source: &str, extra: Value| {
        let template = template(source);
        let Value::Object(extra) = extra else { panic!("{extra}") };
        let input = ChatInput { messages: user("a"), extra, ..ChatInput::default() };
        (template.knows_thinking(), template.render(&input).unwrap().text().into_owned())
    };
    let on = json!({"enable_thinking": true});
    let named = "{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}";
    assert_eq!(think(named, on.clone()), (true, "on".to_owned()));
    assert_eq!(think(named, json!({})), (true, "off".to_owned()));
    let own = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'on' if thinking else 'off' }}";
    assert_eq!(think(own, on.clone()), (true, "on".to_owned()));
    // The template's own name, where the request uses it, is right.
    assert_eq!(think(own, json!({"enable_thinking": true, "thinking": false})), (true, "off".to_owned()));
    assert_eq!(think("{{ messages[0].content }} thinking", on), (false, "a thinking".to_owned()));
}

#[test]
fn calls_of_tools_are_written_as_the_template_takes_them() {
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}});
    let messages = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]);
    let each = |inside: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% if m.role == 'assistant' %}}{inside}{{% elif m.role == 'tool' %}} \
             {{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
        );
        render(&source, messages.clone()).unwrap()
    };
    let calls = |arguments: &str| {
        format!("{{% for c in m.tool_calls %}}{{{{ c.function.name + {arguments} }}}}{{% endfor %}}")
    };
    let (object, text) = (calls("c.function.arguments|tojson"), calls("c.function.arguments"));
    let written = "f{\"a\": \"b\"} r";
    assert_eq!(each(&object), written);
    assert_eq!(each(&text), written);
    assert_eq!(each(&format!("{{% if m.content is none %}}{object}{{% endif %}}")), written);
    assert_eq!(each(&format!("{{% if m.content is none %}}{text}{{% endif %}}")), written);
    // A template that writes no calls gets them as what the assistant said, and results as what the user said.
    assert_eq!(
        each("[{{ m.content }}]"),
        "[<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}\n</tool_call>]"
    );
    // What was said beside a call stays.
    let said = json!([{"role": "assistant", "content": "x", "tool_calls": [call]}]);
    let source = format!(
        "{{% for m in messages %}}{{% if m.content is none %}}{text}{{% endif %}}{{{{ m.content }}}}{{% endfor %}}"
    );
    assert_eq!(render(&source, said).unwrap(), "x");
}
