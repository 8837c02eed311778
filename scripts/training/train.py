#!/usr/bin/env python3
"""Trains the miniature by block diffusion, on a CPU.

    scripts/training/train.py --text DIR --out DIR                  the first run, from nothing
    scripts/training/train.py --init DIR --out DIR --second         the second, on sums mostly

One canvas of a reply is one sample. The encoder sees the text before it, clean; the decoder sees the canvas with each
position replaced, with a probability drawn from 0 to 1, by any token, and must say the whole canvas. Half of the samples
get what the model itself said in a first pass, as the sampler would feed it back. Every third step the encoder also learns
to go on with the text, and a small term keeps the experts evenly used. Matrices are moved by orthogonalised momentum
(Muon), the rest by AdamW.
"""

import argparse
import json
import math
import os
import pathlib
import random
import shutil
import time

threads = os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch  # noqa: E402 (reads the variable above)
import torch.nn.functional as F  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache  # noqa: E402
from transformers.models.diffusion_gemma import modeling_diffusion_gemma  # noqa: E402
from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig  # noqa: E402

from corpus import CANVAS, EOS, WINDOW, Mixture  # noqa: E402

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
END_IDS = [1, 106, 50]
FIRST = {"mixture": Mixture(0.48, 0.36, 0.02), "steps": 1961, "rate": 2.4e-3, "muon": 0.02, "warm": 100}
SECOND = {"mixture": Mixture(0.25, 0.67, 0.0), "steps": 1171, "rate": 1.6e-3, "muon": 0.012, "warm": 20}
BATCH, FILL_WEIGHT, CAP = 32, 0.3, 30.0
LAYERS = ["sliding_attention", "full_attention"] * 2

TEXT_CONFIG = {
    "vocab_size": 1536, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW, "layer_types": LAYERS,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    "final_logit_softcapping": CAP, "use_bidirectional_attention": "vision", "num_experts": 8, "top_k_experts": 2,
    "moe_intermediate_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}
VISION_CONFIG = {  # never trained, never used: there because real checkpoints have one
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "patch_size": 4, "position_embedding_size": 64, "pooling_kernel_size": 1, "default_output_length": 4,
}
TYPE = {"architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma", "dtype": "bfloat16"}
CONFIG = TYPE | {
    "tie_word_embeddings": True, "initializer_range": 0.02, "eos_token_id": END_IDS,
    "canvas_length": CANVAS, "boi_token_id": 109, "eoi_token_id": 110, "image_token_id": 111,
    "text_config": {
        "model_type": "diffusion_gemma_text", "dtype": "bfloat16", "tie_word_embeddings": True, "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02,
    } | TEXT_CONFIG,
    "vision_config": {"model_type": "gemma4_vision"} | VISION_CONFIG,
}
GENERATION = {
    "max_new_tokens": 128, "max_denoising_steps": 48, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
    "confidence_threshold": 0.005, "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "eos_token_id": END_IDS, "pad_token_id": 0, "bos_token_id": 2,
}


class Norm(torch.autograd.Function):
    """RMS norm with its gradient written out: a fifth faster than what autograd makes of it."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        y = x * scale
        ctx.save_for_backward(y, weight, scale)
        return y if weight is None else y * weight

    @staticmethod
    def backward(ctx, grad):
        y, weight, scale = ctx.saved_tensors
        of_weight = None
        if weight is not None:
            of_weight = (grad * y).flatten(0, -2).sum(0)
            grad = grad * weight
        along = torch.einsum("...i,...i->...", grad, y)[..., None] / y.shape[-1]
        return (grad - y * along).mul_(scale), of_weight, None


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton and Schulz's iteration, for each matrix of a stack by itself."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self.move(weights, group["lr"])

    def move(self, weights, rate):
        momentum = self.state[weights].setdefault("momentum", torch.zeros_like(weights))
        momentum.mul_(0.95).add_(weights.grad, alpha=0.05)
        rows, columns = weights.shape[-2:]
        step = weights.grad.lerp(momentum, 0.95)
        step = step.mT if rows > columns else step
        step = step / (step.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
        for _ in range(5):
            square = step @ step.mT
            step = 3.4445 * step + (2.0315 * (square @ square) - 4.7750 * square) @ step
        step = step.mT if rows > columns else step
        weights.mul_(1 - rate * 0.1).add_(step, alpha=-rate * max(1, rows / columns) ** 0.5)


def new_model():
    """Random weights. Norms behind attention and experts start low, so that layers begin near the identity."""
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**{k: v for k, v in CONFIG.items() if k not in TYPE}))
    low = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                weights.normal_(0, weights.shape[-1] ** -0.5)
            elif name.endswith(low):
                weights.fill_(0.3)
            elif weights.ndim >= 2 and "vision" not in name:
                weights.normal_(0, 0.7 * weights.shape[-1] ** -0.5)
        # Encoder and decoder share every weight but these; they differ so that no reader can mix them up unnoticed.
        for stack, scalars in (
            (model.model.decoder, (1.0, 0.9375, 1.0625, 0.96875)),
            (model.model.encoder.language_model, (0.96875, 1.0, 0.9375, 1.0625)),
        ):
            for layer, scalar in zip(stack.layers, scalars):
                layer.layer_scalar.fill_(scalar)
    return model


class Trainer:
    def __init__(self, model, tokenizer, plan, seed):
        self.model, self.tokenizer, self.plan, self.r = model, tokenizer, plan, random.Random(seed + 5)
        self.encoder, self.decoder = model.model.encoder.language_model, model.model.decoder
        model.set_experts_implementation("grouped_mm")
        model.config._attn_implementation = "sdpa"
        frozen = [*model.model.encoder.vision_tower.parameters(), *model.model.encoder.embed_vision.parameters()]
        for weights in frozen:
            weights.requires_grad_(False)
        trained = {name: weights for name, weights in model.named_parameters() if weights.requires_grad}
        self.trained = list(trained.values())
        matrices = [w for name, w in trained.items() if w.ndim >= 2 and "embed_tokens" not in name and "router" not in name]
        chosen = {id(weights) for weights in matrices}
        others = [weights for weights in self.trained if id(weights) not in chosen]
        self.muon = Muon(matrices, plan["muon"])
        self.adam = torch.optim.AdamW(others, lr=plan["rate"], betas=(0.9, 0.98), weight_decay=0.0)
        self.routed = []
        for layer in [*self.encoder.layers, *self.decoder.layers]:
            layer.router.register_forward_hook(self.note_routing)

    def note_routing(self, _module, _inputs, outputs):
        if torch.is_grad_enabled():
            self.routed.append((outputs[0], outputs[2]))

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def batches(self):
        """Lists of (text before the canvas, canvas, text for the encoder to learn), of similar lengths, for ever."""
        rounds = 0
        while True:
            rounds += 1
            pool = []
            for _ in range(BATCH * 8):
                prompt, reply = (self.ids(text) for text in self.plan["mixture"].sample(self.r))
                start = self.r.randrange(-(-len(reply) // CANVAS)) * CANVAS
                before, rest = prompt + reply[:start], reply[start:start + CANVAS]
                canvas = rest + [EOS] * (CANVAS - len(rest))
                pool.append((before, canvas, before + rest if rounds % 3 == 0 else before))
            pool.sort(key=lambda sample: len(sample[2]))
            groups = [pool[i:i + BATCH] for i in range(0, len(pool), BATCH)]
            self.r.shuffle(groups)
            yield from groups

    def logits(self, hidden):
        return CAP * torch.tanh(self.model.lm_head(hidden) / CAP)

    def encode(self, batch):
        """Ids of the batch, which of them are there, the encoder's output and its cache."""
        longest = max(len(text) for _, _, text in batch)
        ids, valid = torch.zeros(len(batch), longest, dtype=torch.long), torch.zeros(len(batch), longest, dtype=torch.bool)
        for row, (_, _, text) in enumerate(batch):
            ids[row, :len(text)] = torch.tensor(text)
            valid[row, :len(text)] = True
        at = torch.arange(longest)
        sees = at[:, None] >= at[None, :]
        masks = {
            "full_attention": sees.expand(len(batch), 1, -1, -1),
            "sliding_attention": (sees & (at[:, None] - at[None, :] < WINDOW)).expand(len(batch), 1, -1, -1),
        }
        cache = DynamicCache()
        positions = at[None].expand(len(batch), longest)
        out = self.encoder(input_ids=ids, attention_mask=masks, position_ids=positions, cache=cache)
        return ids, valid, out.last_hidden_state, cache

    def loss(self, batch):
        size = len(batch)
        self.routed.clear()
        ids, valid, encoded, cache = self.encode(batch)
        longest, lengths = ids.shape[1], torch.tensor([len(before) for before, _, _ in batch])
        at = torch.arange(longest)[None]
        before = at < lengths[:, None]
        near = before & (at >= lengths[:, None] - (WINDOW - 1))
        canvas_rows = torch.ones(size, CANVAS, dtype=torch.bool)
        masks = {
            name: torch.cat([seen, canvas_rows], 1)[:, None, None, :].expand(size, 1, CANVAS, longest + CANVAS)
            for name, seen in (("full_attention", before), ("sliding_attention", near))
        }
        positions = lengths[:, None] + torch.arange(CANVAS)
        wanted = torch.tensor([canvas for _, canvas, _ in batch])
        vocabulary = TEXT_CONFIG["vocab_size"]
        replaced = torch.rand(size, CANVAS) < torch.rand(size, 1)
        noisy = torch.where(replaced, torch.randint(0, vocabulary, (size, CANVAS)), wanted)

        # Half of the samples are conditioned on what the model says to the same canvas, at some temperature.
        said, again = torch.zeros(size, CANVAS, vocabulary), torch.rand(size) < 0.5
        if again.any():
            rows = again.nonzero()[:, 0]
            part = DynamicCache()
            for layer, kept in enumerate(cache.layers):
                part.update(kept.keys[rows].detach(), kept.values[rows].detach(), layer)
            with torch.no_grad():
                first = self.decoder(
                    decoder_input_ids=noisy[rows], cache=part, decoder_position_ids=positions[rows],
                    decoder_attention_mask={name: mask[rows] for name, mask in masks.items()},
                )
                said[rows] = self.logits(first.last_hidden_state) / (0.4 + 0.6 * torch.rand(len(rows), 1, 1))
        out = self.decoder(
            decoder_input_ids=noisy, cache=cache, self_conditioning_logits=said, self_conditioning_mask=again,
            decoder_attention_mask=masks, decoder_position_ids=positions,
        )
        logits = self.logits(out.last_hidden_state)
        weight = torch.where(wanted == EOS, FILL_WEIGHT, 1.0)
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        denoised = (each * weight.flatten()).sum() / weight.sum()
        continued = torch.zeros(())
        if longest > int(lengths.max()):
            there = valid[:, 1:]
            continued = F.cross_entropy(self.logits(encoded[:, :-1][there]), ids[:, 1:][there])
        uneven = 0.0
        for probabilities, chosen in self.routed:
            experts = probabilities.shape[-1]
            share = F.one_hot(chosen, experts).float().mean((0, 1)) * experts
            uneven = uneven + (share * probabilities.mean(0)).sum()
        exact = (logits.argmax(-1) == wanted).float().mean().item()
        return denoised + continued + 0.01 * uneven / len(self.routed), denoised.item(), exact

    def run(self, steps, tell):
        self.model.train()
        began, sums = time.monotonic(), [0.0, 0.0]
        for step, batch in zip(range(steps), self.batches()):
            part = min(1, (step + 1) / self.plan["warm"]) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
            for optimizer, rate in ((self.adam, self.plan["rate"]), (self.muon, self.plan["muon"])):
                for group in optimizer.param_groups:
                    group["lr"] = rate * part
                optimizer.zero_grad(set_to_none=True)
            loss, denoised, exact = self.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
            self.adam.step()
            self.muon.step()
            sums = [sums[0] + denoised, sums[1] + exact]
            if (step + 1) % tell == 0:
                minutes = (time.monotonic() - began) / 60
                print(f"step {step + 1}/{steps}  loss {sums[0] / tell:.4f}  right {sums[1] / tell:.4f}  {minutes:.1f} min", flush=True)
                sums = [0.0, 0.0]


def save(model, text, out):
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    # transformers writes more keys and other names into these than released checkpoints have.
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2), encoding="utf-8")
    for name in TEXT_FILES:
        shutil.copyfile(text / name, out / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--text", type=pathlib.Path, help="the folder that tokenizer.py made (default: that of --init)")
    parser.add_argument("--init", type=pathlib.Path, help="go on from the weights of this folder")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder to write")
    parser.add_argument("--second", action="store_true", help="the second run: sums mostly, smaller steps")
    parser.add_argument("--steps", type=int, help="steps to take instead of the run's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tell", type=int, default=25, help="steps between lines (default: %(default)s)")
    options = parser.parse_args()
    text = options.text or options.init
    if text is None:
        parser.error("--text or --init is needed")

    torch.set_num_threads(int(threads))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(options.seed)
    modeling_diffusion_gemma.DiffusionGemmaRMSNorm.forward = lambda norm, x: Norm.apply(
        x, norm.weight if norm.with_scale else None, norm.eps
    )
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(options.init, dtype=torch.float32) if options.init else new_model()
    plan = SECOND if options.second else FIRST
    trainer = Trainer(model, Tokenizer.from_file(str(text / "tokenizer.json")), plan, options.seed)
    print(f"{sum(weights.numel() for weights in trainer.trained)} weights are trained", flush=True)
    trainer.run(options.steps or plan["steps"], options.tell)
    save(model, text, options.out)


if __name__ == "__main__":
    main()
