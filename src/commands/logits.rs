//! `axed logits`

mod causal;
mod diffusion;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use axe::checkpoint::gguf::Gguf;
use axe::checkpoint::kind::Kind;
use axe::config::Config;
use axe::model::diffusion_gemma::GGUF_ARCHITECTURE;
use axe::ops::CacheKind;
use axe::text::Specials;
use clap::{ArgGroup, Args};
use safetensors::tensor::TensorView;

/// Write the logits of a text's positions, or of a canvas behind it, to a safetensors file.
///
/// The text is fed as it is. Causal models: position t of `logits` is what the model says after the first t + 1 ids.
/// Diffusion models: the text is encoded, and `logits` are those of the canvas, soft-capped, before any temperature;
/// expert weights are used as the checkpoint has them.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true).args(["ids", "text"]))]
pub struct Options {
    /// The checkpoint: a GGUF file, or the directory of a diffusion model.
    #[arg(short, long, value_name = "PATH", env = "AXE_MODEL")]
    pub model: PathBuf,
    /// Token ids, separated by commas. May be given several times: a diffusion model encodes each list in a pass of its
    /// own.
    #[arg(long, value_name = "IDS")]
    pub ids: Vec<IdList>,
    /// File with a text to tokenize (`-`: standard input); the begin-of-text token comes first if the model wants one.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Diffusion models: the ids of the canvas, separated by commas.
    #[arg(long, value_name = "IDS")]
    pub canvas: Option<IdList>,
    /// Diffusion models: logits of the step before, soft-capped and divided by its temperature, as tensor `sc_logits`
    /// (f32, canvas by vocabulary) of a safetensors file. Without, nothing conditions the canvas.
    #[arg(long, value_name = "FILE", requires = "canvas")]
    pub previous: Option<PathBuf>,
    /// Diffusion models: also write what the text left in the cache, as `kv.<layer>.k` and `kv.<layer>.v` (f32, heads by
    /// positions by head size; sliding layers: what the canvas sees).
    #[arg(long, requires = "canvas")]
    pub with_cache: bool,
    /// Causal models: tokens fed in one pass. The logits do not depend on it.
    #[arg(long, value_name = "N", conflicts_with = "canvas", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub block: Option<u32>,
    /// Number type of the key-value cache. The server's default is f16; f32 shows the model without that rounding.
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub kv_cache: CacheKind,
    /// The file to write: `ids` (i32, one for each token) and `logits` (f32, tokens or canvas by vocabulary).
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Configuration file, for the device to use [default: as for `serve`].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Token ids separated by commas.
#[derive(Debug, Clone, Default)]
pub struct IdList(pub Vec<u32>);

impl FromStr for IdList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = |id: &str| id.trim().parse::<u32>().map_err(|_| format!("'{id}' is no token id"));
        text.split(',').map(id).collect::<Result<_, _>>().map(Self)
    }
}

/// Runs the model.
pub fn run(options: &Options) -> Result<()> {
    let mut config = Config::load(options.config.as_deref(), Vec::new())?;
    config.device.kv_cache = options.kv_cache;
    axe::device::runtime::locate(config.device.threads)?;
    let causal = match Kind::of(&options.model)? {
        Kind::Gguf(path) => {
            let gguf = Gguf::open(&path)?;
            let diffusion = gguf.metadata().str("general.architecture")? == Some(GGUF_ARCHITECTURE);
            (!diffusion).then(|| Arc::new(gguf))
        }
        Kind::W4Directory(_) | Kind::HfDirectory(_) => None,
    };
    match (causal, &options.canvas) {
        (Some(_), Some(_)) => {
            bail!("{} is a causal model: it has no canvas (--canvas)", options.model.display())
        }
        (Some(gguf), None) => causal::run(options, &config, gguf),
        (None, Some(canvas)) => diffusion::run(options, &config, &canvas.0),
        (None, None) => {
            bail!("{} is a diffusion model: give the ids of a canvas (--canvas)", options.model.display())
        }
    }
}

impl Options {
    /// The ids to feed, list by list.
    fn lists(&self) -> Result<Vec<Vec<u32>>> {
        let lists = match &self.text {
            Some(path) => {
                let tokenizer = axe::load::text::tokenizer(&self.model).map_err(anyhow::Error::from_boxed)?;
                vec![tokenizer.with_bos(tokenizer.encode(&super::read_text(path)?, Specials::Text))]
            }
            None => self.ids.iter().map(|list| list.0.clone()).collect(),
        };
        if lists.iter().all(Vec::is_empty) {
            bail!("the text has no tokens");
        }
        Ok(lists)
    }

    /// Writes the tensors.
    fn write(&self, tensors: Vec<(String, TensorView<'_>)>) -> Result<()> {
        write_to(&self.output, &safetensors::serialize(tensors, None)?)
    }
}

/// Ids as bytes of i32.
fn id_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect()
}

fn check_length(tokens: usize, trained: usize) -> Result<()> {
    if tokens > trained {
        bail!("{tokens} tokens are more than the {trained} that the model was trained for");
    }
    Ok(())
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
