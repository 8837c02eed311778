//! The law of block decoding on real weights: every width gives the tokens of one a pass, whatever the sampling.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod block_support;
mod support;

use std::path::Path;

use axe::checkpoint::gguf::Gguf;
use axe::decode::block::{Costs, Measured};
use axe::decode::{BlockOptions, BlockStats, CausalBackend, Sampling};
use axe::ops::{CacheKind, Products};
use axe::text::{Specials, Tokenizer};
use block_support::{auto, fixed, generate, most};
use support::{fixture, open_by, open_model, real_model, units};

/// Prompts of the law; a debug build tries a part of them.
const PROMPTS: usize = if cfg!(debug_assertions) { 6 } else { 200 };

fn tokenizer(path: &Path) -> Tokenizer {
    Tokenizer::new(axe::load::vocabulary(&Gguf::open(path).unwrap()).unwrap()).unwrap()
}

/// Texts of several sorts: prose, code, lists, text to be repeated.
fn texts() -> Vec<String> {
    let subjects = [
        "the old lighthouse",
        "a river in spring",
        "my grandmother",
        "the night train",
        "a small garden",
        "the city library",
        "an empty harbour",
        "the last bus",
        "a clockmaker",
        "the first snow",
    ];
    let ways = [
        |s: &str| format!("Once upon a time there was {s}, and"),
        |s: &str| format!("Write one sentence about {s}.\n"),
        |s: &str| format!("- {s}\n- {s}\n- {s}\n-"),
        |s: &str| {
            format!(
                "def describe():\n    name = \"{s}\"\n    print(name)\n\ndef describe_twice():\n    name ="
            )
        },
        |s: &str| format!("Repeat: {s} was here, and {s} will be here again. Answer: {s} was"),
        |s: &str| format!("{{\"title\": \"{s}\", \"pages\": 12}}\n{{\"title\": \"{s}\", \"pages\":"),
        |s: &str| format!("Q: What is {s}?\nA: It is {s}.\nQ: What is {s}?\nA:"),
        |s: &str| format!("<p>{s}</p>\n<p>{s}</p>\n<p>"),
        |s: &str| format!("The quick brown fox saw {s}. The quick brown fox"),
        |s: &str| format!("for i in range(10):\n    print(i, \"{s}\")\nfor j in range(10):\n"),
    ];
    let both = |s: &str, t: &str| format!("{s} and {t}");
    let doubled = subjects.iter().zip(subjects.iter().skip(3).chain(&subjects)).map(|(s, t)| both(s, t));
    let all: Vec<String> = subjects.iter().map(|s| (*s).to_owned()).chain(doubled).collect();
    all.iter().flat_map(|subject| ways.map(|way| way(subject))).collect()
}

/// Samplings by turns: greedy, warm, cut, penalised.
fn sampling(prompt: usize, seed: u64) -> Sampling {
    let neutral = Sampling { seed: seed * 1000 + prompt as u64, ..Sampling::default() };
    match (prompt + seed as usize) % 5 {
        0 => neutral,
        1 => Sampling { temperature: 0.8, ..neutral },
        2 => Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, ..neutral },
        3 => Sampling { repetition_penalty: 1.2, ..neutral },
        _ => Sampling { temperature: 0.8, presence_penalty: 0.5, frequency_penalty: 0.3, ..neutral },
    }
}

fn show(what: &str, stats: &BlockStats) {
    let guesses: Vec<String> =
        stats.proposers.iter().map(|p| format!("{} {}/{}", p.name, p.accepted, p.offered)).collect();
    println!(
        "{what}: {} tokens in {} passes, {:.2} a pass, {:.2} rows a pass; accepted {}",
        stats.committed,
        stats.passes,
        stats.committed as f64 / stats.passes as f64,
        stats.evaluated as f64 / stats.passes as f64,
        guesses.join(", ")
    );
}

/// Every prompt with three seeds at every width, on one model that keeps its experience.
fn law(path: &Path, products: Products, prompts: &[Vec<u32>], tokens: usize) {
    let open = || open_by(products, path, 256, 64, CacheKind::F16);
    let mut alone = CausalBackend::new(open(), fixed(1));
    let sizes: [(&str, BlockOptions); 4] = [
        ("4", fixed(4)),
        ("8", fixed(8)),
        ("16", BlockOptions { pool: true, ..fixed(16) }),
        ("auto", BlockOptions { pool: true, ..auto() }),
    ];
    // One model is enough for all widths: what it holds in its cache belongs to the same prompt.
    let mut blocks: Vec<(&str, CausalBackend, BlockStats)> = sizes
        .into_iter()
        .map(|(name, options)| (name, CausalBackend::new(open(), options), BlockStats::default()))
        .collect();
    for seed in 0..3 {
        for (place, prompt) in prompts.iter().enumerate() {
            let sampling = sampling(place, seed);
            let expected = generate(&mut alone, prompt, &sampling, &most(tokens)).tokens;
            for (name, backend, sum) in &mut blocks {
                let told = generate(backend, prompt, &sampling, &most(tokens));
                assert_eq!(
                    told.tokens,
                    expected,
                    "{}: prompt {place}, seed {seed}, width {name}, {sampling:?}",
                    path.display()
                );
                sum.add(&told.stats);
            }
        }
    }
    let mut rows = 0;
    for (name, _, stats) in &blocks {
        show(&format!("{} at width {name}", path.file_name().unwrap().display()), stats);
        rows += stats.evaluated - stats.passes;
    }
    assert!(rows > prompts.len() * 3, "hardly a guess was evaluated");
}

#[test]
fn small_models_say_the_same_at_every_width() {
    for name in ["llama", "gemma3"] {
        let path = fixture(&format!("causal-families/{name}.gguf"));
        let prompts: Vec<Vec<u32>> = (0..PROMPTS as u32)
            .map(|p| (0..4 + p % 40).map(|i| 3 + (i * i * 31 + i * 7 + p * 13) % (20 + p)).collect())
            .collect();
        law(&path, Products::Vector, &prompts, 20);
    }
}

#[test]
fn codes_of_any_sort_say_the_same_at_every_width() {
    let prompts: Vec<Vec<u32>> = (0..PROMPTS as u32 / 4)
        .map(|p| (0..4 + p % 40).map(|i| 3 + (i * i * 31 + i * 7 + p * 13) % (20 + p)).collect())
        .collect();
    for name in ["Q4_K_S", "Q8_0"] {
        for &products in units() {
            law(&fixture(&format!("quant-types/{name}.gguf")), products, &prompts, 20);
        }
    }
}

#[test]
fn a_real_model_says_the_same_at_every_width() {
    let path = real_model("smollm2-135m-instruct-q4_1.gguf");
    let tokenizer = tokenizer(&path);
    let prompts: Vec<Vec<u32>> =
        texts().iter().take(PROMPTS).map(|text| tokenizer.encode(text, Specials::Text)).collect();
    assert_eq!(prompts.len(), PROMPTS);
    // As such a model is served: by the best that this processor has.
    law(&path, *units().last().unwrap(), &prompts, 6);
}

/// Tokens a pass by sort of text, and what guesses were worth. Prints, and asks for what each sort must give at least.
#[test]
#[ignore = "a measurement; run it by name, in a release build"]
fn tokens_a_pass_by_sort_of_text() {
    let path = real_model("smollm2-135m-instruct-q4_1.gguf");
    let tokenizer = tokenizer(&path);
    let code = "import json\nimport sys\n\n\ndef load(path):\n    with open(path) as file:\n        return json.load(file)\n\n\ndef save(path, data):\n    with open(path, \"w\") as file:\n        json.dump(data, file)\n\n\ndef main():\n    data = load(sys.argv[1])\n    data[\"count\"] = len(data[\"items\"])\n    save(sys.argv[2], data)\n\n\nif __name__ == \"__main__\":\n    main()\n";
    let letter = "From: Anna Berg <anna.berg@example.org>\nTo: Office <office@example.org>\nDate: 12 March 2024\nSubject: Invoice 4711\n\nDear Mr. Smith, please find attached invoice 4711 over 1,250 euros, due on 30 April 2024. The order number is A-9938-X. Kind regards, Anna Berg, Berg & Sons, 12 Harbour Street, Kiel.\n";
    let chat = |text: &str| {
        format!(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )
    };
    let sets = [
        ("prose", chat("Write a short story about a lighthouse keeper who finds a letter.")),
        (
            "code",
            chat("Write a Python class for a stack with push, pop, peek and size, and a few tests for it."),
        ),
        (
            "editing",
            chat(&format!(
                "Repeat this file with one change: rename the function load to read.\n\n```python\n{code}```"
            )),
        ),
        (
            "extraction",
            chat(&format!(
                "Extract sender, date, subject, amount, due date and order number from this letter as JSON.\n\n{letter}"
            )),
        ),
        ("chat", chat("What are the three primary colours, and how do they mix?")),
    ];
    let mut model = open_model(&path, 1024, 256, CacheKind::F16);
    let measured = Measured::new("test", &mut model).unwrap();
    println!("{measured:?}");
    drop(model);
    for temperature in [0.0, 0.8] {
        for (name, options) in
            [("1", fixed(1)), ("4", fixed(4)), ("8", fixed(8)), ("16", fixed(16)), ("auto", auto())]
        {
            let model = open_model(&path, 1024, 256, CacheKind::F16);
            let mut backend = CausalBackend::new(model, options).with_costs(Costs::new(&measured, |_| 1.0));
            for (set, text) in &sets {
                let prompt = tokenizer.encode(text, Specials::Parse);
                let sampling = Sampling { temperature, seed: 7, ..Sampling::default() };
                generate(&mut backend, &prompt, &sampling, &most(1));
                let began = std::time::Instant::now();
                let told = generate(&mut backend, &prompt, &sampling, &most(200));
                let seconds = began.elapsed().as_secs_f64();
                show(
                    &format!("T {temperature} B {name:>4} {set:<10} {:6.1} tok/s", 200.0 / seconds),
                    &told.stats,
                );
            }
        }
    }
}
