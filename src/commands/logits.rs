//! `axed logits`

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use axe::checkpoint::gguf::Gguf;
use axe::config::Config;
use axe::model::{Causal, LoadOptions, Logits};
use axe::ops::CacheKind;
use axe::text::{Specials, Tokenizer};
use clap::{ArgGroup, Args};
use safetensors::tensor::{Dtype, TensorView};

/// Tokens in a pass when `--block` does not say: more only cost memory for logits.
const DEFAULT_BLOCK: usize = 64;

/// Write the logits of every position of a text to a safetensors file.
///
/// The text is fed as it is: position t of `logits` is what the model says after the first t + 1 ids.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true).args(["ids", "text"]))]
pub struct Options {
    /// The checkpoint (GGUF).
    #[arg(short, long, value_name = "FILE", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Token ids, separated by commas.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub ids: Vec<u32>,
    /// File with a text to tokenize (`-`: standard input); the begin-of-text token comes first if the model wants one.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Tokens fed in one pass. The logits do not depend on it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub block: Option<u32>,
    /// Number type of the key-value cache. The server's default is f16; f32 shows the model without that rounding.
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub kv_cache: CacheKind,
    /// The file to write: `ids` (i32, one for each token) and `logits` (f32, tokens by vocabulary).
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Configuration file, for the device to use [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Runs the model over the tokens.
pub fn run(options: &Options) -> Result<()> {
    let config = Config::load(options.config.as_deref(), Vec::new())?;
    axe::device::runtime::locate(config.device.threads)?;
    let gguf = Arc::new(Gguf::open(&options.model)?);
    let ids = match &options.text {
        Some(path) => {
            let tokenizer = Tokenizer::new(axe::load::vocabulary(&gguf)?)?;
            tokenizer.with_bos(tokenizer.encode(&super::read_text(path)?, Specials::Text))
        }
        None => options.ids.clone(),
    };
    if ids.is_empty() {
        bail!("the text has no tokens");
    }
    let block = options.block.map_or(DEFAULT_BLOCK, |block| block as usize).min(ids.len());
    let load = LoadOptions {
        context: ids.len(),
        rows: block,
        logit_rows: block,
        cache: options.kv_cache,
        cache_dir: config.device.zero_copy.then(|| config.device.cache_dir.clone()),
    };
    let device = axe::load::open_device(&config.device)?;
    let mut model = Causal::load(device, gguf, &load, &mut |_| {})?;
    let vocabulary = model.config().vocabulary;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("token id {id} is outside the vocabulary of {vocabulary} tokens");
    }
    let trained = model.config().context;
    if ids.len() > trained {
        bail!("{} tokens are more than the {trained} that the model was trained for", ids.len());
    }
    let mut logits: Vec<u8> = Vec::with_capacity(ids.len() * vocabulary * 4);
    for (part, tokens) in ids.chunks(block).enumerate() {
        model.forward(tokens, part * block, Logits::All)?;
        for row in 0..tokens.len() {
            model.with_logits(row, |row| {
                row.iter().for_each(|logit| logits.extend_from_slice(&logit.to_le_bytes()));
            })?;
        }
    }
    let id_bytes: Vec<u8> = ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect();
    let tensors = [
        ("ids", TensorView::new(Dtype::I32, vec![ids.len()], &id_bytes)?),
        ("logits", TensorView::new(Dtype::F32, vec![ids.len(), vocabulary], &logits)?),
    ];
    write_to(&options.output, &safetensors::serialize(tensors, None)?)
}

/// Writes to a file, a pipe or a device, whatever is at `path`; what could not be written whole is no file.
fn write_to(path: &Path, bytes: &[u8]) -> Result<()> {
    let existed = path.symlink_metadata().is_ok();
    let tried = || format!("cannot write {}", path.display());
    let written = File::create(path).with_context(tried)?.write_all(bytes);
    if written.is_err() && !existed {
        // The file is incomplete, and the error that is told is why.
        let _ = std::fs::remove_file(path);
    }
    written.with_context(tried)
}
