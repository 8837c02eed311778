//! `dg-w4a16-v1`: a Hugging Face directory whose experts are 4-bit codes in files of their own, one a layer.

pub mod convert;
mod experts;
mod quantise;

use std::path::Path;

use serde_json::Value;

pub use experts::{W4Experts, W4Layer};
pub use quantise::{
    Group, QuantiseError, dequantise_row, extremes, not_finite, pack_codes, quantise_group, rounded,
};

use super::safetensors::{Fault, Place, SafetensorsError, read_json};

/// The format's name.
pub const FORMAT: &str = "dg-w4a16-v1";
/// The file that makes a directory one of this format.
pub const META: &str = "w4_meta.json";
/// Columns of a gate or up projection that share a scale.
pub const GATE_UP_GROUP: usize = 128;
/// Columns of a down projection that share a scale.
pub const DOWN_GROUP: usize = 64;
/// Begins the names of the experts' files.
pub(super) const EXPERTS: &str = "experts_";

/// Whether a directory is of this format: whether it has [`META`], which must be sound then.
pub(super) fn read_meta(directory: &Path) -> Result<bool, SafetensorsError> {
    let path = directory.join(META);
    let Some(meta) = read_json::<serde_json::Map<String, Value>>(&path, "a JSON object")? else {
        return Ok(false);
    };
    match meta.get("format") {
        Some(Value::String(format)) if format == FORMAT => Ok(true),
        other => Err(SafetensorsError::from(Box::new(Fault {
            path,
            place: Place::Key("format".to_owned()),
            found: other.map_or_else(
                || "nothing".to_owned(),
                |value| {
                    let text: String = value.to_string().chars().take(80).collect();
                    text
                },
            ),
            expected: format!("\"{FORMAT}\""),
            advice: "use a checkpoint of this format, or convert one with `axed convert`",
        }))),
    }
}
