//! The tensors of a DiffusionGemma by what they are for, whichever file format they come in.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use super::config::DiffusionConfig;
use super::generation::GenerationConfig;
use crate::checkpoint::directory::{CONFIG, GENERATION_CONFIG, HfDirectory};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::kind::Kind;
use crate::checkpoint::quant::{GgmlType, dequantize};
use crate::checkpoint::rows::{Encoding, Rows};
use crate::checkpoint::w4::{DOWN_GROUP, GATE_UP_GROUP, W4Experts};
use crate::model::error::ModelError;

/// A checkpoint in one of its file formats.
#[derive(Debug, Clone)]
pub enum DiffusionCheckpoint {
    /// A GGUF of architecture `diffusion-gemma`.
    Gguf(Arc<Gguf>),
    /// A Hugging Face directory, with plain experts or those of `dg-w4a16-v1`.
    Directory(Arc<HfDirectory>),
}

impl DiffusionCheckpoint {
    /// Opens what is at `path`, whichever of the formats it has.
    ///
    /// # Errors
    /// What is there instead of a checkpoint, or what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Ok(match Kind::of(path)? {
            Kind::Gguf(path) => Self::Gguf(Arc::new(Gguf::open(&path)?)),
            Kind::W4Directory(path) | Kind::HfDirectory(path) => {
                Self::Directory(Arc::new(HfDirectory::open(&path)?))
            }
        })
    }

    /// How the checkpoint wants to be sampled.
    ///
    /// # Errors
    /// Values that are not supported, by file and key.
    pub fn generation_config(&self) -> Result<GenerationConfig, ModelError> {
        match self {
            Self::Gguf(gguf) => GenerationConfig::from_gguf(gguf),
            Self::Directory(directory) => match &directory.generation_config {
                Some(value) => GenerationConfig::from_json(&directory.path().join(GENERATION_CONFIG), value),
                None => Ok(GenerationConfig::default()),
            },
        }
    }

    /// The file or directory.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(gguf) => gguf.path(),
            Self::Directory(directory) => directory.path(),
        }
    }

    /// Tells the checkpoint from every other one.
    pub fn identity(&self) -> String {
        match self {
            Self::Gguf(gguf) => gguf.identity().to_string(),
            Self::Directory(directory) => directory.identity().to_string(),
        }
    }

    /// The model's sizes and switches.
    ///
    /// # Errors
    /// What is missing or not supported, by file and key.
    pub fn config(&self) -> Result<DiffusionConfig, ModelError> {
        match self {
            Self::Gguf(gguf) => DiffusionConfig::from_gguf(gguf),
            Self::Directory(directory) => {
                DiffusionConfig::from_json(&directory.path().join(CONFIG), &directory.config)
            }
        }
    }

    /// Lets go of the pages that were read.
    pub fn release(&self) {
        match self {
            Self::Gguf(gguf) => gguf.mapping().release(),
            Self::Directory(directory) => directory.release(),
        }
    }

    /// The kind of most weights, as status shows it.
    pub fn quantisation(&self, experts: ExpertWeights) -> String {
        match self {
            Self::Gguf(gguf) => gguf
                .tensor("blk.0.ffn_gate_up_exps.weight")
                .map_or("unknown", |tensor| tensor.ty.name())
                .to_owned(),
            Self::Directory(directory) if directory.experts.is_some() => "dg-w4a16-v1".to_owned(),
            Self::Directory(_) => match experts {
                ExpertWeights::Quantised => "dg-w4a16-v1 (quantised while loading)".to_owned(),
                ExpertWeights::AsStored => "plain".to_owned(),
            },
        }
    }
}

/// What becomes of plain expert weights on their way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum ExpertWeights {
    /// Quantised to 4 bits as `dg-w4a16-v1` does it, where their sizes allow.
    #[serde(rename = "w4")]
    Quantised,
    /// Kept as the file has them.
    #[serde(rename = "as-stored")]
    AsStored,
}

/// A tensor's names in both formats.
#[derive(Clone)]
pub(super) struct Name {
    hugging_face: String,
    gguf: String,
}

impl Name {
    pub(super) fn new(hugging_face: &str, gguf: &str) -> Self {
        Self { hugging_face: format!("model.decoder.{hugging_face}"), gguf: gguf.to_owned() }
    }

    pub(super) fn of_layer(layer: usize, hugging_face: &str, gguf: &str) -> Self {
        Self {
            hugging_face: format!("model.decoder.layers.{layer}.{hugging_face}"),
            gguf: format!("blk.{layer}.{gguf}"),
        }
    }

    pub(super) fn encoder_scalar(layer: usize) -> Self {
        Self {
            hugging_face: format!("model.encoder.language_model.layers.{layer}.layer_scalar"),
            gguf: format!("blk.{layer}.enc_layer_output_scale.weight"),
        }
    }
}

/// Expert projections of a layer: gate and up of each expert in turn, and down of each.
pub(super) struct ExpertRows {
    pub(super) gate_up: Vec<Rows>,
    pub(super) down: Vec<Rows>,
}

/// Gives out the tensors of a checkpoint and remembers which.
pub(super) struct Source<'a> {
    checkpoint: &'a DiffusionCheckpoint,
    config: &'a DiffusionConfig,
    experts: ExpertWeights,
    used: HashSet<String>,
}

impl<'a> Source<'a> {
    pub(super) fn new(
        checkpoint: &'a DiffusionCheckpoint,
        config: &'a DiffusionConfig,
        experts: ExpertWeights,
    ) -> Self {
        Self { checkpoint, config, experts, used: HashSet::new() }
    }

    fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.checkpoint.path().to_owned(), what }
    }

    /// A matrix of `rows` outputs and `columns` inputs.
    pub(super) fn matrix(&mut self, name: &Name, rows: usize, columns: usize) -> Result<Rows, ModelError> {
        match self.checkpoint {
            DiffusionCheckpoint::Gguf(gguf) => {
                self.used.insert(name.gguf.clone());
                let tensor = gguf.require_tensor(&name.gguf, &[columns as u64, rows as u64])?;
                Ok(gguf.rows(tensor))
            }
            DiffusionCheckpoint::Directory(directory) => {
                self.used.insert(name.hugging_face.clone());
                Ok(directory.safetensors.matrix(&name.hugging_face, [rows, columns])?)
            }
        }
    }

    /// A vector of `n` values.
    pub(super) fn vector(&mut self, name: &Name, n: usize) -> Result<Vec<f32>, ModelError> {
        match self.checkpoint {
            DiffusionCheckpoint::Gguf(gguf) => {
                self.used.insert(name.gguf.clone());
                let tensor = gguf.require_tensor(&name.gguf, &[n as u64])?;
                let mut values = vec![0f32; n];
                dequantize(tensor.ty, gguf.bytes(tensor), &mut values)?;
                Ok(values)
            }
            DiffusionCheckpoint::Directory(directory) => {
                self.used.insert(name.hugging_face.clone());
                Ok(directory.safetensors.vector(&name.hugging_face, n)?)
            }
        }
    }

    /// A single number.
    pub(super) fn scalar(&mut self, name: &Name) -> Result<f32, ModelError> {
        Ok(self.vector(name, 1)?[0])
    }

    /// The experts of a layer.
    pub(super) fn experts(&mut self, layer: usize) -> Result<ExpertRows, ModelError> {
        let (count, hidden, inner) =
            (self.config.experts, self.config.hidden, self.config.expert_feed_forward);
        if let DiffusionCheckpoint::Directory(directory) = self.checkpoint
            && let Some(experts) = &directory.experts
        {
            return self.quantised(experts, layer);
        }
        let gate_up =
            self.stacked(layer, "experts.gate_up_proj", "ffn_gate_up_exps.weight", 2 * inner, hidden)?;
        let down = self.stacked(layer, "experts.down_proj", "ffn_down_exps.weight", hidden, inner)?;
        let (gate_up, down) = (self.as_wanted(gate_up, GATE_UP_GROUP), self.as_wanted(down, DOWN_GROUP));
        let part = |rows: &Rows, first, count| {
            rows.part(first, count).ok_or_else(|| {
                self.unsupported(format!("tensor {} is shorter than its shape says", rows.name))
            })
        };
        Ok(ExpertRows {
            gate_up: (0..2 * count).map(|i| part(&gate_up, i * inner, inner)).collect::<Result<_, _>>()?,
            down: (0..count).map(|i| part(&down, i * hidden, hidden)).collect::<Result<_, _>>()?,
        })
    }

    /// The experts of a layer of `dg-w4a16-v1`.
    fn quantised(&self, experts: &W4Experts, layer: usize) -> Result<ExpertRows, ModelError> {
        let (count, hidden, inner) =
            (self.config.experts, self.config.hidden, self.config.expert_feed_forward);
        let layers = experts.layers();
        let wrong = |what: String| self.unsupported(what);
        let found = match layers.get(layer) {
            Some(found) if layers.len() == self.config.layers.len() => found,
            _ => {
                let expected = self.config.layers.len();
                return Err(wrong(format!("experts of {} layers; {CONFIG} says {expected}", layers.len())));
            }
        };
        if (found.experts(), found.hidden(), found.width()) != (count, hidden, inner) {
            return Err(wrong(format!(
                "layer {layer} has {} experts of {} by {}; {CONFIG} says {count} of {hidden} by {inner}",
                found.experts(),
                found.hidden(),
                found.width()
            )));
        }
        found.check_values()?;
        let (mut gate_up, mut down) = (Vec::with_capacity(2 * count), Vec::with_capacity(count));
        for expert in 0..count {
            let parts = (found.gate(expert), found.up(expert), found.down(expert));
            let (Some(gate), Some(up), Some(down_rows)) = parts else {
                return Err(wrong(format!("layer {layer} lacks expert {expert}")));
            };
            gate_up.extend([gate, up]);
            down.push(down_rows);
        }
        Ok(ExpertRows { gate_up, down })
    }

    /// The matrices of all experts, one below the other.
    fn stacked(
        &mut self,
        layer: usize,
        hugging_face: &str,
        gguf_name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Rows, ModelError> {
        let name = Name::of_layer(layer, hugging_face, gguf_name);
        let experts = self.config.experts;
        match self.checkpoint {
            DiffusionCheckpoint::Gguf(gguf) => {
                self.used.insert(name.gguf.clone());
                let shape = [columns as u64, rows as u64, experts as u64];
                Ok(gguf.rows(gguf.require_tensor(&name.gguf, &shape)?))
            }
            DiffusionCheckpoint::Directory(directory) => {
                self.used.insert(name.hugging_face.clone());
                Ok(directory.safetensors.matrices(&name.hugging_face, [experts, rows, columns])?)
            }
        }
    }

    fn as_wanted(&self, rows: Rows, group: usize) -> Rows {
        match (&rows.encoding, self.experts) {
            (
                Encoding::Ggml(from @ (GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)),
                ExpertWeights::Quantised,
            ) if matches!(self.checkpoint, DiffusionCheckpoint::Directory(_))
                && rows.columns.is_multiple_of(group) =>
            {
                let encoding = Encoding::ToW4 { from: *from, group };
                Rows { encoding, ..rows }
            }
            _ => rows,
        }
    }

    /// A tensor that nothing uses means a model that is not what it is taken for; those of the vision tower, and second
    /// copies of what encoder and decoder share, are passed over with a line in the log.
    pub(super) fn check_the_rest(&self) -> Result<(), ModelError> {
        const SHOWN: usize = 4;
        let names: Vec<&str> = match self.checkpoint {
            DiffusionCheckpoint::Gguf(gguf) => {
                gguf.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
            }
            DiffusionCheckpoint::Directory(directory) => directory.safetensors.names().collect(),
        };
        let (mut vision, mut copies, mut unknown) = (0, 0, Vec::new());
        for name in names {
            if self.used.contains(name) || name == "rope_freqs.weight" {
            } else if is_vision(name) {
                vision += 1;
            } else if self.is_copy(name) {
                copies += 1;
            } else {
                unknown.push(name);
            }
        }
        if vision > 0 {
            tracing::info!(tensors = vision, "skipping the vision tower: this version reads text only");
        }
        if copies > 0 {
            tracing::info!(
                tensors = copies,
                "skipping second copies of weights that encoder and decoder share"
            );
        }
        if unknown.is_empty() {
            return Ok(());
        }
        let more = match unknown.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = unknown.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
        Err(self.unsupported(format!(
            "this version has no use for the tensors {names}{more}; without them the model would not be the one in the \
             checkpoint"
        )))
    }

    /// Whether a Hugging Face tensor is one that is used under its decoder's name.
    fn is_copy(&self, name: &str) -> bool {
        let shared =
            name.strip_prefix("model.encoder.language_model.").map(|rest| format!("model.decoder.{rest}"));
        let tied = (name == "lm_head.weight").then(|| "model.decoder.embed_tokens.weight".to_owned());
        shared.or(tied).is_some_and(|name| self.used.contains(&name))
    }
}

fn is_vision(name: &str) -> bool {
    ["model.encoder.vision_tower.", "model.encoder.embed_vision.", "v.", "mm."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}
