//! Safetensors files and Hugging Face directories: what sound ones say, and that unsound ones are refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod safetensors_support;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use axe::checkpoint::directory::HfDirectory;
use axe::checkpoint::kind::Kind;
use axe::checkpoint::quant::GgmlType;
use axe::checkpoint::rows::Encoding;
use axe::checkpoint::safetensors::Safetensors;
use safetensors_support::*;
use serde_json::json;

const TINY: &str = "tiny-diffusiongemma";

#[test]
fn a_directory_gives_matrices_experts_and_vectors() {
    let dir = HfDirectory::open(&fixture(TINY)).unwrap();
    let expected = tiny();
    assert!(dir.experts.is_none());
    assert_eq!(dir.safetensors.names().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    let name = "model.decoder.layers.1.self_attn.o_proj.weight";
    let matrix = dir.safetensors.matrix(name, [128, 256]).unwrap();
    assert!(matches!(matrix.encoding, Encoding::Ggml(GgmlType::BF16)));
    assert_eq!((matrix.rows, matrix.columns), (128, 256));
    assert_eq!(matrix.bytes.as_ref(), expected[name].bytes);
    let name = "model.decoder.layers.2.experts.gate_up_proj";
    let all = dir.safetensors.matrices(name, [8, 128, 128]).unwrap();
    let each = 128 * 128 * 2;
    assert_eq!(all.part(3 * 128, 128).unwrap().bytes.as_ref(), &expected[name].bytes[3 * each..4 * each]);
    let name = "model.decoder.norm.weight";
    assert_eq!(dir.safetensors.vector(name, 128).unwrap(), numbers(&expected[name]));
    assert_eq!(dir.config["text_config"]["hidden_size"], 128);
    assert_eq!(dir.generation_config.as_ref().unwrap()["eos_token_id"], json!([1, 106, 50]));
    assert!(dir.bytes("tokenizer_config.json").unwrap().is_some());
    assert!(dir.bytes("chat_template.jinja").unwrap().unwrap().starts_with(b"{"));
    assert!(dir.bytes("no_such.json").unwrap().is_none());
    dir.release();
    assert_eq!(dir.safetensors.vector(name, 128).unwrap(), numbers(&expected[name]));
}

#[test]
fn wrong_questions_are_answered_with_file_and_tensor() {
    let tensors = Safetensors::open(&fixture(TINY)).unwrap();
    let norm = "model.decoder.norm.weight";
    for (error, words) in [
        (tensors.vector("no.such", 3).unwrap_err(), ["no.such", "is missing"]),
        (tensors.vector(norm, 127).unwrap_err(), ["shape [128]", "shape [127]"]),
        (tensors.matrix(norm, [1, 128]).unwrap_err(), ["shape [128]", "shape [1, 128]"]),
        (
            tensors.matrices(norm, [1, 1, 128]).unwrap_err(),
            ["model.decoder.norm.weight", "shape [1, 1, 128]"],
        ),
    ] {
        let error = error.to_string();
        assert!(error.contains(TINY) && words.iter().all(|word| error.contains(word)), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let raw = Raw { dtype: "I32", shape: vec![2], bytes: vec![0; 8] };
    fs::write(&path, file_of(&Tensors::from([("ids".to_owned(), raw)]))).unwrap();
    let error = Safetensors::open(&path).unwrap().vector("ids", 2).unwrap_err().to_string();
    assert!(error.contains("type I32") && error.contains("F32, F16 or BF16"), "{error}");
}

#[test]
fn numbers_of_every_plain_type_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    let raw = |dtype, bytes: &[u8]| Raw { dtype, shape: vec![2], bytes: bytes.to_vec() };
    let tensors = Tensors::from([
        ("bf".to_owned(), raw("BF16", &[0xC0, 0x3F, 0x00, 0xC0])),
        ("f".to_owned(), raw("F32", &[0, 0, 0xC0, 0x3F, 0, 0, 0, 0xC0])),
        ("h".to_owned(), raw("F16", &[0x00, 0x3E, 0x00, 0xC0])),
    ]);
    fs::write(&path, file_of(&tensors)).unwrap();
    let tensors = Safetensors::open(&path).unwrap();
    for name in ["bf", "f", "h"] {
        assert_eq!(tensors.vector(name, 2).unwrap(), [1.5, -2.0], "{name}");
    }
}

#[test]
fn shards_are_one_checkpoint_with_or_without_an_index() {
    let all = tiny();
    let dir = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Tensors::new(), Tensors::new());
    for (index, (name, raw)) in all.iter().enumerate() {
        (if index % 2 == 0 { &mut first } else { &mut second }).insert(name.clone(), raw.clone());
    }
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    sharded(dir.path(), &[(names[0], &first), (names[1], &second)]);
    let whole = Safetensors::open(&fixture(TINY)).unwrap();
    for index in [true, false] {
        if !index {
            fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
        }
        let tensors = Safetensors::open(dir.path()).unwrap();
        assert!(tensors.names().eq(whole.names()));
        for (one, other) in tensors.tensors().zip(whole.tensors()) {
            assert_eq!(
                (one.dtype, &one.shape, one.bytes.as_ref()),
                (other.dtype, &other.shape, other.bytes.as_ref())
            );
        }
    }
    fs::remove_file(dir.path().join(names[1])).unwrap();
    let error = Safetensors::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("1 files of tensors") && error.contains("2 as that name says"), "{error}");
}

#[test]
fn identities_tell_files_and_contents_apart() {
    let dir = tempfile::tempdir().unwrap();
    directory(dir.path(), &tiny());
    let identity = || HfDirectory::open(dir.path()).unwrap().identity().to_string();
    let first = identity();
    assert_eq!(first, identity());
    assert_ne!(first, HfDirectory::open(&fixture(TINY)).unwrap().identity().to_string());
    let file = fs::File::options().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(5)).unwrap();
    assert_ne!(first, identity());
}

/// The error for a file of these bytes, after its path.
fn refusal(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    let start = Instant::now();
    let error = Safetensors::open(&path).expect_err("the file must be refused").to_string();
    assert!(start.elapsed() < Duration::from_millis(500), "refusing took {:?}", start.elapsed());
    error.strip_prefix(&format!("{}: ", path.display())).unwrap_or_else(|| panic!("{error}")).to_owned()
}

#[test]
fn hostile_headers_are_refused_by_name() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let dims =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,8]}}}}"#, "2,".repeat(100_000));
    let cases: &[(&str, &str)] = &[
        ("", "header: found text that does not fit"),
        ("[]", "invalid type: sequence, expected an object"),
        ("{} {}", "trailing characters"),
        (&deep, "header: found text"),
        (&dims, "tensor `a`: found 8 bytes for shape [2, 2, 2, 2, 2, 2, 2, 2] and 99993 more"),
        (r#"{"a":{"dtype":"F4X","shape":[2],"data_offsets":[0,8]}}"#, "tensor `a`: found type `F4X`"),
        (r#"{"a":{"dtype":"F32","shape":[2]}}"#, "`a`: missing field `data_offsets`"),
        (r#"{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}"#, "invalid value"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}"#, "unknown field `x`"),
        (
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#,
            "tensor `a`: found 8 bytes for shape [3] of type F32, expected 12 bytes",
        ),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}"#, "tensor `a`: found bytes 0 to 9"),
        (r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, "tensor `a`: found bytes 8 to 0"),
        (
            r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615]}}"#,
            "expected a range within their 8 bytes",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296,16],"data_offsets":[0,8]}}"#,
            "expected a shape that fits the file",
        ),
        (
            r#"{"a":{"dtype":"F64","shape":[2305843009213693953],"data_offsets":[0,8]}}"#,
            "expected a shape that fits the file",
        ),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, "expected whole bytes"),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}"#,
            "tensor `b`: found bytes from offset 2, expected a start at 4, where tensor `a` ends",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}}"#,
            "tensor `b`: found bytes from offset 5",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[7],"data_offsets":[1,8]}}"#,
            "tensor `a`: found bytes from offset 1, expected a start at 0",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[7],"data_offsets":[0,7]}}"#,
            "found 8 bytes of tensors, expected the 7 that its header describes",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#,
            "`a` a second time",
        ),
        (r#"{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}"#, "duplicate field `dtype`"),
    ];
    for (header, expected) in cases {
        let error = refusal(&with_header(header, &[0; 8]));
        let shown = &header[..header.len().min(120)];
        assert!(error.contains(expected), "{shown}\n{error}\nlacks {expected}");
        assert!(error.len() < 700, "{} bytes of error for {shown}", error.len());
    }
    let mut bad = with_header(r#"{"ä":{}}"#, &[]);
    bad[11] = 0xFF;
    assert!(refusal(&bad).contains("header: found text"));
    assert!(refusal(&[1, 2, 3]).contains("a file of 3 bytes"));
    assert!(refusal(&u64::MAX.to_le_bytes()).contains("a length of 18446744073709551615 bytes"));
    assert!(refusal(&[9, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']).contains("at most 2 in a file of 10 bytes"));
}

#[test]
fn flipped_and_missing_bytes_give_an_error_or_a_sound_reading() {
    let raw = |dtype, shape: &[usize], len| Raw { dtype, shape: shape.to_vec(), bytes: vec![7; len] };
    let tensors = Tensors::from([
        ("one".to_owned(), raw("BF16", &[2, 3], 12)),
        ("two.experts".to_owned(), raw("F32", &[1, 2, 2], 16)),
        ("none".to_owned(), raw("U8", &[0, 5], 0)),
    ]);
    let sound = file_of(&tensors);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.safetensors");
    fs::write(&path, &sound).unwrap();
    assert_eq!(Safetensors::open(&path).unwrap().names().count(), 3);
    for len in 0..sound.len() {
        fs::write(&path, &sound[..len]).unwrap();
        assert!(Safetensors::open(&path).is_err(), "{len} bytes");
    }
    for at in 0..sound.len() {
        for mask in [1, 0x20, 0x80] {
            let mut bytes = sound.clone();
            bytes[at] ^= mask;
            fs::write(&path, bytes).unwrap();
            if let Ok(read) = Safetensors::open(&path) {
                for tensor in read.tensors() {
                    let values: usize = tensor.shape.iter().product();
                    assert_eq!(tensor.bytes.as_ref().len(), values * tensor.dtype.bitsize() / 8);
                }
            }
        }
    }
}

#[test]
fn an_index_must_agree_with_the_shards() {
    let raw = || Raw { dtype: "U8", shape: vec![1], bytes: vec![1] };
    let of = |names: &[&str]| names.iter().map(|name| (name.to_string(), raw())).collect::<Tensors>();
    let check = |files: &[(&str, &[&str])], map: &str, expected: &str| {
        let dir = tempfile::tempdir().unwrap();
        for (name, tensors) in files {
            fs::write(dir.path().join(name), file_of(&of(tensors))).unwrap();
        }
        let index = dir.path().join("model.safetensors.index.json");
        fs::write(&index, map).unwrap();
        let error = Safetensors::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.starts_with(&*dir.path().to_string_lossy()), "{error}");
    };
    let (a, b) = ("a.safetensors", "b.safetensors");
    let two: &[(&str, &[&str])] = &[(a, &["x"]), (b, &["y"])];
    check(
        two,
        r#"{"weight_map":{"x":"a.safetensors","y":"c.safetensors"}}"#,
        "file `c.safetensors`, which is missing",
    );
    check(
        two,
        r#"{"weight_map":{"x":"a.safetensors","z":"b.safetensors"}}"#,
        "key `weight_map.z`: found file `b.safetensors`, which lacks the tensor",
    );
    check(two, r#"{"weight_map":{"x":"b.safetensors","y":"a.safetensors"}}"#, "holds the tensor");
    check(two, r#"{"weight_map":{"x":"a.safetensors","x":"a.safetensors"}}"#, "`x` a second time");
    check(two, r#"{"weight_map":{"x":"../a.safetensors"}}"#, "names of files beside the index");
    check(two, r#"{"weight_map":{"x":"/etc/passwd"}}"#, "names of files beside the index");
    check(two, r#"{"weight_map":{"x":7}}"#, "`x`: invalid type");
    check(two, r#"{"metadata":{}}"#, "missing field `weight_map`");
    check(two, "{", "text that does not fit");
    check(
        &[(a, &["x"]), (b, &["x", "y"])],
        r#"{"weight_map":{"x":"a.safetensors","y":"b.safetensors"}}"#,
        "tensor `x`: found the name a second time",
    );
    check(
        &[(a, &["x"]), ("model.safetensors", &["x"])],
        r#"{"weight_map":{"x":"a.safetensors"}}"#,
        "it is not clear which is meant",
    );
}

#[test]
fn kinds_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let kind = |path: &Path| Kind::of(path).map_err(|error| error.to_string());
    let refused = |path: &Path, words: &[&str]| {
        let error = kind(path).unwrap_err();
        assert!(error.starts_with(&*path.to_string_lossy()) || error.starts_with("cannot read"), "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{error} lacks {words:?}");
    };
    let gguf = fixture("diffusion-random/model.gguf");
    assert_eq!(kind(&gguf), Ok(Kind::Gguf(gguf.clone())));
    let tiny = fixture(TINY);
    assert_eq!(kind(&tiny), Ok(Kind::HfDirectory(tiny.clone())));
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    refused(&dir.path().join("none"), &["cannot read", "none"]);
    refused(&file("text", "hello"), &["begins with \"hell\"", "GGUF file"]);
    refused(&file("empty", ""), &["begins with \"\""]);
    refused(dir.path(), &["config.json", "model.safetensors", "w4_meta.json", "dg-w4a16-v1"]);
    refused(&file("model.safetensors", "x"), &["give the directory that holds this file"]);
    refused(dir.path(), &["found no checkpoint"]);
    refused(&file("config.json", "{}"), &["give the directory"]);
    assert!(matches!(kind(dir.path()), Ok(Kind::HfDirectory(_))));
    file("w4_meta.json", "{}");
    assert!(matches!(kind(dir.path()), Ok(Kind::W4Directory(_))));
    file(".axed-convert.json", "{}");
    refused(dir.path(), &["not finished", "run `axed convert`"]);
    assert!(HfDirectory::open(dir.path()).unwrap_err().to_string().contains("not finished"));
    let other = tempfile::tempdir().unwrap();
    fs::copy(&gguf, other.path().join("m.gguf")).unwrap();
    refused(other.path(), &["m.gguf"]);
    refused(Path::new("/dev/null"), &["neither a regular file nor a directory"]);
}

#[test]
fn unsound_configurations_name_their_file() {
    let dir = tempfile::tempdir().unwrap();
    directory(dir.path(), &tiny());
    let fails = |name: &str, text: Option<&str>, expected: &str| {
        let path = dir.path().join(name);
        let before = fs::read(&path).unwrap();
        match text {
            Some(text) => fs::write(&path, text).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let error = HfDirectory::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        fs::write(&path, before).unwrap();
    };
    fails("config.json", None, "found no config.json");
    fails("config.json", Some("[1]"), "config.json: found text that does not fit");
    fails("generation_config.json", Some("{\"a\":"), "generation_config.json: found text that does not fit");
    fails("model.safetensors", None, "found neither model.safetensors nor model.safetensors.index.json");
    fs::remove_file(dir.path().join("generation_config.json")).unwrap();
    assert!(HfDirectory::open(dir.path()).unwrap().generation_config.is_none());
}
