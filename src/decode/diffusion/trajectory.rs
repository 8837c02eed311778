//! A recorded run of the reference with every random draw.
//!
//! The file is safetensors. Of canvas `p` and step `s` it has `p<p>.s<s>.` with `canvas_in`, `argmax`, `sampled`,
//! `renoise`, `canvas_out` (i32 [rows]), `entropy` (f32 [rows]), `u` (f64 [rows]), `accepted` (u8 [rows]) and perhaps
//! `logits` (f32 [rows, vocabulary]: soft-capped, before the temperature); of canvas `p` as a whole `p<p>.init` and
//! `p<p>.final` (i32 [rows]).

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use thiserror::Error;

/// Why a recorded run cannot be read.
#[derive(Debug, Error)]
pub enum TrajectoryError {
    /// The bytes are no safetensors file.
    #[error("not a safetensors file: {0}")]
    File(#[from] SafeTensorError),
    /// A tensor is missing or not what it must be.
    #[error("tensor `{name}`: {what}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What was found and what was expected.
        what: String,
    },
}

/// A recorded run. Tensors are read when they are asked for.
pub struct Trajectory<'a> {
    file: SafeTensors<'a>,
    rows: usize,
    canvases: usize,
}

/// What happened in one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// What the step started from.
    pub canvas_in: Vec<u32>,
    /// Soft-capped logits before the temperature, `[rows][vocabulary]`, where they were recorded.
    pub logits: Option<Vec<f32>>,
    /// The most probable tokens.
    pub argmax: Vec<u32>,
    /// Entropies after the temperature, in nats.
    pub entropy: Vec<f32>,
    /// Uniform draws: the token is the first whose cumulative probability exceeds the draw.
    pub u: Vec<f64>,
    /// The tokens drawn so.
    pub sampled: Vec<u32>,
    /// Which positions kept them.
    pub accepted: Vec<bool>,
    /// The ids that replaced, or would have replaced, what was not accepted.
    pub renoise: Vec<u32>,
    /// What the next step starts from.
    pub canvas_out: Vec<u32>,
}

/// What a canvas started from and came to.
#[derive(Debug, Clone, PartialEq)]
pub struct CanvasRecord {
    /// The noise it started from.
    pub init: Vec<u32>,
    /// The most probable tokens of its last step, with padding after the first that ends the reply.
    pub finished: Vec<u32>,
    /// Its number of steps.
    pub steps: usize,
}

impl<'a> Trajectory<'a> {
    /// Reads the head of a file.
    ///
    /// # Errors
    /// Not a safetensors file, or one without a first canvas.
    pub fn read(bytes: &'a [u8]) -> Result<Self, TrajectoryError> {
        let file = SafeTensors::deserialize(bytes)?;
        let rows = tensor(&file, "p0.init", Dtype::I32)?.shape().iter().product();
        let canvases = count(&file, |canvas| format!("p{canvas}.init"));
        if rows == 0 {
            return Err(wrong("p0.init", "a canvas without rows"));
        }
        Ok(Self { file, rows, canvases })
    }

    /// Rows of a canvas.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of canvases.
    pub fn canvases(&self) -> usize {
        self.canvases
    }

    /// A canvas as a whole.
    ///
    /// # Errors
    /// Missing tensors, or such of another type or shape.
    pub fn canvas(&self, canvas: usize) -> Result<CanvasRecord, TrajectoryError> {
        Ok(CanvasRecord {
            init: self.ids(&format!("p{canvas}.init"))?,
            finished: self.ids(&format!("p{canvas}.final"))?,
            steps: count(&self.file, |step| format!("p{canvas}.s{step}.canvas_in")),
        })
    }

    /// One step of a canvas.
    ///
    /// # Errors
    /// As for [`Trajectory::canvas`].
    pub fn step(&self, canvas: usize, step: usize) -> Result<StepRecord, TrajectoryError> {
        let name = |what: &str| format!("p{canvas}.s{step}.{what}");
        let accepted = self.rows_of(&name("accepted"), Dtype::U8, |[byte]: [u8; 1]| byte)?;
        if let Some(byte) = accepted.iter().find(|&&byte| byte > 1) {
            return Err(wrong(&name("accepted"), &format!("found the byte {byte}, expected 0 or 1")));
        }
        Ok(StepRecord {
            canvas_in: self.ids(&name("canvas_in"))?,
            logits: self.logits(&name("logits"))?,
            argmax: self.ids(&name("argmax"))?,
            entropy: self.rows_of(&name("entropy"), Dtype::F32, f32::from_le_bytes)?,
            u: self.rows_of(&name("u"), Dtype::F64, f64::from_le_bytes)?,
            sampled: self.ids(&name("sampled"))?,
            accepted: accepted.into_iter().map(|byte| byte == 1).collect(),
            renoise: self.ids(&name("renoise"))?,
            canvas_out: self.ids(&name("canvas_out"))?,
        })
    }

    fn ids(&self, name: &str) -> Result<Vec<u32>, TrajectoryError> {
        let ids = self.rows_of(name, Dtype::I32, i32::from_le_bytes)?;
        ids.into_iter()
            .map(|id| u32::try_from(id).map_err(|_| wrong(name, &format!("found {id}, expected a token id"))))
            .collect()
    }

    fn logits(&self, name: &str) -> Result<Option<Vec<f32>>, TrajectoryError> {
        if self.file.tensor(name).is_err() {
            return Ok(None);
        }
        let view = tensor(&self.file, name, Dtype::F32)?;
        match view.shape() {
            [rows, vocabulary] if *rows == self.rows && *vocabulary > 0 => {
                Ok(Some(values(view.data(), f32::from_le_bytes)))
            }
            shape => Err(wrong(name, &format!("shape {shape:?}, expected [{}, vocabulary]", self.rows))),
        }
    }

    /// A tensor with one value a row.
    fn rows_of<T, const N: usize>(
        &self,
        name: &str,
        dtype: Dtype,
        read: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, TrajectoryError> {
        let view = tensor(&self.file, name, dtype)?;
        if view.shape().iter().product::<usize>() != self.rows {
            return Err(wrong(name, &format!("shape {:?}, expected [{}]", view.shape(), self.rows)));
        }
        Ok(values(view.data(), read))
    }
}

fn wrong(name: &str, what: &str) -> TrajectoryError {
    TrajectoryError::Tensor { name: name.to_owned(), what: what.to_owned() }
}

fn tensor<'a>(file: &SafeTensors<'a>, name: &str, dtype: Dtype) -> Result<TensorView<'a>, TrajectoryError> {
    let view = file.tensor(name).map_err(|_| wrong(name, "missing; is this a recorded trajectory?"))?;
    if view.dtype() != dtype {
        return Err(wrong(name, &format!("type {:?}, expected {dtype:?}", view.dtype())));
    }
    Ok(view)
}

fn values<T, const N: usize>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| read(*chunk)).collect()
}

/// How many of the names that are numbered from 0 are there without a gap.
fn count(file: &SafeTensors<'_>, name: impl Fn(usize) -> String) -> usize {
    (0..file.len()).take_while(|&index| file.tensor(&name(index)).is_ok()).count()
}
