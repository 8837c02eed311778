"""Writes a random DiffusionGemma with the sizes of the 26B-A4B. Started by scripts/make-synthetic-26b.sh, which tells more.

Weights are spread so that what goes through the layers keeps its size: a matrix of n inputs has a deviation of 1 over the
square root of n, norms are near 1, and those of queries and keys make scores of about 1. Standard library only.
"""

import argparse
import json
import math
import pathlib
import shutil
import struct

from synthetic import (
    PARTIAL, Numbers, Progress, bf16, even, f16, fail, need_room, normal, vocabulary, write_tensors, write_whole,
)

MINIATURE = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/tiny-diffusion"
LAYERS_A_FILE = 6
# Bytes of the types that occur.
WIDTH = {"BF16": 2, "F16": 2, "U8": 1}
# Deviation of the codes 0 to 15, all equally frequent.
CODES = math.sqrt((16 * 16 - 1) / 12)

REAL = {
    "vocab_size": 262144, "hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
    "intermediate_size": 2112, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "sliding_window": 1024, "max_position_embeddings": 262144, "canvas_length": 256, "sliding_of": 6,
}
SMALL = {
    "vocab_size": 1536, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
    "intermediate_size": 96, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
    "sliding_window": 48, "max_position_embeddings": 1024, "canvas_length": 32, "sliding_of": 2,
}


class Tensor:
    """A tensor to be: its name, type, shape, and what its values are picked from."""

    def __init__(self, name, dtype, shape, kind):
        self.name, self.dtype, self.shape, self.kind = name, dtype, shape, kind
        self.length, self.padding = math.prod(shape) * WIDTH[dtype], 0


def full(sizes, layer):
    """Whether a layer sees everything; the last one does."""
    return layer % sizes["sliding_of"] == sizes["sliding_of"] - 1 or layer == sizes["num_hidden_layers"] - 1


def weights(name, outputs, inputs):
    return Tensor(f"{name}.weight", "BF16", [outputs, inputs], normal(inputs**-0.5, bf16))


def around(name, count, value):
    """A vector of numbers near that one."""
    return Tensor(name, "BF16", [count], even(0.9 * value, 1.1 * value, bf16))


def head_tensors(sizes):
    hidden, inner, decoder = sizes["hidden_size"], sizes["intermediate_size"], "model.decoder."
    conditioning = f"{decoder}self_conditioning."
    # Embeddings are multiplied by the root of the hidden size, and are then of size 1, as logits are.
    yield Tensor(f"{decoder}embed_tokens.weight", "BF16", [sizes["vocab_size"], hidden], normal(hidden**-0.5, bf16))
    yield around(f"{decoder}norm.weight", hidden, 1)
    yield around(f"{conditioning}pre_norm.weight", hidden, 1)
    yield weights(f"{conditioning}gate_proj", inner, hidden)
    yield weights(f"{conditioning}up_proj", inner, hidden)
    yield weights(f"{conditioning}down_proj", hidden, inner)
    for layer in range(sizes["num_hidden_layers"]):
        yield around(f"model.encoder.language_model.layers.{layer}.layer_scalar", 1, 0.9)


def layer_tensors(sizes, layer):
    own = f"model.decoder.layers.{layer}."
    hidden, inner, experts = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_experts"]
    heads, kind = sizes["num_attention_heads"], ("global_head_dim", "num_global_key_value_heads")
    size, kv_heads = (sizes[key] for key in (kind if full(sizes, layer) else ("head_dim", "num_key_value_heads")))
    yield weights(f"{own}self_attn.q_proj", heads * size, hidden)
    yield weights(f"{own}self_attn.k_proj", kv_heads * size, hidden)
    if not full(sizes, layer):
        yield weights(f"{own}self_attn.v_proj", kv_heads * size, hidden)
    yield weights(f"{own}self_attn.o_proj", hidden, heads * size)
    for norm in ("q_norm", "k_norm"):
        yield around(f"{own}self_attn.{norm}.weight", size, size**-0.25)
    for norm in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm_2",
                 "post_feedforward_layernorm", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        yield around(f"{own}{norm}.weight", hidden, 1)
    yield weights(f"{own}mlp.gate_proj", inner, hidden)
    yield weights(f"{own}mlp.up_proj", inner, hidden)
    yield weights(f"{own}mlp.down_proj", hidden, inner)
    yield weights(f"{own}router.proj", experts, hidden)
    # The router divides by the root of the hidden size: scores of about 1.
    yield around(f"{own}router.scale", hidden, hidden**0.5)
    yield around(f"{own}router.per_expert_scale", experts, 1)
    yield around(f"{own}layer_scalar", 1, 0.9)


def expert_tensors(sizes, layer):
    own = f"model.decoder.layers.{layer}.experts."
    experts, hidden, width = sizes["num_experts"], sizes["hidden_size"], sizes["moe_intermediate_size"]
    zeros = even(7, 8, lambda value: f16(round(value)))
    for name, outputs, inputs, group in (("gu", 2 * width, hidden, 128), ("dn", hidden, width, 64)):
        scale = 1 / (CODES * math.sqrt(inputs))
        yield Tensor(f"{own}{name}_q", "U8", [experts, outputs, inputs // 2], None)
        yield Tensor(f"{own}{name}_s", "F16", [experts, outputs, inputs // group], even(0.8 * scale, 1.2 * scale, f16))
        yield Tensor(f"{own}{name}_z", "F16", [experts, outputs, inputs // group], zeros)


def config(sizes):
    with open(MINIATURE / "config.json", encoding="utf-8") as file:
        found = json.load(file)
    layers = sizes["num_hidden_layers"]
    text = found["text_config"]
    text |= {key: value for key, value in sizes.items() if key not in ("canvas_length", "sliding_of")}
    text["layer_types"] = ["full_attention" if full(sizes, layer) else "sliding_attention" for layer in range(layers)]
    found["canvas_length"] = sizes["canvas_length"]
    # There is no vision tower.
    for key in ("vision_config", "boi_token_id", "eoi_token_id", "image_token_id"):
        found.pop(key, None)
    return found


def tokenizer(sizes):
    """The miniature's, with a token for each row of the table."""
    with open(MINIATURE / "tokenizer.json", encoding="utf-8") as file:
        found = json.load(file)
    vocabulary(found, sizes["vocab_size"])
    return found


def files(sizes):
    """Names of the files of tensors, with those in each."""
    layers = range(sizes["num_hidden_layers"])
    groups = [list(head_tensors(sizes))]
    for first in layers[::LAYERS_A_FILE]:
        group = layers[first:first + LAYERS_A_FILE]
        groups.append([tensor for layer in group for tensor in layer_tensors(sizes, layer)])
    for index, group in enumerate(groups):
        yield f"model-{index + 1:05}-of-{len(groups):05}.safetensors", group
    for layer in layers:
        yield f"experts_{layer:03}.safetensors", list(expert_tensors(sizes, layer))


def header(tensors, seed):
    """The description at the start of a file."""
    described, at = {"__metadata__": {"synthetic": f"seed {seed}"}}, 0
    for tensor in tensors:
        offsets = [at, at + tensor.length]
        described[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        at += tensor.length
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--hollow", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    sizes = dict(SMALL if args.small else REAL)
    most = sizes["num_hidden_layers"]
    sizes["num_hidden_layers"] = most if args.layers is None else args.layers
    if not 1 <= sizes["num_hidden_layers"] <= most:
        fail(f"--layers is {args.layers}; expected 1 to {most}")
    args.folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: (tensors, header(tensors, args.seed)) for name, tensors in files(sizes)}
    foreign = [path.name for path in args.folder.glob("*.safetensors") if path.name not in wanted]
    missing = []
    for name, (tensors, head) in wanted.items():
        path, length = args.folder / name, sum(tensor.length for tensor in tensors)
        if not path.exists():
            missing.append((name, length))
            continue
        with open(path, "rb") as file:
            same = file.read(len(head)) == head and path.stat().st_size == len(head) + length
        if not same:
            foreign.append(name)
    if foreign:
        fail(f"{args.folder} holds {sorted(foreign)[0]} of something else: other sizes, or another seed; name another folder, or "
             "empty this one")
    # Files that no command can have been writing to: this one begins them anew.
    for path in args.folder.glob(f"*{PARTIAL}"):
        path.unlink()
    total = sum(tensor.length for tensors, _ in wanted.values() for tensor in tensors)
    left = sum(length for _, length in missing)
    need_room(args.folder, 0 if args.hollow else left)
    progress = Progress(total)
    progress.skip(total - left)
    numbers = None if args.hollow else Numbers(args.seed)
    for name, length in missing:
        tensors, head = wanted[name]
        if args.hollow:
            with open(args.folder / name, "wb") as file:
                file.write(head)
                file.truncate(len(head) + length)
            continue
        write_tensors(args.folder / name, head, tensors, numbers, progress)
    index = {"metadata": {"total_size": total}, "weight_map": {
        tensor.name: name for name, (tensors, _) in wanted.items() if name.startswith("model-") for tensor in tensors}}
    texts = {"model.safetensors.index.json": index, "tokenizer.json": tokenizer(sizes), "config.json": config(sizes),
             "w4_meta.json": {"format": "dg-w4a16-v1", "synthetic": True, "seed": args.seed}}
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MINIATURE / name, args.folder / name)
    for name, value in texts.items():
        write_whole(args.folder / name, [json.dumps(value, ensure_ascii=False).encode()])
    print(args.folder)


if __name__ == "__main__":
    main()
