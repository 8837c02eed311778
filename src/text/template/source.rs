//! What is rewritten in a template's source, since the engine reads it otherwise than Python's.

/// The source as the engine should read it: line breaks of one kind, strings that go on behind a break in one line,
/// and no `generation` blocks.
pub(super) fn rewritten(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    without_generation_blocks(&joined_lines(&source))
}

/// The source without backslashes before the end of a line in strings, where Python takes both away.
fn joined_lines(source: &str) -> String {
    const JOINT: &str = "\\\n";
    if !source.contains(JOINT) {
        return source.to_owned();
    }
    let mut joined = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = ["{{", "{%", "{#"].iter().filter_map(|opening| rest.find(opening)).min() {
        let (before, tag) = rest.split_at(start);
        joined.push_str(before);
        let (end, raw) = match tag.starts_with("{#") {
            true => (tag.find("#}").map_or(tag.len(), |end| end + 2), false),
            false => end_of_tag(tag),
        };
        let (inside, after) = tag.split_at(end);
        rest = after;
        match inside.starts_with("{#") {
            true => joined.push_str(inside),
            // A backslash stands in strings only, and hides the next character if that is one.
            false => {
                let mut letters = inside.chars().peekable();
                while let Some(letter) = letters.next() {
                    match (letter, letters.peek().copied()) {
                        ('\\', Some('\n')) => drop(letters.next()),
                        ('\\', Some(hidden)) => {
                            joined.extend([letter, hidden]);
                            letters.next();
                        }
                        _ => joined.push(letter),
                    }
                }
            }
        }
        if raw {
            let end = rest.find("endraw").unwrap_or(rest.len());
            joined.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    joined.push_str(rest);
    joined
}

/// Where a tag ends, strings in it skipped, and whether text that is no template follows.
fn end_of_tag(tag: &str) -> (usize, bool) {
    let bytes = tag.as_bytes();
    let (mut at, mut depth) = (2, 0usize);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'}' | b'%' if depth == 0 && bytes.get(at + 1) == Some(&b'}') => {
                let word =
                    tag[2..at].trim_matches(|letter: char| "-+".contains(letter) || letter.is_whitespace());
                return (at + 2, word == "raw");
            }
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            b'"' | b'\'' => {
                at += 1;
                while bytes.get(at).is_some_and(|other| other != byte) {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            _ => {}
        }
        at += 1;
    }
    (tag.len(), false)
}

/// The source with `generation` blocks, which only say what to train on, turned into blocks that are always taken.
fn without_generation_blocks(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        plain.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => word,
        };
        if replacement == word {
            // Past the opening only: what looks like a tag may be text that holds a real one.
            plain.push_str("{%");
            rest = &tag[2..];
        } else {
            plain.push_str(&format!("{{%{}%}}", inside.replacen(word, replacement, 1)));
            rest = &tag[end + 2..];
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_go_on_in_the_next_line() {
        assert_eq!(rewritten("{{ 'a\\\nb' }}"), "{{ 'ab' }}");
        assert_eq!(rewritten("{% set x = {'a': {}} ~ \"}}\\\r\nb\" %}"), "{% set x = {'a': {}} ~ \"}}b\" %}");
        // A backslash that is hidden itself, text, comments and what is raw stay as they are.
        for same in [
            "{{ 'a\\\\\nb' }}",
            "a\\\nb{{ 1 }}\\\n",
            "{# 'a\\\nb' #}",
            "{% raw %}{{ 'a\\\nb' }}{% endraw %}",
            "{{ 'a",
        ] {
            assert_eq!(rewritten(same), same);
        }
        assert_eq!(
            rewritten("{%- raw -%}\\\n{% endraw %}{{ '\\\n' }}"),
            "{%- raw -%}\\\n{% endraw %}{{ '' }}"
        );
        assert_eq!(rewritten("a\r\nb\rc"), "a\nb\nc");
    }

    #[test]
    fn blocks_for_trainers_are_always_taken() {
        assert_eq!(rewritten("a{%- generation -%}b{% endgeneration %}"), "a{%- if true -%}b{% endif %}");
    }
}
