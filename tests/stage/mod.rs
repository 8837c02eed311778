//! What the tests of engine and HTTP share: a backend that follows a script, a vocabulary of single bytes, and a
//! server on a free port.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

pub mod troupe;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use axe::config::{Config, Override};
use axe::decode::{Backend, BackendError, DenoisingStats, Generation, Memory, Sampling, Step, Texts};
use axe::engine::{
    Constraints, Engine, EngineHandle, Event, Events, FinishReason, Loaded, Model, ModelKind, Options, State,
    Usage,
};
use axe::http::{App, serve};
use axe::text::{ChatTemplate, Fim, TokenKind, Tokenizer, Vocabulary};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// Ends a reply.
pub const EOS: u32 = 2;
/// A token with a very long text.
pub const LOUD: u32 = 259;
/// Bytes of that text.
pub const LOUD_BYTES: usize = 8000;
/// Positions of the scripted model's cache.
pub const CONTEXT: usize = 4096;
/// Longest wait for anything; far more than a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The tokens of a text: one for each byte.
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| 3 + u32::from(byte)).collect()
}

/// Prompt tokens back to their text.
pub fn text_of(tokens: &[u32]) -> String {
    let bytes = tokens.iter().filter_map(|token| u8::try_from(token.checked_sub(3)?).ok()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Commits of one token each for `text`, then the end token.
pub fn say(text: &str) -> Vec<Step> {
    bytes(text).into_iter().chain([EOS]).map(|token| Step::Commit(vec![token])).collect()
}

/// Opens the thinking channel, on a thinking stage.
pub const OPEN: u32 = 260;
/// Closes it.
pub const CLOSE: u32 = 261;
/// Ends a reply besides [`EOS`], on a thinking stage.
pub const HAND_OVER: u32 = 262;
/// Prints nothing and ends nothing, on a thinking stage.
pub const SILENT: u32 = 263;

/// Control tokens of a model that thinks and calls tools.
const CHANNELS: &[&str] = &["<|channel>", "<channel|>", "<|tool_response>", "<|tool_call>"];

/// A template that can make the model think.
pub const THINKING_TEMPLATE: &str = "{% if enable_thinking %}[think]{% endif %}\
    {% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]\
    {% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}";

/// A canvas of the scripted diffusion model.
pub const CANVAS: usize = 256;

/// The tokens of a text in which `{` opens the thinking channel, `}` closes it and `~` prints nothing.
pub fn marked(text: &str) -> Vec<u32> {
    let token = |token: u32| match token.checked_sub(3).and_then(|byte| u8::try_from(byte).ok()) {
        Some(b'{') => OPEN,
        Some(b'}') => CLOSE,
        Some(b'~') => SILENT,
        _ => token,
    };
    bytes(text).into_iter().map(token).collect()
}

/// Canvases of `width` that end up as `tokens`, filled up with end tokens. Each takes as many steps as `drafts` says
/// for it (the last number for all others), each of them a draft; then it is committed whole.
pub fn canvases(tokens: &[u32], width: usize, drafts: &[usize]) -> Vec<Step> {
    let mut steps = Vec::new();
    for (place, canvas) in tokens.chunks(width).enumerate() {
        let mut canvas = canvas.to_vec();
        canvas.resize(width, EOS);
        for step in 0..*drafts.get(place).or(drafts.last()).unwrap() {
            steps.push(Step::Draft { tokens: vec![3 + step as u32; width], entropy: vec![0.5; width] });
        }
        steps.push(Step::Commit(canvas));
    }
    steps
}

/// A vocabulary where every byte is a token, besides the unknown, begin and end tokens and a loud one.
pub fn tokenizer() -> Tokenizer {
    tokenizer_with(&[])
}

/// As [`tokenizer`], with more control tokens at the end.
fn tokenizer_with(control: &[&str]) -> Tokenizer {
    Tokenizer::new(vocabulary_with(control)).unwrap()
}

fn vocabulary_with(control: &[&str]) -> Vocabulary {
    let mut names = vec!["<unk>".to_owned(), "<s>".to_owned(), "</s>".to_owned()];
    names.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    let mut kinds = vec![TokenKind::Unknown, TokenKind::Control, TokenKind::Control];
    kinds.extend([TokenKind::Byte; 256]);
    names.push("z".repeat(LOUD_BYTES));
    kinds.push(TokenKind::Normal);
    names.extend(control.iter().map(|&name| name.to_owned()));
    kinds.resize(names.len(), TokenKind::Control);
    Vocabulary {
        model: "llama".to_owned(),
        scores: vec![0.0; names.len()],
        tokens: names.iter().collect(),
        kinds,
        bos: Some(1),
        eos: Some(EOS),
        unk: Some(0),
        add_bos: Some(true),
        add_space_prefix: Some(false),
        ..Vocabulary::default()
    }
}

/// The tokens before the text before a gap, before that behind it, and before what stands between them, on a stage that
/// fills gaps in the middle.
pub const FIM: [u32; 3] = [260, 261, 262];

/// A template that shows what it got.
pub const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]";

/// What a scripted model does with a prompt: the steps after prefill.
pub type Play = Box<dyn Fn(&[u32]) -> Vec<Step> + Send + Sync>;

/// A script, and what happened while it was played.
pub struct Script {
    play: Play,
    /// Prompt tokens a prefill step takes.
    prefill_chunk: usize,
    /// After so many steps of a generation, fail or panic.
    trouble: Option<(usize, Trouble)>,
    gate: Option<Gate>,
    /// Time a step takes.
    pace: Duration,
    /// Whether drafts count as denoising steps and commits as canvases.
    denoises: bool,
    /// Steps done in all.
    pub steps: AtomicUsize,
    /// Prompts started, with their sampling.
    pub started: Mutex<Vec<(Vec<u32>, Sampling)>>,
    /// What gaps that were to be filled were followed by, and how much of the prompt was plain text.
    pub suffixes: Mutex<Vec<(Vec<u32>, usize)>>,
    /// Generations that have ended.
    pub ended: AtomicUsize,
}

/// What a script can do wrong.
#[derive(Clone, Copy)]
pub enum Trouble {
    Error,
    Panic,
}

impl Script {
    pub fn new(play: impl Fn(&[u32]) -> Vec<Step> + Send + Sync + 'static) -> Self {
        Self {
            play: Box::new(play),
            prefill_chunk: 1024,
            trouble: None,
            gate: None,
            pace: Duration::ZERO,
            denoises: false,
            steps: AtomicUsize::new(0),
            started: Mutex::default(),
            suffixes: Mutex::default(),
            ended: AtomicUsize::new(0),
        }
    }

    /// Says the same to every prompt.
    pub fn saying(text: &str) -> Self {
        let steps = say(text);
        Self::new(move |_| steps.clone())
    }

    /// Repeats what it was told.
    pub fn echo() -> Self {
        Self::new(|prompt| say(&text_of(prompt)))
    }

    /// Never ends by itself.
    pub fn endless() -> Self {
        Self::new(|_| bytes("x").repeat(2 * CONTEXT).into_iter().map(|t| Step::Commit(vec![t])).collect())
    }

    pub fn prefill_chunk(mut self, tokens: usize) -> Self {
        self.prefill_chunk = tokens;
        self
    }

    pub fn trouble(mut self, after_steps: usize, trouble: Trouble) -> Self {
        self.trouble = Some((after_steps, trouble));
        self
    }

    pub fn pace(mut self, step: Duration) -> Self {
        self.pace = step;
        self
    }

    /// Plays a model that denoises: drafts are steps, commits are canvases.
    pub fn denoises(mut self) -> Self {
        self.denoises = true;
        self
    }

    /// Each step waits for a permit of [`Script::permit`].
    pub fn gated(mut self) -> Self {
        self.gate = Some(Gate::default());
        self
    }

    /// Lets `steps` more steps happen.
    pub fn permit(&self, steps: usize) {
        self.gate.as_ref().unwrap().open(steps);
    }

    pub fn steps_done(&self) -> usize {
        self.steps.load(Ordering::SeqCst)
    }
}

#[derive(Default)]
struct Gate {
    permits: Mutex<usize>,
    opened: Condvar,
}

impl Gate {
    fn open(&self, steps: usize) {
        let mut permits = self.permits.lock().unwrap();
        *permits = permits.saturating_add(steps);
        self.opened.notify_all();
    }

    fn pass(&self) -> Result<(), BackendError> {
        let permits = self.permits.lock().unwrap();
        let (mut permits, wait) = self.opened.wait_timeout_while(permits, PATIENCE, |p| *p == 0).unwrap();
        if wait.timed_out() {
            return Err("the test never opened the gate".into());
        }
        *permits -= 1;
        Ok(())
    }
}

/// The backend that plays a script.
pub struct Scripted(pub Arc<Script>);

impl Backend for Scripted {
    fn start<'a>(
        &'a mut self,
        prompt: &[u32],
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        Ok(Box::new(self.play(prompt, sampling, false)))
    }

    fn infill<'a>(
        &'a mut self,
        texts: Texts<'_>,
        sampling: &Sampling,
    ) -> Result<Box<dyn Generation + 'a>, BackendError> {
        self.0.suffixes.lock().unwrap().push((texts.suffix.to_vec(), texts.plain));
        Ok(Box::new(self.play(texts.prompt, sampling, true)))
    }

    fn context_length(&self) -> usize {
        CONTEXT
    }

    fn memory(&self) -> Memory {
        Memory { weights: 3000, kv_cache: 200, scratch: 10, budget: 9000 }
    }
}

impl Scripted {
    fn play(&mut self, prompt: &[u32], sampling: &Sampling, fills: bool) -> Playing<'_> {
        let script = &*self.0;
        script.started.lock().unwrap().push((prompt.to_vec(), sampling.clone()));
        Playing {
            script,
            total: prompt.len(),
            done: 0,
            play: (script.play)(prompt).into(),
            steps: 0,
            denoised: DenoisingStats::default(),
            open: false,
            fills,
        }
    }
}

struct Playing<'a> {
    script: &'a Script,
    total: usize,
    done: usize,
    play: VecDeque<Step>,
    steps: usize,
    denoised: DenoisingStats,
    /// Whether the last step left a canvas unfinished.
    open: bool,
    /// Whether it fills a gap, and so is complete at the end of the script.
    fills: bool,
}

impl Playing<'_> {
    fn count(&mut self, step: &Step) {
        if let Step::Draft { tokens, .. } = step {
            self.denoised.steps += 1;
            self.denoised.accepted.push(tokens.len() as u32);
            self.denoised.canvases += usize::from(!self.open);
        }
        self.open = matches!(step, Step::Draft { .. });
    }
}

impl Generation for Playing<'_> {
    fn step(&mut self) -> Result<Step, BackendError> {
        if let Some(gate) = &self.script.gate {
            gate.pass()?;
        }
        std::thread::sleep(self.script.pace);
        match self.script.trouble {
            Some((after, Trouble::Error)) if after == self.steps => return Err("NaN in layer 3".into()),
            Some((after, Trouble::Panic)) if after == self.steps => panic!("the device fell over"),
            _ => {}
        }
        self.steps += 1;
        self.script.steps.fetch_add(1, Ordering::SeqCst);
        if self.done < self.total {
            self.done = (self.done + self.script.prefill_chunk).min(self.total);
            return Ok(Step::Prefill { done: self.done, total: self.total });
        }
        let step = self.play.pop_front().ok_or("the script is at its end")?;
        self.count(&step);
        Ok(step)
    }

    fn cached_tokens(&self) -> usize {
        1
    }

    fn complete(&self) -> bool {
        self.fills && self.play.is_empty()
    }

    fn denoising(&self) -> Option<DenoisingStats> {
        self.script.denoises.then(|| self.denoised.clone())
    }
}

impl Drop for Playing<'_> {
    fn drop(&mut self) {
        self.script.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// An engine that plays a script.
pub struct Stage {
    pub engine: EngineHandle,
    pub script: Arc<Script>,
}

impl Stage {
    /// An engine that is ready.
    pub fn ready(script: Script, queue_capacity: usize) -> Self {
        Self::with_template(script, queue_capacity, Some(TEMPLATE))
    }

    pub fn with_template(script: Script, queue_capacity: usize, template: Option<&str>) -> Self {
        let template = template.map(str::to_owned);
        Self::with(script, queue_capacity, move |backend| loaded(backend, template.as_deref()))
    }

    /// An engine over a model that can think; one that denoises if the script does.
    pub fn thinking(script: Script, queue_capacity: usize) -> Self {
        Self::with(script, queue_capacity, thinker)
    }

    /// An engine over a model with this template and these control tokens.
    pub fn speaking(script: Script, template: String, control: &'static [&'static str]) -> Self {
        Self::with(script, 4, move |backend| speaker(backend, &template, control))
    }

    /// An engine over a model of another kind; the script is idle.
    pub fn of(load: impl FnOnce() -> Loaded + Send + 'static, queue_capacity: usize) -> Self {
        Self::with(Script::saying(""), queue_capacity, move |_| load())
    }

    /// An engine over a causal model that was trained to fill gaps.
    fn filling_in_the_middle(script: Script) -> Self {
        Self::with(script, 4, |backend| {
            let [prefix, suffix, middle] = FIM;
            let mut vocabulary = vocabulary_with(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]);
            vocabulary.fim = Some(Fim { prefix, suffix, middle });
            let Loaded { backend, model } = loaded(backend, None);
            Loaded {
                backend,
                model: Model { tokenizer: Tokenizer::new(vocabulary).unwrap().into(), ..model },
            }
        })
    }

    pub fn with(
        script: Script,
        queue_capacity: usize,
        load: impl FnOnce(Scripted) -> Loaded + Send + 'static,
    ) -> Self {
        let script = Arc::new(script);
        let backend = Scripted(Arc::clone(&script));
        let engine =
            Engine::spawn(move |_| Ok(load(backend)), Options { queue_capacity, ..Options::default() })
                .unwrap()
                .handle();
        let mut state = engine.watch();
        futures::executor::block_on(state.wait_for(|state| *state == State::Ready)).unwrap();
        Self { engine, script }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.engine.shutdown();
        if self.script.gate.is_some() {
            self.script.permit(1_000_000);
        }
    }
}

/// A model around a backend.
pub fn loaded(backend: impl Backend + 'static, template: Option<&str>) -> Loaded {
    let tokenizer = tokenizer();
    let template = template.map(|source| ChatTemplate::new(source, &tokenizer).unwrap());
    let model = Model {
        name: "scripted".to_owned(),
        identity: "0123abcd".to_owned(),
        device: "a stage of boards".to_owned(),
        kind: ModelKind::Causal,
        context_length: CONTEXT,
        tokenizer: tokenizer.into(),
        template,
        constraints: Constraints::default(),
    };
    Loaded { backend: Box::new(backend), model }
}

/// A model that can think around a script; one that denoises if the script does.
fn thinker(backend: Scripted) -> Loaded {
    speaker(backend, THINKING_TEMPLATE, CHANNELS)
}

/// A model around a script, with this template and these control tokens behind those of [`tokenizer`].
pub fn speaker(backend: Scripted, template: &str, control: &[&str]) -> Loaded {
    let kind = match backend.0.denoises {
        true => ModelKind::BlockDiffusion { canvas: CANVAS, max_steps: 48 },
        false => ModelKind::Causal,
    };
    let Loaded { backend, model } = spoken(backend, template, control);
    Loaded { backend, model: Model { kind, ..model } }
}

/// A causal model that can think around a backend.
pub fn thinking(backend: impl Backend + 'static) -> Loaded {
    spoken(backend, THINKING_TEMPLATE, CHANNELS)
}

fn spoken(backend: impl Backend + 'static, template: &str, control: &[&str]) -> Loaded {
    let tokenizer = tokenizer_with(control);
    let template = Some(ChatTemplate::new(template, &tokenizer).unwrap());
    let Loaded { backend, model } = loaded(backend, None);
    Loaded { backend, model: Model { tokenizer: tokenizer.into(), template, ..model } }
}

/// A configuration from TOML text.
pub fn config(toml: &str) -> Config {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), toml).unwrap();
    let name = Override { flag: "--served-name", key: "model.served_name", value: "scripted".to_owned() };
    Config::from_sources(Some(file.path()), BTreeMap::new(), vec![name]).unwrap()
}

/// The real router and server over a scripted engine.
pub struct Server {
    pub address: SocketAddr,
    pub stage: Stage,
    pub client: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
}

impl Server {
    /// Serves `script` with the default configuration.
    pub async fn start(script: Script) -> Self {
        Self::configured(script, "").await
    }

    /// Serves `script` with the configuration `toml`.
    pub async fn configured(script: Script, toml: &str) -> Self {
        let config = config(toml);
        let capacity = config.server.queue_capacity;
        let stage = tokio::task::spawn_blocking(move || Stage::ready(script, capacity)).await.unwrap();
        Self::over(stage, &config).await
    }

    /// Serves `script` as a model that can think, with the configuration `toml`.
    pub async fn thinking(script: Script, toml: &str) -> Self {
        let stage = tokio::task::spawn_blocking(move || Stage::thinking(script, 4)).await.unwrap();
        Self::over(stage, &config(toml)).await
    }

    /// Serves `script` as a model with this template and these control tokens.
    pub async fn speaking(script: Script, template: &str, control: &'static [&'static str]) -> Self {
        let template = template.to_owned();
        let stage = tokio::task::spawn_blocking(move || Stage::speaking(script, template, control));
        Self::over(stage.await.unwrap(), &config("")).await
    }

    /// Serves `script` as a causal model that was trained to fill gaps.
    pub async fn filling_in_the_middle(script: Script) -> Self {
        let stage = tokio::task::spawn_blocking(move || Stage::filling_in_the_middle(script)).await.unwrap();
        Self::over(stage, &config("")).await
    }

    /// Serves an engine that is there already.
    pub async fn over(stage: Stage, config: &Config) -> Self {
        let app = App::new(stage.engine.clone(), config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(serve(listener, app, async { drop(stopped.await) }, Duration::from_millis(100)));
        // Answers are looked at as they come over the wire.
        let client = reqwest::Client::builder().timeout(PATIENCE).gzip(false).build().unwrap();
        Self { address, stage, client, stop: Some(stop) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &serde_json::Value) -> reqwest::Response {
        self.client.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// Posts and expects 200; returns the JSON.
    pub async fn ask(&self, path: &str, body: &serde_json::Value) -> serde_json::Value {
        let response = self.post(path, body).await;
        let status = response.status();
        let text = response.text().await.unwrap();
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Posts and expects `status`; returns the error object.
    pub async fn refusal(&self, path: &str, body: &serde_json::Value, status: u16) -> serde_json::Value {
        let response = self.post(path, body).await;
        let found = response.status();
        let text = response.text().await.unwrap();
        assert_eq!(found, status, "{body} -> {text}");
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(json["error"]["message"].is_string() && json["error"]["type"].is_string(), "{text}");
        json["error"].take()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
    }
}

/// All events of a job, folded.
#[derive(Debug)]
pub struct Outcome {
    pub text: String,
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub reason: FinishReason,
    pub usage: Usage,
    pub stats: axe::engine::Stats,
    pub events: Vec<Event>,
}

/// Listens until the finish.
pub async fn listen(mut events: Events) -> Outcome {
    let all = async {
        let mut seen = Vec::new();
        while let Some(event) = events.recv().await {
            seen.push(event);
        }
        seen
    };
    let seen = tokio::time::timeout(PATIENCE, all).await.expect("the job never finished");
    let (mut text, mut reasoning, mut tokens) = (String::new(), String::new(), Vec::new());
    for event in &seen {
        if let Event::Commit { tokens: more, text: on, reasoning: thought, .. } = event {
            tokens.extend(more);
            text.push_str(on);
            reasoning.push_str(thought);
        }
    }
    match seen.last() {
        Some(Event::Finish { reason, usage, stats }) => Outcome {
            text,
            reasoning,
            tokens,
            reason: reason.clone(),
            usage: *usage,
            stats: stats.clone(),
            events: seen,
        },
        other => panic!("the last event is {other:?}"),
    }
}

/// Waits until `happened`.
pub async fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !happened() {
        assert!(start.elapsed() < PATIENCE, "{what} never happened");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
