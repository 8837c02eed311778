//! Weights from the checkpoint to the device, once repacked kept in a file that later starts map.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::error::ModelError;
use super::repack::Blueprint;
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::quant::QuantError;
use crate::device::{Device, HostBytes, Purpose};
use crate::ops::Matrix;

/// Counts changes of the tile layouts: files of another version are made again.
const LAYOUT: u32 = 1;
const MAGIC: &[u8; 8] = b"AXETILES";
/// Matrices start at multiples of a page, so that the device can use the mapped file in place.
const PAGE: usize = 4096;
/// Ends the names of files that are being written.
const PARTIAL: &str = ".partial";
/// Bytes repacked between two writes.
const BOUNCE: usize = 32 << 20;

/// First bytes of a file of repacked weights, as JSON. A file that says anything else is not used.
#[derive(Serialize)]
struct Header<'a> {
    layout: u32,
    checkpoint: String,
    matrices: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    format: &'static str,
    rows: usize,
    columns: usize,
    at: usize,
}

/// Makes the matrices that `blueprints` describe. `progress` hears the share that is done, 0 to 1.
///
/// Where the device works on host memory and there is a cache folder, the tiles go to a file there and are used in
/// place, now and at later starts; otherwise they are uploaded piece by piece.
///
/// # Errors
/// Too little device memory, or what the device says. A cache folder that cannot be used is only logged.
pub fn load(
    device: &Device,
    gguf: &Gguf,
    blueprints: &[Blueprint],
    cache_dir: Option<&Path>,
    progress: &mut dyn FnMut(f32),
) -> Result<Vec<Matrix>, ModelError> {
    if let Some(dir) = cache_dir.filter(|_| device.info().unified_memory) {
        match tiles_file(gguf, blueprints, dir, progress) {
            Ok((map, starts)) => return wrap(device, blueprints, &map, &starts),
            Err(CacheFault::Model(error)) => return Err(error),
            Err(CacheFault::Io(path, error)) => tracing::warn!(
                path = %path.display(),
                %error,
                "cannot keep repacked weights; every start will repack them. Make the folder writable or set \
                 [device] cache_dir"
            ),
        }
    }
    upload(device, gguf, blueprints, progress)
}

enum CacheFault {
    Io(PathBuf, io::Error),
    Model(ModelError),
}

fn wrap(
    device: &Device,
    blueprints: &[Blueprint],
    map: &Arc<Mapping>,
    starts: &[usize],
) -> Result<Vec<Matrix>, ModelError> {
    blueprints
        .iter()
        .zip(starts)
        .map(|(blueprint, &at)| {
            let owner: HostBytes = map.clone();
            let buffer = device.wrap(Purpose::Weights, owner, at..at + blueprint.bytes())?;
            Ok(matrix(blueprint, buffer))
        })
        .collect()
}

fn matrix(blueprint: &Blueprint, buffer: crate::device::Buffer) -> Matrix {
    Matrix { buffer, format: blueprint.format(), rows: blueprint.rows(), columns: blueprint.columns() }
}

fn total_bytes(blueprints: &[Blueprint]) -> usize {
    blueprints.iter().map(Blueprint::bytes).sum::<usize>().max(1)
}

/// Repacks a matrix piece by piece; `take` gets each piece and where it starts.
fn pieces<E: From<QuantError>>(
    gguf: &Gguf,
    blueprint: &Blueprint,
    mut take: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let tile_bytes = blueprint.format().tile_bytes(blueprint.columns()).max(1);
    let at_once = (BOUNCE / tile_bytes).max(1);
    let mut bounce = Vec::new();
    for first in (0..blueprint.tiles()).step_by(at_once) {
        let tiles = at_once.min(blueprint.tiles() - first);
        bounce.clear();
        bounce.resize(tiles * tile_bytes, 0);
        blueprint.write(gguf, first, &mut bounce)?;
        take(first * tile_bytes, &bounce)?;
    }
    Ok(())
}

fn upload(
    device: &Device,
    gguf: &Gguf,
    blueprints: &[Blueprint],
    progress: &mut dyn FnMut(f32),
) -> Result<Vec<Matrix>, ModelError> {
    let total = total_bytes(blueprints) as f32;
    let mut done = 0;
    blueprints
        .iter()
        .map(|blueprint| {
            let buffer = device.alloc(Purpose::Weights, blueprint.bytes())?;
            pieces(gguf, blueprint, |at, bytes| -> Result<(), ModelError> {
                device.write(&buffer, at, bytes)?;
                done += bytes.len();
                progress(done as f32 / total);
                Ok(())
            })?;
            Ok(matrix(blueprint, buffer))
        })
        .collect()
}

/// The mapped file of tiles and where each matrix starts in it; made if it is not there or says something else.
fn tiles_file(
    gguf: &Gguf,
    blueprints: &[Blueprint],
    dir: &Path,
    progress: &mut dyn FnMut(f32),
) -> Result<(Arc<Mapping>, Vec<usize>), CacheFault> {
    let dir = dir.join("weights");
    let path = dir.join(format!("{}.tiles", gguf.identity()));
    // The header's length depends on the offsets in it, so it gets room for any.
    let names: usize = blueprints.iter().map(|blueprint| blueprint.name.len() + 160).sum();
    let header_bytes = crate::ops::round_up(names + PAGE, PAGE);
    let mut end = header_bytes;
    let starts: Vec<usize> = blueprints
        .iter()
        .map(|blueprint| {
            let start = end;
            end = crate::ops::round_up(end + blueprint.bytes(), PAGE);
            start
        })
        .collect();
    let header = Header {
        layout: LAYOUT,
        checkpoint: gguf.identity().to_string(),
        matrices: blueprints
            .iter()
            .zip(&starts)
            .map(|(blueprint, &at)| Entry {
                name: &blueprint.name,
                format: blueprint.format().name(),
                rows: blueprint.rows(),
                columns: blueprint.columns(),
                at,
            })
            .collect(),
    };
    let mut first_bytes = MAGIC.to_vec();
    first_bytes.extend(
        serde_json::to_vec(&header).map_err(|error| CacheFault::Io(path.clone(), io::Error::other(error)))?,
    );
    first_bytes.resize(header_bytes, 0);

    if let Some(map) = usable(&path, &first_bytes, end) {
        progress(1.0);
        return Ok((map, starts));
    }
    tracing::info!(path = %path.display(), mib = end >> 20, "repacking weights for this device, once");
    let fault = |error| CacheFault::Io(path.clone(), error);
    fs::create_dir_all(&dir).map_err(fault)?;
    drop_leftovers(&dir);
    // Under a name that nobody else has: several daemons may be repacking the same model.
    let file = tempfile::Builder::new().suffix(PARTIAL).tempfile_in(&dir).map_err(fault)?;
    write_tiles(gguf, blueprints, &starts, &first_bytes, end, file.as_file(), progress).map_err(|error| {
        match error {
            PieceFault::Io(error) => fault(error),
            PieceFault::Quant(error) => CacheFault::Model(error.into()),
        }
    })?;
    file.persist(&path).map_err(|error| fault(error.error))?;
    match usable(&path, &first_bytes, end) {
        Some(map) => Ok((map, starts)),
        None => Err(fault(io::Error::other("the file changed while it was being written"))),
    }
}

fn usable(path: &Path, first_bytes: &[u8], length: usize) -> Option<Arc<Mapping>> {
    let map = Mapping::open(path).ok()?;
    let bytes: &[u8] = map.as_ref();
    (bytes.len() == length && bytes.starts_with(first_bytes)).then(|| Arc::new(map))
}

/// Removes what daemons that were killed while repacking left behind.
fn drop_leftovers(dir: &Path) {
    const OLD: Duration = Duration::from_secs(3600);
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let age =
            entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed().unwrap_or_default());
        if entry.file_name().to_string_lossy().ends_with(PARTIAL) && age.is_ok_and(|age| age > OLD) {
            // Whether it goes now or at the next start makes no difference.
            let _ = fs::remove_file(entry.path());
        }
    }
}

enum PieceFault {
    Io(io::Error),
    Quant(QuantError),
}

impl From<QuantError> for PieceFault {
    fn from(error: QuantError) -> Self {
        Self::Quant(error)
    }
}

fn write_tiles(
    gguf: &Gguf,
    blueprints: &[Blueprint],
    starts: &[usize],
    first_bytes: &[u8],
    length: usize,
    file: &File,
    progress: &mut dyn FnMut(f32),
) -> Result<(), PieceFault> {
    use std::os::unix::fs::FileExt;
    file.write_all_at(first_bytes, 0).map_err(PieceFault::Io)?;
    let total = total_bytes(blueprints) as f32;
    let mut done = 0;
    for (blueprint, &start) in blueprints.iter().zip(starts) {
        pieces(gguf, blueprint, |at, bytes| -> Result<(), PieceFault> {
            file.write_all_at(bytes, (start + at) as u64).map_err(PieceFault::Io)?;
            done += bytes.len();
            progress(done as f32 / total);
            Ok(())
        })?;
    }
    file.set_len(length as u64).map_err(PieceFault::Io)?;
    // The name must never stand for bytes that a power cut took.
    file.sync_all().map_err(PieceFault::Io)
}
