//! How each kind of model is asked for the new part of a text.
//!
//! | model | a selected part | the whole text |
//! | --- | --- | --- |
//! | denoises, takes instructions | its reply is the text; the gap in it is denoised | a block of code in its reply |
//! | denoises, has no template | the gap in the text; no instruction | – |
//! | causal, takes instructions | a block of code in its reply | a block of code in its reply |
//! | causal, with tokens around gaps | the gap in the text, where there is no instruction | – |

use serde_json::{Map, Value, json};

use super::document::{Document, Wish};
use super::reply::Form;
use crate::engine::{Model, ModelKind};
use crate::http::chat::ENABLE_THINKING;
use crate::http::error::ApiError;
use crate::http::infill::{Gapped, on_canvas, told_in_tokens};
use crate::text::{ChatInput, ChatTemplate, Specials};

/// What the model reads, and how its reply becomes the new part.
pub(super) struct Prepared {
    pub(super) prompt: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    pub(super) stops: Vec<String>,
    pub(super) form: Form,
}

/// Brings a wish into the model's words.
///
/// # Errors
/// What the model cannot be asked for; a template that refuses the message.
pub(super) fn prepare(model: &Model, wish: &Wish) -> Result<Prepared, ApiError> {
    let Wish { document, selection, instruction, .. } = wish;
    match (&model.template, model.kind) {
        (Some(template), ModelKind::BlockDiffusion { canvas, .. })
            if *selection && !instruction.is_empty() =>
        {
            let ends = turn_end(model, template)?;
            let begun = begin_reply(model, template, &task_in_place(wish))?;
            Ok(gap(model, document, begun, canvas, ends))
        }
        (_, ModelKind::BlockDiffusion { canvas, .. }) if *selection && instruction.is_empty() => {
            let ends = model.tokenizer.eos_ids().first().copied();
            Ok(gap(model, document, model.tokenizer.with_bos(Vec::new()), canvas, ends))
        }
        (_, ModelKind::Causal) if *selection && instruction.is_empty() => {
            let Some(fim) = model.tokenizer.fim() else {
                let message = "`instruction` is missing; this model cannot fill a gap without one";
                return Err(ApiError::field("instruction", message));
            };
            let encode = |text: &str| model.tokenizer.encode(text, Specials::Text);
            let before = model.tokenizer.with_bos(encode(document.before()));
            let bos = model.tokenizer.bos();
            let Gapped { prompt, suffix } = told_in_tokens(fim, bos, &before, &encode(document.after()));
            Ok(Prepared { prompt, suffix, stops: Vec::new(), form: Form::Plain })
        }
        (None, _) => Err(ApiError::unsupported(
            "instruction",
            "this model takes no instructions, since it has no chat template; a model that fills gaps takes a selection \
             without an instruction",
        )),
        (Some(template), _) => {
            let fence = fence(&wish.document);
            let mut prompt = begin_reply(model, template, &task_in_a_block(wish, &fence))?;
            let opening = format!("{fence}{}", wish.language);
            prompt.extend(model.tokenizer.encode(&opening, Specials::Text));
            let ends_line = document.part().ends_with('\n');
            Ok(Prepared {
                prompt,
                suffix: Vec::new(),
                stops: vec![format!("\n{fence}")],
                form: Form::Block { ends_line },
            })
        }
    }
}

/// The gap in place of the part, in a text that begins behind `begun`; `end` stands behind the text.
fn gap(model: &Model, document: &Document, begun: Vec<u32>, canvas: usize, end: Option<u32>) -> Prepared {
    let encode = |text: &str| model.tokenizer.encode(text, Specials::Text);
    // Tokens begin with the space before a word: a lone space before the gap is left to it.
    let before = document.before();
    let shorter = before.strip_suffix(' ').filter(|rest| rest.ends_with(|c: char| !c.is_whitespace()));
    let mut prompt = begun;
    prompt.extend(encode(shorter.unwrap_or(before)));
    let suffix = encode(document.after()).into_iter().chain(end).collect();
    Prepared {
        prompt,
        suffix: on_canvas(canvas, suffix),
        stops: Vec::new(),
        form: if shorter.is_some() { Form::Spaced } else { Form::Plain },
    }
}

/// A prompt with one message, as far as the beginning of the reply, behind any thoughts.
fn begin_reply(model: &Model, template: &ChatTemplate, message: &str) -> Result<Vec<u32>, ApiError> {
    let input = ChatInput {
        messages: json!([{ "role": "user", "content": message }]),
        add_generation_prompt: true,
        extra: without_thoughts(template),
        ..ChatInput::default()
    };
    let rendered = template.render(&input).map_err(|error| ApiError::from(error).param("instruction"))?;
    let mut prompt = model.tokenizer.encode_prompt(&rendered);
    // Some templates open the thinking channel whatever they are told.
    if let Some(channel) = model.tokenizer.channel() {
        let marks = |id: &&u32| {
            **id == channel.open || **id == channel.close || model.tokenizer.eos_ids().contains(*id)
        };
        if prompt.iter().rev().find(marks) == Some(&channel.open) {
            prompt.push(channel.close);
        }
    }
    Ok(prompt)
}

fn without_thoughts(template: &ChatTemplate) -> Map<String, Value> {
    let knows = template.knows_thinking();
    knows.then(|| (ENABLE_THINKING.to_owned(), false.into())).into_iter().collect()
}

/// The token with which the template ends a reply.
fn turn_end(model: &Model, template: &ChatTemplate) -> Result<Option<u32>, ApiError> {
    let input = ChatInput {
        messages: json!([{ "role": "user", "content": "x" }, { "role": "assistant", "content": "x" }]),
        extra: without_thoughts(template),
        ..ChatInput::default()
    };
    let prompt = model.tokenizer.encode_prompt(&template.render(&input)?);
    let ends = model.tokenizer.eos_ids();
    Ok(prompt.into_iter().rev().find(|id| ends.contains(id)).or_else(|| ends.first().copied()))
}

/// What is asked where the reply is the text itself.
fn task_in_place(wish: &Wish) -> String {
    let Wish { document, instruction, language, .. } = wish;
    let mut task = instruction.clone();
    if !document.part().trim().is_empty() {
        let fence = fence(document);
        task.push_str(&format!(
            "\n\nThis part is to be replaced:\n{fence}{language}\n{}\n{fence}",
            document.part().trim_end_matches('\n')
        ));
    } else if !language.is_empty() {
        task.push_str(&format!("\n\nLanguage: {language}"));
    }
    task
}

/// What is asked where the reply holds the new part in a block of code.
fn task_in_a_block(wish: &Wish, fence: &str) -> String {
    let Wish { document, selection, instruction, language } = wish;
    let (before, part, after) = (document.before(), document.part(), document.after());
    if *selection {
        return format!(
            "{instruction}\n\nThis is about the part between <selection> and </selection>:\n{fence}{language}\n\
             {before}<selection>{part}</selection>{after}\n{fence}\n\nReply with what is to stand in place of that part, in a \
             block of code, and with nothing else."
        );
    }
    if part.trim().is_empty() {
        return format!("{instruction}\n\nReply with the text in a block of code, and with nothing else.");
    }
    format!(
        "{instruction}\n\n{fence}{language}\n{}\n{fence}\n\nReply with the whole new text in a block of code, and with \
         nothing else.",
        part.trim_end_matches('\n')
    )
}

/// Opens and closes a block of code that may hold the text: longer than any run of backticks in it.
fn fence(document: &Document) -> String {
    let text = document.with(document.part());
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    "`".repeat(longest.max(2) + 1)
}

#[cfg(test)]
mod tests {
    use crate::http::fields::Fields;

    use super::*;

    #[test]
    fn a_fence_is_longer_than_any_in_the_text() {
        for (code, wanted) in [("", 3), ("a `b` c", 3), ("```\nx\n```", 4), ("`````", 6)] {
            let Value::Object(body) = json!({"code": code, "instruction": "x"}) else { unreachable!() };
            let wish = Wish::read(&mut Fields::new(body)).unwrap();
            assert_eq!(fence(&wish.document).len(), wanted, "{code}");
        }
    }
}
