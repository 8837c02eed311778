//! Weights from the checkpoint to the device, once repacked kept in a file that later starts map.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, SystemTime};

use nix::sys::statvfs::statvfs;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use super::error::ModelError;
use super::pieces::{each_piece, each_run};
use super::repack::{Blueprint, RepackError};
use super::sums::sums_of;
use crate::checkpoint::mapping::Mapping;
use crate::device::{Device, HostBytes, Purpose};
use crate::ops::{Family, Matrix};

/// Counts changes of the tile layouts: files of another version are made again.
const LAYOUT: u32 = 2;
const MAGIC: &[u8; 8] = b"AXETILES";
/// Matrices start at multiples of a page, so that the device can use the mapped file in place.
const PAGE: usize = 4096;
/// Bytes that are still in a processor's cache when they are written after being added up.
const CACHED: usize = 256 << 10;
/// Ends the names of files of repacked weights.
const TILES: &str = ".tiles";
/// Most files that stay, the one in use and those used last.
const KEPT: usize = 4;
/// Ends the names of files that are being written.
const PARTIAL: &str = ".partial";

/// Describes a file of repacked weights, as JSON at its start. A file that says anything else is not used; nor is one
/// whose matrices do not have the checksums (XXH3, 64 bits each, little-endian) that stand behind the description.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    family: Option<&'static str>,
}

/// Makes the matrices that `blueprints` describe, and what `kernels` makes. `progress` hears the share that is done, 0 to
/// 1. `identity` tells the checkpoint from every other one.
///
/// Where the device works on host memory and there is a cache folder, the tiles go to a file there and are used in
/// place, now and at later starts: that needs no device, and is done while `kernels` compiles and tests. Otherwise they
/// are uploaded piece by piece.
///
/// # Errors
/// Too little device memory, what the device says, or what `kernels` does. A cache folder that cannot be used is only
/// logged.
pub fn load<T>(
    device: &Device,
    identity: &str,
    blueprints: &[Blueprint],
    cache_dir: Option<&Path>,
    kernels: impl FnOnce() -> Result<T, ModelError>,
    progress: &mut dyn FnMut(f32),
) -> Result<(Vec<Matrix>, T), ModelError> {
    let Some(dir) = cache_dir.filter(|_| device.info().unified_memory) else {
        let kernels = kernels()?;
        return Ok((upload(device, blueprints, progress)?, kernels));
    };
    let (made, kernels) = meanwhile(|tell| tiles_file(identity, blueprints, dir, tell), kernels, progress)?;
    let matrices = match made {
        Ok((map, starts)) => wrap(device, blueprints, &map, &starts)?,
        Err(CacheFault::Model(error)) => return Err(error),
        Err(CacheFault::Io(path, error)) => {
            tracing::warn!(
                path = %path.display(),
                %error,
                "cannot keep repacked weights; every start will repack them. Make the folder writable or set \
                 [device] cache_dir"
            );
            upload(device, blueprints, progress)?
        }
    };
    Ok((matrices, kernels))
}

/// The same where kernels are there already.
///
/// # Errors
/// As for [`load`].
pub fn load_alone(
    device: &Device,
    identity: &str,
    blueprints: &[Blueprint],
    cache_dir: Option<&Path>,
    progress: &mut dyn FnMut(f32),
) -> Result<Vec<Matrix>, ModelError> {
    let (matrices, ()) = load(device, identity, blueprints, cache_dir, || Ok(()), progress)?;
    Ok(matrices)
}

/// What unwinds work that nobody wants any more.
struct Unwanted;

/// Does `work` on another thread while this one does `own`, and then hands on what `work` tells of its progress. Where
/// either ends early, so does the other.
fn meanwhile<W: Send, T, E>(
    work: impl FnOnce(&mut dyn FnMut(f32)) -> W + Send,
    own: impl FnOnce() -> Result<T, E>,
    progress: &mut dyn FnMut(f32),
) -> Result<(W, T), E> {
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        let worker = scope.spawn(move || {
            work(&mut |share| {
                if tell.send(share).is_err() {
                    resume_unwind(Box::new(Unwanted));
                }
            })
        });
        let own = match own() {
            Ok(own) => own,
            Err(error) => {
                drop(told);
                // Unwound, or done: nobody wants it.
                let _ = worker.join();
                return Err(error);
            }
        };
        told.iter().for_each(progress);
        match worker.join() {
            Ok(work) => Ok((work, own)),
            Err(panic) => resume_unwind(panic),
        }
    })
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
    Matrix {
        buffer,
        format: blueprint.format(),
        rows: blueprint.rows(),
        columns: blueprint.columns(),
        family: blueprint.family,
    }
}

fn total_bytes(blueprints: &[Blueprint]) -> usize {
    blueprints.iter().map(Blueprint::bytes).sum::<usize>().max(1)
}

fn upload(
    device: &Device,
    blueprints: &[Blueprint],
    progress: &mut dyn FnMut(f32),
) -> Result<Vec<Matrix>, ModelError> {
    let total = total_bytes(blueprints) as f32;
    let matrices: Vec<Matrix> = blueprints
        .iter()
        .map(|blueprint| Ok(matrix(blueprint, device.alloc(Purpose::Weights, blueprint.bytes())?)))
        .collect::<Result<_, ModelError>>()?;
    let mut done = 0;
    let mut tell = |bytes: usize| {
        done += bytes;
        progress(done as f32 / total);
    };
    if device.info().unified_memory {
        // Made where they are to lie: whatever else they went through would take longer than to repack them.
        each_run(blueprints, |run| -> Result<(), ModelError> {
            let (buffer, place) = (&matrices[run.matrix].buffer, run.place(blueprints));
            let bytes = place.len();
            device.map_write(buffer, place, |out| blueprints[run.matrix].write(run.tile, out))??;
            tell(bytes);
            Ok(())
        })?;
    } else {
        each_piece(blueprints, |index, at, bytes| -> Result<(), ModelError> {
            device.write(&matrices[index].buffer, at, bytes)?;
            tell(bytes.len());
            Ok(())
        })?;
    }
    Ok(matrices)
}

/// The mapped file of tiles and where each matrix starts in it; made if it is not there, says something else or is
/// damaged.
fn tiles_file(
    identity: &str,
    blueprints: &[Blueprint],
    dir: &Path,
    progress: &mut dyn FnMut(f32),
) -> Result<(Arc<Mapping>, Vec<usize>), CacheFault> {
    let dir = dir.join("weights");
    let families = if blueprints.iter().any(|matrix| matrix.family == Family::Xmx) { "-xmx" } else { "" };
    let path = dir.join(format!("{identity}{families}{TILES}"));
    let fault = |error| CacheFault::Io(path.clone(), error);
    let plan = Plan::new(identity, blueprints).map_err(|error| fault(error.into()))?;
    match plan.open(&path, progress) {
        Ok(map) => {
            // What is used stays when files are dropped; whether the time can be set decides nothing else.
            let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            return Ok((map, plan.starts));
        }
        Err(Unusable::Missing) => {}
        Err(Unusable::Other) => {
            tracing::info!(path = %path.display(), "repacked weights are of another version: making them again");
        }
        Err(Unusable::Damaged(matrix)) => tracing::warn!(
            path = %path.display(),
            matrix,
            "repacked weights are damaged: making them again. If this repeats, check the disk"
        ),
    }
    tracing::info!(path = %path.display(), mib = plan.length >> 20, "repacking weights for this device, once");
    fs::create_dir_all(&dir).map_err(fault)?;
    // Known now rather than when the disk is full, which others write to as well.
    if let Some(error) = no_room(&dir, plan.length as u64) {
        return Err(fault(error));
    }
    // Under a name that nobody else has: several daemons may be repacking the same model.
    let file = tempfile::Builder::new().suffix(PARTIAL).tempfile_in(&dir).map_err(fault)?;
    plan.write(file.as_file(), progress).map_err(|error| match error {
        PieceFault::Io(error) => fault(error),
        PieceFault::Repack(error) => CacheFault::Model(error.into()),
    })?;
    // Mapped before it gets the name: others may drop or replace what has one.
    let (map, _) =
        plan.map(file.path()).map_err(|_| fault(io::Error::other("what was written does not read back")))?;
    file.persist(&path).map_err(|error| fault(error.error))?;
    drop_leftovers(&dir, &path);
    Ok((map, plan.starts))
}

/// Bytes of a file system that a file of tiles leaves to others.
const SPARE: u64 = 1 << 30;

/// What keeps a file of that length from being written to a folder, if that is known.
fn no_room(dir: &Path, length: u64) -> Option<io::Error> {
    let of = statvfs(dir).ok()?;
    #[allow(clippy::unnecessary_cast)] // other systems count in other types
    let free = (of.blocks_available() as u64).saturating_mul(of.fragment_size() as u64);
    // Small models never needed to ask.
    (length > SPARE && free < length.saturating_add(SPARE)).then(|| {
        io::Error::new(
            io::ErrorKind::StorageFull,
            format!("{} MiB are free, and {} MiB are needed", free >> 20, (length + SPARE) >> 20),
        )
    })
}

/// Why a file of tiles is not used.
enum Unusable {
    Missing,
    /// Made from something else, or by another version.
    Other,
    /// The first matrix whose bytes are not those that were written.
    Damaged(String),
}

/// What a file of tiles says and where.
struct Plan<'a> {
    blueprints: &'a [Blueprint],
    description: Vec<u8>,
    starts: Vec<usize>,
    length: usize,
}

impl<'a> Plan<'a> {
    fn new(identity: &str, blueprints: &'a [Blueprint]) -> Result<Self, serde_json::Error> {
        // The description's length depends on the offsets in it, so it gets room for any.
        let entries: usize = blueprints.iter().map(|blueprint| blueprint.name.len() + 180 + 8).sum();
        let mut length = crate::ops::round_up(entries + PAGE, PAGE);
        let starts: Vec<usize> = blueprints
            .iter()
            .map(|blueprint| {
                let start = length;
                length = crate::ops::round_up(start + blueprint.bytes(), PAGE);
                start
            })
            .collect();
        let header = Header {
            layout: LAYOUT,
            checkpoint: identity.to_owned(),
            matrices: blueprints
                .iter()
                .zip(&starts)
                .map(|(blueprint, &at)| Entry {
                    name: &blueprint.name,
                    format: blueprint.format().name(),
                    rows: blueprint.rows(),
                    columns: blueprint.columns(),
                    at,
                    family: (blueprint.family == Family::Xmx).then_some("xmx"),
                })
                .collect(),
        };
        let mut description = MAGIC.to_vec();
        serde_json::to_writer(&mut description, &header)?;
        Ok(Self { blueprints, description, starts, length })
    }

    /// The file at `path`, if all of it is as this plan says.
    fn open(&self, path: &Path, progress: &mut dyn FnMut(f32)) -> Result<Arc<Mapping>, Unusable> {
        let (map, sums) = self.map(path)?;
        let total = total_bytes(self.blueprints) as f32;
        let mut done = 0;
        sums_of(&map, &self.ranges(), |matrix, sum| {
            if sum.to_le_bytes() != sums[8 * matrix..][..8] {
                return Err(Unusable::Damaged(self.blueprints[matrix].name.clone()));
            }
            done += self.blueprints[matrix].bytes();
            progress(done as f32 / total);
            Ok(())
        })?;
        Ok(map)
    }

    /// The file at `path`, if it has the length and the description that this plan says, and the checksums that stand in it.
    fn map(&self, path: &Path) -> Result<(Arc<Mapping>, Vec<u8>), Unusable> {
        if !path.exists() {
            return Err(Unusable::Missing);
        }
        let map = Mapping::open(path).map_err(|_| Unusable::Other)?;
        let bytes: &[u8] = map.as_ref();
        let sums = bytes.strip_prefix(&self.description[..]).filter(|_| bytes.len() == self.length);
        let sums =
            sums.and_then(|sums| sums.get(..8 * self.blueprints.len())).ok_or(Unusable::Other)?.to_vec();
        Ok((Arc::new(map), sums))
    }

    /// Where each matrix lies.
    fn ranges(&self) -> Vec<Range<usize>> {
        let ends = self.blueprints.iter().zip(&self.starts);
        ends.map(|(blueprint, &at)| at..at + blueprint.bytes()).collect()
    }

    /// Writes the file: matrices first, then what makes it usable.
    fn write(&self, file: &File, progress: &mut dyn FnMut(f32)) -> Result<(), PieceFault> {
        use std::os::unix::fs::FileExt;
        let total = total_bytes(self.blueprints) as f32;
        let mut done = 0;
        let mut sums: Vec<Xxh3> = self.blueprints.iter().map(|_| Xxh3::new()).collect();
        each_piece(self.blueprints, |matrix, at, bytes| -> Result<(), PieceFault> {
            let mut to = (self.starts[matrix] + at) as u64;
            for bytes in bytes.chunks(CACHED) {
                sums[matrix].update(bytes);
                file.write_all_at(bytes, to).map_err(PieceFault::Io)?;
                to += bytes.len() as u64;
            }
            done += bytes.len();
            progress(done as f32 / total);
            Ok(())
        })?;
        let mut first_bytes = self.description.clone();
        first_bytes.extend(sums.iter().flat_map(|sum| sum.digest().to_le_bytes()));
        file.set_len(self.length as u64).map_err(PieceFault::Io)?;
        file.write_all_at(&first_bytes, 0).map_err(PieceFault::Io)?;
        // The name must never stand for bytes that a power cut took.
        file.sync_all().map_err(PieceFault::Io)
    }
}

/// Removes what daemons that were killed while repacking left behind, and all but the files used last. `used` stays.
fn drop_leftovers(dir: &Path, used: &Path) {
    const OLD: Duration = Duration::from_secs(3600);
    let mut tiles = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(modified) = entry.metadata().and_then(|meta| meta.modified()) else { continue };
        let name = name.to_string_lossy();
        if name.ends_with(PARTIAL) && modified.elapsed().is_ok_and(|age| age > OLD) {
            // Whether it goes now or at the next start makes no difference.
            let _ = fs::remove_file(path);
        } else if name.ends_with(TILES) && path != used {
            tiles.push((modified, path));
        }
    }
    tiles.sort_unstable();
    // Another daemon that has mapped one keeps its bytes for as long as it needs them.
    for (_, path) in tiles.iter().rev().skip(KEPT - 1) {
        tracing::info!(path = %path.display(), "dropping repacked weights that were not used for long");
        let _ = fs::remove_file(path);
    }
}

enum PieceFault {
    Io(io::Error),
    Repack(RepackError),
}

impl From<RepackError> for PieceFault {
    fn from(error: RepackError) -> Self {
        Self::Repack(error)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::Gguf;
    use crate::model::repack::Arrangement;
    use std::os::unix::fs::FileExt;

    fn fixture() -> (String, Vec<Blueprint>) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/causal-families/llama.gguf");
        let gguf = Gguf::open(&path).unwrap();
        let blueprints = ["blk.0.attn_q.weight", "blk.0.ffn_down.weight"]
            .map(|name| {
                let parts = vec![gguf.rows(gguf.tensor(name).unwrap())];
                Blueprint {
                    name: name.to_owned(),
                    parts,
                    arrangement: Arrangement::Stacked,
                    family: Family::Vector,
                }
            })
            .to_vec();
        (gguf.identity().to_string(), blueprints)
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(dir.join("weights"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The file's number tells a file that was kept from one that was made again.
    fn made(identity: &str, blueprints: &[Blueprint], dir: &Path) -> (u64, Arc<Mapping>) {
        let Ok((map, _)) = tiles_file(identity, blueprints, dir, &mut |_| {}) else { panic!("no tiles") };
        (map.stamp().inode, map)
    }

    #[test]
    fn damaged_files_are_made_again_and_sound_ones_kept() {
        let (identity, blueprints) = fixture();
        let dir = tempfile::tempdir().unwrap();
        let (first, sound) = made(&identity, &blueprints, dir.path());
        assert_eq!(made(&identity, &blueprints, dir.path()).0, first);
        let path = dir.path().join("weights").join(format!("{}.tiles", identity));
        let whole = fs::read(&path).unwrap();
        let plan = Plan::new(&identity, &blueprints).unwrap();
        let [first_start, second_start] = plan.starts[..] else { panic!("two matrices") };
        let last = second_start + blueprints[1].bytes() - 1;
        for at in [0, 9, plan.description.len(), plan.description.len() + 15, first_start, last] {
            let before = fs::metadata(&path).unwrap();
            // In place, as a bad disk does it.
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[whole[at] ^ 1], at as u64).unwrap();
            let (inode, map) = made(&identity, &blueprints, dir.path());
            assert_ne!(inode, std::os::unix::fs::MetadataExt::ino(&before), "byte {at}");
            assert!((*map).as_ref() == whole, "byte {at}");
        }
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert!((*made(&identity, &blueprints, dir.path()).1).as_ref() == whole);
        drop(sound);
        assert_eq!(names(dir.path()).len(), 1, "nothing half-written stays");
    }

    #[test]
    fn work_is_done_beside_and_ends_with_what_it_is_for() {
        // More is told than anybody could wait for.
        let endless = |tell: &mut dyn FnMut(f32)| {
            loop {
                tell(0.5);
            }
        };
        let refused: Result<((), ()), &str> = meanwhile(endless, || Err("no"), &mut |_| {});
        assert_eq!(refused, Err("no"));
        let stopped = std::panic::catch_unwind(|| {
            meanwhile::<(), (), ()>(endless, || Ok(()), &mut |_| resume_unwind(Box::new(7u8)))
        });
        assert_eq!(stopped.unwrap_err().downcast_ref::<u8>(), Some(&7));
        let mut told = Vec::new();
        let both = meanwhile(
            |tell| {
                tell(0.25);
                tell(1.0);
                3
            },
            || Ok::<_, ()>(4),
            &mut |share| told.push(share),
        );
        assert_eq!((both, told), (Ok((3, 4)), vec![0.25, 1.0]));
    }

    #[test]
    fn a_disk_without_room_is_told_before_it_is_full() {
        let dir = tempfile::tempdir().unwrap();
        for length in [0, 1 << 20, SPARE] {
            assert!(no_room(dir.path(), length).is_none());
        }
        let error = no_room(dir.path(), 1 << 60).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().contains("1099511628800 MiB are needed"), "{error}");
        assert!(no_room(Path::new("/nonesuch/nor/this"), 1 << 60).is_none());
    }

    #[test]
    fn only_files_used_last_stay() {
        let (identity, blueprints) = fixture();
        let dir = tempfile::tempdir().unwrap();
        let weights = dir.path().join("weights");
        fs::create_dir(&weights).unwrap();
        let now = SystemTime::now();
        for (name, hours) in [("a.tiles", 5), ("b.tiles", 1), ("c.tiles", 4), ("d.tiles", 2), ("e.tiles", 3)]
        {
            let file = File::create(weights.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(3600 * hours)).unwrap();
        }
        for (name, hours) in [("old.partial", 2), ("new.partial", 0), ("other", 9)] {
            let file = File::create(weights.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(3600 * hours)).unwrap();
        }
        made(&identity, &blueprints, dir.path());
        let mut expected =
            ["b.tiles", "d.tiles", "e.tiles", "new.partial", "other"].map(str::to_owned).to_vec();
        expected.push(format!("{}.tiles", identity));
        expected.sort();
        assert_eq!(names(dir.path()), expected);
    }
}
