#!/usr/bin/env python3
"""Makes the miniature's tokenizer, as Gemma's is built: BPE over text whose spaces are ▁, bytes for what it lacks.

    scripts/training/tokenizer.py DIR     writes tokenizer.json, tokenizer_config.json and chat_template.jinja

Special tokens have the ids of the real model, so the code that serves either needs no other numbers.
"""

import json
import pathlib
import random
import shutil
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from corpus import FACTS, WORDS, Mixture

HERE = pathlib.Path(__file__).resolve().parent
VOCABULARY = 1536
SPECIAL = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>",
    49: "<tool_call|>", 50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>",
    101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}
NEWLINE, BYTES, LETTERS = 107, 238, 494


def texts():
    """What merges are learnt from."""
    r, mixture, found = random.Random(0), Mixture(0.36, 0.5, 0.07, lists=1), []
    for questions, answer in FACTS:
        found += questions * 12 + [answer] * 12
    for _ in range(4000):
        found += mixture.turn(r)
    return found + [" ".join(WORDS)] * 100 + ["user", "model", "system", "thought", "I need the answer."] * 50


def merges(alphabet):
    """Pairs to merge, most frequent first: letters only; digits and marks stay single, as in Gemma's vocabulary."""
    learner = Tokenizer(models.BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[A-Za-z]+|."), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - LETTERS, initial_alphabet=alphabet, special_tokens=[], min_frequency=2, show_progress=False
    )
    learner.train_from_iterator(texts(), trainer)
    for pair in json.loads(learner.to_str())["model"]["merges"]:
        yield tuple(pair) if isinstance(pair, list) else tuple(pair.split(" "))


def build():
    # Everything below the letters has a fixed id: special tokens, line breaks, the 256 bytes, and gaps.
    fixed = {number: f"<unused{number}>" for number in range(LETTERS)} | SPECIAL
    fixed |= {NEWLINE: "\n", NEWLINE + 1: "\n\n"} | {BYTES + byte: f"<0x{byte:02X}>" for byte in range(256)}
    ids = {token: number for number, token in fixed.items()}
    alphabet = ["▁"] + [chr(code) for code in range(33, 127)]
    for letter in alphabet:
        ids[letter] = len(ids)
    kept = []
    for left, right in merges(alphabet):
        if left in ids and right in ids and left + right not in ids and len(ids) < VOCABULARY:
            ids[left + right] = len(ids)
            kept.append((left, right))
    ids |= {f"<unused{number}>": number for number in range(len(ids), VOCABULARY)}

    made = Tokenizer(models.BPE(vocab=ids, merges=[*kept, ("\n", "\n")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for _, token in sorted(SPECIAL.items())])
    return made


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "mask_token": "<mask>", "add_bos_token": True, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 2048, "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")


if __name__ == "__main__":
    main()
