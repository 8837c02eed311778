//! Writes safetensors files and directories, sound or not.
#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use serde_json::{Value, json};

/// A tensor as it stands in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Raw {
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Raw>;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A file with this header and these bytes after it.
pub fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A sound file.
pub fn file_of(tensors: &Tensors) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for (name, raw) in tensors {
        let end = data.len() + raw.bytes.len();
        header.insert(
            name.clone(),
            json!({"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [data.len(), end]}),
        );
        data.extend_from_slice(&raw.bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

/// What a file holds, read without the code under test.
pub fn tensors_of(path: &Path) -> Tensors {
    let file = fs::read(path).unwrap();
    let read = safetensors::SafeTensors::deserialize(&file).unwrap();
    read.iter()
        .map(|(name, view)| {
            let dtype = match view.dtype() {
                safetensors::Dtype::BF16 => "BF16",
                safetensors::Dtype::F16 => "F16",
                safetensors::Dtype::F32 => "F32",
                safetensors::Dtype::U8 => "U8",
                other => panic!("{other:?}"),
            };
            let raw = Raw { dtype, shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            (name.to_owned(), raw)
        })
        .collect()
}

/// The numbers of a tensor.
pub fn numbers(raw: &Raw) -> Vec<f32> {
    match raw.dtype {
        "BF16" => raw.bytes.as_chunks().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect(),
        "F16" => raw.bytes.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect(),
        "F32" => raw.bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
        other => panic!("{other}"),
    }
}

/// The same numbers in f32.
pub fn in_f32(raw: &Raw) -> Raw {
    let bytes = numbers(raw).iter().flat_map(|number| number.to_le_bytes()).collect();
    Raw { dtype: "F32", shape: raw.shape.clone(), bytes }
}

/// The bf16 miniature: its tensors.
pub fn tiny() -> Tensors {
    tensors_of(&fixture("tiny-diffusiongemma/model.safetensors"))
}

/// Makes a directory with the miniature's configuration and these tensors in one file.
pub fn directory(path: &Path, tensors: &Tensors) {
    sharded(path, &[("model.safetensors", tensors)]);
}

/// Makes a directory with the miniature's configuration and these files; an index if they are several.
pub fn sharded(path: &Path, files: &[(&str, &Tensors)]) {
    fs::create_dir_all(path).unwrap();
    for entry in fs::read_dir(fixture("tiny-diffusiongemma")).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".json") || name.ends_with(".jinja") {
            fs::copy(entry.path(), path.join(name)).unwrap();
        }
    }
    let mut map = serde_json::Map::new();
    for (name, tensors) in files {
        fs::write(path.join(name), file_of(tensors)).unwrap();
        map.extend(tensors.keys().map(|tensor| (tensor.clone(), json!(name))));
    }
    if files.len() > 1 {
        let index = json!({"metadata": {}, "weight_map": map}).to_string();
        fs::write(path.join("model.safetensors.index.json"), index).unwrap();
    }
}

/// Changes a key of the text part of the configuration of a directory.
pub fn configure(path: &Path, key: &str, value: Value) {
    let path = path.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["text_config"][key] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// Half to even, written out.
fn round_half_even(x: f32) -> f32 {
    let x = f64::from(x);
    let below = x.floor();
    let rounded = match x - below {
        part if part < 0.5 => below,
        part if part > 0.5 => below + 1.0,
        _ if below % 2.0 == 0.0 => below,
        _ => below + 1.0,
    };
    rounded as f32
}

/// The format's quantiser element by element from its description: codes, scale in f32, zero.
#[allow(
    clippy::manual_clamp,
    reason = "written out as the format describes it, not as the code under test does it"
)]
pub fn reference_quantise(weights: &[f32]) -> (Vec<u8>, f32, f32) {
    let mut most = weights[0];
    let mut least = weights[0];
    for &weight in weights {
        if weight > most {
            most = weight;
        }
        if weight < least {
            least = weight;
        }
    }
    let range = if most - least > 1e-8 { most - least } else { 1e-8 };
    let scale = range / 15.0;
    let clamp = |x: f32| x.clamp(0.0, 15.0);
    let zero = clamp(round_half_even(-least / scale));
    let codes = weights.iter().map(|&weight| clamp(round_half_even(weight / scale + zero)) as u8).collect();
    (codes, scale, zero)
}

/// What the reference's codes of a row mean, with the scale as it is stored.
pub fn reference_row(weights: &[f32], group: usize) -> Vec<f32> {
    weights
        .chunks(group)
        .flat_map(|weights| {
            let (codes, scale, zero) = reference_quantise(weights);
            let scale = f16::from_f32(scale).to_f32();
            codes.into_iter().map(move |code| (f32::from(code) - zero) * scale)
        })
        .collect()
}
