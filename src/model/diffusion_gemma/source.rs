//! The tensors of a DiffusionGemma by what they are for, whichever file format they come in.

use std::collections::HashSet;

use super::checkpoint::{DenseWeights, DiffusionCheckpoint, ExpertWeights};
use super::config::DiffusionConfig;
use crate::checkpoint::diffusion_gemma::{self, DECODER, ENCODER};
use crate::checkpoint::directory::CONFIG;
use crate::checkpoint::quant::{GgmlType, dequantize};
use crate::checkpoint::rows::{Encoding, Rows};
use crate::checkpoint::w4::{DOWN_GROUP, GATE_UP_GROUP, W4Experts};
use crate::model::error::ModelError;

/// Begin the names of the vision tower's tensors in GGUF files.
const GGUF_VISION: [&str; 2] = ["v.", "mm."];
/// Columns that share a scale in Q8_0.
const Q8_COLUMNS: usize = 32;

/// A tensor's names in both formats.
#[derive(Clone)]
pub(super) struct Name {
    hugging_face: String,
    gguf: String,
}

impl Name {
    pub(super) fn new(hugging_face: &str, gguf: &str) -> Self {
        Self { hugging_face: format!("{DECODER}{hugging_face}"), gguf: gguf.to_owned() }
    }

    pub(super) fn of_layer(layer: usize, hugging_face: &str, gguf: &str) -> Self {
        Self {
            hugging_face: format!("{DECODER}layers.{layer}.{hugging_face}"),
            gguf: format!("blk.{layer}.{gguf}"),
        }
    }

    pub(super) fn encoder_scalar(layer: usize) -> Self {
        Self {
            hugging_face: format!("{ENCODER}layers.{layer}.layer_scalar"),
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
    dense: DenseWeights,
    used: HashSet<String>,
}

impl<'a> Source<'a> {
    pub(super) fn new(
        checkpoint: &'a DiffusionCheckpoint,
        config: &'a DiffusionConfig,
        (experts, dense): (ExpertWeights, DenseWeights),
    ) -> Self {
        Self { checkpoint, config, experts, dense, used: HashSet::new() }
    }

    fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.checkpoint.path().to_owned(), what }
    }

    /// A matrix of `rows` outputs and `columns` inputs, quantised if that is wanted of it.
    pub(super) fn matrix(&mut self, name: &Name, rows: usize, columns: usize) -> Result<Rows, ModelError> {
        let found = self.plain_matrix(name, rows, columns)?;
        Ok(match (&found.encoding, self.dense) {
            (
                Encoding::Ggml(from @ (GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)),
                DenseWeights::Quantised,
            ) if self.is_directory() && columns.is_multiple_of(Q8_COLUMNS) => {
                Rows { encoding: Encoding::ToQ8(*from), ..found }
            }
            _ => found,
        })
    }

    /// A matrix of `rows` outputs and `columns` inputs as the file has it.
    pub(super) fn plain_matrix(
        &mut self,
        name: &Name,
        rows: usize,
        columns: usize,
    ) -> Result<Rows, ModelError> {
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

    /// What a GGUF holds was chosen when it was made.
    fn is_directory(&self) -> bool {
        matches!(self.checkpoint, DiffusionCheckpoint::Directory(_))
    }

    fn as_wanted(&self, rows: Rows, group: usize) -> Rows {
        match (&rows.encoding, self.experts) {
            (
                Encoding::Ggml(from @ (GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)),
                ExpertWeights::Quantised,
            ) if self.is_directory() && rows.columns.is_multiple_of(group) => {
                let encoding = Encoding::ToW4 { from: *from, group };
                Rows { encoding, ..rows }
            }
            _ => rows,
        }
    }

    /// A tensor that nothing uses means a model that is not what it is taken for; those of the vision tower, and second
    /// copies of what encoder and decoder share, if they are the same to the bit, are passed over with a line in the log.
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
            } else if self.is_vision(name) {
                vision += 1;
            } else if self.is_copy(name)? {
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
    ///
    /// # Errors
    /// It is called so, and is not the same.
    fn is_copy(&self, name: &str) -> Result<bool, ModelError> {
        let DiffusionCheckpoint::Directory(directory) = self.checkpoint else { return Ok(false) };
        let Some(original) = diffusion_gemma::original(name).filter(|original| self.used.contains(original))
        else {
            return Ok(false);
        };
        let tensors = &directory.safetensors;
        let same = tensors.require(name)?.require_copy_of(tensors.require(&original)?);
        // Tables are large, and not needed again soon.
        directory.release();
        Ok(same.map(|()| true)?)
    }

    /// Whether text does without the tensor.
    fn is_vision(&self, name: &str) -> bool {
        match self.checkpoint {
            DiffusionCheckpoint::Gguf(_) => GGUF_VISION.iter().any(|prefix| name.starts_with(prefix)),
            DiffusionCheckpoint::Directory(_) => diffusion_gemma::is_vision(name),
        }
    }
}
