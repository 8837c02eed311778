//! The fields that chat and text completions share: sampling, limits, stop strings, streaming.

use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::constrained::{Form, compile};
use super::error::ApiError;
use super::fields::{Fields, integer, wrong};
use super::reply::Dialect;
use super::{App, bias, logprobs, random};
use crate::config::SamplingConfig;
use crate::decode::{Denoising, Sampling, choice_seed};
use crate::engine::{Model, ModelKind, Request, Stop};
use crate::text::calls::Calling;

/// What a request says about how to generate and how to answer, whatever the model.
pub(super) struct Asked {
    dialect: Dialect,
    /// On a causal model logits are divided by it. A model that denoises follows the schedule of its checkpoint, whose
    /// temperatures are multiplied by it: 1 is the schedule itself. 0 takes the most probable token on both.
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    /// With the name that it came under.
    repetition_penalty: Option<(&'static str, f32)>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Vec<(u32, f32)>,
    form: Option<Form>,
    /// Alternatives a token, if log-probabilities are wanted.
    logprobs: Option<usize>,
    choices: usize,
    /// None: the server chooses.
    seed: Option<u64>,
    /// Fields for models that denoise; whether they are allowed, and how large, is the model's matter.
    denoising: Fields,
    stop: Stop,
    stream: bool,
    include_usage: bool,
}

/// How to generate with the loaded model, and how to answer.
pub(super) struct Generation {
    pub(super) sampling: Sampling,
    pub(super) stop: Stop,
    /// Tell log-probabilities, with so many alternatives a token.
    pub(super) logprobs: Option<usize>,
    /// How many replies to make.
    pub(super) choices: usize,
    /// Answer as server-sent events.
    pub(super) stream: bool,
    /// Send a last chunk with token counts.
    pub(super) include_usage: bool,
    /// What is to stand behind the reply, on a canvas.
    pub(super) suffix: Vec<u32>,
    /// Text before the reply that is part of the answer.
    pub(super) echo: String,
    /// How to find calls of tools in the reply.
    pub(super) calls: Option<Calling>,
}

/// Fields that mean the same whatever the words around them, those of this server's own among them.
pub(super) const SHARED: [&str; 16] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stream",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "max_denoising_steps",
    "entropy_bound",
    "confidence_threshold",
    "chat_template_kwargs",
    "grammar",
];

/// Fields that only a model that denoises can honour.
const DENOISING: [&str; 3] = ["max_denoising_steps", "entropy_bound", "confidence_threshold"];

/// Most denoising steps for a canvas, unless the checkpoint itself takes more.
const MOST_STEPS: usize = 256;

/// Bounds in nats are at least so large: 0 would accept, or end, nothing.
const LEAST_NATS: f64 = 1e-6;

/// Largest entropy that one step may accept, in nats; a position has at most the logarithm of the vocabulary's size.
const MOST_ENTROPY: f64 = 1000.0;

/// Largest mean entropy of a canvas that is done, in nats.
const MOST_CONFIDENCE: f64 = 100.0;

/// Larger wishes are mistakes, unless the server allows as much.
const MOST_TOKENS: usize = 1 << 20;

/// No vocabulary is larger.
const MOST_TOP_K: i64 = 1 << 30;

/// Most stop strings of a request.
const MOST_STOPS: usize = 16;

/// Below this a temperature is 0: logits divided by it would leave the range of f32.
const COLDEST: f32 = 1e-4;

impl Asked {
    pub(super) fn read(fields: &mut Fields, app: &App, dialect: Dialect) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let temperature = fields.number("temperature", 0.0, 2.0)?;
        let top_k = fields.integer("top_k", -1, MOST_TOP_K)?;
        // Both -1 and 0 are in use for "all".
        let top_k = top_k.map(|k| usize::try_from(k).unwrap_or(0));
        let (top_p, min_p) = (fields.number("top_p", 0.0, 1.0)?, fields.number("min_p", 0.0, 1.0)?);
        let repetition_penalty = repetition_penalty(fields)?;
        let presence_penalty = fields.number("presence_penalty", -2.0, 2.0)?;
        let frequency_penalty = fields.number("frequency_penalty", -2.0, 2.0)?;
        let (logit_bias, form) = (bias::read(fields)?, Form::read(fields)?);
        let (logprobs, choices) = (logprobs::read(fields, dialect)?, choices(fields, app)?);
        let seed = seed(fields)?;
        let taken = DENOISING.iter().filter_map(|name| Some(((*name).to_owned(), fields.take(name)?)));
        let denoising = Fields::new(taken.collect());
        let stop = Stop {
            max_tokens: max_tokens(fields, app)?,
            strings: stop_strings(fields)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            deadline: app.server.request_timeout.map(|time| Instant::now() + time),
        };
        if let Some(form) = form.as_ref().filter(|_| stop.ignore_eos) {
            let message =
                format!("`ignore_eos`: `{}` says where the reply ends; send one of them", form.param);
            return Err(ApiError::field("ignore_eos", message));
        }
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            None => false,
            Some(_) if !stream => {
                let message = "`stream_options` is only allowed with `stream`: true";
                return Err(ApiError::field("stream_options", message));
            }
            Some(options) => {
                let mut options = Fields::new(options);
                let include = options.boolean("include_usage").map_err(|e| e.within("stream_options"))?;
                include.unwrap_or(false)
            }
        };
        Ok(Self {
            dialect,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            form,
            logprobs,
            choices,
            seed,
            denoising,
            stop,
            stream,
            include_usage,
        })
    }

    /// What it means for the loaded model, with the configuration's defaults for what a causal model was not told.
    pub(super) async fn of(mut self, app: &App, model: &Arc<Model>) -> Result<Generation, ApiError> {
        let mut sampling = match model.kind {
            ModelKind::Causal => self.causal(&app.sampling)?,
            ModelKind::BlockDiffusion { max_steps, .. } => self.diffusion(max_steps)?,
        };
        bias::check(&self.logit_bias, model.tokenizer.vocab_size())?;
        sampling.logit_bias = self.logit_bias;
        if let Some(Form { format, param }) = self.form.take() {
            let constraint = compile(model, format, &param, self.dialect == Dialect::Chat).await?;
            sampling.constraint = Some(constraint);
        }
        let Self { stop, logprobs, choices, stream, include_usage, .. } = self;
        Ok(Generation {
            sampling,
            stop,
            logprobs,
            choices,
            stream,
            include_usage,
            suffix: Vec::new(),
            echo: String::new(),
            calls: None,
        })
    }

    fn causal(&self, defaults: &SamplingConfig) -> Result<Sampling, ApiError> {
        if let Some(name) = self.denoising.rest().first() {
            return Err(ApiError::unsupported(*name, "this model does not denoise"));
        }
        Ok(Sampling {
            temperature: warm(self.temperature.unwrap_or(defaults.temperature)),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self
                .repetition_penalty
                .map_or(defaults.repetition_penalty, |(_, penalty)| penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            seed: self.seed.map_or_else(random_seed, Ok)?,
            ..Sampling::default()
        })
    }

    /// A model that denoises samples whole distributions: what would cut or shift them is refused. Defaults are the
    /// checkpoint's, never those of the configuration, which are meant for causal models.
    fn diffusion(&self, max_steps: usize) -> Result<Sampling, ApiError> {
        let neutral = Sampling::default();
        let differs = |asked: Option<f32>, neutral: f32| asked.is_some_and(|asked| asked != neutral);
        let (repetition, penalty) = self.repetition_penalty.unzip();
        for (name, has_effect) in [
            ("top_k", self.top_k.is_some_and(|k| k != neutral.top_k)),
            ("top_p", differs(self.top_p, neutral.top_p)),
            ("min_p", differs(self.min_p, neutral.min_p)),
            (repetition.unwrap_or_default(), differs(penalty, neutral.repetition_penalty)),
            ("presence_penalty", differs(self.presence_penalty, neutral.presence_penalty)),
            ("frequency_penalty", differs(self.frequency_penalty, neutral.frequency_penalty)),
            ("logit_bias", !self.logit_bias.is_empty()),
            ("logprobs", self.logprobs.is_some()),
        ] {
            if has_effect {
                return Err(ApiError::unsupported(
                    name,
                    "this model denoises, where it has no meaning; leave it out",
                ));
            }
        }
        let mut fields = self.denoising.clone();
        let [steps, bound, threshold] = DENOISING;
        let most = i64::try_from(max_steps.max(MOST_STEPS)).unwrap_or(i64::MAX);
        let temperature = warm(self.temperature.unwrap_or(1.0));
        // A canvas begins with random tokens even where none is drawn later; who asks for no randomness gets the same ones.
        let chosen = || if temperature == 0.0 { Ok(0) } else { random_seed() };
        Ok(Sampling {
            temperature,
            seed: self.seed.map_or_else(chosen, Ok)?,
            denoising: Denoising {
                max_steps: fields.integer(steps, 1, most)?.and_then(|steps| usize::try_from(steps).ok()),
                entropy_bound: fields.number(bound, LEAST_NATS, MOST_ENTROPY)?,
                confidence_threshold: fields.number(threshold, LEAST_NATS, MOST_CONFIDENCE)?,
            },
            ..neutral
        })
    }
}

impl Generation {
    /// The requests for all choices. They are the same but for their seeds, which follow from the request's, so that the
    /// same request gets the same choices. With `channels`, thoughts are told apart.
    pub(super) fn requests(self, id: &str, prompt: Vec<u32>, channels: bool) -> Vec<Request> {
        let Self { sampling, stop, logprobs, choices, suffix, calls, .. } = self;
        let seed = sampling.seed;
        let id = id.to_owned();
        let first = Request { id, prompt, suffix, sampling, stop, channels, drafts: false, calls, logprobs };
        let mut requests = vec![first; choices.max(1)];
        for (choice, request) in requests.iter_mut().enumerate() {
            request.sampling.seed = choice_seed(seed, choice);
        }
        requests
    }
}

/// The temperature, 0 where a smaller one would do harm.
fn warm(temperature: f32) -> f32 {
    if temperature < COLDEST { 0.0 } else { temperature }
}

/// Fields of either API that are not here, unless they ask for nothing, and those that have no effect.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let off = |value: &Value| *value == Value::Bool(false);
    let no_tools = "tool calls are not supported";
    fields.refuse("tools", no_tools, empty)?;
    fields.refuse("functions", no_tools, empty)?;
    fields.refuse("tool_choice", no_tools, |v| v == "none" || v == "auto")?;
    fields.refuse("function_call", no_tools, |v| v == "none" || v == "auto")?;
    fields.refuse("parallel_tool_calls", no_tools, Value::is_boolean)?;
    let text_only = |v: &Value| *v == serde_json::json!(["text"]);
    fields.refuse("modalities", "only [\"text\"] is supported", text_only)?;
    fields.refuse("audio", "audio is not supported", |_| false)?;
    fields.refuse("prediction", "predicted output is not supported", |_| false)?;
    fields.refuse("verbosity", "verbosity is not supported", |_| false)?;
    fields.refuse("web_search_options", "web search is not supported", |_| false)?;
    fields.refuse("moderation", "nothing here judges texts", |_| false)?;
    fields.refuse("echo", "the prompt is not repeated", off)?;
    fields.refuse("suffix", "text after the gap is not supported", |v| v == "")?;
    for no_effect in ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"] {
        fields.take(no_effect);
    }
    Ok(())
}

/// Refuses what asks for several replies, or for figures of a reply's tokens, where `why` there is neither.
pub(super) fn one_answer(fields: &mut Fields, why: &str) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        fields.refuse(name, why, |value| value.as_f64() == Some(1.0))?;
    }
    for name in ["logprobs", "top_logprobs"] {
        fields.refuse(name, why, |value| *value == false || value.as_f64() == Some(0.0))?;
    }
    Ok(())
}

/// How many replies to make; `best_of` must ask for as many as are shown.
fn choices(fields: &mut Fields, app: &App) -> Result<usize, ApiError> {
    let most = i64::try_from(app.server.max_choices).unwrap_or(i64::MAX);
    let choices = fields.integer("n", 1, most)?.unwrap_or(1);
    fields.refuse(
        "best_of",
        "replies are not compared; leave it out, or make it equal to `n`",
        |best_of| best_of.as_f64() == Some(choices as f64),
    )?;
    Ok(usize::try_from(choices).unwrap_or(1))
}

/// The penalty, and which of its two names it came under.
fn repetition_penalty(fields: &mut Fields) -> Result<Option<(&'static str, f32)>, ApiError> {
    let [long, short] = ["repetition_penalty", "repeat_penalty"];
    match (fields.number(long, 0.01, 10.0)?, fields.number(short, 0.01, 10.0)?) {
        (Some(a), Some(b)) if a != b => {
            let message = format!("`{long}` and `{short}` are the same setting but differ; send one");
            Err(ApiError::field(short, message))
        }
        (a, b) => Ok(a.map(|a| (long, a)).or(b.map(|b| (short, b)))),
    }
}

/// The request's seed. -1 is in use for "random".
fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    if let Some(seed) = value.as_u64() {
        return Ok(Some(seed));
    }
    match integer(&value) {
        Some(-1) => random_seed().map(Some),
        // The generator is keyed by 64 bits; which ones a negative number has is as good as any.
        Some(seed) => Ok(Some(seed.cast_unsigned())),
        None => Err(wrong("seed", &value, "a 64-bit integer")),
    }
}

/// A random seed that fits every client's integers.
fn random_seed() -> Result<u64, ApiError> {
    Ok(u64::from(u32::from_le_bytes(random()?)))
}

fn max_tokens(fields: &mut Fields, app: &App) -> Result<usize, ApiError> {
    let cap = app.server.max_tokens_cap;
    let most = i64::try_from(cap.max(MOST_TOKENS)).unwrap_or(i64::MAX);
    let old = fields.integer("max_tokens", 1, most)?;
    let new = fields.integer("max_completion_tokens", 1, most)?;
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        let message =
            format!("`max_tokens` ({old}) and `max_completion_tokens` ({new}) differ; send one of them");
        return Err(ApiError::field("max_completion_tokens", message));
    }
    let wish = new.or(old).and_then(|n| usize::try_from(n).ok()).or(app.server.default_max_tokens);
    Ok(wish.unwrap_or(cap).min(cap))
}

fn stop_strings(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let expected = "a string or a list of strings, none of them empty";
    let strings: Option<Vec<String>> = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => Some(vec![text]),
        Some(Value::Array(list)) => list.into_iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        Some(other) => return Err(wrong("stop", &other, expected)),
    };
    match strings {
        Some(strings) if strings.len() > MOST_STOPS => Err(ApiError::field(
            "stop",
            format!("`stop`: found {} strings, expected at most {MOST_STOPS}", strings.len()),
        )),
        Some(strings) if strings.iter().all(|s| !s.is_empty()) => Ok(strings),
        _ => Err(ApiError::field("stop", format!("`stop`: expected {expected}"))),
    }
}
