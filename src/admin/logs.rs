//! The last events of the log, kept for `GET /logs`, and the switch for what is logged at all.
//!
//! [`LogRing`] is a layer of the subscriber. It keeps a bounded number of bounded events and passes each on to
//! followers; a follower that reads too slowly loses events and is told how many, so neither the daemon's memory
//! nor its work depends on who listens.

use std::{
    collections::VecDeque,
    fmt::{self, Write as _},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axectl::protocol::{Level, LogLine};
use serde_json::{Map, Value};
use tokio::sync::broadcast::{self, error::RecvError};
use tracing::{Event, Subscriber, field::Field, span};
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{format::Writer, time::FormatTime},
    layer::Context,
    registry::LookupSpan,
    reload,
};

/// Most bytes kept of one message or field value; the rest is cut, so that the ring's size has a bound.
const LONGEST_TEXT: usize = 8 << 10;
/// Events a follower may be behind before it loses some.
const BACKLOG: usize = 256;

/// The last events, shared between the subscriber and the admin socket. Cloning gives another handle to the same
/// ring.
#[derive(Clone, Debug)]
pub struct LogRing {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    kept: Mutex<VecDeque<Arc<LogLine>>>,
    capacity: usize,
    followers: broadcast::Sender<Arc<LogLine>>,
}

impl LogRing {
    /// A ring of the last `capacity` events (at least one).
    pub fn new(capacity: usize) -> Self {
        let shared = Shared {
            kept: Mutex::new(VecDeque::new()),
            capacity: capacity.max(1),
            followers: broadcast::channel(BACKLOG).0,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Events it holds at most.
    pub fn capacity(&self) -> usize {
        self.shared.capacity
    }

    /// The last `count` events that are wanted (all of a severity, if no more is said), oldest first.
    pub fn last(&self, count: usize, wanted: impl Into<Wanted>) -> Vec<Arc<LogLine>> {
        select(&self.kept(), count, &wanted.into())
    }

    /// The same, and a follower of all events after them: none is missed or doubled in between.
    pub fn follow(&self, count: usize, wanted: impl Into<Wanted>) -> (Vec<Arc<LogLine>>, Follower) {
        let wanted = wanted.into();
        let kept = self.kept();
        let events = self.shared.followers.subscribe();
        (select(&kept, count, &wanted), Follower { events, wanted })
    }

    fn keep(&self, line: LogLine) {
        let line = Arc::new(line);
        let mut kept = self.kept();
        while kept.len() >= self.shared.capacity {
            kept.pop_front();
        }
        kept.push_back(Arc::clone(&line));
        // Sent under the lock, so that `follow` sees an event either as kept or as coming. No follower: no error.
        let _ = self.shared.followers.send(line);
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Arc<LogLine>>> {
        self.shared.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn select(kept: &VecDeque<Arc<LogLine>>, count: usize, wanted: &Wanted) -> Vec<Arc<LogLine>> {
    let mut selected: Vec<_> =
        kept.iter().rev().filter(|line| wanted.takes(line)).take(count).cloned().collect();
    selected.reverse();
    selected
}

/// Which events a reader wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Only those of this severity or more.
    pub least: Level,
    /// Only those of this request, by any of its identifiers.
    pub request: Option<String>,
}

impl From<Level> for Wanted {
    fn from(least: Level) -> Self {
        Self { least, request: None }
    }
}

/// Digits of the number of a request.
const DIGITS: usize = 24;

/// The number that an identifier ends with, if it is that of a request over HTTP.
fn number(id: &str) -> Option<&str> {
    let number = id.rsplit(['-', '_']).next()?;
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (number.len() == DIGITS && number.bytes().all(digit)).then_some(number)
}

/// Fields that name a request: the job's identifier, and that of the HTTP exchange.
const IDENTIFIERS: [&str; 2] = ["id", "request"];

impl Wanted {
    fn takes(&self, line: &LogLine) -> bool {
        let Some(request) = &self.request else { return line.level <= self.least };
        // `req-…`, `chatcmpl-…` and so on of one request differ in the word before its number.
        let wanted = number(request);
        let names = |field: &Value| {
            field.as_str().is_some_and(|id| id == request || (wanted.is_some() && number(id) == wanted))
        };
        line.level <= self.least && IDENTIFIERS.iter().any(|name| line.fields.get(*name).is_some_and(names))
    }
}

/// Receives events as they happen.
#[derive(Debug)]
pub struct Follower {
    events: broadcast::Receiver<Arc<LogLine>>,
    wanted: Wanted,
}

impl Follower {
    /// The next event that is wanted, or a note that some were lost; `None` when the ring is gone.
    pub async fn next(&mut self) -> Option<Arc<LogLine>> {
        loop {
            match self.events.recv().await {
                Ok(line) if self.wanted.takes(&line) => return Some(line),
                Ok(_) => {}
                Err(RecvError::Lagged(lost)) => return Some(Arc::new(lost_note(lost))),
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

fn lost_note(lost: u64) -> LogLine {
    LogLine {
        time: now(),
        level: Level::Warn,
        target: module_path!().to_owned(),
        message: format!("{lost} log events were left out here: this reader is slower than the log"),
        fields: Map::from_iter([("lost".to_owned(), lost.into())]),
    }
}

impl<S> Layer<S> for LogRing
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &span::Attributes<'_>, id: &span::Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id) {
            let mut fields = Fields::default();
            attributes.record(&mut fields);
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &span::Id, values: &span::Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        self.keep(line_of(event, &context));
    }
}

/// An event as a line. Fields of spans come along where a [`LogRing`] is a layer of the same subscriber, which keeps
/// them.
pub fn line_of<S>(event: &Event<'_>, context: &Context<'_, S>) -> LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let mut own = Fields::default();
    for span in context.event_scope(event).into_iter().flatten().collect::<Vec<_>>().into_iter().rev() {
        if let Some(fields) = span.extensions().get::<Fields>() {
            own.0.extend(fields.0.clone());
        }
    }
    event.record(&mut own);
    let message = match own.0.shift_remove("message") {
        Some(Value::String(text)) => text,
        Some(other) => other.to_string(),
        None => String::new(),
    };
    let metadata = event.metadata();
    let level = match *metadata.level() {
        tracing::Level::ERROR => Level::Error,
        tracing::Level::WARN => Level::Warn,
        tracing::Level::INFO => Level::Info,
        tracing::Level::DEBUG => Level::Debug,
        tracing::Level::TRACE => Level::Trace,
    };
    LogLine { time: now(), level, target: metadata.target().to_owned(), message, fields: own.0 }
}

/// Now, in RFC 3339.
fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail; an empty time would still be a readable line.
    let _ = tracing_subscriber::fmt::time::SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// Fields of a span or an event as JSON.
#[derive(Debug, Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().trim_start_matches("r#").to_owned(), value.into());
    }
}

impl tracing::field::Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        let mut text = Bounded::default();
        let _ = text.write_str(value);
        self.put(field, text.finish());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = Bounded::default();
        // Stops formatting at the bound.
        let _ = write!(text, "{value:?}");
        self.put(field, text.finish());
    }
}

/// A string that takes [`LONGEST_TEXT`] bytes and then no more.
#[derive(Default)]
struct Bounded {
    text: String,
    cut: bool,
}

impl Bounded {
    fn finish(mut self) -> String {
        if self.cut {
            self.text.push_str("… (cut)");
        }
        self.text
    }
}

impl fmt::Write for Bounded {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let room = LONGEST_TEXT - self.text.len();
        if more.len() <= room {
            self.text.push_str(more);
            return Ok(());
        }
        let end = (0..=room).rev().find(|end| more.is_char_boundary(*end)).unwrap_or(0);
        self.text.push_str(&more[..end]);
        self.cut = true;
        Err(fmt::Error)
    }
}

/// Changes what is logged while the daemon runs.
#[derive(Clone)]
pub struct LogControl {
    set: Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>,
}

impl fmt::Debug for LogControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogControl")
    }
}

impl LogControl {
    /// A filter that lets `directives` through, for the subscriber, and the control that changes it.
    ///
    /// # Errors
    /// A sentence that names the directive that is not understood.
    pub fn new<S: Subscriber>(directives: &str) -> Result<(reload::Layer<EnvFilter, S>, Self), String> {
        let (layer, handle) = reload::Layer::new(parse(directives)?);
        Ok((layer, Self { set: Arc::new(move |filter| handle.reload(filter)) }))
    }

    /// Lets `directives` through from now on; returns them as the filter understood them.
    ///
    /// # Errors
    /// A sentence that names the directive that is not understood; the filter is unchanged then.
    pub fn set(&self, directives: &str) -> Result<String, String> {
        let filter = parse(directives)?;
        let understood = filter.to_string();
        (self.set)(filter).map_err(|error| format!("the log level could not be changed: {error}"))?;
        Ok(understood)
    }
}

/// Like the filter's own parser, which takes any unknown word for the name of a module and then silences
/// everything else: here a word alone must be a level.
fn parse(directives: &str) -> Result<EnvFilter, String> {
    let wanted = "use error, warn, info, debug, trace or off, alone or for a module as in \
                  `info,axe::engine=debug`";
    if directives.trim().is_empty() {
        return Err(format!("no log level given; {wanted}"));
    }
    let mut others = false;
    for directive in directives.split(',').map(str::trim) {
        let (module, level) = directive.rsplit_once('=').unwrap_or(("", directive));
        others |= module.is_empty();
        if level.parse::<Level>().is_err() && !level.eq_ignore_ascii_case("off") {
            return Err(format!("log level `{directive}` is not understood; {wanted}"));
        }
    }
    // Errors are never silenced by a word that names a part, or nothing.
    if !others {
        return Err(format!(
            "log level `{directives}` names modules only, which would silence all others; {wanted}"
        ));
    }
    EnvFilter::try_new(directives)
        .map_err(|error| format!("log level `{directives}` is not understood ({error}); {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    fn with_ring(capacity: usize, work: impl FnOnce(&LogRing)) {
        let ring = LogRing::new(capacity);
        let subscriber = tracing_subscriber::registry().with(ring.clone());
        tracing::subscriber::with_default(subscriber, || work(&ring));
    }

    fn messages(lines: &[Arc<LogLine>]) -> Vec<&str> {
        lines.iter().map(|line| line.message.as_str()).collect()
    }

    #[test]
    fn events_keep_level_target_message_and_typed_fields() {
        with_ring(10, |ring| {
            tracing::warn!(target: "somewhere", id = "j1", tokens = 5_u64, share = 0.5, ok = true, r#type = ?"x", "half done");
            let lines = ring.last(10, Level::Trace);
            let line = &lines[0];
            assert_eq!((line.level, line.target.as_str()), (Level::Warn, "somewhere"));
            assert_eq!(line.message, "half done");
            assert_eq!(
                serde_json::to_value(&line.fields).unwrap(),
                serde_json::json!({"id": "j1", "tokens": 5, "share": 0.5, "ok": true, "type": "\"x\""})
            );
            let bytes = line.time.as_bytes();
            assert!(bytes.len() == 27 && bytes[10] == b'T' && bytes[26] == b'Z', "{}", line.time);
        });
    }

    #[test]
    fn fields_of_spans_come_along_and_inner_ones_win() {
        with_ring(10, |ring| {
            let outer = tracing::info_span!("job", id = "j1", step = 1, late = tracing::field::Empty);
            outer.record("late", 9);
            outer.in_scope(|| {
                tracing::info_span!("pass", step = 2).in_scope(|| tracing::info!(rows = 3, "pass"));
            });
            assert_eq!(
                serde_json::to_value(&ring.last(1, Level::Info)[0].fields).unwrap(),
                serde_json::json!({"id": "j1", "step": 2, "late": 9, "rows": 3})
            );
        });
    }

    #[test]
    fn the_ring_forgets_the_oldest_and_filters_by_level() {
        with_ring(3, |ring| {
            for number in 0..4 {
                tracing::info!("info {number}");
            }
            tracing::error!("bad");
            assert_eq!(messages(&ring.last(10, Level::Trace)), ["info 2", "info 3", "bad"]);
            assert_eq!(messages(&ring.last(1, Level::Info)), ["bad"]);
            assert_eq!(messages(&ring.last(9, Level::Warn)), ["bad"]);
            assert!(ring.last(0, Level::Trace).is_empty());
        });
    }

    #[test]
    fn events_of_one_request_are_found_by_any_of_its_identifiers() {
        with_ring(10, |ring| {
            const NUMBER: &str = "7eb8935196456ca94e465bb9";
            let request = format!("req-{NUMBER}");
            tracing::info_span!("http", request).in_scope(|| tracing::info!("asked"));
            tracing::info!(id = format!("msg_{NUMBER}"), "done");
            tracing::info!(id = "chatcmpl-1eb8935196456ca94e465bb9", "another");
            tracing::info!(id = "bench-1-0", "measured");
            tracing::info!(id = "bench-11-0", "measured again");
            tracing::info!(note = NUMBER, "elsewhere");
            let wanted = |least, id: &str| Wanted { least, request: Some(id.to_owned()) };
            for id in [&request, &format!("msg_{NUMBER}"), NUMBER] {
                assert_eq!(messages(&ring.last(10, wanted(Level::Trace, id))), ["asked", "done"], "{id}");
            }
            assert_eq!(messages(&ring.last(10, wanted(Level::Info, "bench-1-0"))), ["measured"]);
            assert!(ring.last(10, wanted(Level::Warn, &request)).is_empty());
            // Part of an identifier is none.
            for id in ["req-", "bench-1", "1", "e", &NUMBER[1..], &request[..10]] {
                assert!(ring.last(10, wanted(Level::Trace, id)).is_empty(), "{id}");
            }
        });
    }

    #[test]
    fn endless_texts_are_cut_at_a_character() {
        with_ring(3, |ring| {
            let long = "ä".repeat(LONGEST_TEXT);
            tracing::info!(long, "{long}");
            let line = &ring.last(1, Level::Info)[0];
            assert!(line.message.ends_with("ä… (cut)"));
            assert!(line.message.len() <= LONGEST_TEXT + 20);
            assert!(line.fields["long"].as_str().unwrap().len() <= LONGEST_TEXT + 20);
        });
    }

    #[tokio::test]
    async fn a_slow_follower_is_told_what_it_lost() {
        let ring = LogRing::new(2);
        let (_, mut follower) = ring.follow(0, Level::Info);
        let subscriber = tracing_subscriber::registry().with(ring.clone());
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..BACKLOG + 7 {
                tracing::info!("line {number}");
            }
        });
        let note = follower.next().await.unwrap();
        assert_eq!((note.level, note.fields["lost"].as_u64()), (Level::Warn, Some(7)));
        assert_eq!(follower.next().await.unwrap().message, "line 7");
    }

    #[test]
    fn levels_change_at_run_time_and_typos_are_refused() {
        let ring = LogRing::new(10);
        let (filter, control) = LogControl::new("info").unwrap();
        let subscriber = tracing_subscriber::registry().with(filter).with(ring.clone());
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("one");
            assert_eq!(control.set("warn,axe::admin=debug").unwrap(), "axe::admin=debug,warn");
            tracing::debug!("two");
            tracing::info!(target: "other", "three");
            for wrong in [
                "inof",
                "axe=loud",
                "",
                " ",
                "info,",
                "=",
                "info,axe",
                "axe=off",
                "axe::engine=debug,foo=info",
            ] {
                let error = control.set(wrong).unwrap_err();
                assert!(error.contains("use error, warn"), "{wrong}: {error}");
            }
            tracing::debug!("four");
            control.set("off").unwrap();
            tracing::error!("five");
        });
        assert_eq!(messages(&ring.last(10, Level::Trace)), ["two", "four"]);
    }
}
