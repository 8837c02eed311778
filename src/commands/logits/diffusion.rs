//! Logits of a canvas behind an encoded text.

use std::path::Path;

use anyhow::{Context, Result, bail};
use axe::checkpoint::mapping::Mapping;
use axe::config::Config;
use axe::model::diffusion_gemma::{DiffusionCheckpoint, DiffusionGemma};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use super::super::check_ids;
use super::{Options, check_length, id_bytes};

/// Most ids of one list, which are encoded in one pass.
const MOST_ROWS: usize = 4096;

pub(super) fn run(options: &Options, config: &Config, canvas: &[u32]) -> Result<()> {
    let lists = options.lists()?;
    let ids = lists.concat();
    let rows = lists.iter().map(Vec::len).max().unwrap_or(1);
    if rows > MOST_ROWS {
        bail!(
            "a list of {rows} ids is more than the {MOST_ROWS} of one pass: cut it in several (--ids a --ids b)"
        );
    }
    let checkpoint = DiffusionCheckpoint::open(&options.model)?;
    let trained = checkpoint.config()?;
    let (vocabulary, pass) = (trained.vocabulary, rows);
    let rows = trained.canvas;
    check_ids(&ids, vocabulary)?;
    check_ids(canvas, vocabulary)?;
    check_length(ids.len() + rows, trained.context)?;
    if canvas.len() != rows {
        bail!("the canvas has {} ids (--canvas), the model's has {rows}", canvas.len());
    }
    let previous = options.previous.as_deref().map(|path| previous(path, rows, vocabulary)).transpose()?;
    let mut model =
        axe::load::open_diffusion(config, &checkpoint, ids.len(), pass).map_err(anyhow::Error::from_boxed)?;
    let mut start = 0;
    for tokens in lists.iter().filter(|list| !list.is_empty()) {
        model.encode(tokens, start)?;
        start += tokens.len();
    }
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    if options.with_cache {
        cache(&model, start, &mut tensors)?;
    }
    let logits = model.canvas_logits(canvas, start, previous.as_deref())?;
    tensors.push(("ids".to_owned(), Dtype::I32, vec![ids.len()], id_bytes(&ids)));
    tensors.push(("canvas".to_owned(), Dtype::I32, vec![rows], id_bytes(canvas)));
    tensors.push(("logits".to_owned(), Dtype::F32, vec![rows, vocabulary], bytes(&logits)));
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| Ok((name.clone(), TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>>>()?;
    options.write(views)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What the encoded text left in the cache of every layer.
fn cache(
    model: &DiffusionGemma,
    end: usize,
    tensors: &mut Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
) -> Result<()> {
    for (index, layer) in model.config().layers.iter().enumerate() {
        let from = if layer.sliding { (end + 1).saturating_sub(model.config().window) } else { 0 };
        let (keys, values) = model.cached(index, from, end)?;
        let shape = vec![layer.kv_heads, end - from, layer.head_size];
        tensors.push((format!("kv.{index}.k"), Dtype::F32, shape.clone(), bytes(&keys)));
        tensors.push((format!("kv.{index}.v"), Dtype::F32, shape, bytes(&values)));
    }
    Ok(())
}

/// The logits of the step before.
fn previous(path: &Path, rows: usize, vocabulary: usize) -> Result<Vec<f32>> {
    const NAME: &str = "sc_logits";
    let tried = || format!("cannot use {} (--previous)", path.display());
    let file = Mapping::open(path)?;
    let file = SafeTensors::deserialize(file.as_ref()).with_context(tried)?;
    let tensor = file.tensor(NAME).with_context(tried)?;
    if tensor.dtype() != Dtype::F32 || tensor.shape() != [rows, vocabulary] {
        bail!(
            "{}: {NAME} is {:?} {:?}; expected F32 [{rows}, {vocabulary}]",
            path.display(),
            tensor.dtype(),
            tensor.shape()
        );
    }
    Ok(tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}
