//! The built `axed` on real files: logits, tokens, and what it says when something is wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::{cache_dir, fixture, golden, real_model, tensor_f32, tensor_i32};
use tempfile::TempDir;

/// The two real models with the stem of their golden files.
const REAL: [&str; 2] = ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"];

/// What a run of the program gave.
struct Run {
    code: i32,
    out: String,
    err: String,
}

impl Run {
    /// The program must have failed with this status and said all of these words.
    fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no '{word}' in: {}", self.err);
        }
        assert!(self.out.is_empty(), "{}", self.out);
    }
}

/// A place without configuration files, and the program in it.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn axed_with(&self, variables: &[(&str, &str)], arguments: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        for name in ["AXE_MODEL", "AXE_CONFIG", "AXE_PORT", "AXE_API_KEY"] {
            command.env_remove(name);
        }
        command.env("AXE_DEVICE_CACHE_DIR", cache_dir()).envs(variables.iter().copied());
        let Output { status, stdout, stderr } = command.output().unwrap();
        let run = Run {
            code: status.code().expect("the program is not killed"),
            out: String::from_utf8(stdout).unwrap(),
            err: String::from_utf8(stderr).unwrap(),
        };
        assert!(!run.err.contains("panicked"), "{arguments:?}: {}", run.err);
        run
    }

    fn axed(&self, arguments: &[&str]) -> Run {
        self.axed_with(&[], arguments)
    }

    fn axed_ok(&self, arguments: &[&str]) -> String {
        let run = self.axed(arguments);
        assert_eq!(run.code, 0, "{arguments:?}: {}", run.err);
        run.out
    }

    /// The file that `axed logits` writes.
    fn logits(&self, model: &Path, arguments: &[&str]) -> Vec<u8> {
        let output = self.path("logits.safetensors");
        let mut all = vec!["logits", "-m", text(model), "-o", text(&output)];
        all.extend_from_slice(arguments);
        self.axed_ok(&all);
        let bytes = std::fs::read(&output).unwrap();
        std::fs::remove_file(output).unwrap();
        bytes
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn comma(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn logits_are_the_golden_ones_whatever_the_block() {
    let place = Place::new();
    for name in ["llama", "gemma3"] {
        let (ids, expected) = golden(&format!("causal-families/{name}.safetensors"));
        let model = fixture(&format!("causal-families/{name}.gguf"));
        let ids = comma(&ids);
        let files = ["1", "8", "64"].map(|block| place.logits(&model, &["--ids", &ids, "--block", block]));
        assert!(files[0] == files[1] && files[1] == files[2], "{name}: the block changes the file");
        assert_eq!(files[0], place.logits(&model, &["--ids", &ids]), "{name}: without --block");
        assert_eq!(comma(&tensor_i32(&files[0], "ids").iter().map(|&id| id as u32).collect::<Vec<_>>()), ids);
        let found = tensor_f32(&files[0], "logits");
        assert_eq!(found.len(), expected.len());
        for (i, (f, e)) in found.iter().zip(&expected).enumerate() {
            assert!((f - e).abs() <= 1e-3, "{name}: logit {i} is {f}, expected {e}");
        }
        // Rounding keys and values to f16 shows, but little.
        let rounded = tensor_f32(&place.logits(&model, &["--ids", &ids, "--kv-cache", "f16"]), "logits");
        let off = rounded.iter().zip(&found).fold(0f32, |off, (a, b)| off.max((a - b).abs()));
        assert!(off > 0.0 && off < 0.05, "{name}: f16 changes logits by {off}");
    }
}

#[test]
fn logits_of_a_text_are_those_of_its_tokens() {
    let place = Place::new();
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let words = place.write("words.txt", "The capital of Australia is Canberra.\n<|im_end|>");
    let ids = place.axed_ok(&["tokenize", "-m", text(&model), "--text", text(&words), "--bos"]);
    let ids = ids.trim_end();
    let by_text = place.logits(&model, &["--text", text(&words)]);
    assert!(by_text == place.logits(&model, &["--ids", ids, "--block", "3"]), "of {ids}");
    assert_eq!(tensor_i32(&by_text, "ids").len(), ids.split(',').count());
    place.axed(&["logits", "-m", text(&model), "--text", "/dev/null", "-o", "x"]).fails(1, &["no tokens"]);
}

#[test]
fn texts_become_the_golden_tokens_and_texts_again() {
    let place = Place::new();
    for stem in REAL {
        let model = real_model(&format!("{stem}.gguf"));
        let model = text(&model);
        let cases = std::fs::read(fixture(&format!("real-models/{stem}.tokens.json"))).unwrap();
        let cases: Value = serde_json::from_slice(&cases).unwrap();
        for case in cases.as_array().unwrap() {
            let ids = |key: &str| {
                let ids = case[key].as_array().unwrap().iter().map(|id| id.to_string());
                ids.collect::<Vec<_>>().join(",")
            };
            let words = case["text"].as_str().unwrap();
            let file = place.write("text", words);
            let found = place.axed_ok(&["tokenize", "-m", model, "--text", text(&file)]);
            assert_eq!(found, format!("{}\n", ids("ids")), "{stem}: {words:?}");
            let special = place.axed_ok(&["tokenize", "-m", model, "--special", "--text", text(&file)]);
            assert_eq!(special, format!("{}\n", ids("ids_special")), "{stem}: {words:?} with special tokens");
            if !words.is_empty() {
                let back = place.axed_ok(&["detokenize", "-m", model, found.trim_end()]);
                assert_eq!(back, format!("{words}\n"), "{stem}");
            }
        }
    }
}

#[test]
fn the_pieces_of_a_text_add_up_to_it() {
    let place = Place::new();
    let words = place.write("text", "Hello, world!");
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let lines = place.axed_ok(&["tokenize", "-m", text(&model), "--pieces", "--text", text(&words)]);
    let pieces: String = lines.lines().map(|line| line.split_once('\t').unwrap().1).collect();
    assert_eq!(pieces, "Hello, world!");
}

/// `printed | head -c 0`, of a run of the program.
fn into_a_closed_pipe(arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.args(arguments).current_dir(std::env::temp_dir()).env_remove("AXE_CONFIG");
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).output().unwrap()
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let model = fixture("causal-families/llama.gguf");
    let real = real_model("smollm2-135m-instruct-q4_1.gguf");
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    for arguments in [
        &["tokenize", "-m", text(&real), "--pieces", "--text", readme][..],
        &["tokenize", "-m", text(&real), "--text", readme],
        &["detokenize", "-m", text(&real), "1,2,3,400"],
        &["devices"],
        &["devices", "--json"],
        &["bench-ops", "--only", "none"],
    ] {
        let run = into_a_closed_pipe(arguments);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && error.is_empty(), "{arguments:?}: {} {error}", run.status);
    }
    // A half file of logits is a failure, though.
    let run = into_a_closed_pipe(&["logits", "-m", text(&model), "--ids", "1", "-o", "/dev/stdout"]);
    assert!(String::from_utf8_lossy(&run.stderr).contains("cannot write /dev/stdout"), "{run:?}");
}

#[test]
fn logits_go_into_pipes_and_links_too() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let place = Place::new();
    let model = fixture("causal-families/llama.gguf");
    let expected = place.logits(&model, &["--ids", "1,2"]);
    let (target, link) = (place.path("target"), place.path("link"));
    std::fs::write(&target, "").unwrap();
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o640)).unwrap();
    symlink(&target, &link).unwrap();
    place.axed_ok(&["logits", "-m", text(&model), "--ids", "1,2", "-o", text(&link)]);
    assert!(link.is_symlink() && std::fs::read(&target).unwrap() == expected);
    assert_eq!(target.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.args(["logits", "-m", text(&model), "--ids", "1,2", "-o", "/dev/stdout"]);
    let run = command.current_dir(place.folder.path()).env_remove("AXE_CONFIG").output().unwrap();
    assert!(run.stdout == expected, "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn devices_are_listed_with_the_one_that_is_taken() {
    let place = Place::new();
    let lines = place.axed_ok(&["devices"]);
    assert_eq!(lines.lines().filter(|line| line.starts_with('*')).count(), 1, "{lines}");
    let list: Value = serde_json::from_str(&place.axed_ok(&["devices", "--json"])).unwrap();
    assert_eq!(list.as_array().unwrap().len(), lines.lines().count());
}

#[test]
fn a_wrong_command_line_is_told_from_a_failure() {
    let place = Place::new();
    let model = fixture("causal-families/llama.gguf");
    let model = text(&model);
    place.axed(&["logits", "-m", model, "--ids", "1", "-o", "x", "--bogus"]).fails(2, &["--bogus"]);
    place.axed(&["tokenize", "--bogus"]).fails(2, &["--bogus"]);
    place.axed(&["serve", "--bogus"]).fails(2, &["--bogus"]);
    place.axed(&["bogus"]).fails(2, &["bogus"]);
    place.axed(&["logits", "-m", model, "-o", "x"]).fails(2, &["--ids", "--text"]);
    place
        .axed(&["logits", "-m", model, "--ids", "1", "--text", "y", "-o", "x"])
        .fails(2, &["--ids", "--text"]);
    place.axed(&["logits", "-m", model, "--ids", "1,x", "-o", "x"]).fails(2, &["'x'", "--ids"]);
    place.axed(&["logits", "-m", model, "--ids", "-1", "-o", "x"]).fails(2, &["-1"]);
    place.axed(&["logits", "-m", model, "--ids", "1", "--block", "0", "-o", "x"]).fails(2, &["--block"]);
    place
        .axed(&["logits", "-m", model, "--ids", "1", "--kv-cache", "f8", "-o", "x"])
        .fails(2, &["f8", "f16"]);
    place.axed(&["logits", "--ids", "1", "-o", "x"]).fails(2, &["--model"]);
    place.axed(&["serve", "--context-length", "many"]).fails(2, &["--context-length", "many"]);
    place.axed(&["serve"]).fails(1, &["--model", "AXE_MODEL"]);
}

#[test]
fn unknown_tokens_and_texts_that_are_none_are_refused() {
    let place = Place::new();
    let model = fixture("causal-families/llama.gguf");
    let output = place.path("x");
    let run = place.axed(&["logits", "-m", text(&model), "--ids", "1,512", "-o", text(&output)]);
    run.fails(1, &["512", "vocabulary"]);
    assert!(!output.exists(), "a refused call leaves no file");
    let nowhere = place.path("no/such/folder/x");
    place
        .axed(&["logits", "-m", text(&model), "--ids", "1", "-o", text(&nowhere)])
        .fails(1, &[text(&nowhere)]);
    let long = comma(&[1; 1025]);
    place.axed(&["logits", "-m", text(&model), "--ids", &long, "-o", "x"]).fails(1, &["1025", "1024"]);

    let real = real_model("smollm2-135m-instruct-q4_1.gguf");
    place.axed(&["detokenize", "-m", text(&real), "1,49152"]).fails(1, &["49152"]);
    let latin1 = place.write("latin1", b"caf\xe9");
    place.axed(&["tokenize", "-m", text(&real), "--text", text(&latin1)]).fails(1, &[text(&latin1), "UTF-8"]);
    let missing = place.path("missing.txt");
    place.axed(&["tokenize", "-m", text(&real), "--text", text(&missing)]).fails(1, &[text(&missing)]);
}

/// Every command that opens a model, over that path.
fn all_refuse(place: &Place, model: &Path, words: &[&str]) {
    let model = text(model);
    let socket = place.path("admin.sock");
    let words: Vec<&str> = words.iter().copied().chain([model]).collect();
    place.axed(&["logits", "-m", model, "--ids", "1", "-o", "x"]).fails(1, &words);
    place.axed(&["tokenize", "-m", model, "--text", "/dev/null"]).fails(1, &words);
    place.axed(&["detokenize", "-m", model, "1"]).fails(1, &words);
    place.axed(&["serve", "-m", model, "--port", "0", "--admin-socket", text(&socket)]).fails(1, &words);
    assert!(!socket.exists(), "a daemon that did not start leaves no socket");
}

#[test]
fn files_that_are_no_model_are_refused_by_name() {
    let place = Place::new();
    all_refuse(&place, &place.path("missing.gguf"), &["No such file"]);
    all_refuse(&place, &place.write("empty.gguf", ""), &["begins with `GGUF`"]);
    all_refuse(&place, &place.write("text.gguf", "[package]\nname = \"axe\"\n"), &["begins with `GGUF`"]);
    all_refuse(&place, &place.write("version.gguf", b"GGUF\x09\0\0\0aaaaaaaaaaaaaaaa"), &["version 9"]);
    let folder = place.path("folder.gguf");
    std::fs::create_dir(&folder).unwrap();
    all_refuse(&place, &folder, &["found no checkpoint in this directory"]);
}

#[test]
fn truncated_models_are_refused_wherever_they_end() {
    let place = Place::new();
    let whole = std::fs::read(fixture("causal-families/gemma3.gguf")).unwrap();
    let tables = whole.len() - 1_500_000;
    for length in [3, 4, 7, 23, 24, 40, 200, tables / 2, tables, whole.len() / 2, whole.len() - 1] {
        let cut = place.write("cut.gguf", &whole[..length]);
        // A file that ends in its first word is of no format at all.
        all_refuse(&place, &cut, if length < 4 { &["begins with"] } else { &["byte"] });
    }
}

#[test]
fn architectures_that_are_not_supported_are_refused_with_those_that_are() {
    let place = Place::new();
    let mut bytes = std::fs::read(fixture("causal-families/llama.gguf")).unwrap();
    let key = b"general.architecture";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 12;
    assert_eq!(&bytes[at..at + 5], b"llama");
    bytes[at..at + 5].copy_from_slice(b"gptxx");
    let model = place.write("other.gguf", &bytes);
    let run = place.axed(&["logits", "-m", text(&model), "--ids", "1", "-o", "x"]);
    run.fails(1, &["gptxx", "llama", "gemma3", text(&model)]);
    let socket = place.path("admin.sock");
    let run = place.axed(&["serve", "-m", text(&model), "--port", "0", "--admin-socket", text(&socket)]);
    run.fails(1, &["gptxx", "llama", "gemma3"]);
}

#[test]
fn a_damaged_tensor_is_named_and_numbers_that_are_none_end_nothing_but_the_call() {
    let place = Place::new();
    let whole = std::fs::read(fixture("causal-families/llama.gguf")).unwrap();
    let rename = |from: &[u8], to: &[u8]| {
        let mut bytes = whole.clone();
        let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let without = place.write("without.gguf", rename(b"blk.2.ffn_up.weight", b"blk.2.ffn_xx.weight"));
    let run = place.axed(&["logits", "-m", text(&without), "--ids", "1", "-o", "x"]);
    run.fails(1, &["blk.2.ffn_up.weight", text(&without)]);
    let heads =
        place.write("heads.gguf", rename(b"llama.attention.head_count\x04", b"llama.attention.head_xxxxx"));
    let run = place.axed(&["logits", "-m", text(&heads), "--ids", "1", "-o", "x"]);
    run.fails(1, &["llama.attention.head_count", text(&heads)]);
}

#[test]
fn what_is_wrong_with_the_text_shows_before_weights_are_repacked() {
    let place = Place::new();
    let mut whole = std::fs::read(fixture("causal-families/llama.gguf")).unwrap();
    // The fixture's one merge makes no token; without it the vocabulary is sound.
    let merges = b"tokenizer.ggml.merges";
    let at = whole.windows(merges.len()).position(|window| window == merges).unwrap();
    whole[at..at + merges.len()].copy_from_slice(b"tokenizer.ggml.others");
    let cache = place.path("cache");
    let (socket, variables) = (place.path("admin.sock"), [("AXE_DEVICE_CACHE_DIR", text(&cache))]);
    let refused = |model: &Path, more: &[&str], words: &[&str]| {
        let mut all = vec!["serve", "-m", text(model), "--port", "0", "--admin-socket", text(&socket)];
        all.extend_from_slice(more);
        place.axed_with(&variables, &all).fails(1, words);
        assert!(!cache.join("weights").exists(), "weights were repacked");
    };
    // A model with fewer rows than its tokenizer has tokens.
    let mut bytes = whole.clone();
    for name in [&b"llama.vocab_size"[..], b"output.weight", b"token_embd.weight"] {
        let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len();
        let number = bytes[at..].windows(4).position(|window| window == 512u32.to_le_bytes()).unwrap() + at;
        bytes[number..number + 4].copy_from_slice(&496u32.to_le_bytes());
    }
    let model = place.write("short.gguf", &bytes);
    refused(&model, &[], &["512 tokens", "496", "token_embd.weight", text(&model)]);
    let template = place.write("broken.jinja", b"{% for %}");
    let model = place.write("sound.gguf", &whole);
    let config = place.write("daemon.toml", format!("[model]\nchat_template = {template:?}\n").as_bytes());
    refused(&model, &["--config", text(&config)], &["template"]);
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_numbers() {
    let place = Place::new();
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let limit = [("AXE_DEVICE_MEMORY_LIMIT_MIB", "50")];
    let words = ["MiB weights", "limit is 50 MiB", "context"];
    place.axed_with(&limit, &["logits", "-m", text(&model), "--ids", "1", "-o", "x"]).fails(1, &words);
    let socket = place.path("admin.sock");
    let serve = ["serve", "-m", text(&model), "--port", "0", "--admin-socket", text(&socket)];
    place.axed_with(&limit, &serve).fails(1, &words);
    // The weights alone would fit, the cache that was asked for does not; it is told which would.
    let limit = [("AXE_DEVICE_MEMORY_LIMIT_MIB", "120"), ("AXE_MODEL_CONTEXT_LENGTH", "8192")];
    place.axed_with(&limit, &serve).fails(
        1,
        &["MiB for a context of 8192", "limit is 120 MiB", "tokens would fit ([model] context_length)"],
    );
}

#[test]
fn configuration_files_are_checked_to_the_last_key() {
    let place = Place::new();
    let model = fixture("causal-families/llama.gguf");
    for (content, words) in [
        ("[device]\nbogus_key = 1\n", &["device.bogus_key"][..]),
        ("[bogus]\n", &["bogus"]),
        ("[device]\nkind = 3\n", &["device.kind", "3"]),
        ("[device]\nkind = \"tpu\"\n", &["device.kind", "tpu"]),
        ("[server]\nport = \"many\"\n", &["server.port", "many"]),
        ("[server\n", &["daemon.toml"]),
        ("[device]\nkv_cache = \"f8\"\n", &["device.kv_cache", "f8"]),
    ] {
        let file = place.write("daemon.toml", content);
        let logits = ["logits", "--config", text(&file), "-m", text(&model), "--ids", "1", "-o", "x"];
        let run = place.axed(&logits);
        run.fails(1, words);
        run.fails(1, &[text(&file)]);
        let run = place.axed(&["serve", "--config", text(&file), "-m", text(&model)]);
        run.fails(1, words);
        // The file of the folder is read without being named, too.
        place.axed(&["serve", "-m", text(&model)]).fails(1, words);
    }
    let missing = place.path("missing.toml");
    place.axed(&["serve", "--config", text(&missing)]).fails(1, &[text(&missing)]);
    std::fs::remove_file(place.path("daemon.toml")).unwrap();
    place.axed_with(&[("AXE_DEVICE_BOGUS", "1")], &["serve"]).fails(1, &["AXE_DEVICE_BOGUS"]);
}
