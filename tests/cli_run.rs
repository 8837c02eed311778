//! `axed run` from outside: one prompt, a conversation through a pipe, Ctrl-C, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use support::{cache_dir, fixture, real_model};

fn axed(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_axed"));
    command.arg("run").args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR"));
    for name in ["AXE_MODEL", "AXE_CONFIG"] {
        command.env_remove(name);
    }
    command.env("AXE_DEVICE_CACHE_DIR", cache_dir()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Status, standard output and standard error.
fn ended(child: Child) -> (i32, String, String) {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    // What a test has read of the output already may have cut a character.
    let (out, err) = (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8(stderr).unwrap());
    assert!(!err.contains("panicked"), "{err}");
    (status.code().expect("the program is not killed"), out, err)
}

fn run(arguments: &[&str]) -> (i32, String, String) {
    ended(axed(arguments).spawn().unwrap())
}

/// The same with lines on standard input.
fn talk(arguments: &[&str], lines: &str) -> (i32, String, String) {
    let mut child = axed(arguments).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    ended(child)
}

fn fails(arguments: &[&str], code: i32, words: &str) {
    let (found, out, err) = run(arguments);
    assert_eq!((found, &*out), (code, ""), "{arguments:?}: {err}");
    assert!(err.contains(words), "{arguments:?}: no '{words}' in: {err}");
}

fn object(arguments: &[&str]) -> Value {
    let (code, out, err) = run(&[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "{arguments:?}: {err}");
    assert_eq!(err, "", "{arguments:?}");
    assert_eq!(out.lines().count(), 1, "{out}");
    serde_json::from_str(&out).unwrap()
}

/// A small causal model without a chat template. The fixture's one merge makes no token; without it the vocabulary is
/// sound.
fn small() -> tempfile::NamedTempFile {
    let mut bytes = std::fs::read(fixture("causal-families/llama.gguf")).unwrap();
    let key = b"tokenizer.ggml.merges";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at..at + key.len()].copy_from_slice(b"tokenizer.ggml.others");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_prompt_gets_its_answer_and_then_what_it_took() {
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let question = "What is the capital of France?";
    let arguments =
        ["-m", text(&model), "-p", question, "--temp", "0", "-n", "20", "-c", "256", "--seed", "5"];
    let (code, out, err) = run(&arguments);
    assert_eq!(code, 0, "{err}");
    assert_eq!(out, "The capital of France is Paris.\n");
    let lines: Vec<&str> = err.lines().collect();
    assert!(lines[0].starts_with("prompt    37 tokens in ") && lines[0].ends_with(" t/s"), "{err}");
    assert!(lines[1].starts_with("answer    8 tokens, ") && lines[1].ends_with("; ended: stop"), "{err}");
    assert_eq!(lines.last(), Some(&"seed      5"), "{err}");

    // Whatever the block size, the text is the same; what guesses were worth is told.
    let (code, out, err) = run(&[&arguments[..], &["-b", "1"]].concat());
    assert_eq!((code, &*out), (0, "The capital of France is Paris.\n"), "{err}");
    assert!(err.contains("8 passes, 1.00 tokens a pass") && !err.contains("guesses"), "{err}");
    let list = ["-m", text(&model), "-p", "Count from 1 to 40.", "--temp", "0", "-n", "32", "-b", "4"];
    let (code, _, err) = run(&list);
    assert_eq!(code, 0, "{err}");
    assert!(err.lines().any(|line| line.starts_with("guesses   ") && line.contains(" of ")), "{err}");

    let found = object(&arguments);
    assert_eq!(found["text"], "The capital of France is Paris.");
    assert!(found["stats"]["blocks"]["committed"].as_u64().is_some_and(|tokens| tokens >= 8), "{found}");
    assert_eq!(found["finish_reason"], "stop");
    assert_eq!(found["tokens"].as_array().unwrap().len(), 8);
    assert_eq!(found["usage"]["prompt_tokens"], 37);
    assert_eq!((&found["context_length"], &found["kind"]), (&256.into(), &"causal".into()));
    assert!(found["stats"]["elapsed_s"].as_f64().unwrap() > 0.0 && found["load_s"].as_f64().unwrap() > 0.0);

    // What was said before is part of the prompt; what is shared with it is in the cache.
    let lines = format!("{question}\n\n/new\n{question}\nAre you sure?\n");
    let rest = &arguments[4..];
    let (code, out, err) = talk(&[&["-m", text(&model)], rest].concat(), &lines);
    assert_eq!(code, 0, "{err}");
    let answers: Vec<&str> = out.lines().collect();
    assert_eq!(answers[..2], ["The capital of France is Paris."; 2], "{out}");
    let prompts: Vec<&str> = err.lines().filter(|line| line.starts_with("prompt ")).collect();
    assert_eq!(prompts.len(), 3, "{err}");
    assert!(prompts[1].ends_with("; 36 more were in the cache"), "{err}");
    let reused: usize = prompts[2].split("; ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(reused > 37, "{err}");
}

#[test]
fn texts_are_continued_as_they_are() {
    let model = small();
    let model = model.path();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "some words").unwrap();
    let common = ["-m", text(model), "-n", "12", "--seed", "3", "--temp", "1.5", "--ignore-eos"];
    let with = |rest: &[&'static str]| [&common[..], rest].concat();
    let plain = object(&with(&["--raw", "-p", "some words"]));
    assert_eq!(plain["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(plain["finish_reason"], "length");
    assert_eq!(plain["seed"], 3);
    let by_file = object(&[&common[..], &["--raw", "-f", text(file.path())]].concat());
    assert_eq!(by_file["tokens"], plain["tokens"]);
    let mut child = axed(&with(&["--raw", "--json", "-f", "-"])).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"some words").unwrap();
    let (_, out, _) = ended(child);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["tokens"], plain["tokens"]);
    // Another seed, another text; and 0 needs none.
    let other =
        object(&["-m", text(model), "-n", "12", "--seed", "4", "--temp", "1.5", "--raw", "-p", "some words"]);
    assert_ne!(other["tokens"], plain["tokens"]);
    let greedy =
        |seed| object(&["-m", text(model), "-n", "12", "--seed", seed, "--temp", "0", "--raw", "-p", "a"]);
    assert_eq!(greedy("1")["tokens"], greedy("2")["tokens"]);
    // A model without a template is told of, and does the same.
    let (code, _, err) = run(&with(&["-p", "some words"]));
    assert_eq!(code, 0, "{err}");
    assert!(err.starts_with("axed: the model has no chat template"), "{err}");
    let (code, out, err) = talk(&with(&["--raw"]), "some words\nsome words\n");
    assert_eq!(code, 0, "{err}");
    let said = plain["text"].as_str().unwrap();
    let said = if said.ends_with('\n') { said.to_owned() } else { format!("{said}\n") };
    assert_eq!(out, said.repeat(2));
}

#[test]
fn models_that_denoise_answer_too() {
    let model = fixture("tiny-diffusion");
    let arguments = ["-m", text(&model), "--seed", "1", "-p", "What is the capital of Australia?"];
    let (code, out, err) = run(&arguments);
    assert_eq!((code, &*out), (0, "The capital of Australia is Canberra.\n"), "{err}");
    assert!(err.contains("denoised  2 steps, 1 canvases (2)\n"), "{err}");
    assert!(!out.contains('\x1b'), "drafts are for terminals");
    let found = object(&arguments);
    assert_eq!(found["text"], "The capital of Australia is Canberra.");
    assert_eq!(found["kind"], "block_diffusion");
    assert_eq!(found["stats"]["denoising"]["canvases"], 1);
    assert_eq!(found["stats"]["canvas_steps"], serde_json::json!([2]));
}

#[test]
fn a_refused_message_is_forgotten_and_nothing_else() {
    let model = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("tiny-diffusion")).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), model.path().join(file.file_name())).unwrap();
    }
    let strict = r#"{{ bos_token }}
{%- for message in messages -%}
  {%- if message.content == 'No.' -%}{{ raise_exception('not that') }}{%- endif -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('out of turn') }}{%- endif -%}
  {{ '<|turn>' + ('user' if message.role == 'user' else 'model') + '\n' + message.content + '<turn|>\n' }}
{%- endfor -%}
{{ '<|turn>model\n<|channel>thought\n<channel|>' }}"#;
    std::fs::write(model.path().join("chat_template.jinja"), strict).unwrap();
    let lines = "What is the capital of Australia?\nNo.\nWhat is the capital of France?\n";
    let (code, out, err) = talk(&["-m", text(model.path()), "--seed", "1"], lines);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("not that"), "{err}");
    // The first message and its answer are still there.
    assert!(!err.contains("out of turn"), "{err}");
    assert!(err.ends_with("1 of the messages got no answer\n"), "{err}");
    assert_eq!(out.lines().next(), Some("The capital of Australia is Canberra."), "{err}");
    let prompts: Vec<&str> = err.lines().filter(|line| line.starts_with("prompt ")).collect();
    assert_eq!(prompts.len(), 2, "{err}");
}

#[test]
fn ctrl_c_stops_the_answer_and_then_ends() {
    let model = real_model("smollm2-135m-instruct-q4_1.gguf");
    let endless = ["-m", text(&model), "-c", "4096", "--temp", "1", "--raw", "--ignore-eos"];
    let interrupt = |child: &Child| kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();

    let mut child = axed(&[&endless[..], &["-p", "a"]].concat()).spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 8]).unwrap();
    interrupt(&child);
    let (code, _, err) = ended(child);
    assert_eq!(code, 130, "{err}");
    assert!(err.contains("; ended: cancelled"), "{err}");

    // In a conversation the program goes on; at the prompt Ctrl-C ends it.
    let mut child = axed(&endless).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut until = |word: &str| loop {
        let mut line = String::new();
        assert!(errors.read_line(&mut line).unwrap() > 0, "no '{word}'");
        if line.contains(word) {
            break;
        }
    };
    let mut output = child.stdout.take().unwrap();
    let (send, pieces) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while output.read(&mut piece).is_ok_and(|bytes| bytes > 0) && send.send(()).is_ok() {}
    });
    for _ in 0..2 {
        input.write_all(b"a\n").unwrap();
        pieces.recv().unwrap();
        interrupt(&child);
        until("; ended: cancelled");
        until("seed ");
        // What is still on its way belongs to this answer, not to the next.
        while pieces.recv_timeout(Duration::from_millis(200)).is_ok() {}
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn a_reader_that_has_seen_enough_is_no_failure() {
    let model = small();
    let model = model.path();
    let arguments = ["-m", text(model), "-c", "1024", "--raw", "--ignore-eos", "-p", "a"];
    let mut child = axed(&arguments).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 8]).unwrap();
    drop(out);
    let (code, _, err) = ended(child);
    assert_eq!(code, 0, "{err}");
    assert_eq!(err, "");
}

#[test]
fn what_cannot_be_told_is_no_panic() {
    let model = small();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = |arguments: &[&str], err: Stdio| {
        let Output { status, stdout, .. } = axed(arguments).stderr(err).output().unwrap();
        (status.code(), stdout)
    };
    let arguments = ["-m", text(model.path()), "-c", "64", "--raw", "-n", "3", "--temp", "0", "-p", "a"];
    let (told, out) = status(&arguments, Stdio::piped());
    assert_eq!(told, Some(0));
    assert_eq!(status(&arguments, full().into()), (Some(0), out), "the answer came out");
    assert_eq!(status(&["-m", "nowhere", "-p", "a"], full().into()).0, Some(1));
}

#[test]
fn what_cannot_be_is_refused_before_the_model_is_loaded() {
    let causal = small();
    let diffusion = fixture("tiny-diffusion");
    let (causal, diffusion) = (text(causal.path()), text(&diffusion));
    fails(&["-p", "a"], 2, "--model");
    fails(&["-m", causal, "--json"], 2, "--prompt");
    fails(&["-m", causal, "-p", "a", "-f", "b"], 2, "--file");
    fails(&["-m", causal, "-p", "a", "-n", "0"], 2, "--tokens");
    fails(&["-m", causal, "-p", "a", "-n", "-1"], 2, "invalid value '-1' for '--tokens");
    fails(&["-m", causal, "-p", "a", "--temp", "-1"], 2, "expected a number from 0 to 2");
    fails(&["-m", causal, "-p", "a", "--seed", "-1"], 2, "invalid value '-1' for '--seed");
    fails(&["-m", causal, "-p", "a", "--temp", "2.1"], 2, "a number from 0 to 2");
    fails(&["-m", causal, "-p", "a", "--top-p", "NaN"], 2, "a number from 0 to 1");
    fails(&["-m", causal, "-p", "a", "-b", "17"], 2, "expected auto or a number from 1 to 16");
    fails(&["-m", causal, "-p", "a", "--raw", "--system", "b"], 2, "--system");
    fails(&["-m", causal, "-p", ""], 2, "the prompt is empty");
    fails(&["-m", causal, "-f", "nowhere"], 1, "cannot read nowhere");
    fails(&["-m", causal, "-p", "a", "-c", "many"], 2, "flag --context: key `model.context_length`");
    fails(&["-m", causal, "-p", "a", "--device", "tpu"], 2, "flag --device: key `device.kind`");
    fails(&["-m", "nowhere", "-p", "a"], 1, "nowhere");
    for (flag, value) in [("--top-k", "3"), ("--top-p", "0.5"), ("--min-p", "0.1"), ("-b", "4")] {
        fails(&["-m", diffusion, "-p", "a", flag, value], 2, "is a model that denoises");
    }
    fails(&["-m", causal, "-p", "a", "--system", "b"], 1, "no chat template");
    let long = "a ".repeat(200);
    fails(&["-m", causal, "-p", &long, "-c", "64", "--raw"], 1, "context size of 64");
    // In a conversation a message that does not fit is no end, but through a pipe a failure.
    let (code, out, err) = talk(&["-m", causal, "-c", "64", "--raw", "-n", "2"], &format!("{long}\na\n"));
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("context size of 64") && err.contains("1 of the messages got no answer"), "{err}");
    assert!(!out.is_empty());
}
