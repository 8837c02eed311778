//! Models that are split into several files, `NAME-00001-of-00003.gguf` and so on, as `llama-gguf-split` and the
//! converters write them.
//!
//! Each shard is a whole file of the format with tensors of its own. `split.no` counts them from 0, the names from 1;
//! `split.count` and `split.tensors.count` are about the set and the same in all of them. The model's keys are in the
//! first; what later ones repeat of them must be the same.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::error::{Fault, GgufError, Place, quoted};
use super::part::Part;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The digits of a number in a shard's name.
const DIGITS: usize = 5;
/// The ending of all files.
const ENDING: &str = ".gguf";
/// How many missing shards a message names.
const NAMED: usize = 4;

/// The advice for a shard whose name does not say what it is.
const RENAME: &str = "give every shard the name it was published with, NAME-00001-of-00003.gguf and so on, in one \
                      folder; or merge them to one file (`llama-gguf-split --merge`)";
/// The advice for shards that do not belong together.
const SAME_SET: &str =
    "keep the shards of one model, from one download, in a folder of their own: download this one again";
/// The advice for files that were appended to each other.
const APART: &str = "shards are not to be joined byte by byte: keep each in a file of its own, under the name it was \
                     published with, or merge them with `llama-gguf-split --merge`";

/// The files of the model that the file at `path` belongs to, in order; at least one.
///
/// # Errors
/// What is wrong with any of them, with that file's name.
pub(super) fn open(path: &Path) -> Result<Vec<Part>, GgufError> {
    let given = Part::open(path, 0)?;
    let count = number(&given, COUNT)?.unwrap_or(0);
    if count < 2 {
        return Ok(vec![given]);
    }
    let name = ShardName::of(path);
    refuse_joined(&given)?;
    let Some(name) = name.filter(|name| name.count == count) else {
        let found = format!("one of {count} shards in a file that is named {}", named(path));
        let number = number(&given, NO)?.map_or(1, |no| no + 1);
        let expected = format!("a name that ends with {}", ending(number, count));
        return Err(fault(&given, COUNT, found, expected, RENAME));
    };

    let paths: Vec<PathBuf> = (1..=count).map(|number| name.sibling(number)).collect();
    let missing: Vec<PathBuf> = paths.iter().filter(|path| !path.exists()).take(NAMED + 1).cloned().collect();
    if !missing.is_empty() {
        return Err(GgufError::MissingShards { path: path.to_owned(), count, missing });
    }
    let mut given = (name.number == 1).then_some(given);
    let mut parts = Vec::new();
    for (shard, path) in paths.iter().enumerate() {
        let part = match given.take() {
            Some(part) => part,
            None => Part::open(path, shard)?,
        };
        check(&part, shard, count, parts.first())?;
        parts.push(part);
    }
    check_tensors(&parts)?;
    Ok(parts)
}

/// Checks what `part` says of itself as number `shard`, counted from 0, of `count`.
fn check(part: &Part, shard: usize, count: u64, first: Option<&Part>) -> Result<(), GgufError> {
    refuse_joined(part)?;
    match number(part, COUNT)? {
        Some(found) if found == count => {}
        found => {
            let found = found.map_or("no such key".to_owned(), |found| found.to_string());
            let expected = format!("{count}, as its name and the other shards say");
            return Err(fault(part, COUNT, found, expected, SAME_SET));
        }
    }
    match number(part, NO)? {
        Some(no) if no == shard as u64 => {}
        no => {
            let found = no.map_or("no such key".to_owned(), |no| {
                format!("{no}: this is the file {}, under another's name", ending(no + 1, count))
            });
            return Err(fault(part, NO, found, format!("{shard}, as its name says"), SAME_SET));
        }
    }
    let Some(first) = first else { return Ok(()) };
    // What only tells a file's own place, or how its own bytes lie.
    let own = |key: &&str| ![NO, "general.alignment"].contains(key);
    for key in part.metadata.keys().filter(own) {
        let (here, there) = (part.metadata.get(key), first.metadata.get(key));
        if here != there {
            let show =
                |value: Option<super::Value<'_>>| value.map_or("no such key".to_owned(), |v| v.to_string());
            let mut expected = format!("{}, as in {}", show(there), named(first.file.path()));
            if show(here) == show(there) {
                expected.push_str(", with the same elements");
            }
            return Err(fault(part, key, show(here), expected, SAME_SET));
        }
    }
    Ok(())
}

/// Checks that the tensors of all shards are the model's, each once.
fn check_tensors(parts: &[Part]) -> Result<(), GgufError> {
    let [first, ..] = parts else { return Ok(()) };
    let mut holders: HashMap<&str, &Part> = HashMap::new();
    for part in parts {
        for info in &part.tensors {
            if let Some(other) = holders.insert(&info.name, part) {
                return Err(GgufError::from(Box::new(Fault {
                    path: part.file.path().to_owned(),
                    place: Place::Tensor(info.name.clone()),
                    offset: info.declared_at,
                    found: format!("a tensor that {} holds, too", named(other.file.path())),
                    expected: "each tensor in one shard".to_owned(),
                    advice: SAME_SET,
                })));
            }
        }
    }
    let expected = first.metadata.require_u64(TENSORS)?;
    if holders.len() as u64 != expected {
        let found = format!("{expected} tensors in the set");
        let expected = format!("{}, as many as its shards hold together", holders.len());
        return Err(fault(first, TENSORS, found, expected, SAME_SET));
    }
    Ok(())
}

/// Refuses a shard that another file was appended to.
fn refuse_joined(part: &Part) -> Result<(), GgufError> {
    /// The padding after the last tensor is at most an alignment of this size.
    const WITHIN: usize = 4096;
    const MAGIC: &[u8] = b"GGUF";
    let bytes = (*part.file).as_ref();
    let rest = bytes.get(part.data_end()..).unwrap_or_default();
    let Some(at) = rest.iter().take(WITHIN).position(|&byte| byte != 0) else { return Ok(()) };
    if !rest[at..].starts_with(MAGIC) {
        return Ok(());
    }
    Err(GgufError::from(Box::new(Fault {
        path: part.file.path().to_owned(),
        place: Place::Data,
        offset: (part.data_end() + at) as u64,
        found: "another GGUF file behind the last tensor of this shard".to_owned(),
        expected: "the end of the file".to_owned(),
        advice: APART,
    })))
}

/// A whole number of the set's, if the key is there.
fn number(part: &Part, key: &str) -> Result<Option<u64>, GgufError> {
    // Five digits have room for no more, and the keys are 16-bit.
    match part.metadata.u64(key)? {
        Some(found) if found > u16::MAX.into() => {
            Err(fault(part, key, found.to_string(), format!("at most {}", u16::MAX), SAME_SET))
        }
        found => Ok(found),
    }
}

fn fault(part: &Part, key: &str, found: String, expected: String, advice: &'static str) -> GgufError {
    part.metadata.fault_with(key, found, expected, advice)
}

/// A file's name without its folder, as messages show it.
fn named(path: &Path) -> String {
    quoted(&path.file_name().unwrap_or_default().to_string_lossy())
}

/// How the name of shard `number`, counted from 1, ends.
fn ending(number: u64, count: u64) -> String {
    format!("-{number:0DIGITS$}-of-{count:0DIGITS$}{ENDING}")
}

/// What a shard's name says.
struct ShardName {
    folder: PathBuf,
    /// What all names of the set begin with.
    stem: String,
    /// Counted from 1.
    number: u64,
    count: u64,
}

impl ShardName {
    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(ENDING)?;
        let (rest, count) = digits_at_end(name)?;
        let (stem, number) = digits_at_end(rest.strip_suffix("-of-")?)?;
        let stem = stem.strip_suffix('-')?.to_owned();
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Some(Self { folder, stem, number, count }).filter(|name| (1..=count).contains(&name.number))
    }

    fn sibling(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{}{}", self.stem, ending(number, self.count)))
    }
}

/// The number that `text` ends with, and what stands before it.
fn digits_at_end(text: &str) -> Option<(&str, u64)> {
    let (rest, digits) = text.split_at_checked(text.len().checked_sub(DIGITS)?)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
    Some((rest, digits.parse().ok()?))
}
