#!/usr/bin/env python3
"""PyTorch beside axe: what a denoising step of DiffusionGemma costs there, on the same checkpoint and processor.

    python3 -m venv VENV && VENV/bin/pip install -r scripts/peer/requirements.txt
    VENV/bin/python scripts/peer/diffusion_torch.py make DIR
    VENV/bin/python scripts/peer/diffusion_torch.py time DIR --dtype bfloat16
    VENV/bin/python scripts/peer/diffusion_torch.py compare DIR

`make` writes a random mid-size checkpoint (about a billion parameters, 2.1 GB, bf16 safetensors in shards): an eighth
of the released model's size, with its proportions. It has no tokenizer. The seed decides every value.

`time` runs the library's own `generate` over a random prompt and one canvas, and takes the time between one draft and
the next: the decoder, the sampler and the stop test as `generate` does them. Steps after the first are
self-conditioned; the first one is not and is not counted. It prints one JSON object.

`compare` runs `time` in a process of its own for each type and way to compute the experts, and prints them as a JSON
list, fastest first. A way that fails (`batched_mm` copies an expert for each row: 16 GB) is listed with its error.

`--dtype bfloat16` computes in bf16, with AMX where the processor has it; ONEDNN_VERBOSE=1 in the environment tells.
Nothing is fetched from anywhere.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

LAYERS = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention", "full_attention"]
TEXT = dict(
    vocab_size=65536, hidden_size=1408, intermediate_size=1056, num_hidden_layers=len(LAYERS), num_attention_heads=16,
    num_key_value_heads=8, num_global_key_value_heads=2, head_dim=256, global_head_dim=512,
    hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192, rms_norm_eps=1e-6, sliding_window=1024,
    layer_types=LAYERS,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    final_logit_softcapping=30.0, use_bidirectional_attention="vision", num_experts=32, top_k_experts=8,
    moe_intermediate_size=704, pad_token_id=0, eos_token_id=1, bos_token_id=2,
)
# The library builds no model without a vision tower; the smallest does.
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, patch_size=4, position_embedding_size=64, pooling_kernel_size=1, default_output_length=4,
)
TOP = dict(canvas_length=256, boi_token_id=65533, eoi_token_id=65534, image_token_id=65535)
GENERATION = dict(
    max_new_tokens=256, max_denoising_steps=48, t_min=0.4, t_max=0.8, stability_threshold=1, confidence_threshold=0.005,
    sampler_config={"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    eos_token_id=[1], pad_token_id=0, bos_token_id=2,
)


def spread(name, shape):
    """How the values of a tensor are drawn: ("uniform", low, high) or ("normal", standard deviation).

    Rows keep a size of about one through the layers, branches stay smaller than the row they are added to, and the
    router's scores and the logits differ enough that experts and tokens are chosen and not tossed for.
    """
    if name.endswith("layer_scalar"):
        return "uniform", 0.8, 1.1
    if name.endswith("embed_tokens.weight"):
        return "normal", 0.05
    if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
        return "uniform", 0.25, 0.75
    if name.endswith("router.proj.weight"):
        return "normal", 1.0
    if len(shape) == 1:
        return "uniform", 0.5, 1.5
    return "normal", shape[-1] ** -0.5


def make(args):
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

    text = {"model_type": "diffusion_gemma_text", "dtype": "bfloat16", "tie_word_embeddings": True,
            "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, **TEXT}
    config = {"tie_word_embeddings": True, "initializer_range": 0.02, **TOP, "text_config": text,
              "vision_config": {"model_type": "gemma4_vision", **VISION}}
    torch.set_default_dtype(torch.bfloat16)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**json.loads(json.dumps(config)))).eval()
    tensors = [*model.named_parameters(), *(b for b in model.named_buffers() if b[0].endswith("layer_scalar"))]
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for name, tensor in sorted(tensors):
            kind, *how = spread(name, tensor.shape)
            for part in tensor if tensor.ndim == 3 else [tensor]:
                values = torch.empty(part.shape, dtype=torch.float32)
                part.copy_(getattr(values, f"{kind}_")(*([0.0] if kind == "normal" else []), *how, generator=generator))
    args.dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.dir, max_shard_size="1GB")
    # As the released files spell it, not as the library would save it again.
    config = {"architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma",
              "dtype": "bfloat16", **config}
    (args.dir / "config.json").write_text(json.dumps(config, indent=2))
    (args.dir / "generation_config.json").write_text(json.dumps(GENERATION, indent=2))
    print(json.dumps({"dir": str(args.dir), "seed": args.seed, "parameters": sum(p.numel() for _, p in tensors)}))


class Clock:
    """Takes the place of a streamer: `generate` calls it with the prompt, each draft and the finished canvas."""

    def __init__(self):
        self.marks, self.cpu = [], []

    def put_draft(self, value):
        self.marks.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def put(self, value):
        pass

    def end(self):
        pass


def measure(args):
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import DiffusionGemmaForBlockDiffusion

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(
        args.dir, dtype=getattr(torch, args.dtype), attn_implementation=args.attention,
        experts_implementation=args.experts,
    ).eval()
    encoder_times = []
    began = []
    encoder = model.model.encoder
    encoder.register_forward_pre_hook(lambda *_: began.append(time.perf_counter()))
    encoder.register_forward_hook(lambda *_: encoder_times.append(time.perf_counter() - began[-1]))
    prompt = torch.randint(3, model.config.text_config.vocab_size - 8, (1, args.prompt))
    clock = Clock()
    for _ in range(args.rounds):
        clock.marks.append(None)
        clock.cpu.append(None)
        model.generate(prompt, max_new_tokens=model.config.canvas_length, max_denoising_steps=args.steps + 1,
                       streamer=clock, cache_implementation=args.cache)
    steps = [b - a for a, b in zip(clock.marks, clock.marks[1:]) if a is not None and b is not None]
    cpu = [b - a for a, b in zip(clock.cpu, clock.cpu[1:]) if a is not None and b is not None]
    if not steps:
        sys.exit("the canvas was finished before a self-conditioned step could be timed")
    result = {
        "torch": torch.__version__, "dtype": args.dtype, "experts": args.experts, "attention": args.attention,
        "cache": args.cache, "threads": args.threads, "prompt": args.prompt,
        "canvas": model.config.canvas_length, "steps": len(steps), "step_s": round(statistics.median(steps), 4),
        "fastest_step_s": round(min(steps), 4), "step_cpu_s": round(statistics.median(cpu), 4),
        "encoder_s": round(min(encoder_times), 4),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model.generate(prompt, max_new_tokens=model.config.canvas_length, max_denoising_steps=3)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)
    print(json.dumps(result))


def compare(args):
    results = []
    for dtype in ("float32", "bfloat16"):
        for experts in args.experts:
            command = [sys.executable, __file__, "time", str(args.dir), "--dtype", dtype, "--experts", experts,
                       "--attention", args.attention, "--threads", str(args.threads), "--prompt", str(args.prompt),
                       "--steps", str(args.steps), "--rounds", str(args.rounds), "--seed", str(args.seed)]
            done = subprocess.run(command, capture_output=True, text=True)
            try:
                results.append(json.loads(done.stdout.splitlines()[-1]))
            except (IndexError, ValueError):
                error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
                results.append({"dtype": dtype, "experts": experts, "error": error})
    results.sort(key=lambda result: result.get("step_s", float("inf")))
    print(json.dumps(results, indent=2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="write a random checkpoint")
    maker.set_defaults(run=make)
    timer = commands.add_parser("time", help="time one way to run it")
    timer.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    timer.add_argument("--experts", choices=["eager", "grouped_mm", "batched_mm"], default="grouped_mm")
    timer.add_argument("--cache", help="cache_implementation of generate; `static` compiles the decoder")
    timer.add_argument("--profile", action="store_true", help="a table of operators on stderr, after the timing")
    timer.set_defaults(run=measure)
    comparer = commands.add_parser("compare", help="time each type and way to compute the experts")
    comparer.add_argument("--experts", nargs="+", default=["eager", "grouped_mm"])
    comparer.set_defaults(run=compare)
    for command in (maker, timer, comparer):
        command.add_argument("dir", type=pathlib.Path, metavar="DIR", help="the checkpoint")
        command.add_argument("--seed", type=int, default=20260101, help="default: %(default)s")
    for command in (timer, comparer):
        command.add_argument("--threads", type=int, default=2, help="default: %(default)s")
        command.add_argument("--prompt", type=int, default=256, help="tokens (default: %(default)s)")
        command.add_argument("--steps", type=int, default=4, help="steps timed in a round (default: %(default)s)")
        command.add_argument("--rounds", type=int, default=2, help="runs of generate (default: %(default)s)")
        command.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
