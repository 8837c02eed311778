//! The tensors of a file: each is asked for by name and shape, and what nobody has asked for keeps the model from loading.

use std::collections::HashSet;

use crate::checkpoint::gguf::{Gguf, TensorInfo};
use crate::checkpoint::quant::dequantize;
use crate::checkpoint::rows::Rows;
use crate::model::error::ModelError;
use crate::model::gate_up::GateUp;
use crate::model::repack::{Arrangement, Blueprint, format_in_tiles};
use crate::ops::Family;

/// Collects the matrices and vectors that a model is made of; they are named by their places in the collection.
pub(super) struct Finder<'a> {
    gguf: &'a Gguf,
    asked: HashSet<String>,
    blueprints: Vec<Blueprint>,
    vectors: Vec<Vec<f32>>,
}

impl<'a> Finder<'a> {
    pub(super) fn new(gguf: &'a Gguf) -> Self {
        Self { gguf, asked: HashSet::new(), blueprints: Vec::new(), vectors: Vec::new() }
    }

    /// The file does not go together with this program for this reason.
    pub(super) fn unsupported(&self, what: String) -> ModelError {
        ModelError::Unsupported { path: self.gguf.path().to_owned(), what }
    }

    /// Whether the file has a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// A tensor of this shape, the contiguous dimension first.
    pub(super) fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorInfo, ModelError> {
        self.asked.insert(name.to_owned());
        let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
        Ok(self.gguf.require_tensor(name, &shape)?)
    }

    /// A tensor that the file may have and this model does not need.
    pub(super) fn pass_over(&mut self, name: &str) {
        if self.has(name) {
            tracing::debug!(name, "a tensor that the model does not need");
            self.asked.insert(name.to_owned());
        }
    }

    /// The rows of a matrix of `columns` inputs and `rows` outputs.
    pub(super) fn rows(&mut self, name: &str, columns: usize, rows: usize) -> Result<Rows, ModelError> {
        let tensor = self.tensor(name, &[columns, rows])?;
        Ok(self.gguf.rows(tensor))
    }

    /// The rows of `count` matrices of that shape, each by itself.
    pub(super) fn matrices(
        &mut self,
        name: &str,
        columns: usize,
        rows: usize,
        count: usize,
    ) -> Result<Vec<Rows>, ModelError> {
        let tensor = self.tensor(name, &[columns, rows, count])?;
        let all = self.gguf.rows(tensor);
        (0..count)
            .map(|i| {
                all.part(i * rows, rows)
                    .ok_or_else(|| self.unsupported(format!("tensor {name} is shorter than its shape says")))
            })
            .collect()
    }

    /// The values of a vector.
    pub(super) fn values(&mut self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[n])?;
        let mut values = vec![0f32; n];
        dequantize(tensor.ty, self.gguf.bytes(tensor), &mut values)?;
        Ok(values)
    }

    /// Takes a vector into the collection.
    pub(super) fn vector(&mut self, name: &str, n: usize) -> Result<usize, ModelError> {
        let values = self.values(name, n)?;
        Ok(self.keep(values))
    }

    /// The same for a vector whose values are compared before they are added to anything: what is no number there would
    /// go unnoticed.
    pub(super) fn finite_vector(&mut self, name: &str, n: usize) -> Result<usize, ModelError> {
        let values = self.values(name, n)?;
        match values.iter().position(|value| !value.is_finite()) {
            None => Ok(self.keep(values)),
            Some(index) => Err(self.unsupported(format!(
                "value {index} of {name} is {}, which is no number; copy the file again from its source",
                values[index]
            ))),
        }
    }

    /// Takes values into the collection of vectors.
    pub(super) fn keep(&mut self, values: Vec<f32>) -> usize {
        self.vectors.push(values);
        self.vectors.len() - 1
    }

    /// Takes a matrix into the collection, called `name`, made of parts of one format.
    pub(super) fn matrix(
        &mut self,
        name: String,
        parts: Vec<Rows>,
        arrangement: Arrangement,
    ) -> Result<usize, ModelError> {
        if let Some(odd) = parts.iter().find(|part| !same_format(&parts[0], part)) {
            return Err(self.unsupported(format!(
                "tensors {} and {} are of different types; one type is supported for {name}",
                parts[0].name, odd.name
            )));
        }
        self.blueprints.push(Blueprint { name, parts, arrangement, family: Family::Vector });
        Ok(self.blueprints.len() - 1)
    }

    /// Takes a matrix of one tensor into the collection.
    pub(super) fn plain(&mut self, name: &str, columns: usize, rows: usize) -> Result<usize, ModelError> {
        let parts = vec![self.rows(name, columns, rows)?];
        self.matrix(name.to_owned(), parts, Arrangement::Stacked)
    }

    /// Gate and up in one matrix where they have one format, else in two.
    pub(super) fn gate_up(&mut self, name: &str, gate: Rows, up: Rows) -> Result<GateUp<usize>, ModelError> {
        if same_format(&gate, &up) {
            return Ok(GateUp::Joined(self.matrix(name.to_owned(), vec![gate, up], Arrangement::Paired)?));
        }
        let gate = self.matrix(format!("{name}, gate"), vec![gate], Arrangement::Stacked)?;
        Ok(GateUp::Apart(gate, self.matrix(format!("{name}, up"), vec![up], Arrangement::Stacked)?))
    }

    /// The matrices and vectors in the order they were taken. A tensor that nothing uses means a model that is not what
    /// it is taken for.
    ///
    /// # Errors
    /// The tensors that nobody has asked for, by name.
    pub(super) fn finish(self) -> Result<(Vec<Blueprint>, Vec<Vec<f32>>), ModelError> {
        const SHOWN: usize = 4;
        let tensors = self.gguf.tensors().iter().map(|tensor| tensor.name.as_str());
        let unused: Vec<&str> = tensors.filter(|&name| !self.asked.contains(name)).collect();
        if unused.is_empty() {
            return Ok((self.blueprints, self.vectors));
        }
        let more = match unused.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = unused.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
        Err(self.unsupported(format!(
            "this version has no use for the tensors {names}{more}; without them the model would not be the one in \
             the file"
        )))
    }
}

/// Whether two tensors can lie in one matrix.
pub(super) fn same_format(a: &Rows, b: &Rows) -> bool {
    format_in_tiles(&a.encoding) == format_in_tiles(&b.encoding)
}
