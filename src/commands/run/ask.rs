//! From what was typed to a request: flags, messages, the model's template.

use anyhow::{Context, Result};
use axe::config::{Config, SamplingConfig};
use axe::decode::Sampling;
use axe::engine::{Model, ModelKind, Request, Stop};
use axe::load::Checkpoint;
use axe::text::{ChatInput, Specials, TextError};
use serde_json::{Value, json};

use super::Options;

/// Below this a temperature is 0: logits divided by it would leave the range of f32.
const COLDEST: f32 = 1e-4;

/// What the flags say about answers.
pub(super) struct Asked {
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    block_size: bool,
    seed: Option<u64>,
    system: Option<String>,
    raw: bool,
    ignore_eos: bool,
    tokens: Option<u32>,
}

impl Asked {
    pub(super) fn new(options: &Options) -> Self {
        Self {
            temperature: options.temperature.map(|t| if t < COLDEST { 0.0 } else { t }),
            top_k: options.top_k,
            top_p: options.top_p,
            min_p: options.min_p,
            block_size: options.block_size.is_some(),
            seed: options.seed,
            system: options.system.clone(),
            raw: options.raw,
            ignore_eos: options.ignore_eos,
            tokens: options.tokens,
        }
    }

    /// Refuses flags that mean nothing to such a model.
    pub(super) fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        let Checkpoint::Diffusion(checkpoint) = checkpoint else { return Ok(()) };
        for (flag, given) in [
            ("--top-k", self.top_k.is_some()),
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--block-size", self.block_size),
        ] {
            if given {
                return Err(crate::commands::meaningless(flag, checkpoint.path()).into());
            }
        }
        Ok(())
    }

    fn sampling(&self, kind: ModelKind, defaults: &SamplingConfig) -> Result<Sampling> {
        let random = || getrandom::u32().map(u64::from).context("the system gives no random numbers");
        let neutral = Sampling::default();
        if let ModelKind::BlockDiffusion { .. } = kind {
            let temperature = self.temperature.unwrap_or(1.0);
            // A canvas begins with random tokens even where none is drawn later; who asks for no randomness gets the same
            // ones.
            let seed = self.seed.map_or_else(|| if temperature == 0.0 { Ok(0) } else { random() }, Ok)?;
            return Ok(Sampling { temperature, seed, ..neutral });
        }
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.map_or(defaults.top_k, |k| k as usize),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: defaults.repetition_penalty,
            seed: self.seed.map_or_else(random, Ok)?,
            ..neutral
        })
    }
}

/// What was said so far.
pub(super) struct Conversation {
    /// Texts are continued as they are, each by itself.
    raw: bool,
    messages: Vec<Value>,
    answers: usize,
}

impl Conversation {
    /// One with the system message, if there is one.
    ///
    /// # Errors
    /// A system message for a model without a chat template.
    pub(super) fn new(asked: &Asked, model: &Model) -> Result<Self> {
        let raw = asked.raw || model.template.is_none();
        if raw && !asked.raw {
            if asked.system.is_some() {
                return Err(anyhow::Error::new(TextError::NoChatTemplate).context("--system has no place"));
            }
            crate::commands::tell(
                "axed: the model has no chat template: texts are continued as they are (--raw)",
            );
        }
        let system = asked.system.as_ref().map(|text| json!({ "role": "system", "content": text }));
        Ok(Self { raw, messages: system.into_iter().collect(), answers: 0 })
    }

    /// The request for an answer to `text`, which is part of the conversation until [`Conversation::answered`] says that
    /// there is none, whether this fails or what is done with the request.
    ///
    /// # Errors
    /// Messages that the template refuses; a text without tokens.
    pub(super) fn ask(
        &mut self,
        text: &str,
        asked: &Asked,
        model: &Model,
        config: &Config,
    ) -> Result<Request> {
        let prompt = match model.template.as_ref().filter(|_| !self.raw) {
            Some(template) => {
                self.messages.push(json!({ "role": "user", "content": text }));
                let messages = Value::Array(self.messages.clone());
                let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
                model.tokenizer.encode_prompt(&template.render(&input)?)
            }
            None => model.tokenizer.with_bos(model.tokenizer.encode(text, Specials::Parse)),
        };
        self.answers += 1;
        Ok(Request {
            id: format!("run-{}", self.answers),
            prompt,
            sampling: asked.sampling(model.kind, &config.sampling)?,
            stop: Stop {
                max_tokens: asked.tokens.map_or(usize::MAX, |tokens| tokens as usize),
                ignore_eos: asked.ignore_eos,
                ..Stop::default()
            },
            channels: !self.raw,
            drafts: false,
            ..Request::default()
        })
    }

    /// What the model said to the last message; without an answer that is forgotten.
    pub(super) fn answered(&mut self, text: Option<&str>) {
        match text {
            _ if self.raw => {}
            Some(text) => self.messages.push(json!({ "role": "assistant", "content": text })),
            None => drop(self.messages.pop()),
        }
    }
}
