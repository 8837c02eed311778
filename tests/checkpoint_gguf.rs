//! GGUF files: what sound ones say, and that unsound ones are refused by name, whatever they claim.
// The lints know test functions, not their helpers: those fail by panicking too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoint_support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use axe::checkpoint::gguf::{Gguf, Value, ValueType};
use axe::checkpoint::quant::{GgmlType, dequantize};
use checkpoint_support::*;
use proptest::prelude::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Opens a file with these bytes; the folder keeps it in place.
fn open(bytes: &Bytes) -> (tempfile::TempDir, Gguf) {
    let (dir, path) = bytes.save();
    let file = Gguf::open(&path).unwrap();
    (dir, file)
}

/// The error for a file with these bytes, without its path, which must come first.
fn refusal(bytes: &Bytes) -> String {
    let (_dir, path) = bytes.save();
    let start = Instant::now();
    let error = Gguf::open(&path).expect_err("the file must be refused").to_string();
    assert!(start.elapsed() < Duration::from_millis(500), "refusing took {:?}", start.elapsed());
    let prefix = format!("{}: ", path.display());
    error.strip_prefix(&prefix).unwrap_or_else(|| panic!("{error} does not begin with {prefix}")).to_owned()
}

/// A sound file with every kind of value and two tensors.
fn sound(version: u32) -> Bytes {
    Bytes::header(version, 2, 15)
        .key("general.architecture", STRING)
        .string("llama")
        .key("a.u8", U8)
        .raw(&[200])
        .key("a.i8", I8)
        .raw(&[0xFF])
        .key("a.u16", U16)
        .raw(&60_000u16.to_le_bytes())
        .key("a.i16", I16)
        .raw(&(-2i16).to_le_bytes())
        .key("a.u32", U32)
        .u32(7)
        .key("a.i32", I32)
        .raw(&(-3i32).to_le_bytes())
        .key("a.f32", F32)
        .raw(&1.5f32.to_le_bytes())
        .key("a.bool", BOOL)
        .raw(&[1])
        .key("a.u64", U64)
        .u64(1 << 40)
        .key("a.i64", I64)
        .raw(&(-4i64).to_le_bytes())
        .key("a.f64", F64)
        .raw(&0.1f64.to_le_bytes())
        .array("a.strings", STRING, 3)
        .string("ä")
        .string("")
        .string("token")
        .array("a.floats", F32, 2)
        .raw(&2.5f32.to_le_bytes())
        .raw(&(-1f32).to_le_bytes())
        .array("a.nested", ARRAY, 2)
        .u32(U8)
        .u64(1)
        .raw(&[1])
        .u32(STRING)
        .u64(1)
        .string("x")
        .tensor("token_embd.weight", &[32, 2], GgmlType::Q8_0.id(), 0)
        .tensor("output_norm.weight", &[3], GgmlType::F32.id(), 96)
        .data(32, &[1; 68])
        .data(32, &[2; 12])
}

/// Where the value of a key starts.
fn value_at(bytes: &Bytes, key: &str) -> usize {
    let name = bytes.0.windows(key.len()).position(|window| window == key.as_bytes()).unwrap();
    name + key.len() + 4
}

// What a sound file says.

#[test]
fn both_versions_give_every_kind_of_value() {
    for version in [2, 3] {
        let (_dir, file) = open(&sound(version));
        assert_eq!(file.version(), version);
        let meta = file.metadata();
        assert_eq!(meta.len(), 15);
        assert_eq!(meta.require_str("general.architecture").unwrap(), "llama");
        for (key, value) in [
            ("a.u8", Value::U8(200)),
            ("a.i8", Value::I8(-1)),
            ("a.u16", Value::U16(60_000)),
            ("a.i16", Value::I16(-2)),
            ("a.u32", Value::U32(7)),
            ("a.i32", Value::I32(-3)),
            ("a.f32", Value::F32(1.5)),
            ("a.bool", Value::Bool(true)),
            ("a.u64", Value::U64(1 << 40)),
            ("a.i64", Value::I64(-4)),
            ("a.f64", Value::F64(0.1)),
        ] {
            assert_eq!(meta.get(key), Some(value), "{key}");
        }
        assert_eq!(meta.get("a.none"), None);
        let strings: Vec<_> = meta.require_array_str("a.strings").unwrap().iter().collect();
        assert_eq!(strings, ["ä", "", "token"]);
        let floats = meta.require_array_f32("a.floats").unwrap();
        assert_eq!(
            (floats.len(), floats.get(0), floats.get(1), floats.get(2)),
            (2, Some(2.5), Some(-1.0), None)
        );
        let Some(Value::Array(nested)) = meta.get("a.nested") else { panic!("no nested array") };
        assert_eq!((nested.element_type(), nested.len(), nested.get(0)), (ValueType::Array, 2, None));
    }
}

#[test]
fn tensors_are_found_where_the_table_says() {
    let (_dir, file) = open(&sound(3));
    let names: Vec<_> = file.tensors().iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["token_embd.weight", "output_norm.weight"]);
    let embedding = file.require_tensor("token_embd.weight", &[32, 2]).unwrap();
    assert_eq!((embedding.values(), embedding.rows(), embedding.row_values()), (64, 2, 32));
    assert_eq!((embedding.nbytes, embedding.row_bytes(), embedding.offset % 32), (68, 34, 0));
    assert_eq!(file.bytes(embedding), [1; 68]);
    let norm = file.tensor("output_norm.weight").unwrap();
    assert_eq!(file.bytes(norm), [2; 12]);
    assert_eq!(norm.offset + norm.nbytes, file.file_len());
    assert!(file.tensor("output.weight").is_none());
}

#[test]
fn whole_numbers_are_read_at_any_width_that_holds_them() {
    let (_dir, file) = open(&sound(3));
    let meta = file.metadata();
    assert_eq!(meta.require_u32("a.u8").unwrap(), 200);
    assert_eq!(meta.require_u64("a.u32").unwrap(), 7);
    assert_eq!(meta.u32("a.none").unwrap(), None);
    let expected = format!(
        "key `a.u64`, byte {}: found the u64 1099511627776, expected a whole number from 0 to 4294967295",
        value_at(&sound(3), "a.u64")
    );
    let error = meta.u32("a.u64").unwrap_err().to_string();
    assert!(error.contains(&expected), "{error}");
    assert!(meta.u64("a.i64").unwrap_err().to_string().contains("found the i64 -4, expected a whole number"));
}

#[test]
fn a_value_of_another_type_is_an_error_that_names_both() {
    let (_dir, file) = open(&sound(3));
    let meta = file.metadata();
    for (error, text) in [
        (meta.str("a.u8").unwrap_err(), "key `a.u8`, byte 85: found the u8 200, expected a string"),
        (meta.f32("a.f64").unwrap_err(), "found the f64 0.1, expected an f32"),
        (meta.bool("general.architecture").unwrap_err(), "found the string `llama`, expected a bool"),
        (
            meta.array_str("a.floats").unwrap_err(),
            "key `a.floats`, byte 382: found an array of 2 f32, expected an array of strings",
        ),
        (meta.array_f32("a.strings").unwrap_err(), "found an array of 3 string, expected an array of f32"),
        (
            meta.array_i64("a.floats").unwrap_err(),
            "found an array of 2 f32, expected an array of whole numbers",
        ),
        (meta.array_bool("a.u8").unwrap_err(), "found the u8 200, expected an array of bool"),
        (meta.require_f32("a.none").unwrap_err(), "key `a.none` is missing"),
    ] {
        assert!(error.to_string().contains(text), "{error}\n  should contain\n{text}");
        assert!(error.to_string().contains("model.gguf: "), "{error}");
    }
}

#[test]
fn whole_numbers_in_arrays_must_fit_64_bits_with_sign() {
    let bytes = Bytes::header(3, 0, 2)
        .array("ok", U16, 2)
        .raw(&[1, 0, 255, 255])
        .array("big", U64, 2)
        .u64(1)
        .u64(u64::MAX);
    let (_dir, file) = open(&bytes);
    assert_eq!(file.metadata().require_array_i64("ok").unwrap().iter().collect::<Vec<_>>(), [1, 65_535]);
    let error = file.metadata().array_i64("big").unwrap_err().to_string();
    assert!(
        error.contains("key `big`, byte 69: found a number over 9223372036854775807 at index 1"),
        "{error}"
    );
}

#[test]
fn a_tensor_of_another_shape_or_none_is_an_error_that_names_it() {
    let (_dir, file) = open(&sound(3));
    let error = file.require_tensor("token_embd.weight", &[32, 4]).unwrap_err().to_string();
    assert!(error.contains("tensor `token_embd.weight`, byte "), "{error}");
    assert!(error.contains("found shape [32, 2], expected shape [32, 4]"), "{error}");
    let error = file.require_tensor("blk.0.attn_q.weight", &[1]).unwrap_err().to_string();
    assert!(error.contains("tensor `blk.0.attn_q.weight` is missing"), "{error}");
}

#[test]
fn the_family_fixtures_open_and_their_tensors_are_finite() {
    for family in ["llama", "llama3", "mistral", "gemma3"] {
        let file = Gguf::open(&fixture(&format!("causal-families/{family}.gguf"))).unwrap();
        assert!(file.metadata().require_str("general.architecture").is_ok());
        assert!(file.tensors().len() > 30, "{family}");
        for info in file.tensors() {
            let mut values = vec![f32::NAN; info.values() as usize];
            dequantize(info.ty, file.bytes(info), &mut values).unwrap();
            assert!(values.iter().all(|v| v.is_finite()), "{family} {}", info.name);
        }
    }
}

#[test]
fn every_quantised_fixture_opens() {
    for (name, ty) in [
        ("F16", GgmlType::F16),
        ("BF16", GgmlType::BF16),
        ("Q4_0", GgmlType::Q4_0),
        ("Q4_1", GgmlType::Q4_1),
        ("Q4_K_S", GgmlType::Q4K),
        ("Q5_0", GgmlType::Q5_0),
        ("Q5_1", GgmlType::Q5_1),
        ("Q5_K_S", GgmlType::Q5K),
        ("Q6_K", GgmlType::Q6K),
        ("Q2_K", GgmlType::Q2K),
        ("Q3_K_S", GgmlType::Q3K),
        ("IQ4_NL", GgmlType::IQ4_NL),
        ("IQ4_XS", GgmlType::IQ4_XS),
        ("TQ1_0", GgmlType::TQ1_0),
        ("MXFP4", GgmlType::MXFP4),
        ("Q8_0", GgmlType::Q8_0),
    ] {
        let file = Gguf::open(&fixture(&format!("quant-types/{name}.gguf"))).unwrap();
        assert_eq!(file.tensor("blk.0.ffn_gate.weight").unwrap().ty, ty, "{name}");
    }
}

#[test]
fn identity_is_stable_and_follows_the_content() {
    let (_dir, path) = sound(3).save();
    let first = Gguf::open(&path).unwrap().identity();
    assert_eq!(first, Gguf::open(&path).unwrap().identity());
    assert_eq!(first.to_string().len(), 32);

    let later = std::time::SystemTime::now() + Duration::from_secs(5);
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    let touched = Gguf::open(&path).unwrap().identity();
    assert_ne!(first, touched, "a later change must give another identity");

    // Another value of a key, with time, length and number kept.
    let mut changed = sound(3).0;
    let at = changed.windows(5).position(|w| w == b"llama").unwrap();
    changed[at] = b'L';
    std::fs::write(&path, &changed).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    assert_ne!(touched, Gguf::open(&path).unwrap().identity());
}

#[test]
fn a_vocabulary_of_262144_strings_is_read_fast() {
    let mut bytes = Bytes::header(3, 0, 1).array("tokens", STRING, 262_144);
    for i in 0..262_144u32 {
        bytes = bytes.string(&format!("token{i}"));
    }
    let (_dir, path) = bytes.save();
    let start = Instant::now();
    let file = Gguf::open(&path).unwrap();
    let took = start.elapsed();
    let tokens = file.metadata().require_array_str("tokens").unwrap();
    assert_eq!((tokens.len(), tokens.get(262_143)), (262_144, Some("token262143")));
    // Unoptimised and on a busy machine; optimised it takes a few milliseconds.
    assert!(took < Duration::from_secs(1), "{took:?}");
}

// What is not a model file at all.

#[test]
fn a_missing_file_is_named() {
    let error = Gguf::open(Path::new("/nonexistent/model.gguf")).unwrap_err().to_string();
    assert!(error.starts_with("cannot open /nonexistent/model.gguf: No such file"), "{error}");
}

#[test]
fn a_folder_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Gguf::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("is not a regular file"), "{error}");
}

#[test]
fn an_empty_file_is_refused() {
    assert_eq!(
        refusal(&Bytes::default()),
        "header, byte 0: found 0 bytes to the end of the file, expected 4 bytes of the magic `GGUF`; \
         the file is incomplete or damaged: download or convert it again"
    );
}

#[test]
fn another_format_is_refused() {
    assert_eq!(
        refusal(&Bytes(b"PK\x03\x04 and so on".to_vec())),
        "header, byte 0: found the bytes [50, 4b, 03, 04] (\"PK\\x03\\x04\"), expected the magic \"GGUF\"; \
         give a model file in GGUF format"
    );
}

#[test]
fn version_1_and_later_ones_are_refused() {
    for version in [0, 1, 4, u32::MAX] {
        let text = refusal(&Bytes::header(version, 0, 0));
        let expected =
            format!("header, byte 4: found GGUF version {version}, expected version 2 or 3; convert");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn a_big_endian_file_is_refused_by_name() {
    let text = refusal(&Bytes(b"GGUF\0\0\0\x03".to_vec()).raw(&[0; 16]));
    assert!(text.starts_with("header, byte 4: found a big-endian GGUF file, version 3, expected"), "{text}");
    assert!(
        refusal(&Bytes(b"FUGG\x03\0\0\0".to_vec())).starts_with("header, byte 0: found a big-endian GGUF")
    );
}

// Hostile sizes.

#[test]
fn a_tensor_count_beyond_the_file_is_refused() {
    for count in [1, 1 << 32, u64::MAX] {
        let text = refusal(&Bytes::header(3, count, 0));
        let expected =
            format!("header, byte 8: found a count of {count} tensors, expected at most 0, as many");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn a_key_count_beyond_the_file_is_refused() {
    for count in [8, 1 << 40, u64::MAX] {
        let text = refusal(&Bytes::header(3, 0, count).raw(&[0; 100]));
        let expected =
            format!("header, byte 16: found a count of {count} keys, expected at most 7, as many as");
        assert!(text.starts_with(&expected), "{text}");
    }
}

#[test]
fn a_key_length_beyond_the_file_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).u64(u64::MAX).raw(&[b'a'; 40]));
    let expected = "name of key 0, byte 32: found 40 bytes to the end of the file, \
                    expected 18446744073709551615 bytes of a key";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn a_key_over_the_formats_limit_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).key(&"k".repeat(65_536), U32).u32(1));
    assert!(
        text.starts_with("name of key 0, byte 24: found a key of 65536 bytes, expected 1 to 65535"),
        "{text}"
    );
}

#[test]
fn an_empty_key_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).key("", U32).u32(1));
    assert!(text.starts_with("name of key 0, byte 24: found a key of 0 bytes, expected 1 to"), "{text}");
}

#[test]
fn names_with_control_characters_are_refused_and_shown_without_them() {
    let key = refusal(&Bytes::header(3, 0, 1).key("a\x1b[2Jb\n", U32).u32(1));
    assert!(key.starts_with("name of key 0, byte 24: found `a\\u{1b}[2Jb\\n`, expected no control"), "{key}");
    let tensor = refusal(&with_tensors(&[("w\x07", &[4], 0, 0)], 256));
    assert!(
        tensor.starts_with("name of tensor 0, byte 24: found `w\\u{7}`, expected no control"),
        "{tensor}"
    );
}

#[test]
fn a_string_length_beyond_the_file_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).key("general.name", STRING).u64(1 << 34).raw(b"abc"));
    let expected = "key `general.name`, byte 56: found 3 bytes to the end of the file, \
                    expected 17179869184 bytes of a string value";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn an_array_length_beyond_the_file_is_refused() {
    for (element, least) in [(U8, 1), (F64, 8), (STRING, 8), (ARRAY, 12), (BOOL, 1)] {
        for len in [241 / least + 1, 1 << 62, u64::MAX] {
            let text = refusal(&Bytes::header(3, 0, 1).array("tokens", element, len).raw(&[0; 240]));
            let expected = format!("at most {}, as many as the rest of the file could hold", 240 / least);
            assert!(text.starts_with(&format!("key `tokens`, byte 46: found a count of {len} ")), "{text}");
            assert!(text.contains(&expected), "{text}");
        }
    }
}

#[test]
fn a_string_in_an_array_beyond_the_file_is_refused() {
    let text =
        refusal(&Bytes::header(3, 0, 1).array("tokens", STRING, 2).string("ok").u64(u64::MAX).raw(&[0; 8]));
    assert!(text.starts_with("key `tokens`, byte 72: found 8 bytes to the end of the file"), "{text}");
}

#[test]
fn deep_nesting_is_refused() {
    let mut bytes = Bytes::header(3, 0, 1).array("deep", ARRAY, 1);
    for _ in 0..10_000 {
        bytes = bytes.u32(ARRAY).u64(1);
    }
    let text = refusal(&bytes.u32(U8).u64(1).raw(&[0]));
    assert!(text.starts_with("key `deep`, byte "), "{text}");
    assert!(text.contains("found arrays nested deeper than that, expected at most 4 levels"), "{text}");
}

#[test]
fn a_hostile_key_is_shown_short_and_on_one_line() {
    let text = refusal(&Bytes::header(3, 0, 1).key(&"evil\n".repeat(9_000), 99));
    assert!(text.len() < 600 && !text.contains('\n'), "{text}");
}

// Wrong types and values.

#[test]
fn an_unknown_value_type_is_named_with_the_known_ones() {
    let text = refusal(&Bytes::header(3, 0, 1).key("a", 13).u64(0));
    let expected = "key `a`, byte 33: found value type 13, expected one of 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, \
                    6 f32, 7 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64; ";
    assert!(text.starts_with(expected), "{text}");
    let text = refusal(&Bytes::header(3, 0, 1).array("a", 77, 0));
    assert!(text.starts_with("key `a`, byte 37: found value type 77"), "{text}");
}

#[test]
fn a_bool_of_another_byte_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).key("flag", BOOL).raw(&[2]));
    assert!(text.starts_with("key `flag`, byte 40: found the byte 2, expected 0 or 1 for a bool"), "{text}");
    let text = refusal(&Bytes::header(3, 0, 1).array("flag", BOOL, 3).raw(&[0, 1, 255]));
    assert!(
        text.starts_with("key `flag`, byte 54: found the byte 255, expected 0 or 1 for a bool"),
        "{text}"
    );
}

#[test]
fn text_that_is_not_utf8_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 1).array("tokens", STRING, 1).u64(3).raw(b"ab\xFF"));
    let expected = "key `tokens`, byte 64: found bytes that are not UTF-8 after `ab`, expected UTF-8 in a string element";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn a_key_given_twice_is_refused() {
    let text = refusal(&Bytes::header(3, 0, 2).key("a", U8).raw(&[1]).key("a", U8).raw(&[1]));
    assert!(
        text.starts_with("key `a`, byte 38: found the key a second time, expected each key once"),
        "{text}"
    );
}

#[test]
fn an_alignment_that_is_none_is_refused() {
    for alignment in [0, 1, 4, 24, u32::MAX] {
        let text = refusal(&Bytes::header(3, 0, 1).key("general.alignment", U32).u32(alignment));
        let expected = format!(
            "key `general.alignment`, byte 53: found {alignment}, expected a power of two, 8 or more; convert"
        );
        assert!(text.starts_with(&expected), "{text}");
    }
    let text = refusal(&Bytes::header(3, 0, 1).key("general.alignment", STRING).string("32"));
    assert!(
        text.starts_with("key `general.alignment`, byte 53: found the string `32`, expected a whole"),
        "{text}"
    );
}

// Tensors.

/// A file of these tensors, each with name, shape, type and offset, and `data` bytes behind them.
fn with_tensors(tensors: &[(&str, &[u64], u32, u64)], data: usize) -> Bytes {
    let mut bytes = Bytes::header(3, tensors.len() as u64, 0);
    for (name, shape, ty, offset) in tensors {
        bytes = bytes.tensor(name, shape, *ty, *offset);
    }
    bytes.data(32, &vec![0; data])
}

#[test]
fn an_unknown_tensor_type_is_named_with_the_supported_ones() {
    for (id, shown) in [(21, "IQ3_S (id 21)"), (16, "IQ2_XXS (id 16)"), (4_000_000_000, "id 4000000000")] {
        let text = refusal(&with_tensors(&[("w", &[256], id, 0)], 4096));
        let expected = format!(
            "tensor `w`, byte 45: found type {shown}, which is not supported, expected one of F32, F16, BF16, Q4_0, \
             Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4; use a file with a \
             quantisation from this list"
        );
        assert_eq!(text, expected);
    }
}

#[test]
fn a_number_of_dimensions_outside_one_to_four_is_refused() {
    for shape in [&[][..], &[1; 5]] {
        let text = refusal(&with_tensors(&[("w", shape, 0, 0)], 64));
        let expected = format!("tensor `w`, byte 33: found {} dimensions, expected 1 to 4", shape.len());
        assert!(text.starts_with(&expected), "{text}");
    }
    let text = refusal(&Bytes::header(3, 1, 0).string("w").u32(u32::MAX).raw(&[0; 64]));
    assert!(text.starts_with("tensor `w`, byte 33: found 4294967295 dimensions, expected 1 to 4"), "{text}");
}

#[test]
fn a_dimension_of_zero_is_refused() {
    let text = refusal(&with_tensors(&[("w", &[32, 0], 0, 0)], 64));
    assert!(
        text.starts_with("tensor `w`, byte 37: found shape [32, 0], expected no dimension of zero"),
        "{text}"
    );
}

#[test]
fn dimensions_that_overflow_are_refused() {
    for shape in [[1 << 32, 1 << 32, 1], [1 << 62, 2, 1], [1 << 62, 1, 1], [1 << 40, 1 << 12, 1 << 12]] {
        let text = refusal(&with_tensors(&[("w", &shape, 0, 0)], 64));
        assert!(
            text.starts_with(&format!("tensor `w`, byte 37: found shape {shape:?} of type F32, which")),
            "{text}"
        );
    }
}

#[test]
fn rows_of_part_blocks_are_refused() {
    let text = refusal(&with_tensors(&[("w", &[48, 2], GgmlType::Q4_0.id(), 0)], 64));
    let expected = "tensor `w`, byte 37: found rows of 48 values of type Q4_0, expected a multiple of 32";
    assert!(text.starts_with(expected), "{text}");
    // The whole is a multiple of 256, the rows are not.
    let text = refusal(&with_tensors(&[("w", &[128, 2], GgmlType::Q6K.id(), 0)], 4096));
    assert!(text.contains("rows of 128 values of type Q6_K, expected a multiple of 256"), "{text}");
}

#[test]
fn a_tensor_past_the_end_is_refused() {
    let text = refusal(&with_tensors(&[("w", &[17], 0, 0)], 64));
    assert_eq!(
        text,
        "tensor `w`, byte 49: found 68 bytes at offset 0 of the tensor data, which starts at byte 64, \
         expected an end within the file's 128 bytes; \
         the file is incomplete or damaged: download or convert it again"
    );
    for offset in [64, 1 << 40, u64::MAX - 31] {
        let text = refusal(&with_tensors(&[("w", &[16], 0, offset)], 64));
        assert!(text.contains(&format!("found 64 bytes at offset {offset} of the tensor data")), "{text}");
    }
}

#[test]
fn every_type_takes_its_blocks_and_no_byte_less() {
    for ty in GgmlType::ALL {
        let (values, bytes) = (3 * ty.block_values() as u64, 3 * ty.block_bytes());
        let (_dir, path) = with_tensors(&[("w", &[values], ty.id(), 0)], bytes).save();
        assert_eq!(Gguf::open(&path).unwrap().tensor("w").unwrap().ty, ty);
        let text = refusal(&with_tensors(&[("w", &[values], ty.id(), 0)], bytes - 1));
        assert!(
            text.contains(&format!("found {bytes} bytes at offset 0 of the tensor data")),
            "{ty}: {text}"
        );
        // A few bytes that claim to be the weights of a thousand models.
        let text = refusal(&with_tensors(&[("w", &[values, 1 << 40], ty.id(), 0)], bytes));
        assert!(text.contains("expected an end within the file"), "{ty}: {text}");
        if ty.is_quantised() {
            let half = ty.block_values() as u64 / 2;
            let text = refusal(&with_tensors(&[("w", &[half, 2], ty.id(), 0)], bytes));
            let expected = format!("rows of {half} values of type {ty}, expected a multiple of {}", 2 * half);
            assert!(text.contains(&expected), "{text}");
        }
    }
}

#[test]
fn an_alignment_past_the_end_is_refused() {
    let bytes =
        Bytes::header(3, 1, 1).key("general.alignment", U32).u32(1 << 31).tensor("w", &[1], 0, 0).u32(0);
    let text = refusal(&bytes);
    assert!(text.contains("offset 0 of the tensor data, which starts at byte 2147483648"), "{text}");
}

#[test]
fn an_offset_off_the_alignment_is_refused() {
    let text = refusal(&with_tensors(&[("w", &[4], 0, 16)], 64));
    let expected = "tensor `w`, byte 49: found offset 16, expected a multiple of the file's alignment, 32";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn overlapping_tensors_are_refused() {
    for (second, found) in [(0, 96), (32, 128)] {
        let text = refusal(&with_tensors(&[("a", &[16], 0, 0), ("b", &[4], 0, second)], 256));
        let expected = format!(
            "tensor `b`, byte 57: found bytes from {found}, inside tensor `a`, expected a start at 160 or later"
        );
        assert!(text.starts_with(&expected), "{text}");
    }
    // The table need not be in the order of the data.
    let text = refusal(&with_tensors(&[("late", &[4], 0, 32), ("early", &[16], 0, 0)], 256));
    assert!(text.contains("tensor `late`, byte 24: found bytes from 160, inside tensor `early`"), "{text}");
}

#[test]
fn a_tensor_name_given_twice_is_refused() {
    let text = refusal(&with_tensors(&[("a", &[4], 0, 0), ("a", &[4], 0, 32)], 256));
    assert!(
        text.starts_with("tensor `a`, byte 57: found the name a second time, expected each tensor"),
        "{text}"
    );
}

#[test]
fn tensor_names_outside_the_formats_limit_are_refused() {
    for len in [0, 65] {
        let text = refusal(&with_tensors(&[(&"n".repeat(len), &[4], 0, 0)], 256));
        let expected =
            format!("name of tensor 0, byte 24: found a name of {len} bytes, expected 1 to 64 bytes");
        assert!(text.starts_with(&expected), "{text}");
    }
}

// Damage of every kind: an error or a sound reading, never a panic.

/// Reads all that a file offers, so that whatever opening let pass is used once.
fn read_everything(file: &Gguf) {
    let meta = file.metadata();
    for key in meta.keys() {
        if let Some(Value::Array(array)) = meta.get(key) {
            for index in 0..array.len() {
                assert_eq!(array.get(index).is_none(), array.element_type() == ValueType::Array);
            }
        }
    }
    for info in file.tensors() {
        assert_eq!(file.bytes(info).len() as u64, info.nbytes);
        let mut values = vec![0.0; info.values() as usize];
        dequantize(info.ty, file.bytes(info), &mut values).unwrap();
    }
    assert_eq!(file.identity(), file.identity());
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    for name in ["causal-families/llama.gguf", "quant-types/Q4_K_S.gguf"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        let (_dir, path) = Bytes(whole.clone()).save();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // The last tensor ends with the file or in its padding, so that one byte less than that is too little.
        let end = Gguf::open(&path).unwrap().tensors().iter().map(|t| t.range().end).max().unwrap();
        for len in (0..end).step_by(997).chain([end - 1]).collect::<Vec<_>>().into_iter().rev() {
            file.set_len(len as u64).unwrap();
            let error = Gguf::open(&path).expect_err("a tensor is cut off").to_string();
            assert!(error.contains("incomplete or damaged"), "at {len} bytes: {error}");
        }
    }
}

#[test]
fn every_prefix_of_a_small_file_is_refused() {
    let whole = sound(3).0;
    for len in 0..whole.len() {
        let error = refusal(&Bytes(whole[..len].to_vec()));
        assert!(error.contains("incomplete or damaged"), "at {len} bytes: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn flipped_bytes_give_an_error_or_a_sound_reading(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = sound(3);
        for (index, byte) in flips {
            let index = index.index(bytes.0.len());
            bytes.0[index] = byte;
        }
        let (_dir, path) = bytes.save();
        match Gguf::open(&path) {
            Ok(file) => read_everything(&file),
            Err(error) => prop_assert!(error.to_string().contains("model.gguf: "), "{}", error),
        }
    }

    #[test]
    fn arbitrary_bytes_behind_a_header_give_an_error_or_a_sound_reading(
        tensors in 0u64..3,
        keys in 0u64..3,
        tail in prop::collection::vec(prop::sample::select(vec![0u8, 1, 2, 4, 8, 9, 32, 255]), 0..200),
    ) {
        let (_dir, path) = Bytes::header(3, tensors, keys).raw(&tail).save();
        if let Ok(file) = Gguf::open(&path) {
            read_everything(&file);
        }
    }
}

#[test]
fn tensors_of_three_dimensions_give_the_rows_of_each_expert() {
    let gguf = Gguf::open(&fixture("diffusion-random/model.gguf")).unwrap();
    let info = gguf.tensor("blk.1.ffn_gate_up_exps.weight").unwrap();
    let [columns, each, experts] = info.shape[..] else { panic!("{:?}", info.shape) };
    let rows = gguf.rows(info);
    assert_eq!((rows.rows as u64, rows.columns as u64), (each * experts, columns));
    assert_eq!(rows.bytes.as_ref(), gguf.bytes(info));
    let bytes = info.row_bytes() * each;
    let third = rows.part(2 * each as usize, each as usize).unwrap();
    assert_eq!(third.bytes.as_ref(), &gguf.bytes(info)[2 * bytes as usize..3 * bytes as usize]);
    assert!(rows.part((experts * each) as usize, 1).is_none());

    let mut outside = info.clone();
    outside.offset = gguf.file_len();
    assert_eq!((gguf.rows(&outside).rows, gguf.rows(&outside).bytes.as_ref()), (0, &[][..]));
}
