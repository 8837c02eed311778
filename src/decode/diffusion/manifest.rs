//! The list of recorded runs: what each was asked, and how it was sampled.

use serde_json::{Value, json};
use thiserror::Error;

use crate::model::diffusion_gemma::GenerationConfig;

/// The list has no sound entry for a run: what was looked for and found.
#[derive(Debug, Error)]
#[error("manifest: {0}")]
pub struct ManifestError(String);

/// The prompt of the run called `name` and how it was sampled, from a parsed manifest.json.
///
/// # Errors
/// No such run, or keys that are missing or not understood.
pub fn manifest_entry(manifest: &Value, name: &str) -> Result<(Vec<u32>, GenerationConfig), ManifestError> {
    let failed = |what: String| ManifestError(what);
    let runs = manifest.get("trajectories").and_then(Value::as_array);
    let runs = runs.ok_or_else(|| failed("no list `trajectories`".to_owned()))?;
    let run =
        runs.iter().find(|run| run.get("name").and_then(Value::as_str) == Some(name)).ok_or_else(|| {
            let names: Vec<&str> =
                runs.iter().filter_map(|run| run.get("name").and_then(Value::as_str)).collect();
            failed(format!("no trajectory `{name}`; there are {}", names.join(", ")))
        })?;
    let value = |key: &str| {
        run.get(key).ok_or_else(|| failed(format!("trajectory `{name}` has no key `{key}`"))).cloned()
    };
    let prompt = value("prompt")?
        .as_array()
        .and_then(|ids| ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<u32>>>())
        .ok_or_else(|| failed(format!("trajectory `{name}`: `prompt` is no list of token ids")))?;
    let said = json!({
        "max_denoising_steps": value("max_denoising_steps")?,
        "t_min": value("t_min")?,
        "t_max": value("t_max")?,
        "sampler_config": { "_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": value("entropy_bound")? },
        "stability_threshold": value("stability_threshold")?,
        "confidence_threshold": value("confidence_threshold")?,
        "eos_token_id": value("eos_token_id")?,
        "pad_token_id": value("pad_token_id")?,
    });
    let mut config = GenerationConfig::from_json(std::path::Path::new(name), &said)
        .map_err(|error| failed(error.to_string()))?;
    // Defaults were applied before the run was recorded: what is null here was switched off.
    if said["stability_threshold"].is_null() {
        config.stability_threshold = None;
    }
    if said["confidence_threshold"].is_null() {
        config.confidence_threshold = None;
    }
    Ok((prompt, config))
}
