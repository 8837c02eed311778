//! Models split into several files: any of them leads to the whole, and what does not fit is refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail the test")]

#[allow(dead_code, reason = "shared with other tests of the checkpoint room")]
mod checkpoint_support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axe::checkpoint::gguf::{Gguf, TensorInfo, Value};
use checkpoint_support::*;
use tempfile::TempDir;

const F32_TYPE: u32 = 0;

/// One shard to be written.
#[derive(Clone)]
struct Shard {
    no: u64,
    count: u64,
    /// `split.tensors.count`.
    total: u64,
    /// Keys of strings beside those of the set.
    keys: Vec<(&'static str, &'static str)>,
    /// Names of tensors of eight numbers; each number is the tensor's place in the set.
    tensors: Vec<(&'static str, f32)>,
}

impl Shard {
    fn bytes(&self) -> Bytes {
        let keys = 3 + self.keys.len() as u64;
        let mut bytes = Bytes::header(3, self.tensors.len() as u64, keys);
        for (key, text) in &self.keys {
            bytes = bytes.key(key, STRING).string(text);
        }
        bytes = bytes.key("split.no", U16).raw(&(self.no as u16).to_le_bytes());
        bytes = bytes.key("split.count", U16).raw(&(self.count as u16).to_le_bytes());
        bytes = bytes.key("split.tensors.count", I32).raw(&(self.total as i32).to_le_bytes());
        for (place, (name, _)) in self.tensors.iter().enumerate() {
            bytes = bytes.tensor(name, &[8], F32_TYPE, place as u64 * 32);
        }
        let data: Vec<u8> =
            self.tensors.iter().flat_map(|(_, value)| [*value; 8]).flat_map(f32::to_le_bytes).collect();
        bytes.data(32, &data)
    }
}

/// Three shards, the first without tensors, as converters write them on request.
fn set() -> Vec<Shard> {
    let shard = |no, keys: &[_], tensors: &[_]| Shard {
        no,
        count: 3,
        total: 3,
        keys: keys.to_vec(),
        tensors: tensors.to_vec(),
    };
    vec![
        shard(0, &[("general.architecture", "llama"), ("general.name", "a")], &[]),
        shard(1, &[], &[("a", 1.0), ("b", 2.0)]),
        shard(2, &[], &[("c", 3.0)]),
    ]
}

fn name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.gguf")
}

/// Writes the shards in order; the folder keeps them in place.
fn save(shards: &[Shard]) -> (TempDir, Vec<PathBuf>) {
    let dir = tempfile::tempdir().unwrap();
    let paths = shards.iter().enumerate().map(|(place, shard)| {
        let path = dir.path().join(name(place + 1, shards.len()));
        std::fs::write(&path, shard.bytes().0).unwrap();
        path
    });
    let paths = paths.collect();
    (dir, paths)
}

fn refusal(path: &Path) -> String {
    let start = Instant::now();
    let error = Gguf::open(path).expect_err("the set must be refused").to_string();
    assert!(start.elapsed() < Duration::from_millis(500), "refusing took {:?}", start.elapsed());
    error
}

/// Any of the files is refused with the same words, which all of `words` are among.
#[track_caller]
fn refused(paths: &[PathBuf], words: &[&str]) {
    for path in paths {
        let error = refusal(path);
        for word in words {
            assert!(error.contains(word), "{word:?} is not in {error:?}");
        }
    }
}

#[test]
fn any_shard_leads_to_the_whole_set() {
    let (_dir, paths) = save(&set());
    let identity = Gguf::open(&paths[0]).unwrap().identity();
    for path in &paths {
        let gguf = Gguf::open(path).unwrap();
        assert_eq!((gguf.shards(), gguf.path()), (3, paths[0].as_path()));
        assert_eq!(gguf.metadata().require_str("general.architecture").unwrap(), "llama");
        let found: Vec<(&str, f32, usize)> = gguf
            .tensors()
            .iter()
            .map(|info| {
                let first = gguf.bytes(info).first_chunk::<4>().unwrap();
                assert_eq!(gguf.rows(info).bytes.as_ref(), gguf.bytes(info));
                (info.name.as_str(), f32::from_le_bytes(*first), info.shard)
            })
            .collect();
        assert_eq!(found, [("a", 1.0, 1), ("b", 2.0, 1), ("c", 3.0, 2)]);
        assert_eq!(gguf.path_of(gguf.tensor("c").unwrap()), paths[2]);
        assert_eq!(gguf.identity(), identity);
        let lengths: u64 = paths.iter().map(|path| path.metadata().unwrap().len()).sum();
        assert_eq!(gguf.file_len(), lengths);
        // Released pages are read again.
        gguf.release();
        assert_eq!(gguf.bytes(gguf.tensor("b").unwrap()), [2f32.to_le_bytes(); 8].concat());
    }
}

#[test]
fn the_identity_covers_every_shard() {
    let (_dir, paths) = save(&set());
    let first = Gguf::open(&paths[0]).unwrap().identity();
    let later = std::time::SystemTime::now() + Duration::from_secs(5);
    for path in &paths {
        let before = Gguf::open(&paths[0]).unwrap().identity();
        std::fs::File::options().write(true).open(path).unwrap().set_modified(later).unwrap();
        let after = Gguf::open(&paths[0]).unwrap().identity();
        assert_ne!(before, after, "{}", path.display());
        assert_ne!(first, after);
    }
}

#[test]
fn errors_about_a_tensor_name_its_own_file() {
    let (_dir, paths) = save(&set());
    let gguf = Gguf::open(&paths[0]).unwrap();
    let error = gguf.require_tensor("c", &[4]).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: tensor `c`", paths[2].display())), "{error}");
    let outside = TensorInfo { shard: 3, ..gguf.tensor("c").unwrap().clone() };
    assert_eq!((gguf.bytes(&outside), gguf.rows(&outside).rows), (&[][..], 0));

    let mut cut = std::fs::read(&paths[1]).unwrap();
    cut.pop();
    std::fs::write(&paths[1], cut).unwrap();
    let start = format!("{}: tensor `b`", paths[1].display());
    assert!(refusal(&paths[0]).starts_with(&start), "{}", refusal(&paths[0]));
}

/// A whole model, cut into shards of some tensors each, is read as before.
#[test]
fn a_model_that_was_split_reads_as_one() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/causal-families/llama.gguf");
    let whole = Gguf::open(&whole).unwrap();
    let total = whole.tensors().len();
    let dir = tempfile::tempdir().unwrap();
    let shards: Vec<&[TensorInfo]> = whole.tensors().chunks(15).collect();
    assert!(shards.len() > 2);
    for (no, tensors) in shards.iter().enumerate() {
        let mut bytes = Bytes::header(3, tensors.len() as u64, 4);
        bytes = bytes.key("general.architecture", STRING).string("llama");
        bytes = bytes.key("split.no", U16).raw(&(no as u16).to_le_bytes());
        bytes = bytes.key("split.count", U16).raw(&(shards.len() as u16).to_le_bytes());
        bytes = bytes.key("split.tensors.count", I32).raw(&(total as i32).to_le_bytes());
        let mut data = Vec::new();
        for info in *tensors {
            data.resize(data.len().next_multiple_of(32), 0);
            bytes = bytes.tensor(&info.name, &info.shape, info.ty.id(), data.len() as u64);
            data.extend_from_slice(whole.bytes(info));
        }
        std::fs::write(dir.path().join(name(no + 1, shards.len())), bytes.data(32, &data).0).unwrap();
    }
    let split = Gguf::open(&dir.path().join(name(2, shards.len()))).unwrap();
    assert_eq!(split.tensors().len(), total);
    for info in whole.tensors() {
        let found = split.require_tensor(&info.name, &info.shape).unwrap();
        assert_eq!((found.ty, split.bytes(found)), (info.ty, whole.bytes(info)), "{}", info.name);
    }
}

#[test]
fn missing_shards_are_named() {
    let (_dir, paths) = save(&set());
    std::fs::remove_file(&paths[1]).unwrap();
    let both = [paths[0].clone(), paths[2].clone()];
    refused(&both, &["one of 3 shards", "`model-00002-of-00003.gguf` is not beside it", "download all 3"]);
    std::fs::remove_file(&paths[0]).unwrap();
    let words = "`model-00001-of-00003.gguf`, `model-00002-of-00003.gguf` are not beside it";
    refused(&both[1..], &[words]);
    // A set of thousands, of which one is there, costs no more.
    let shard = Shard { count: 65_535, ..set()[0].clone() };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model-00001-of-65535.gguf");
    std::fs::write(&path, shard.bytes().0).unwrap();
    refused(&[path], &["`model-00005-of-65535.gguf` and more are not beside it"]);
}

#[test]
fn renamed_shards_are_refused_with_the_name_they_had() {
    let (dir, paths) = save(&set());
    let renamed = dir.path().join("model.gguf");
    std::fs::copy(&paths[1], &renamed).unwrap();
    refused(&[renamed], &["file that is named `model.gguf`", "ends with -00002-of-00003.gguf", "--merge"]);
    let count = dir.path().join(name(2, 4));
    std::fs::copy(&paths[1], &count).unwrap();
    refused(&[count], &["split.count", "`model-00002-of-00004.gguf`", "-00002-of-00003.gguf"]);
}

#[test]
fn copies_of_a_shard_are_refused() {
    let (_dir, paths) = save(&set());
    std::fs::copy(&paths[1], &paths[2]).unwrap();
    let found = "found 1: this is the file -00002-of-00003.gguf, under another's name, expected 2";
    refused(&paths, &["model-00003-of-00003.gguf: key `split.no`", found]);
    // Renumbered by hand, its tensors still give it away.
    let mut shards = set();
    shards[2].tensors = shards[1].tensors.clone();
    let (_dir, paths) = save(&shards);
    refused(&paths, &["model-00003-of-00003.gguf: tensor `a`", "`model-00002-of-00003.gguf` holds, too"]);
}

#[test]
fn shards_of_other_models_are_refused() {
    let refused_with = |change: &dyn Fn(&mut Vec<Shard>), words: &[&str]| {
        let mut shards = set();
        change(&mut shards);
        let (_dir, paths) = save(&shards);
        refused(&paths, words);
    };
    // Another count.
    let (dir, paths) = save(&set());
    let foreign = Shard { count: 2, ..set()[1].clone() };
    std::fs::write(&paths[1], foreign.bytes().0).unwrap();
    let words = ["model-00002-of-00003.gguf: key `split.count`", "found 2, expected 3"];
    refused(&[paths[0].clone(), paths[2].clone()], &words);
    drop(dir);
    // No shard at all.
    let (_dir, paths) = save(&set());
    std::fs::write(&paths[2], Bytes::header(3, 0, 0).0).unwrap();
    refused(&paths[..2], &["model-00003-of-00003.gguf: key `split.count`", "found no such key"]);
    // Another number of tensors.
    refused_with(
        &|shards| shards[2].total = 4,
        &[
            "model-00003-of-00003.gguf: key `split.tensors.count`",
            "found the i32 4, expected the i32 3, as in `model-00001-of-00003.gguf`",
            "from one download",
        ],
    );
    // Keys that say something else than the first's.
    refused_with(
        &|shards| shards[1].keys.push(("general.name", "b")),
        &["model-00002-of-00003.gguf: key `general.name`", "found the string `b`, expected the string `a`"],
    );
    refused_with(&|shards| shards[1].keys.push(("general.extra", "b")), &["expected no such key, as in"]);
    // The sum does not come out.
    refused_with(
        &|shards| shards.iter_mut().for_each(|shard| shard.total = 5),
        &["model-00001-of-00003.gguf: key `split.tensors.count`", "found 5 tensors in the set, expected 3"],
    );
}

#[test]
fn shards_that_were_joined_are_refused() {
    let (dir, paths) = save(&set());
    let joined: Vec<u8> = paths.iter().flat_map(|path| std::fs::read(path).unwrap()).collect();
    let path = dir.path().join("joined.gguf");
    std::fs::write(&path, &joined).unwrap();
    let words = ["another GGUF file behind the last tensor", "not to be joined byte by byte"];
    refused(&[path, paths[0].clone()][..1], &words);
    // Under the name of the first, too.
    std::fs::write(&paths[0], &joined).unwrap();
    refused(&paths, &words);
}

#[test]
fn hostile_keys_of_a_set_are_refused() {
    let with = |key: &str, ty: u32, value: &[u8]| {
        let bytes = Bytes::header(3, 0, 2).key("split.count", U32).u32(2).key(key, ty).raw(value);
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = (1..=2).map(|number| dir.path().join(name(number, 2))).collect();
        paths.iter().for_each(|path| std::fs::write(path, &bytes.0).unwrap());
        refusal(&paths[0])
    };
    assert!(with("split.no", STRING, &[0; 8]).contains("key `split.no`"));
    let error = with("split.no", U64, &u64::MAX.to_le_bytes());
    assert!(error.contains("18446744073709551615, expected at most 65535"), "{error}");
    assert!(with("other", U8, &[0]).contains("key `split.no`, byte 0: found no such key"));
    let error = with("split.no", I8, &[0xff]);
    assert!(error.contains("found the i8 -1"), "{error}");
    // A single file may say that it is one.
    let (_dir, path) = Bytes::header(3, 0, 1).key("split.count", U16).raw(&[1, 0]).save();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!((gguf.shards(), gguf.metadata().get("split.count")), (1, Some(Value::U16(1))));
    let (_dir, path) = Bytes::header(3, 0, 1).key("split.count", U32).u32(70_000).save();
    refused(&[path], &["found 70000, expected at most 65535"]);
}
