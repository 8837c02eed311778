//! The source of a program of phases: the kernels' own sources one after the other, each with names of its own, since
//! several of them define the same names for other formats and sizes.

use std::fmt::Write;

use super::Kind;
use crate::ops::kernels::PHASES;

/// What a kernel takes for a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Parameter {
    Memory,
    Local,
    Int,
    Uint,
    Long,
    Ulong,
    Float,
    /// The position of the first row.
    Start,
}

/// The whole source behind `common.h`. `parts`: the sources that kinds name; `words`: of an entry of the table.
pub(super) fn program(parts: &[String], kinds: &[Kind], words: usize, pause: bool) -> String {
    let mut source = String::new();
    for (number, part) in parts.iter().enumerate() {
        source.push_str(&with_prefix(part, &prefix(number)));
    }
    source.push_str(
        "inline void call(int kind, global const ulong* a, int3 at, int3 of, int again, int start, \
         local uchar* scratch) {\n    switch (kind) {\n",
    );
    for (number, kind) in kinds.iter().enumerate() {
        let _ = write!(source, "    case {number}: {}{}(at, of, again", prefix(kind.part), kind.name);
        for (i, parameter) in kind.parameters.iter().enumerate() {
            let _ = match parameter {
                Parameter::Memory => write!(source, ", (global void*)a[{i}]"),
                Parameter::Local => write!(source, ", (local void*)(scratch + a[{i}])"),
                Parameter::Int => write!(source, ", (int)a[{i}]"),
                Parameter::Uint => write!(source, ", (uint)a[{i}]"),
                Parameter::Long => write!(source, ", (long)a[{i}]"),
                Parameter::Ulong => write!(source, ", a[{i}]"),
                Parameter::Float => write!(source, ", as_float((uint)a[{i}])"),
                Parameter::Start => write!(source, ", start"),
            };
        }
        source.push_str("); break;\n");
    }
    let pause = if pause { "#define HOST_PAUSE\n" } else { "" };
    let _ = write!(source, "    }}\n}}\n#define TABLE_WORDS {words}\n{pause}{PHASES}");
    source
}

fn prefix(part: usize) -> String {
    format!("part{part}_")
}

fn in_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The last word of a text.
fn last_word(text: &str) -> &str {
    let text = text.trim_end();
    &text[text.rfind(|c| !in_word(c)).map_or(0, |before| before + 1)..]
}

/// The text with a prefix before every name that it defines: macros, functions, types and kernels. A name that a macro
/// pastes together is known by its first part.
fn with_prefix(text: &str, prefix: &str) -> String {
    let (mut names, mut beginnings) = (Vec::new(), Vec::new());
    for line in text.lines().map(str::trim_start) {
        if let Some(rest) = line.strip_prefix("#define ") {
            names.push(&rest[..rest.find(|c| !in_word(c)).unwrap_or(rest.len())]);
        } else if line.starts_with("inline ") || line.starts_with("KERNEL ") {
            let head = &line[..line.find('(').unwrap_or(line.len())];
            match head.find("##") {
                Some(pasted) => beginnings.push(last_word(&head[..pasted])),
                None => names.push(last_word(head)),
            }
        } else if let Some((head, _)) = line.strip_prefix("constant ").and_then(|rest| rest.split_once('[')) {
            names.push(last_word(head));
        } else if line.starts_with("typedef ") || line.starts_with("} ") {
            names.extend(line.strip_suffix(';').map(last_word));
        }
    }
    let defined =
        |word: &str| names.contains(&word) || beginnings.iter().any(|beginning| word.starts_with(beginning));
    let mut out = String::with_capacity(2 * text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = if in_word(first) {
            rest.find(|c| !in_word(c)).unwrap_or(rest.len())
        } else {
            rest.find(in_word).unwrap_or(rest.len())
        };
        if defined(&rest[..end]) {
            out.push_str(prefix);
        }
        out.push_str(&rest[..end]);
        rest = &rest[end..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::ENTRY_ARGS;
    use super::*;

    #[test]
    fn what_a_text_defines_gets_a_prefix_and_nothing_else_does() {
        let text = "#define SIZE 4\n\
                    typedef half cached;\n\
                    inline float twice(float x) { return SIZE * x + SIZES; }\n\
                    #define MAKE(T) \\\n    inline void make_##T(int n) { twice(n); }\n\
                    MAKE(2)\n\
                    KERNEL go(ITEM global cached* x) { make_2(AT(0)); remake_2(x); }\n";
        let expected = "#define p_SIZE 4\n\
                        typedef half p_cached;\n\
                        inline float p_twice(float x) { return p_SIZE * x + SIZES; }\n\
                        #define p_MAKE(T) \\\n    inline void p_make_##T(int n) { p_twice(n); }\n\
                        p_MAKE(2)\n\
                        KERNEL p_go(ITEM global p_cached* x) { p_make_2(AT(0)); remake_2(x); }\n";
        assert_eq!(with_prefix(text, "p_"), expected);
    }

    #[test]
    fn kernels_are_called_with_what_their_entry_says() {
        let kind = Kind {
            part: 0,
            name: "go".to_owned(),
            parameters: vec![Parameter::Memory, Parameter::Start, Parameter::Float, Parameter::Local],
        };
        let source = program(&["KERNEL go(ITEM int x) {}\n".to_owned()], &[kind], ENTRY_ARGS + 4, false);
        assert!(source.contains("KERNEL part0_go(ITEM int x) {}\n"), "{source}");
        let call = "case 0: part0_go(at, of, again, (global void*)a[0], start, as_float((uint)a[2]), \
                    (local void*)(scratch + a[3])); break;";
        assert!(source.contains(call), "{source}");
    }
}
