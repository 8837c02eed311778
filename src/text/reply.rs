//! A reply as the model writes it, parted into what it thinks and what it says.
//!
//! Gemma writes `<|channel>thought`, a line break, its thoughts, and `<channel|>`; Qwen, DeepSeek and others write
//! `<think>`, their thoughts, and `</think>`, with line breaks around each. The two markers are single tokens and are
//! told by their ids, so the same characters written as text mean nothing. What comes out does not depend on how the
//! tokens are cut into runs.

use std::ops::Range;

use super::Assembler;
use super::Tokenizer;
use super::calls::{Call, Calling, Reader, Said, Segment};

/// The first line inside a named channel: the channel's name, which is not part of the thoughts.
const NAME: &[u8] = b"thought\n";

/// The tokens that open and close the thinking channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channel {
    /// Begins the channel.
    pub open: u32,
    /// Ends it.
    pub close: u32,
    /// What is written around the thoughts.
    pub form: ChannelForm,
}

/// What a model writes around its thoughts, besides the markers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelForm {
    /// The channel's name, `thought`, and a line break before them.
    Named,
    /// Line breaks before and behind them, and before what is said next. Templates put the same there again when the
    /// reply comes back as part of a conversation, so they belong to neither.
    Plain,
}

/// Text that was released, by where it belongs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// The reply itself.
    pub content: String,
    /// What stood in the thinking channel.
    pub reasoning: String,
    /// Calls of tools.
    pub calls: Vec<Call>,
}

impl Parts {
    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Outside of any channel.
    Content,
    /// In the name of a channel, of which so many bytes have come.
    Name(usize),
    /// In a channel, behind its name.
    Thoughts,
}

/// A stretch of the content and what it was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Bytes of all that was written outside of the thoughts ([`ReplyText::written`]).
    pub written: Range<usize>,
    /// Bytes of the content, of what is held back, was cut off or is not a whole character yet included.
    pub content: Range<usize>,
}

/// Assembles a reply from its tokens. Stop strings end it where they occur in the content; the thoughts may hold them.
#[derive(Debug, Clone)]
pub struct ReplyText {
    channel: Option<Channel>,
    place: Place,
    content: Assembler,
    reasoning: Assembler,
    reasoning_tokens: usize,
    /// Takes calls out of the content.
    calls: Option<Reader>,
    segments: Vec<Segment>,
    /// Of what the content is made that nobody has asked about.
    origins: Vec<Origin>,
    /// Line breaks that come next are layout.
    leading: bool,
    /// Line breaks of thoughts that are layout if nothing follows them.
    breaks: usize,
}

impl ReplyText {
    /// A reply that is ended by any of `stops`. Without a `channel` everything is content.
    pub fn new<S: AsRef<str>>(channel: Option<Channel>, stops: impl IntoIterator<Item = S>) -> Self {
        Self {
            channel,
            place: Place::Content,
            content: Assembler::new(stops, false),
            reasoning: Assembler::new([""; 0], false),
            reasoning_tokens: 0,
            calls: None,
            segments: Vec::new(),
            origins: Vec::new(),
            leading: false,
            breaks: 0,
        }
    }

    /// With calls of tools taken out, as `calling` says if it does. They hold stop strings without ending the reply.
    #[must_use]
    pub fn calling(mut self, calling: Option<&Calling>, tokenizer: &Tokenizer) -> Self {
        self.calls = calling.map(|calling| Reader::new(calling, tokenizer));
        self
    }

    /// The reply to `prompt`, which may have opened the channel and left it open. `ends` are the tokens that end
    /// turns, behind which nothing is open any more; `piece` is what a token prints.
    #[must_use]
    pub fn following<'p>(mut self, prompt: &[u32], ends: &[u32], piece: impl Fn(u32) -> &'p [u8]) -> Self {
        let Some(Channel { open, close, .. }) = self.channel else { return self };
        let last = prompt.iter().rposition(|id| *id == open || *id == close || ends.contains(id));
        if let Some(last) = last.filter(|&last| prompt[last] == open) {
            let mut lost = Parts::default();
            for &token in &prompt[last..] {
                self.push(token, piece(token), &mut lost);
            }
            // What the prompt wrote is no part of the reply.
            self.reasoning = Assembler::new([""; 0], false);
            self.reasoning_tokens = 0;
            self.breaks = 0;
        }
        self
    }

    /// What the prompt holds of the reply itself: the beginning of a call.
    #[must_use]
    pub fn begun<'p>(mut self, tokens: &[u32], piece: impl Fn(u32) -> &'p [u8]) -> Self {
        let mut lost = Parts::default();
        for &token in tokens {
            self.push(token, piece(token), &mut lost);
        }
        self
    }

    /// Takes the next token, which prints `piece`, and appends the text it releases to `out`. True once a stop string
    /// has ended the reply; everything after it is ignored.
    pub fn push(&mut self, token: u32, piece: &[u8], out: &mut Parts) -> bool {
        if self.content.stopped().is_some() || self.calls.as_ref().is_some_and(Reader::is_over) {
            return true;
        }
        if let Some(channel) = self.channel {
            let opens = token == channel.open;
            if opens || (token == channel.close && self.place != Place::Content) {
                self.leave_name(out);
                self.place = match (opens, channel.form) {
                    (true, ChannelForm::Named) => Place::Name(0),
                    (true, ChannelForm::Plain) => Place::Thoughts,
                    (false, _) => Place::Content,
                };
                self.leading = channel.form == ChannelForm::Plain;
                self.breaks = 0;
                self.reasoning_tokens += 1;
                if let Some(calls) = &mut self.calls {
                    calls.interrupt(&mut self.segments);
                }
                return self.say(out);
            }
        }
        match self.place {
            Place::Content => {
                let piece = self.without_leading(piece);
                let Some(calls) = &mut self.calls else {
                    let from = self.content.place().1;
                    add(&mut self.content, &mut self.origins, from, piece, out);
                    return self.content.stopped().is_some();
                };
                calls.push(token, piece, &mut self.segments);
                return self.say(out);
            }
            Place::Name(seen) => self.name(seen, piece, out),
            Place::Thoughts => self.think(piece, out),
        }
        self.reasoning_tokens += 1;
        false
    }

    /// Ends the reply: appends what was held back to `out` and drops what is not complete.
    pub fn flush(&mut self, out: &mut Parts) {
        self.reasoning.flush(&mut out.reasoning);
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut self.segments);
            if calls.unfinished() {
                // What there is of a call that was cut is told, but stop strings are not looked for in calls.
                self.content.end_search(&mut out.content);
            }
        }
        self.say(out);
        self.content.flush(&mut out.content);
    }

    /// Bytes that were written outside of the thoughts: text, calls, and the names of the calls' markers.
    pub fn written(&self) -> usize {
        self.calls.as_ref().map_or(self.content.place().1, Reader::written)
    }

    /// What of it has become content since this was asked last, in order.
    pub fn origins(&mut self) -> impl Iterator<Item = Origin> {
        self.origins.drain(..)
    }

    /// How many tokens belonged to the thinking channel, its markers and name included.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// How many calls of tools there were.
    pub fn calls(&self) -> usize {
        self.calls.as_ref().map_or(0, Reader::calls)
    }

    /// Which stop string has ended the reply.
    pub fn stopped(&self) -> Option<usize> {
        self.content.stopped()
    }

    /// Whether the reply ended in the middle of a call.
    pub fn broke_off(&self) -> bool {
        self.calls.as_ref().is_some_and(Reader::unfinished)
    }

    /// Releases what was told apart. True if that ends the reply.
    fn say(&mut self, out: &mut Parts) -> bool {
        for segment in self.segments.drain(..) {
            match segment {
                Segment::Content(Said { from, bytes }) => {
                    add(&mut self.content, &mut self.origins, from, &bytes, out);
                }
                // What comes after a stop string is no part of the reply.
                Segment::Call(call) if self.content.stopped().is_none() => out.calls.push(call),
                Segment::Call(_) => {}
            }
        }
        // White space before a call is no content, but it was written: a stop string that it completes ends the reply.
        if let Some(calls) = &mut self.calls
            && self.content.would_stop(calls.spaces().iter().flat_map(|said| &said.bytes))
        {
            for Said { from, bytes } in calls.take_spaces() {
                add(&mut self.content, &mut self.origins, from, &bytes, out);
            }
        }
        self.content.stopped().is_some() || self.calls.as_ref().is_some_and(Reader::is_over)
    }

    /// Takes text where a name is expected, of which `seen` bytes have come. What is no name is thought.
    fn name(&mut self, seen: usize, piece: &[u8], out: &mut Parts) {
        let rest = &NAME[seen..];
        let same = rest.iter().zip(piece).take_while(|(wanted, found)| wanted == found).count();
        if same == piece.len() && same < rest.len() {
            self.place = Place::Name(seen + same);
            return;
        }
        self.place = Place::Thoughts;
        let mut thoughts = piece;
        if same == rest.len() {
            thoughts = &piece[same..];
        } else {
            self.reasoning.push(&NAME[..seen], &mut out.reasoning);
        }
        self.reasoning.push(thoughts, &mut out.reasoning);
    }

    /// `piece` without line breaks that are layout.
    fn without_leading<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        if !self.leading {
            return piece;
        }
        let layout = piece.iter().take_while(|&&byte| byte == b'\n').count();
        self.leading = layout == piece.len();
        &piece[layout..]
    }

    /// Takes text of thoughts. Line breaks at their end wait until it is known that it is not the end.
    fn think(&mut self, piece: &[u8], out: &mut Parts) {
        let piece = self.without_leading(piece);
        let plain = self.channel.is_some_and(|channel| channel.form == ChannelForm::Plain);
        let breaks = piece.iter().rev().take_while(|&&byte| plain && byte == b'\n').count();
        let thoughts = &piece[..piece.len() - breaks];
        if !thoughts.is_empty() {
            self.reasoning.push(&b"\n".repeat(std::mem::take(&mut self.breaks)), &mut out.reasoning);
            self.reasoning.push(thoughts, &mut out.reasoning);
        }
        self.breaks += breaks;
    }

    /// A marker has come. Where a name was expected, a whole one without its line break is still a name; what only
    /// began like one is thought.
    fn leave_name(&mut self, out: &mut Parts) {
        if let Place::Name(seen) = self.place
            && seen + 1 < NAME.len()
        {
            self.reasoning.push(&NAME[..seen], &mut out.reasoning);
        }
    }
}

/// More content, which was written from `from` on. What comes after a stop string is none.
fn add(content: &mut Assembler, origins: &mut Vec<Origin>, from: usize, bytes: &[u8], out: &mut Parts) {
    if bytes.is_empty() || content.stopped().is_some() {
        return;
    }
    let before = content.place().0;
    content.push(bytes, &mut out.content);
    origins.push(Origin { written: from..from + bytes.len(), content: before..content.place().0 });
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    const OPEN: u32 = 1000;
    const CLOSE: u32 = 1001;
    const END: u32 = 1002;
    const CHANNEL: Channel = Channel { open: OPEN, close: CLOSE, form: ChannelForm::Named };
    const PLAIN: Channel = Channel { form: ChannelForm::Plain, ..CHANNEL };

    /// Letters are tokens that print themselves; markers print nothing.
    fn print(token: u32) -> &'static [u8] {
        static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| (0..=255).collect());
        BYTES.get(token as usize..=token as usize).unwrap_or_default()
    }

    /// `<` and `>` stand for the markers.
    fn tokens(text: &str) -> Vec<u32> {
        let token = |byte| match byte {
            b'<' => OPEN,
            b'>' => CLOSE,
            byte => u32::from(byte),
        };
        text.bytes().map(token).collect()
    }

    fn after(prompt: &[u32], stops: &[&str]) -> ReplyText {
        ReplyText::new(Some(CHANNEL), stops).following(prompt, &[END], print)
    }

    /// Content, reasoning and the number of reasoning tokens of a reply.
    fn read(mut reply: ReplyText, tokens: &[u32]) -> (String, String, usize) {
        let mut out = Parts::default();
        for &token in tokens {
            if reply.push(token, print(token), &mut out) {
                break;
            }
        }
        reply.flush(&mut out);
        (out.content, out.reasoning, reply.reasoning_tokens())
    }

    fn parts(text: &str) -> (String, String) {
        let (content, reasoning, _) = read(after(&[], &[]), &tokens(text));
        (content, reasoning)
    }

    #[test]
    fn thoughts_and_content_are_told_apart() {
        let is = |text: &str, content: &str, reasoning: &str| {
            assert_eq!(parts(text), (content.to_owned(), reasoning.to_owned()), "{text:?}");
        };
        is("plain", "plain", "");
        is("<thought\nhm\n>yes", "yes", "hm\n");
        is("<thought\n>yes", "yes", "");
        is("a<thought\nb>c<thought\nd>e", "ace", "bd");
        // A channel in a channel is one more channel.
        is("<thought\na<thought\nb>c", "c", "ab");
        is("a>b", "ab", "");
    }

    #[test]
    fn line_breaks_around_plain_thoughts_are_layout() {
        let is = |prompt: &str, text: &str, content: &str, reasoning: &str| {
            let reply = ReplyText::new(Some(PLAIN), ["stop"]).following(&tokens(prompt), &[END], print);
            let (said, thought, _) = read(reply, &tokens(text));
            assert_eq!((said.as_str(), thought.as_str()), (content, reasoning), "{prompt:?} {text:?}");
        };
        is("", "<\nhm,\n\nso\n>\n\nyes\n", "yes\n", "hm,\n\nso");
        is("", "\nplain", "\nplain", "");
        is("", "<\n\n>\n\n\nyes", "yes", "");
        is("", "<thought\nhm\n\n", "", "thought\nhm");
        is("", "a\n<\nb>\nc<d\n>e", "a\nce", "bd");
        is("", "a>b", "ab", "");
        // Stop strings see what is said only.
        is("", "<stop\n>\n\nyes\nstop no", "yes\n", "stop");
        // Prompts that open the channel, or open and close it.
        is("q<\n", "\nhm\n>\n\nyes", "yes", "hm");
        is("q<", "hm>yes", "yes", "hm");
        is("q<\n\n>\n\n", "yes\n", "yes\n", "");
        is("q<said\n\n", "\nmore>x", "x", "\nmore");
    }

    #[test]
    fn what_is_no_name_is_thought() {
        let is = |text: &str, reasoning: &str| {
            assert_eq!(parts(text), (String::new(), reasoning.to_owned()), "{text:?}");
        };
        is("<thought>", "");
        is("<tho>", "tho");
        is("<thoughts\n>", "thoughts\n");
        is("<ideas\nhm>", "ideas\nhm");
        is("<>", "");
        is("<thought\nthought\n>", "thought\n");
        is("<thought<thought\na>", "a");
    }

    #[test]
    fn a_channel_that_is_cut_short_leaves_no_content() {
        let is = |text: &str, reasoning: &str| {
            assert_eq!(parts(text), (String::new(), reasoning.to_owned()), "{text:?}");
        };
        is("<", "");
        is("<tho", "");
        is("<thought\nand so", "and so");
        assert_eq!(read(after(&[], &[]), &tokens("<thought\nand so")).2, "<thought\nand so".len());
    }

    #[test]
    fn stop_strings_are_for_content_only() {
        let stopped = |text: &str| read(after(&[], &["stop"]), &tokens(text));
        assert_eq!(stopped("<thought\nstop it>yes stop no"), ("yes ".into(), "stop it".into(), 17));
        // Content before and behind a channel is one text.
        assert_eq!(stopped("ab st<thought\nx>op no").0, "ab ");
        assert_eq!(stopped("ab st<thought\nx>").0, "ab st");
        assert_eq!(stopped("stop<thought\nx>"), (String::new(), String::new(), 0));
    }

    #[test]
    fn without_a_channel_markers_mean_nothing() {
        let reply = ReplyText::new(None, [""; 0]).following(&tokens("<"), &[END], print);
        assert_eq!(read(reply, &tokens("a<thought\nb>c")), ("athought\nbc".into(), String::new(), 0));
    }

    #[test]
    fn a_prompt_can_have_opened_the_channel() {
        let reply = |prompt: &str| read(after(&tokens(prompt), &[]), &tokens("t\nso>yes"));
        assert_eq!(reply("x<though"), ("yes".into(), "so".into(), 5));
        assert_eq!(reply("x<thought\nI "), ("yes".into(), "t\nso".into(), 5));
        assert_eq!(reply("x<thought\n>"), ("t\nsoyes".into(), String::new(), 0));
        let mut ended = tokens("x<thought\nI ");
        ended.push(END);
        assert_eq!(read(after(&ended, &[]), &tokens("so")).0, "so");
    }

    /// What the rules of plain channels say, without any increments.
    fn whole_plain(text: &str) -> (String, String) {
        let (mut content, mut reasoning) = (String::new(), String::new());
        let (mut inside, mut leading) = (false, false);
        for run in text.split_inclusive(['<', '>']) {
            let marker = run.chars().next_back().filter(|letter| ['<', '>'].contains(letter));
            // Outside, a closing marker is nothing, and the text around it is one.
            let text = run.trim_end_matches(['<', '>']);
            let text = if leading { text.trim_start_matches('\n') } else { text };
            leading &= text.is_empty();
            match inside {
                true => reasoning.push_str(text.trim_end_matches('\n')),
                false => content.push_str(text),
            }
            if marker == Some('<') || (marker.is_some() && inside) {
                (inside, leading) = (marker == Some('<'), true);
            }
        }
        (content, reasoning)
    }

    /// What the rules say, without any increments.
    fn whole(tokens: &[u32]) -> (Vec<u8>, Vec<u8>) {
        let (mut content, mut reasoning) = (Vec::new(), Vec::new());
        let mut rest = tokens;
        while let Some(&first) = rest.first() {
            if first != OPEN {
                content.extend(print(first));
                rest = &rest[1..];
                continue;
            }
            let end = rest[1..].iter().position(|id| [OPEN, CLOSE].contains(id)).map(|place| place + 1);
            let inside = &rest[1..end.unwrap_or(rest.len())];
            let inside: Vec<u8> = inside.iter().flat_map(|&id| print(id)).copied().collect();
            let named = inside
                .strip_prefix(NAME)
                .or_else(|| inside.strip_prefix(b"thought").filter(|t| t.is_empty()));
            let cut = end.is_none() && NAME.starts_with(&inside);
            reasoning.extend_from_slice(if cut { b"" } else { named.unwrap_or(&inside) });
            // An opening marker is looked at again.
            rest = end.map_or(&[], |end| &rest[end + usize::from(rest[end] == CLOSE)..]);
        }
        (content, reasoning)
    }

    proptest! {
        #[test]
        fn cuts_of_plain_thoughts_do_not_matter(
            parts in prop::collection::vec(prop_oneof![Just("<"), Just(">"), Just("\n"), Just("a"), Just("\n\n")], 0..16),
            widths in prop::collection::vec(1usize..5, 0..40),
        ) {
            let text = parts.concat();
            let tokens = tokens(&text);
            let (mut reply, mut out) = (ReplyText::new(Some(PLAIN), [""; 0]), Parts::default());
            let (mut at, mut widths) = (0, widths.into_iter());
            while at < tokens.len() {
                let most = widths.next().unwrap_or(1);
                let run = tokens[at..].iter().take(most).take_while(|id| **id < OPEN).count();
                let piece: Vec<u8> = tokens[at..at + run].iter().flat_map(|&id| print(id)).copied().collect();
                reply.push(if run == 0 { tokens[at] } else { 7 }, &piece, &mut out);
                at += run.max(1);
            }
            reply.flush(&mut out);
            prop_assert_eq!((out.content, out.reasoning), whole_plain(&text));
        }
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            parts in prop::collection::vec(
                prop_oneof![
                    Just("<".to_owned()), Just(">".to_owned()), Just("thought\n".to_owned()), Just("thought".to_owned()),
                    "[ab\u{e9}👍\nt]{0,5}",
                ],
                0..12,
            ),
            widths in prop::collection::vec(1usize..9, 0..40),
        ) {
            // Runs of several bytes in one token, as vocabularies have them: `widths` bytes each.
            let tokens = tokens(&parts.concat());
            let (content, reasoning) = whole(&tokens);
            let (mut reply, mut out) = (after(&[], &[]), Parts::default());
            let (mut at, mut widths) = (0, widths.into_iter());
            while at < tokens.len() {
                let most = widths.next().unwrap_or(1);
                let run = tokens[at..].iter().take(most).take_while(|id| **id < OPEN).count();
                let piece: Vec<u8> = tokens[at..at + run].iter().flat_map(|&id| print(id)).copied().collect();
                reply.push(if run == 0 { tokens[at] } else { 7 }, &piece, &mut out);
                at += run.max(1);
            }
            reply.flush(&mut out);
            prop_assert_eq!(out.content, String::from_utf8_lossy(&content));
            prop_assert_eq!(out.reasoning, String::from_utf8_lossy(&reasoning));
        }
    }
}
