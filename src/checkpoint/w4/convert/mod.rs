//! A Hugging Face directory to a `dg-w4a16-v1` directory, layer by layer.
//!
//! Memory stays small whatever the model's size: the source is read through its map in pieces whose pages are let go, and
//! pieces are written to their place in the file at once. A file gets its name when it is whole and on the disk; what has
//! been finished stands in a record in the target, so that a conversion that was cut off goes on where it was. The record
//! stays until the last file, the one that names the format, is in place: no unfinished directory is taken for a
//! checkpoint.

mod error;
mod plan;
mod record;
mod write;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

pub use error::ConvertError;

use crate::checkpoint::directory::{CONFIG, GENERATION_CONFIG, HfDirectory};
use crate::checkpoint::kind::{Kind, UNFINISHED};
use crate::checkpoint::safetensors::{INDEX, read_bytes};
use crate::checkpoint::w4::META;
use plan::{OutFile, Plan};
use record::{Finished, Record};
use write::Done;

/// Files that are copied as they are, where the source has them.
const COPIED: [&str; 13] = [
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "LICENSE",
    "NOTICE",
    CONFIG,
];
/// Ends the names of files that are being written; they begin with a dot.
const PARTIAL: &str = ".partial";
/// Bytes of the source after which its pages are let go.
const RELEASE_BYTES: u64 = 32 << 20;

/// How to convert.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Leave the vision tower out.
    pub text_only: bool,
    /// Remove what an earlier conversion has left in the target, finished or not, and start over.
    pub force: bool,
    /// Bytes after which the tensors that are not experts go on in a further file.
    pub shard_bytes: u64,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        Self { text_only: false, force: false, shard_bytes: 4 << 30 }
    }
}

/// What a conversion tells while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConvertEvent {
    /// It begins.
    Start {
        /// Bytes of tensors in the source.
        bytes: u64,
        /// Files to be made of them.
        files: usize,
    },
    /// Something that the user should know.
    Note(String),
    /// More of the source has been dealt with.
    Progress {
        /// Bytes since the last of these events.
        bytes: u64,
    },
    /// A file is in place.
    File {
        /// Its name.
        name: String,
        /// It was there from an earlier run.
        kept: bool,
    },
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Files of tensors made.
    pub made: usize,
    /// Files of tensors that were there from an earlier run.
    pub kept: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// Converts `source` to a new directory `target`.
///
/// # Errors
/// A source that is no sound diffusion_gemma directory or cannot be held in the format; a target that holds something
/// else; what the system refuses. What is finished by then stays for the next run.
pub fn convert(
    source: &Path,
    target: &Path,
    options: &ConvertOptions,
    listen: &mut dyn FnMut(ConvertEvent),
) -> Result<Converted, ConvertError> {
    let other = |found: &str, advice| {
        Err(ConvertError::OtherKind { path: source.to_owned(), found: found.to_owned(), advice })
    };
    match Kind::of(source)? {
        Kind::HfDirectory(_) => {}
        Kind::W4Directory(_) => return other("a directory that is converted already", "use it as it is"),
        Kind::Gguf(_) => return other("a GGUF file", "use it as it is"),
    }
    let from = HfDirectory::open(source)?;
    let plan = Plan::new(&from, options)?;
    let mut into = Target::open(source, target, &from, &plan, options, listen)?;

    listen(ConvertEvent::Start { bytes: plan.source_bytes(), files: plan.files.len() });
    if plan.rounded > 0 {
        listen(ConvertEvent::Note(format!(
            "{} tensors that are not experts are f32 or f16 in the source: rounding them to bf16, half to even",
            plan.rounded
        )));
    }
    if plan.skipped > 0 {
        listen(ConvertEvent::Note(format!("leaving out {} tensors of the vision tower", plan.skipped)));
    }
    let keeps = into.keeps(&plan);
    let needed = plan.files.iter().zip(&keeps).filter(|(_, keep)| !**keep).map(|(file, _)| file.len).sum();
    into.require_space(needed)?;
    let mut converted = Converted::default();
    let mut total = Done::default();
    for (file, keep) in plan.files.iter().zip(keeps) {
        if keep {
            converted.kept += 1;
            listen(ConvertEvent::Progress { bytes: file.source_bytes });
        } else {
            let mut unreleased = 0;
            into.make(file, &mut |done| {
                total.groups += done.groups;
                total.one_sided += done.one_sided;
                unreleased += done.bytes;
                if unreleased >= RELEASE_BYTES {
                    from.release();
                    unreleased = 0;
                }
                listen(ConvertEvent::Progress { bytes: done.bytes });
            })?;
            from.release();
            converted.made += 1;
        }
        converted.bytes += file.len;
        listen(ConvertEvent::File { name: file.name.clone(), kept: keep });
    }
    if total.one_sided > 0 {
        listen(ConvertEvent::Note(format!(
            "{} of {} groups of weights lie wholly on one side of zero, which the format can hold only roughly",
            total.one_sided, total.groups
        )));
    }
    if let Some(index) = &plan.index {
        into.put(INDEX, index.as_bytes())?;
    }
    for name in COPIED {
        if let Some(bytes) = from.bytes(name)? {
            into.put(name, &bytes)?;
        }
    }
    into.put(META, plan.meta.as_bytes())?;
    into.finish()?;
    Ok(converted)
}

/// The directory that is written, held against other conversions.
struct Target {
    path: PathBuf,
    record: Record,
    /// Held until the end.
    lock: Flock<File>,
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ConvertError {
    let path = path.to_owned();
    move |source| ConvertError::Io { action, path, source }
}

impl Target {
    /// Makes or takes over the directory, and leaves nothing in it but finished files of this conversion.
    fn open(
        source: &Path,
        path: &Path,
        from: &HfDirectory,
        plan: &Plan,
        options: &ConvertOptions,
        listen: &mut dyn FnMut(ConvertEvent),
    ) -> Result<Target, ConvertError> {
        fs::create_dir_all(path).map_err(io_error("make the directory", path))?;
        let real = |path: &Path| path.canonicalize().map_err(io_error("find", path));
        if real(source)? == real(path)? {
            return Err(ConvertError::Same { path: path.to_owned() });
        }
        let directory = File::open(path).map_err(io_error("open", path))?;
        let lock = match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => return Err(ConvertError::Busy { path: path.to_owned() }),
            Err((_, errno)) => return Err(io_error("lock", path)(errno.into())),
        };
        let mut record = Record {
            made_by: concat!("axed ", env!("CARGO_PKG_VERSION")).to_owned(),
            source: from.identity().to_string(),
            text_only: options.text_only,
            shard_bytes: options.shard_bytes,
            finished: BTreeMap::new(),
        };
        let mut names = Vec::new();
        for entry in fs::read_dir(path).map_err(io_error("list", path))? {
            let entry = entry.map_err(io_error("list", path))?;
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        let has = |name: &str| names.iter().any(|other| other == name);
        let foreign = |found: String| ConvertError::Foreign { path: path.to_owned(), found };
        let mut others = names.iter().filter(|name| !is_ours(name));
        if let Some(name) = others.next() {
            return Err(foreign(match others.count() {
                0 => format!("`{name}`"),
                more => format!("`{name}` and {more} more"),
            }));
        }
        let unfinished = has(UNFINISHED);
        if !names.is_empty() && !unfinished && !has(META) {
            return Err(foreign(format!("`{}`, but no sign of a conversion", names[0])));
        }
        if has(META) && !unfinished && !options.force {
            return Err(ConvertError::Finished { path: path.to_owned() });
        }
        if unfinished && !options.force {
            let text = read_bytes(&path.join(UNFINISHED))?.unwrap_or_default();
            match serde_json::from_slice::<Record>(&text) {
                Ok(earlier) if earlier.is_of(&record) => record.finished = earlier.finished,
                // Hours of work must not go for a wrong path.
                Ok(_) => return Err(ConvertError::OtherWork { path: path.to_owned() }),
                Err(_) => listen(ConvertEvent::Note(format!(
                    "the record of what is finished ({UNFINISHED}) is damaged: starting over"
                ))),
            }
        }
        let mut target = Target { path: path.to_owned(), record, lock };
        // Before anything is removed, the directory is marked: nothing of it may be taken for a checkpoint from here on.
        target.save()?;
        for name in &names {
            let planned = plan.files.iter().any(|file| file.name == **name);
            let kept = planned && target.record.finished.contains_key(name);
            if name != UNFINISHED && !kept {
                let path = target.path.join(name);
                match fs::remove_file(&path) {
                    // What a killed run left of the record went when the record was saved above.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    removed => removed.map_err(io_error("remove", &path))?,
                }
            }
        }
        target.record.finished.retain(|name, _| has(name));
        target.sync()?;
        Ok(target)
    }

    /// For each file of the plan, whether it is there already.
    fn keeps(&self, plan: &Plan) -> Vec<bool> {
        let whole = |file: &OutFile| {
            let finished = self.record.finished.get(&file.name)?;
            let path = self.path.join(&file.name);
            if finished.bytes != file.len || fs::symlink_metadata(&path).ok()?.len() != file.len {
                return None;
            }
            (Finished::of(&path).ok()? == *finished).then_some(())
        };
        plan.files.iter().map(|file| whole(file).is_some()).collect()
    }

    /// Refuses to begin what cannot end.
    fn require_space(&self, needed: u64) -> Result<(), ConvertError> {
        // A file system that does not say is tried.
        let Ok(state) = nix::sys::statvfs::statvfs(&self.path) else { return Ok(()) };
        let available = state.blocks_available().saturating_mul(state.fragment_size());
        if needed > available {
            return Err(ConvertError::Space { path: self.path.clone(), needed, available });
        }
        Ok(())
    }

    /// Makes a file of tensors and notes that it is finished.
    fn make(&mut self, out: &OutFile, done: &mut dyn FnMut(Done)) -> Result<(), ConvertError> {
        let partial = self.partial(&out.name);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&partial)
            .map_err(io_error("make", &partial))?;
        reserve(&file, out.len).map_err(io_error("reserve space for", &partial))?;
        write::fill(out, &file, &partial, done)?;
        let finished = Finished::of(&partial).map_err(io_error("read", &partial))?;
        self.name(&file, &out.name)?;
        self.record.finished.insert(out.name.clone(), finished);
        self.save()
    }

    /// Writes a small file.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
        let partial = self.partial(name);
        let mut file = File::create(&partial).map_err(io_error("make", &partial))?;
        file.write_all(bytes).map_err(io_error("write", &partial))?;
        self.name(&file, name)
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.path.join(format!(".{name}{PARTIAL}"))
    }

    /// Gives a file its name once all of it is on the disk.
    fn name(&self, file: &File, name: &str) -> Result<(), ConvertError> {
        let (partial, path) = (self.partial(name), self.path.join(name));
        file.sync_all().map_err(io_error("write", &partial))?;
        fs::rename(&partial, &path).map_err(io_error("name", &path))?;
        self.sync()
    }

    fn save(&self) -> Result<(), ConvertError> {
        let text = serde_json::to_vec_pretty(&self.record)
            .map_err(|error| io_error("write", &self.path.join(UNFINISHED))(error.into()))?;
        self.put(UNFINISHED, &text)
    }

    /// Brings names to the disk.
    fn sync(&self) -> Result<(), ConvertError> {
        self.lock.sync_all().map_err(io_error("write", &self.path))
    }

    /// Everything is in place.
    fn finish(self) -> Result<(), ConvertError> {
        let path = self.path.join(UNFINISHED);
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
        self.sync()
    }
}

/// Whether a conversion may have made a file of this name.
fn is_ours(name: &str) -> bool {
    let whole =
        |name: &str| name == UNFINISHED || name == META || COPIED.contains(&name) || plan::is_made(name);
    whole(name) || name.strip_prefix('.').and_then(|name| name.strip_suffix(PARTIAL)).is_some_and(whole)
}

/// Gives a file its length, and the space for it where the file system can promise that.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)?;
    let Ok(length) = len.try_into() else { return Ok(()) };
    loop {
        match nix::fcntl::posix_fallocate(file, 0, length) {
            Err(Errno::EINTR) => {}
            // Not every file system can: writing will tell.
            Ok(()) | Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}
