//! The experts' projections of a `dg-w4a16-v1` directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;

use super::{DOWN_GROUP, EXPERTS, GATE_UP_GROUP};
use crate::checkpoint::diffusion_gemma::of_experts;
use crate::checkpoint::mapping::{Mapping, Stamp};
use crate::checkpoint::rows::{Encoding, Rows};
use crate::checkpoint::safetensors::{
    COPY_AGAIN, Dtype, Fault, Place, Safetensors, SafetensorsError, Tensor, WRONG_MODEL, list,
};

/// The six tensors of a layer.
const NAMES: [&str; 6] = ["gu_q", "gu_s", "gu_z", "dn_q", "dn_s", "dn_z"];

/// The experts of all layers.
#[derive(Debug)]
pub struct W4Experts {
    layers: Vec<W4Layer>,
    files: Vec<Arc<Mapping>>,
    headers: Vec<(Stamp, Vec<u8>)>,
}

/// The experts of a layer.
#[derive(Debug, Clone)]
pub struct W4Layer {
    experts: usize,
    hidden: usize,
    width: usize,
    gate_up: Projection,
    down: Projection,
}

/// Codes, scales and zeros of one projection of all experts, one below the other.
#[derive(Debug, Clone)]
struct Projection {
    rows: Rows,
    scales: Tensor,
    zeros: Tensor,
}

impl W4Experts {
    /// Opens all files of experts of a directory.
    ///
    /// # Errors
    /// Files that are not sound; tensors that are missing, of another type or shape, or not of this format; layers that
    /// are missing; a layer that stands in two files which do not agree byte by byte.
    pub(in crate::checkpoint) fn open(directory: &Path) -> Result<Self, SafetensorsError> {
        let files: Vec<PathBuf> = list(directory, EXPERTS)?.iter().map(|name| directory.join(name)).collect();
        let opened = Safetensors::open_overlapping(&files)?;
        let mut layers: BTreeMap<usize, BTreeMap<&'static str, Tensor>> = BTreeMap::new();
        for tensor in opened.tensors {
            let Some((layer, name)) = place(&tensor.name) else {
                let expected = "<path of the encoder or decoder>.layers.<i>.experts.<gu_q, gu_s, gu_z, dn_q, dn_s or dn_z>";
                return Err(tensor.fault("a tensor of another name", expected, WRONG_MODEL));
            };
            let slots = layers.entry(layer).or_default();
            if let Some(other) = slots.get(name) {
                tensor.require_copy_of(other)?;
            } else {
                slots.insert(name, tensor);
            }
        }
        opened.files.iter().for_each(|file| file.release());
        let whole = |found: String, expected: String| {
            SafetensorsError::from(Box::new(Fault {
                path: directory.to_owned(),
                place: Place::Whole,
                found,
                expected,
                advice: "download the checkpoint again, with all of its files, or convert it again",
            }))
        };
        if layers.is_empty() {
            let found = format!("no experts in files named {EXPERTS}*.safetensors");
            return Err(whole(found, "one file for each layer".to_owned()));
        }
        let mut checked: Vec<W4Layer> = Vec::with_capacity(layers.len());
        for (index, (layer, tensors)) in layers.into_iter().enumerate() {
            if layer != index {
                let found = format!("experts of layer {layer}, but none of layer {index}");
                return Err(whole(found, "those of every layer".to_owned()));
            }
            let layer = W4Layer::new(directory, index, &tensors)?;
            if let Some(first) = checked.first()
                && (first.experts, first.hidden, first.width) != (layer.experts, layer.hidden, layer.width)
            {
                let codes = &tensors["gu_q"];
                let expected = format!(
                    "{} experts, hidden size {} and expert size {} as in layer 0",
                    first.experts, first.hidden, first.width
                );
                return Err(codes.fault(format!("shape {:?}", codes.shape), expected, WRONG_MODEL));
            }
            checked.push(layer);
        }
        Ok(Self { layers: checked, files: opened.files, headers: opened.headers })
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[W4Layer] {
        &self.layers
    }

    /// Lets go of what has been read.
    pub fn release(&self) {
        self.files.iter().for_each(|file| file.release());
    }

    /// Stamp and header of every file.
    pub(in crate::checkpoint) fn described(&self) -> impl Iterator<Item = (Stamp, &[u8])> {
        self.headers.iter().map(|(stamp, header)| (*stamp, header.as_slice()))
    }
}

/// Layer and kind of a tensor, from its name.
fn place(name: &str) -> Option<(usize, &'static str)> {
    let (layer, name) = of_experts(name)?;
    Some((layer, NAMES.into_iter().find(|&other| other == name)?))
}

impl W4Layer {
    fn new(
        directory: &Path,
        index: usize,
        tensors: &BTreeMap<&'static str, Tensor>,
    ) -> Result<Self, SafetensorsError> {
        let get = |name: &str| {
            tensors.get(name).ok_or_else(|| SafetensorsError::MissingTensor {
                path: directory.to_owned(),
                name: format!("layers.{index}.experts.{name}"),
            })
        };
        let [gu_q, gu_s, gu_z, dn_q, dn_s, dn_z] =
            [get("gu_q")?, get("gu_s")?, get("gu_z")?, get("dn_q")?, get("dn_s")?, get("dn_z")?];
        let gate_up = Projection::new([gu_q, gu_s, gu_z], GATE_UP_GROUP)?;
        let down = Projection::new([dn_q, dn_s, dn_z], DOWN_GROUP)?;
        let (experts, hidden, width) = (gu_q.shape[0], gate_up.rows.columns, down.rows.columns);
        if gu_q.shape[1] != 2 * width {
            let expected = format!("[{experts}, {}, {}] as dn_q says", 2 * width, hidden / 2);
            return Err(gu_q.fault(format!("shape {:?}", gu_q.shape), expected, WRONG_MODEL));
        }
        if dn_q.shape[..2] != [experts, hidden] {
            let expected = format!("[{experts}, {hidden}, {}] as gu_q says", width / 2);
            return Err(dn_q.fault(format!("shape {:?}", dn_q.shape), expected, WRONG_MODEL));
        }
        Ok(Self { experts, hidden, width, gate_up, down })
    }

    /// Experts of the layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Inputs of an expert, and its outputs.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Values between an expert's two projections.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The gate projection of an expert: `width` rows of `hidden`.
    pub fn gate(&self, expert: usize) -> Option<Rows> {
        self.gate_up.rows.part(expert.checked_mul(2 * self.width)?, self.width)
    }

    /// The up projection of an expert: `width` rows of `hidden`.
    pub fn up(&self, expert: usize) -> Option<Rows> {
        self.gate_up.rows.part(expert.checked_mul(2 * self.width)?.checked_add(self.width)?, self.width)
    }

    /// The down projection of an expert: `hidden` rows of `width`.
    pub fn down(&self, expert: usize) -> Option<Rows> {
        self.down.rows.part(expert.checked_mul(self.hidden)?, self.hidden)
    }

    /// Reads all scales and zeros.
    ///
    /// # Errors
    /// The first scale that is not finite or is negative, or the first zero that is no whole number from 0 to 15.
    pub fn check_values(&self) -> Result<(), SafetensorsError> {
        let each = |tensor: &Tensor, fits: fn(f32) -> bool, expected: &str| {
            let values = tensor.bytes.as_ref().chunks_exact(2);
            let wrong = values
                .map(|raw| f16::from_le_bytes([raw[0], raw[1]]).to_f32())
                .enumerate()
                .find(|&(_, value)| !fits(value));
            match wrong {
                None => Ok(()),
                Some((index, value)) => {
                    Err(tensor.fault(format!("{value} at index {index}"), expected, COPY_AGAIN))
                }
            }
        };
        for projection in [&self.gate_up, &self.down] {
            let finite = |value: f32| value.is_finite() && value >= 0.0;
            each(&projection.scales, finite, "scales that are finite and not negative")?;
            let whole = |value: f32| (0.0..=15.0).contains(&value) && value.fract() == 0.0;
            each(&projection.zeros, whole, "whole numbers from 0 to 15")?;
        }
        Ok(())
    }
}

impl Projection {
    /// From codes `[E, R, C / 2]`, scales and zeros `[E, R, C / group]`.
    fn new([codes, scales, zeros]: [&Tensor; 3], group: usize) -> Result<Self, SafetensorsError> {
        let typed = |tensor: &Tensor, dtype: Dtype| {
            if tensor.dtype == dtype {
                return Ok(());
            }
            Err(tensor.fault(format!("type {:?}", tensor.dtype), format!("{dtype:?}"), WRONG_MODEL))
        };
        typed(codes, Dtype::U8)?;
        typed(scales, Dtype::F16)?;
        typed(zeros, Dtype::F16)?;
        let [experts, rows, half] = codes.shape[..] else {
            let expected = "three dimensions: experts, rows, bytes of a row";
            return Err(codes.fault(format!("shape {:?}", codes.shape), expected, WRONG_MODEL));
        };
        // Twice what a file holds cannot overflow, nor can the product, unless one of them is zero.
        let (columns, total) = (half.saturating_mul(2), experts.saturating_mul(rows));
        if experts == 0 || rows == 0 || half == 0 || !columns.is_multiple_of(group) {
            let expected = format!("none of them zero, and rows of a multiple of {group} codes");
            return Err(codes.fault(format!("shape {:?}", codes.shape), expected, WRONG_MODEL));
        }
        let grouped = [experts, rows, columns / group];
        for tensor in [scales, zeros] {
            if tensor.shape != grouped {
                let expected = format!("{grouped:?}: one for {group} columns");
                return Err(tensor.fault(format!("shape {:?}", tensor.shape), expected, WRONG_MODEL));
            }
        }
        let encoding = Encoding::W4 { scales: scales.bytes.clone(), zeros: zeros.bytes.clone(), group };
        let rows =
            Rows { name: codes.name.clone(), encoding, rows: total, columns, bytes: codes.bytes.clone() };
        Ok(Self { rows, scales: scales.clone(), zeros: zeros.clone() })
    }
}
