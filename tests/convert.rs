//! `axed convert`: what it writes, what a cut-off run leaves, what it refuses, and how much memory it takes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod safetensors_support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use axe::checkpoint::directory::HfDirectory;
use axe::checkpoint::kind::{Kind, KindError};
use axe::checkpoint::w4::convert::{ConvertError, ConvertEvent, ConvertOptions, Converted, convert};
use axe::checkpoint::w4::dequantise_row;
use half::bf16;
use safetensors_support::*;
use serde_json::{Value, json};
use tempfile::TempDir;

const RECORD: &str = ".axed-convert.json";
const GATE_UP: &str = "model.decoder.layers.2.experts.gate_up_proj";
const DOWN: &str = "model.decoder.layers.2.experts.down_proj";

/// A place with the miniature in it, whose tensors a test may change.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self::with(&tiny())
    }

    fn with(tensors: &Tensors) -> Self {
        let folder = tempfile::tempdir().unwrap();
        directory(&folder.path().join("source"), tensors);
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn convert_with(&self, target: &str, options: &ConvertOptions) -> Result<Converted, ConvertError> {
        convert(&self.path("source"), &self.path(target), options, &mut |_| {})
    }

    fn convert(&self, target: &str) -> Result<Converted, ConvertError> {
        self.convert_with(target, &ConvertOptions::default())
    }

    /// The error of a conversion that must fail, and leave no checkpoint.
    fn refused(&self, target: &str) -> String {
        let error = self.convert(target).expect_err("the conversion must fail").to_string();
        assert!(!self.path(target).join("w4_meta.json").exists());
        error
    }

    fn axed(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_axed"))
            .arg("convert")
            .args(arguments)
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }
}

/// Every file of a directory.
fn bytes_of(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        files.insert(entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
    }
    files
}

fn assert_same(one: &Path, other: &Path) {
    let (one, other) = (bytes_of(one), bytes_of(other));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (name, bytes) in &one {
        assert!(*bytes == other[name], "{name} differs");
    }
}

#[test]
fn experts_dequantise_to_what_the_reference_says() {
    let place = Place::new();
    let converted = place.convert("w4").unwrap();
    assert_eq!((converted.made, converted.kept), (5, 0));
    let source = tiny();
    let dir = HfDirectory::open(&place.path("w4")).unwrap();
    let layers = dir.experts.as_ref().unwrap().layers();
    let mut row = vec![0.0; 128];
    let mut down_row = vec![0.0; 64];
    for (index, layer) in layers.iter().enumerate() {
        layer.check_values().unwrap();
        let of = |name: &str| numbers(&source[&format!("model.decoder.layers.{index}.experts.{name}")]);
        let (gate_up, down) = (of("gate_up_proj"), of("down_proj"));
        for expert in 0..8 {
            for at in 0..128 {
                let (rows, part) = match at {
                    0..64 => (layer.gate(expert).unwrap(), at),
                    _ => (layer.up(expert).unwrap(), at - 64),
                };
                dequantise_row(&rows, part, &mut row).unwrap();
                let weights = &gate_up[(expert * 128 + at) * 128..][..128];
                assert_eq!(row, reference_row(weights, 128), "gate and up, {index} {expert} {at}");
                dequantise_row(&layer.down(expert).unwrap(), at, &mut down_row).unwrap();
                let weights = &down[(expert * 128 + at) * 64..][..64];
                assert_eq!(down_row, reference_row(weights, 64), "down, {index} {expert} {at}");
            }
        }
    }
}

#[test]
fn everything_else_is_carried_over_unchanged() {
    let place = Place::new();
    place.convert("w4").unwrap();
    let mut expected = tiny();
    expected.retain(|name, _| !name.contains(".experts."));
    assert_eq!(tensors_of(&place.path("w4/model.safetensors")), expected);
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        assert_eq!(
            fs::read(place.path("w4").join(name)).unwrap(),
            fs::read(place.path("source").join(name)).unwrap(),
            "{name}"
        );
    }
    let names: Vec<String> = bytes_of(&place.path("w4")).into_keys().collect();
    assert_eq!(
        names,
        [
            "chat_template.jinja",
            "config.json",
            "experts_000.safetensors",
            "experts_001.safetensors",
            "experts_002.safetensors",
            "experts_003.safetensors",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "w4_meta.json"
        ]
    );
    let meta: Value = serde_json::from_slice(&fs::read(place.path("w4/w4_meta.json")).unwrap()).unwrap();
    assert_eq!(
        meta,
        json!({
            "format": "dg-w4a16-v1", "made_by": concat!("axed ", env!("CARGO_PKG_VERSION")), "source": "source",
            "gate_up_group": 128, "down_group": 64, "layers": 4, "experts": 8
        })
    );
    assert!(matches!(Kind::of(&place.path("w4")), Ok(Kind::W4Directory(_))));
}

#[test]
fn shards_of_the_source_make_no_difference() {
    let place = Place::new();
    place.convert("w4").unwrap();
    let parts = Place::new();
    fs::remove_dir_all(parts.path("source")).unwrap();
    let mut shards = vec![Tensors::new(); 3];
    for (index, (name, raw)) in tiny().into_iter().enumerate() {
        shards[index % 3].insert(name, raw);
    }
    let names: Vec<String> = (1..=3).map(|n| format!("model-0000{n}-of-00003.safetensors")).collect();
    let files: Vec<(&str, &Tensors)> = names.iter().map(String::as_str).zip(&shards).collect();
    sharded(&parts.path("source"), &files);
    parts.convert("w4").unwrap();
    assert_same(&place.path("w4"), &parts.path("w4"));
}

#[test]
fn sources_in_f32_give_the_same_and_say_that_they_are_rounded() {
    let place = Place::new();
    place.convert("w4").unwrap();
    let mut tensors: Tensors = tiny().iter().map(|(name, raw)| (name.clone(), in_f32(raw))).collect();
    let wide = Place::with(&tensors);
    wide.convert("w4").unwrap();
    assert_same(&place.path("w4"), &wide.path("w4"));

    // Halfway between two bf16: to the even one.
    let norm = tensors.get_mut("model.decoder.norm.weight").unwrap();
    for (at, bits) in [0x3F80_8000u32, 0x3F81_8000, 0x3F80_8001, 0x3F80_7FFF].into_iter().enumerate() {
        norm.bytes[at * 4..][..4].copy_from_slice(&bits.to_le_bytes());
    }
    let wide = Place::with(&tensors);
    let run = wide.axed(&["source", "w4"]);
    assert!(run.status.success());
    let told = String::from_utf8(run.stderr).unwrap();
    assert!(told.contains("are f32 or f16 in the source: rounding them to bf16"), "{told}");
    let norm = &tensors_of(&wide.path("w4/model.safetensors"))["model.decoder.norm.weight"];
    assert_eq!(norm.bytes[..8], [0x80, 0x3F, 0x82, 0x3F, 0x81, 0x3F, 0x80, 0x3F]);

    let norm = tensors.get_mut("model.decoder.norm.weight").unwrap();
    norm.bytes[28..32].copy_from_slice(&f32::MAX.to_le_bytes());
    let error = Place::with(&tensors).refused("w4");
    assert!(error.contains("model.decoder.norm.weight") && error.contains("index [7]"), "{error}");
}

#[test]
fn many_tensors_go_to_several_files_with_an_index() {
    let place = Place::new();
    let options = ConvertOptions { shard_bytes: 500_000, ..Default::default() };
    let converted = place.convert_with("w4", &options).unwrap();
    let dir = HfDirectory::open(&place.path("w4")).unwrap();
    let files: Vec<String> =
        bytes_of(&place.path("w4")).into_keys().filter(|name| name.starts_with("model-")).collect();
    assert_eq!(files.len() + 4, converted.made);
    assert!(
        files.len() >= 3 && files[0].ends_with(&format!("-of-{:05}.safetensors", files.len())),
        "{files:?}"
    );
    let mut expected = tiny();
    expected.retain(|name, _| !name.contains(".experts."));
    assert!(dir.safetensors.names().eq(expected.keys()));
    for tensor in dir.safetensors.tensors() {
        assert_eq!(tensor.bytes.as_ref(), expected[&tensor.name].bytes);
    }
    // Only a tensor that is longer by itself makes a longer file.
    for file in &files {
        let tensors = tensors_of(&place.path("w4").join(file));
        let bytes: usize = tensors.values().map(|raw| raw.bytes.len()).sum();
        assert!(bytes <= 500_000 || tensors.len() == 1, "{file}: {bytes}");
    }
}

#[test]
fn the_vision_tower_stays_unless_it_is_not_wanted() {
    let place = Place::new();
    let vision =
        |name: &str| tensors_of(&place.path(name)).keys().filter(|name| name.contains("vision")).count();
    place.convert("w4").unwrap();
    assert!(vision("w4/model.safetensors") > 10);
    place.convert_with("text", &ConvertOptions { text_only: true, ..Default::default() }).unwrap();
    assert_eq!(vision("text/model.safetensors"), 0);
    let kept = tensors_of(&place.path("text/model.safetensors"));
    assert!(kept.contains_key("model.encoder.language_model.layers.3.layer_scalar"));
}

/// Stops a conversion as a kill would, right after the `k`-th file is in place or in the middle of the next one.
fn cut_off(place: &Place, target: &str, k: usize, inside: bool) {
    let mut files = 0;
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
        convert(&place.path("source"), &place.path(target), &ConvertOptions::default(), &mut |event| {
            match event {
                ConvertEvent::File { .. } => files += 1,
                ConvertEvent::Progress { .. } if inside => {}
                _ => return,
            }
            assert!(files < k, "cut off");
        })
    }));
    assert!(outcome.is_err());
}

#[test]
fn a_conversion_that_was_cut_off_goes_on() {
    let place = Place::new();
    place.convert("whole").unwrap();
    for k in 1..=5 {
        for inside in [false, true] {
            let target = format!("cut-{k}-{inside}");
            cut_off(&place, &target, k, inside);
            let path = place.path(&target);
            assert!(matches!(Kind::of(&path), Err(KindError::Unfinished { .. })));
            assert!(HfDirectory::open(&path).is_err());
            let files: Vec<String> = bytes_of(&path).into_keys().collect();
            let finished = files.iter().filter(|name| name.ends_with(".safetensors")).count();
            // A file that has its name may not be in the record yet only if the end came between the two.
            assert_eq!(finished, k, "{files:?}");
            let again = place.convert(&target).unwrap();
            assert_eq!((again.kept, again.made), (k, 5 - k), "{target}");
            assert_same(&place.path("whole"), &path);
        }
    }
}

#[test]
fn only_files_that_are_as_they_were_finished_are_kept() {
    let place = Place::new();
    place.convert("whole").unwrap();
    type Damage = fn(&Path);
    let damage: [(&str, Damage); 4] = [
        ("flipped", |path| {
            let mut bytes = fs::read(path).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(path, bytes).unwrap();
        }),
        ("shortened", |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
        }),
        ("removed", |path| fs::remove_file(path).unwrap()),
        ("unrecorded", |path| {
            let record = path.with_file_name(RECORD);
            let mut text: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
            text["finished"].as_object_mut().unwrap().remove("experts_001.safetensors");
            fs::write(record, text.to_string()).unwrap();
        }),
    ];
    for (name, damage) in damage {
        cut_off(&place, name, 3, false);
        damage(&place.path(name).join("experts_001.safetensors"));
        // What was being written when the end came.
        fs::write(place.path(name).join(".model.safetensors.partial"), "half").unwrap();
        let again = place.convert(name).unwrap();
        assert_eq!((again.kept, again.made), (2, 3), "{name}");
        assert_same(&place.path("whole"), &place.path(name));
    }
    // The end came between the last file and the record's removal.
    cut_off(&place, "last", 5, false);
    let record = fs::read(place.path("last").join(RECORD)).unwrap();
    place.convert("last").unwrap();
    fs::write(place.path("last").join(RECORD), record).unwrap();
    assert!(matches!(Kind::of(&place.path("last")), Err(KindError::Unfinished { .. })));
    assert_eq!(place.convert("last").unwrap().kept, 5);
    assert_same(&place.path("whole"), &place.path("last"));
}

#[test]
fn another_source_or_other_options_are_refused_unless_forced() {
    let place = Place::new();
    cut_off(&place, "w4", 2, false);
    let kept = fs::read_dir(place.path("w4")).unwrap().count();
    let run =
        |options: &ConvertOptions| convert(&place.path("source"), &place.path("w4"), options, &mut |_| {});
    let text_only = ConvertOptions { text_only: true, ..Default::default() };
    assert!(matches!(run(&text_only), Err(ConvertError::OtherWork { .. })));
    let mut tensors = tiny();
    tensors.get_mut(DOWN).unwrap().bytes[0] ^= 1;
    directory(&place.path("source"), &tensors);
    assert!(matches!(run(&ConvertOptions::default()), Err(ConvertError::OtherWork { .. })));
    assert_eq!(fs::read_dir(place.path("w4")).unwrap().count(), kept, "nothing is lost");
    let forced = ConvertOptions { force: true, ..Default::default() };
    assert_eq!(run(&forced).unwrap().kept, 0);
}

#[test]
fn what_a_kill_left_of_the_record_does_not_stop_the_next_run() {
    let place = Place::new();
    cut_off(&place, "w4", 2, false);
    fs::copy(place.path("w4").join(RECORD), place.path("w4").join(format!(".{RECORD}.partial"))).unwrap();
    assert_eq!(place.convert("w4").unwrap().kept, 2);
}

#[test]
fn what_others_made_is_not_touched() {
    let place = Place::new();
    let refused = |target: &str, force: bool, words: &[&str]| {
        let before = bytes_of(&place.path(target));
        let options = ConvertOptions { force, ..Default::default() };
        let error = place.convert_with(target, &options).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!(before, bytes_of(&place.path(target)));
    };
    for force in [false, true] {
        refused("source", force, &["are the same directory"]);
        fs::create_dir_all(place.path("full")).unwrap();
        fs::write(place.path("full/notes.txt"), "mine").unwrap();
        fs::write(place.path("full/more.txt"), "mine").unwrap();
        refused("full", force, &["not empty", "`more.txt` and 1 more"]);
        // Names that a conversion would write, but nothing that says that one did.
        fs::create_dir_all(place.path("model")).unwrap();
        fs::write(place.path("model/model.safetensors"), "mine").unwrap();
        refused("model", force, &["not empty", "`model.safetensors`"]);
    }
    std::os::unix::fs::symlink(place.path("source"), place.path("link")).unwrap();
    assert!(place.convert("link").unwrap_err().to_string().contains("are the same directory"));
    place.convert("w4").unwrap();
    refused("w4", false, &["finished checkpoint", "--force"]);
    fs::write(place.path("w4/notes.txt"), "mine").unwrap();
    refused("w4", true, &["`notes.txt`"]);
    fs::remove_file(place.path("w4/notes.txt")).unwrap();
    let force = ConvertOptions { force: true, ..Default::default() };
    assert_eq!(place.convert_with("w4", &force).unwrap().made, 5);
    fs::write(place.path("file"), "x").unwrap();
    assert!(place.convert("file").is_err());
    assert_eq!(fs::read(place.path("file")).unwrap(), b"x");

    cut_off(&place, "busy", 1, false);
    let held = File::open(place.path("busy")).unwrap();
    let held = nix::fcntl::Flock::lock(held, nix::fcntl::FlockArg::LockExclusiveNonblock).unwrap();
    refused("busy", false, &["another `axed convert`"]);
    drop(held);
    assert_eq!(place.convert("busy").unwrap().kept, 1);
}

#[test]
fn sources_that_the_format_cannot_hold_are_refused() {
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = tiny();
        change(&mut tensors);
        Place::with(&tensors).refused("w4")
    };
    let configured = |key: &str, value: Value| {
        let place = Place::new();
        configure(&place.path("source"), key, value);
        place.refused("w4")
    };
    let cases = [
        (changed(&|t| drop(t.remove(DOWN))), "layers.2.experts.down_proj` is missing"),
        (
            changed(&|t| {
                let raw = t.remove(DOWN).unwrap();
                t.insert("model.decoder.layers.4.experts.down_proj".to_owned(), raw);
            }),
            "found 4, expected more than 4",
        ),
        (
            changed(&|t| {
                let raw = t.remove(DOWN).unwrap();
                t.insert("model.decoder.layers.2.experts.down_proj.weight".to_owned(), raw);
            }),
            "an expert's tensor of another name",
        ),
        (changed(&|t| t.get_mut(DOWN).unwrap().shape = vec![8, 64, 128]), "expected shape [8, 128, 64]"),
        (changed(&|t| t.get_mut(DOWN).unwrap().dtype = "I16"), "type I16"),
        (changed(&|t| t.get_mut("model.decoder.norm.weight").unwrap().dtype = "U16"), "type U16"),
        (configured("num_hidden_layers", json!(3)), "found 3, expected more than 3"),
        (configured("num_hidden_layers", json!(5)), "layers.4.experts.gate_up_proj` is missing"),
        (configured("num_experts", json!(4)), "expected shape [4, 128, 128]"),
        (configured("num_experts", json!("8")), "key `text_config.num_experts`: found \"8\""),
        (configured("num_experts", Value::Null), "key `text_config.num_experts`: found null"),
        (configured("hidden_size", json!(0)), "found 0, expected a whole number from 1 to 1048576"),
        // What is not said is the format's default, as for the loader.
        (configured("hidden_size", Value::Null), "expected shape [8, 128, 2304]"),
        (configured("hidden_size", json!(96)), "found 96, expected a multiple of 128"),
        (configured("moe_intermediate_size", json!(96)), "found 96, expected a multiple of 64"),
        (configured("num_hidden_layers", json!(u64::MAX)), "a whole number from 1 to 4096"),
        (configured("num_hidden_layers", json!(1_000_000_000_000_000u64)), "a whole number from 1 to 4096"),
        (configured("num_hidden_layers", json!(4097)), "found 4097, expected a whole number from 1 to 4096"),
        (configured("num_experts", json!(u64::MAX)), "a whole number from 1 to 4096"),
        (configured("moe_intermediate_size", json!(u64::MAX)), "a whole number from 1 to 4194304"),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{error}\nlacks {expected}");
    }
    let place = Place::new();
    let config = place.path("source/config.json");
    fs::write(&config, r#"{"model_type":"gemma3"}"#).unwrap();
    assert!(place.refused("w4").contains("a model of type \"gemma3\""));
    fs::write(&config, "{}").unwrap();
    assert!(place.refused("w4").contains("no `model_type`"));
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    let with = |at: usize, bits: u16| {
        let mut tensors = tiny();
        tensors.get_mut(GATE_UP).unwrap().bytes[at * 2..][..2].copy_from_slice(&bits.to_le_bytes());
        let place = Place::with(&tensors);
        let error = place.refused("w4");
        assert!(error.contains(GATE_UP), "{error}");
        assert!(matches!(Kind::of(&place.path("w4")), Err(KindError::Unfinished { .. })));
        error
    };
    // Expert 3, row 5, column 7.
    let error = with((3 * 128 + 5) * 128 + 7, bf16::NAN.to_bits());
    assert!(error.contains("index [3, 5, 0]: weight 7 of the group is NaN"), "{error}");
    let error = with((8 * 128 - 1) * 128 + 127, bf16::INFINITY.to_bits());
    assert!(error.contains("index [7, 127, 0]: weight 127 of the group is inf"), "{error}");
    let error = with(0, bf16::from_f32(1e7).to_bits());
    assert!(error.contains("index [0, 0, 0]") && error.contains("does not fit f16"), "{error}");
}

#[test]
fn experts_under_the_encoders_name_count_once() {
    let place = Place::new();
    place.convert("w4").unwrap();
    let mut tensors = tiny();
    for (name, raw) in tiny() {
        if name.contains(".experts.") {
            tensors.insert(name.replace("model.decoder.", "model.encoder.language_model."), raw);
        }
    }
    let twice = Place::with(&tensors);
    twice.convert("w4").unwrap();
    assert_same(&place.path("w4"), &twice.path("w4"));
    tensors.get_mut(DOWN).unwrap().bytes[3] ^= 1;
    assert!(Place::with(&tensors).refused("w4").contains("of which it is a second copy"));
}

#[test]
fn groups_that_the_format_holds_only_roughly_are_counted() {
    let mut tensors = tiny();
    for weight in tensors.get_mut(DOWN).unwrap().bytes[..64 * 2 * 3].as_chunks_mut().0 {
        *weight = bf16::from_f32(0.5).to_le_bytes();
    }
    let mut notes = Vec::new();
    let place = Place::with(&tensors);
    convert(&place.path("source"), &place.path("w4"), &ConvertOptions::default(), &mut |event| {
        if let ConvertEvent::Note(note) = event {
            notes.push(note);
        }
    })
    .unwrap();
    assert_eq!(notes.len(), 1);
    assert!(notes[0].starts_with("3 of 8192 groups of weights lie wholly on one side"), "{notes:?}");
}

#[test]
fn the_command_reports_by_lines_and_exit_codes() {
    let place = Place::new();
    let run = place.axed(&["source", "w4", "--text-only"]);
    let (out, err) = (String::from_utf8(run.stdout).unwrap(), String::from_utf8(run.stderr).unwrap());
    assert!(run.status.success(), "{err}");
    assert!(out.starts_with("w4: dg-w4a16-v1, 5 files of tensors (0 kept from an earlier run)"), "{out}");
    assert!(
        err.starts_with("leaving out ") && err.contains("\nexperts_003.safetensors: written (4 of 5)\n"),
        "{err}"
    );
    let run = place.axed(&["source", "w4"]);
    assert_eq!(run.status.code(), Some(1));
    let err = String::from_utf8(run.stderr).unwrap();
    assert!(err.starts_with("axed: w4: the directory holds a finished checkpoint"), "{err}");
    assert!(place.axed(&["source", "w4", "--force"]).status.success());
    assert_eq!(place.axed(&["source"]).status.code(), Some(2));
    let run = place.axed(&["nowhere", "w5"]);
    assert_eq!(run.status.code(), Some(1));
    assert!(String::from_utf8(run.stderr).unwrap().starts_with("axed: cannot read nowhere"));
    assert!(!place.path("w5").exists(), "a source that is refused makes no target");
}

/// A source of 605 MB: 4 layers of 64 experts, and a large table.
fn large(path: &Path) -> u64 {
    let (hidden, width, experts, vocabulary) = (512, 512, 64, 200_000);
    directory(path, &Tensors::new());
    for (key, value) in [
        ("hidden_size", hidden),
        ("moe_intermediate_size", width),
        ("num_experts", experts),
        ("num_hidden_layers", 4),
    ] {
        configure(path, key, json!(value));
    }
    let mut shapes = vec![("model.decoder.embed_tokens.weight".to_owned(), vec![vocabulary, hidden])];
    for layer in 0..4 {
        let name = |part: &str| format!("model.decoder.layers.{layer}.experts.{part}");
        shapes.push((name("down_proj"), vec![experts, hidden, width]));
        shapes.push((name("gate_up_proj"), vec![experts, 2 * width, hidden]));
    }
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let start = end;
        end += shape.iter().product::<usize>() * 2;
        header.insert(name, json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}));
    }
    // A few thousand different groups, over and over.
    let block: Vec<u8> = (0u32..1 << 19)
        .flat_map(|n| {
            let mixed = n.wrapping_mul(0x9E37_79B9) ^ n >> 7;
            bf16::from_f32((mixed >> 8) as f32 / 2.0_f32.powi(24) - 0.5).to_le_bytes()
        })
        .collect();
    let mut file = BufWriter::new(File::create(path.join("model.safetensors")).unwrap());
    file.write_all(&with_header(&Value::Object(header).to_string(), &[])).unwrap();
    let mut left = end;
    while left > 0 {
        let part = left.min(block.len());
        file.write_all(&block[..part]).unwrap();
        left -= part;
    }
    file.flush().unwrap();
    end as u64
}

#[test]
fn memory_stays_flat_and_an_interrupt_leaves_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    assert!(large(&path("source")) > 600_000_000);
    let start = |errors: Stdio| {
        // Whoever runs the tests in the background may have them ignore interrupts, which programs inherit.
        Command::new("env")
            .args(["--default-signal=INT", env!("CARGO_BIN_EXE_axed"), "convert", "source", "cut"])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .unwrap()
    };
    // Interrupted once it is at the second file, behind which it cannot come: there is no room to say that it is written.
    let first = "experts_000.safetensors: written (1 of 5)\n";
    let (errors, errors_in) = nix::unistd::pipe().unwrap();
    let room = nix::fcntl::fcntl(&errors_in, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap() as usize;
    let filling = vec![b'.'; room - first.len() - 1];
    assert_eq!(nix::unistd::write(&errors_in, &filling).unwrap(), filling.len());
    let mut child = start(errors_in.into());
    let at_second = || {
        let files = fs::read_dir(path("cut")).into_iter().flatten();
        files.into_iter().any(|file| file.unwrap().file_name().to_string_lossy().contains("experts_001"))
    };
    while !at_second() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before its second file");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "ended by the signal");
    let mut said = String::new();
    File::from(errors).read_to_string(&mut said).unwrap();
    assert!(said[filling.len()..].starts_with(first), "{said}");
    assert!(matches!(Kind::of(&path("cut")), Err(KindError::Unfinished { .. })));

    let mut child = start(Stdio::piped());
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let mut peak = 0;
    let code = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
        let text = fs::read_to_string(&status).unwrap_or_default();
        if let Some(line) = text.lines().find(|line| line.starts_with("VmHWM:")) {
            peak = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.unwrap().read_to_string(&mut out).unwrap();
    child.stderr.unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(code, Some(0), "{err}");
    assert!(err.starts_with("experts_000.safetensors: kept (1 of 5)\n"), "{err}");
    // Of 605 MB, of which the largest tensor has 205: two pieces of 4 MiB and what 32 MiB have touched.
    assert!((1..120 << 10).contains(&peak), "{peak} KiB");
    println!("peak {peak} KiB; {out}");
    let dir = HfDirectory::open(&path("cut")).unwrap();
    assert_eq!(dir.experts.unwrap().layers().len(), 4);
}
