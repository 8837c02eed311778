#!/usr/bin/env python3
"""Measures the miniature in PyTorch, by transformers' own `generate`, f32: what the daemon is compared with.

    scripts/training/evaluate.py DIR --out tests/fixtures/tiny-diffusion-sets.json

Every question is drawn --draws times (20), each with its own noise. Writes the sets with their questions and answers, the
share of exact answers, and the mean denoising steps per canvas.
"""

import argparse
import json
import pathlib

import torch
from tokenizers import Tokenizer
from transformers import DiffusionGemmaForBlockDiffusion

from corpus import render, sets
from train import END_IDS


class Counted:
    """Counts denoising steps and canvases of each row of a batch by itself: rows that are done wait for the others."""

    def __init__(self, model):
        self.model, self.steps, self.canvases, self.done = model, None, None, None
        kind = type(model)
        step, finalize = kind._denoising_step, kind._finalize_canvas
        counted = self

        def denoising_step(model, **named):
            counted.steps += ~(named["finished_denoising"] | counted.done)
            return step(model, **named)

        def finalize_canvas(**named):
            counted.canvases += ~counted.done
            ids, done = finalize(**named)
            counted.done = done.clone()
            return ids, done

        kind._denoising_step, kind._finalize_canvas = denoising_step, staticmethod(finalize_canvas)

    def generate(self, ids, draws):
        self.steps, self.canvases = torch.zeros(draws, dtype=torch.long), torch.zeros(draws, dtype=torch.long)
        self.done = torch.zeros(draws, dtype=torch.bool)
        rows = self.model.generate(torch.tensor([ids] * draws)).sequences
        return rows[:, len(ids):].tolist(), int(self.steps.sum()), int(self.canvases.sum())


def measure(model, tokenizer, pairs, draws):
    """(share of exact answers, mean steps per canvas) over these questions."""
    right, steps, canvases = 0, 0, 0
    for question, expected in pairs:
        # Any seed would do; this one is the question's own, so that a set can be measured alone.
        torch.manual_seed(len(question) * 1009 + sum(map(ord, question)))
        ids = tokenizer.encode(render([("user", question)]), add_special_tokens=False).ids
        rows, took, made = model.generate(ids, draws)
        steps, canvases = steps + took, canvases + made
        for row in rows:
            end = next((at for at, token in enumerate(row) if token in END_IDS), len(row))
            right += tokenizer.decode(row[:end], skip_special_tokens=True) == expected
    return right / (len(pairs) * draws), steps / canvases


def text_of(measured, draws):
    """The file: JSON with a pair a line, so that a change shows as one."""
    parts = []
    for name, (exact, steps, pairs) in measured.items():
        lines = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs)
        parts.append(f'"{name}": {{"exact": {round(exact, 4)}, "steps": {round(steps, 4)}, "pairs": [\n{lines}]}}')
    return f'{{\n"draws": {draws},\n"sets": {{\n' + ",\n".join(parts) + "\n}\n}\n"


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=pathlib.Path, help="a Hugging Face directory")
    parser.add_argument("--draws", type=int, default=20, help="answers to each question (default: %(default)s)")
    parser.add_argument("--only", default="", help="only the sets with this in their name")
    parser.add_argument("--out", type=pathlib.Path, help="the file to write")
    options = parser.parse_args()
    model = Counted(DiffusionGemmaForBlockDiffusion.from_pretrained(options.model, dtype=torch.float32).eval())
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    measured = {}
    for name, pairs in sets().items():
        if options.only in name:
            exact, steps = measure(model, tokenizer, pairs, options.draws)
            print(f"{name:<26} {len(pairs):>4} x {options.draws}  {exact:.2%} exact  {steps:.3f} steps a canvas", flush=True)
            measured[name] = (exact, steps, pairs)
    if options.out:
        options.out.write_text(text_of(measured, options.draws), encoding="utf-8")


if __name__ == "__main__":
    main()
