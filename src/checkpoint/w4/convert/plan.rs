//! Which files a conversion writes and what of the source goes into each.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{ConvertError, ConvertOptions};
use crate::checkpoint::diffusion_gemma::{
    self, EXPERT_WIDTH, HIDDEN, LAYERS, MODEL_TYPE, Size, is_vision, of_experts,
};
use crate::checkpoint::directory::{CONFIG, HfDirectory};
use crate::checkpoint::quant::GgmlType;
use crate::checkpoint::rows::Rows;
use crate::checkpoint::safetensors::{Fault, INDEX, Place, SINGLE, SafetensorsError, Tensor, WRONG_MODEL};
use crate::checkpoint::w4::{DOWN_GROUP, EXPERTS, FORMAT, GATE_UP_GROUP};

/// All files of tensors, in the order in which they are made.
pub(super) struct Plan {
    pub files: Vec<OutFile>,
    /// The text of the index of the files that are not experts, if those are several.
    pub index: Option<String>,
    /// What the file that names the format says.
    pub meta: String,
    /// Tensors that are not bf16 in the source and will be rounded.
    pub rounded: usize,
    /// Tensors that are left out.
    pub skipped: usize,
}

/// A file to be made.
pub(super) struct OutFile {
    pub name: String,
    /// Length of the header and the header.
    pub header: Vec<u8>,
    pub jobs: Vec<Job>,
    /// Bytes of the file.
    pub len: u64,
    /// Bytes of the source that go into it.
    pub source_bytes: u64,
}

/// A part of a file and where it comes from.
pub(super) enum Job {
    /// Numbers, in bf16 whatever the source has.
    Plain { tensor: Tensor, ty: GgmlType, at: u64 },
    /// Projections of all experts of a layer, quantised: where codes, scales and zeros go.
    Experts { tensor: Tensor, rows: Rows, group: usize, codes_at: u64, scales_at: u64, zeros_at: u64 },
}

/// The two projections of a layer in the source.
#[derive(Default)]
struct Layer<'a> {
    gate_up: Option<&'a Tensor>,
    down: Option<&'a Tensor>,
}

impl Plan {
    pub fn new(source: &HfDirectory, options: &ConvertOptions) -> Result<Plan, ConvertError> {
        let sizes = Sizes::read(source)?;
        let mut layers: BTreeMap<usize, Layer<'_>> = BTreeMap::new();
        let mut others: Vec<&Tensor> = Vec::new();
        let mut skipped = 0;
        for tensor in source.safetensors.tensors() {
            if is_vision(&tensor.name) {
                if options.text_only {
                    skipped += 1;
                } else {
                    others.push(tensor);
                }
                continue;
            }
            match expert(&tensor.name) {
                Some((layer, is_down)) => {
                    let layer = layers.entry(layer).or_default();
                    let slot = if is_down { &mut layer.down } else { &mut layer.gate_up };
                    match slot {
                        Some(other) => tensor.require_copy_of(other)?,
                        None => *slot = Some(tensor),
                    }
                }
                None if tensor.name.contains(".experts.") => {
                    let expected = "`….layers.<i>.experts.gate_up_proj` or `….down_proj`";
                    return Err(tensor
                        .fault("an expert's tensor of another name", expected, WRONG_MODEL)
                        .into());
                }
                None => others.push(tensor),
            }
        }
        source.release();
        if let Some((&layer, _)) = layers.range(sizes.layers..).next() {
            return Err(sizes
                .fault(LAYERS, sizes.layers, format!("more than {layer}, which has experts"))
                .into());
        }
        let mut files = Vec::new();
        for index in 0..sizes.layers {
            let layer = layers.remove(&index).unwrap_or_default();
            files.push(experts_file(source, &sizes, index, &layer)?);
        }
        let rounded = others.iter().filter(|tensor| tensor.plain_type().ok() != Some(GgmlType::BF16)).count();
        let index = plain_files(&others, options.shard_bytes, &mut files)?;
        let meta = json!({
            "format": FORMAT,
            "made_by": concat!("axed ", env!("CARGO_PKG_VERSION")),
            "source": source.path().canonicalize().ok().as_deref().and_then(Path::file_name)
                .map(|name| name.to_string_lossy()),
            "gate_up_group": GATE_UP_GROUP,
            "down_group": DOWN_GROUP,
            "layers": sizes.layers,
            "experts": sizes.experts,
        });
        Ok(Plan { files, index, meta: pretty(&meta), rounded, skipped })
    }

    /// Bytes of the source that go into all files.
    pub fn source_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.source_bytes).sum()
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// The sizes that the configuration states.
struct Sizes<'a> {
    source: &'a HfDirectory,
    layers: usize,
    experts: usize,
    hidden: usize,
    width: usize,
}

impl<'a> Sizes<'a> {
    fn read(source: &'a HfDirectory) -> Result<Self, ConvertError> {
        match source.config.get("model_type") {
            Some(Value::String(ty)) if ty == MODEL_TYPE => {}
            other => {
                let found = match other {
                    Some(value) => {
                        format!("a model of type {}", value.to_string().chars().take(80).collect::<String>())
                    }
                    None => format!("no `model_type` in {CONFIG}"),
                };
                let advice = "other models need no conversion of this kind";
                return Err(ConvertError::OtherKind { path: source.path().to_owned(), found, advice });
            }
        }
        let number = |size: Size| {
            let value = source.config.get("text_config").and_then(|text| text.get(size.key));
            // As for the loader, null says nothing.
            let number = match value.filter(|value| !value.is_null()) {
                Some(value) => value.as_u64().and_then(|number| usize::try_from(number).ok()),
                None => size.default,
            };
            number.filter(|number| (1..=size.most).contains(number)).ok_or_else(|| {
                let found = value.map_or_else(
                    || "nothing".to_owned(),
                    |value| value.to_string().chars().take(80).collect(),
                );
                key_fault(source, size.key, found, format!("a whole number from 1 to {}", size.most))
            })
        };
        let sizes = Self {
            source,
            layers: number(LAYERS)?,
            experts: number(diffusion_gemma::EXPERTS)?,
            hidden: number(HIDDEN)?,
            width: number(EXPERT_WIDTH)?,
        };
        for (size, value, group) in
            [(HIDDEN, sizes.hidden, GATE_UP_GROUP), (EXPERT_WIDTH, sizes.width, DOWN_GROUP)]
        {
            if !value.is_multiple_of(group) {
                let expected = format!("a multiple of {group}, the weights that share a scale in {FORMAT}");
                return Err(sizes.fault(size, value, expected).into());
            }
        }
        Ok(sizes)
    }

    fn fault(&self, size: Size, found: usize, expected: String) -> SafetensorsError {
        key_fault(self.source, size.key, found.to_string(), expected)
    }
}

fn key_fault(source: &HfDirectory, key: &str, found: String, expected: String) -> SafetensorsError {
    SafetensorsError::from(Box::new(Fault {
        path: source.path().join(CONFIG),
        place: Place::Key(format!("text_config.{key}")),
        found,
        expected,
        advice: "this checkpoint cannot be converted as it is",
    }))
}

/// Layer of an expert projection, and whether it is the second one.
fn expert(name: &str) -> Option<(usize, bool)> {
    let (layer, name) = of_experts(name)?;
    match name {
        "gate_up_proj" => Some((layer, false)),
        "down_proj" => Some((layer, true)),
        _ => None,
    }
}

/// Lays tensors one after the other, in this order: the header of a file and where each starts.
fn lay_out(tensors: &[(String, &'static str, Vec<usize>, u64)]) -> (Vec<u8>, Vec<u64>, u64) {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut at = 0;
    let mut starts = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, bytes) in tensors {
        starts.push(at);
        entries.insert(
            name.clone(),
            json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes] }),
        );
        at += bytes;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    // Tensors start at a multiple of 8 bytes, as readers expect.
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&text);
    let base = header.len() as u64;
    starts.iter_mut().for_each(|start| *start += base);
    (header, starts, base + at)
}

fn experts_file(
    source: &HfDirectory,
    sizes: &Sizes<'_>,
    index: usize,
    layer: &Layer<'_>,
) -> Result<OutFile, ConvertError> {
    let &Sizes { experts, hidden, width, .. } = sizes;
    let prefix = format!("{}layers.{index}.experts", diffusion_gemma::DECODER);
    let present = |tensor: Option<&Tensor>, name: &str| match tensor {
        Some(tensor) => Ok(tensor.clone()),
        None => Err(SafetensorsError::MissingTensor {
            path: source.path().to_owned(),
            name: format!("{prefix}.{name}"),
        }),
    };
    let gate_up = present(layer.gate_up, "gate_up_proj")?;
    let down = present(layer.down, "down_proj")?;
    // The configuration's sizes, and what tensors of those shapes hold, are products that the files bound.
    let rows = |tensor: &Tensor, shape| source.safetensors.matrices(&tensor.name, shape);
    let gate_up_rows = rows(&gate_up, [experts, width.saturating_mul(2), hidden])?;
    let down_rows = rows(&down, [experts, hidden, width])?;
    let scales = |rows: &Rows, group: usize, each: usize| {
        (vec![experts, each, rows.columns / group], (rows.rows * (rows.columns / group) * 2) as u64)
    };
    let codes = |rows: &Rows, each: usize| {
        (vec![experts, each, rows.columns / 2], (rows.rows * (rows.columns / 2)) as u64)
    };
    let (gu_shape, gu_bytes) = scales(&gate_up_rows, GATE_UP_GROUP, 2 * width);
    let (dn_shape, dn_bytes) = scales(&down_rows, DOWN_GROUP, hidden);
    let (gu_q_shape, gu_q_bytes) = codes(&gate_up_rows, 2 * width);
    let (dn_q_shape, dn_q_bytes) = codes(&down_rows, hidden);
    let (header, starts, len) = lay_out(&[
        (format!("{prefix}.dn_s"), "F16", dn_shape.clone(), dn_bytes),
        (format!("{prefix}.dn_z"), "F16", dn_shape, dn_bytes),
        (format!("{prefix}.gu_s"), "F16", gu_shape.clone(), gu_bytes),
        (format!("{prefix}.gu_z"), "F16", gu_shape, gu_bytes),
        (format!("{prefix}.dn_q"), "U8", dn_q_shape, dn_q_bytes),
        (format!("{prefix}.gu_q"), "U8", gu_q_shape, gu_q_bytes),
    ]);
    let source_bytes = (gate_up.bytes.as_ref().len() + down.bytes.as_ref().len()) as u64;
    let jobs = vec![
        Job::Experts {
            tensor: gate_up,
            rows: gate_up_rows,
            group: GATE_UP_GROUP,
            codes_at: starts[5],
            scales_at: starts[2],
            zeros_at: starts[3],
        },
        Job::Experts {
            tensor: down,
            rows: down_rows,
            group: DOWN_GROUP,
            codes_at: starts[4],
            scales_at: starts[0],
            zeros_at: starts[1],
        },
    ];
    Ok(OutFile { name: format!("{EXPERTS}{index:03}.safetensors"), header, jobs, len, source_bytes })
}

/// Spreads tensors over files of about `shard_bytes`; the text of their index if they are several.
fn plain_files(
    tensors: &[&Tensor],
    shard_bytes: u64,
    files: &mut Vec<OutFile>,
) -> Result<Option<String>, ConvertError> {
    let mut shards: Vec<Vec<(&Tensor, GgmlType, u64)>> = vec![Vec::new()];
    let mut filled = 0u64;
    let mut total = 0u64;
    for &tensor in tensors {
        let ty = tensor.plain_type()?;
        let bytes = (tensor.bytes.as_ref().len() / ty.block_bytes() * 2) as u64;
        if filled > 0 && filled + bytes > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        total += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((tensor, ty, bytes));
        }
    }
    let count = shards.len();
    let mut weight_map = Map::new();
    for (index, shard) in shards.into_iter().enumerate() {
        let name = match count {
            1 => SINGLE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let described: Vec<_> = shard
            .iter()
            .map(|(tensor, _, bytes)| (tensor.name.clone(), "BF16", tensor.shape.clone(), *bytes))
            .collect();
        let (header, starts, len) = lay_out(&described);
        for (name_in, ..) in described {
            weight_map.insert(name_in, Value::String(name.clone()));
        }
        let source_bytes = shard.iter().map(|(tensor, ..)| tensor.bytes.as_ref().len() as u64).sum();
        let jobs = shard
            .into_iter()
            .zip(starts)
            .map(|((tensor, ty, _), at)| Job::Plain { tensor: tensor.clone(), ty, at })
            .collect();
        files.push(OutFile { name, header, jobs, len, source_bytes });
    }
    // Alphabetical order is the order of the map.
    Ok((count > 1).then(|| pretty(&json!({ "metadata": { "total_size": total }, "weight_map": weight_map }))))
}

/// Names a file that conversions make, and only those: they may be removed to start over.
pub(super) fn is_made(name: &str) -> bool {
    let tensors = |prefix: &str| name.starts_with(prefix) && name.ends_with(".safetensors");
    tensors(EXPERTS) || tensors("model") || name == INDEX
}
