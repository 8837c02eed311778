"""Writes a random GGUF with the sizes of Gemma 4 E4B in Q4_K_M. Started by scripts/make-synthetic-e4b.sh, which tells more.

Weights are spread as in synthetic_26b.py, and quantised as such files are: most matrices in Q4_K; the table, and the values'
and the projection down of every third layer and of the first and last eighth, in Q6_K. Standard library only.
"""

import argparse
import json
import math
import pathlib
import struct

from synthetic import (
    PARTIAL, Blocks, Numbers, Progress, bf16, even, f16, f32, fail, need_room, normal, vocabulary, write_tensors,
)

MINIATURE = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/tiny-diffusion"
ALIGNMENT = 32
# Numbers of the types, values of a block and its bytes.
F32, Q4_K, Q6_K, BF16 = (0, 1, 4), (12, 256, 144), (14, 256, 210), (30, 1, 2)
# Deviations of codes 0 to 15 and 0 to 63, all equally frequent.
CODES_4, CODES_6 = math.sqrt((16 * 16 - 1) / 12), math.sqrt((64 * 64 - 1) / 12)

REAL = {
    "layers": 42, "hidden": 2560, "heads": 8, "kv_heads": 2, "head": 256, "full_head": 512, "inner": 10240, "input": 256,
    "shared": 18, "window": 512, "full_every": 6, "vocabulary": 262144, "context": 131072,
}
SMALL = {
    "layers": 6, "hidden": 256, "heads": 2, "kv_heads": 1, "head": 128, "full_head": 256, "inner": 512, "input": 256,
    "shared": 3, "window": 32, "full_every": 3, "vocabulary": 1536, "context": 1024,
}


class Tensor:
    """A tensor to be; the shape as GGUF writes it, the length of a row first."""

    def __init__(self, name, form, shape, kind):
        self.name, self.form, self.shape, self.kind = name, form[0], shape, kind
        self.length = math.prod(shape) // form[1] * form[2]
        self.padding = -self.length % ALIGNMENT


def q4_k(deviation):
    """Eight scales and offsets of 32 each, and factors such that codes stand for numbers around 0."""
    scales = bytes([0xA0] * 8 + [0] * 4)
    factor = deviation / (32 * CODES_4)
    heads = (f16(step) + f16(7.5 * step) + scales for step in (factor * (0.8 + 0.4 * index / 255) for index in range(256)))
    return Blocks(tuple(heads), 128, (b"",) * 256)


def q6_k(deviation):
    """Sixteen scales of 16 each, and a factor."""
    factor = deviation / (16 * CODES_6)
    tails = (bytes([16] * 16) + f16(factor * (0.8 + 0.4 * index / 255)) for index in range(256))
    return Blocks((b"",) * 256, 192, tuple(tails))


def matrix(name, outputs, inputs, form=Q4_K):
    made = q4_k if form == Q4_K else q6_k
    return Tensor(f"{name}.weight", form, [inputs, outputs], made(inputs**-0.5))


def around(name, count, value):
    return Tensor(name, F32, [count], even(0.9 * value, 1.1 * value, f32))


def better(layer, layers):
    """Whether the tensors that matter most have more bits in a layer."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def full(sizes, layer):
    return layer % sizes["full_every"] == sizes["full_every"] - 1


def layer_tensors(sizes, layer):
    own, hidden, inner = f"blk.{layer}.", sizes["hidden"], sizes["inner"]
    size = sizes["full_head" if full(sizes, layer) else "head"]
    rich = Q6_K if better(layer, sizes["layers"]) else Q4_K
    yield matrix(f"{own}attn_q", sizes["heads"] * size, hidden)
    yield around(f"{own}attn_q_norm.weight", size, size**-0.25)
    if layer < sizes["layers"] - sizes["shared"]:
        yield matrix(f"{own}attn_k", sizes["kv_heads"] * size, hidden)
        yield matrix(f"{own}attn_v", sizes["kv_heads"] * size, hidden, rich)
        yield around(f"{own}attn_k_norm.weight", size, size**-0.25)
    yield matrix(f"{own}attn_output", hidden, sizes["heads"] * size)
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
        yield around(f"{own}{norm}.weight", hidden, 1)
    yield matrix(f"{own}ffn_gate", inner, hidden)
    yield matrix(f"{own}ffn_up", inner, hidden)
    yield matrix(f"{own}ffn_down", hidden, inner, rich)
    yield matrix(f"{own}inp_gate", sizes["input"], hidden)
    yield matrix(f"{own}proj", hidden, sizes["input"])
    yield around(f"{own}layer_output_scale.weight", 1, 0.9)


def tensors(sizes):
    hidden, width, words = sizes["hidden"], sizes["input"] * sizes["layers"], sizes["vocabulary"]
    pairs = sizes["full_head"] // 2
    # A quarter of the pairs turn; the others' frequencies are divided by something huge.
    yield Tensor("rope_freqs.weight", F32, [pairs],
                 b"".join(f32(1.0 if pair < pairs // 4 else 1e30) for pair in range(pairs)))
    yield matrix("token_embd", words, hidden, Q6_K)
    yield Tensor("per_layer_token_embd.weight", Q4_K, [width, words], q4_k(sizes["input"]**-0.5))
    yield Tensor("per_layer_model_proj.weight", BF16, [hidden, width], normal(hidden**-0.5, bf16))
    yield around("per_layer_proj_norm.weight", sizes["input"], 1)
    yield around("output_norm.weight", hidden, 1)
    for layer in range(sizes["layers"]):
        yield from layer_tensors(sizes, layer)


def text(value):
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def u32(value):
    return 4, struct.pack("<I", value)


def listed(kind, values):
    return 9, struct.pack("<IQ", kind, len(values)) + b"".join(values)


def kind_of(token, special):
    """Control, byte, unused or normal."""
    if token in special:
        return 3
    if token.startswith("<0x"):
        return 6
    return 5 if token.startswith("<unused") else 1


def metadata(sizes):
    with open(MINIATURE / "tokenizer.json", encoding="utf-8") as file:
        tokenizer = json.load(file)
    with open(MINIATURE / "chat_template.jinja", encoding="utf-8") as file:
        template = file.read()
    vocabulary(tokenizer, sizes["vocabulary"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    number, truth = (lambda value: (6, f32(value))), (lambda value: (7, bytes([value])))
    own = {
        "block_count": u32(sizes["layers"]), "context_length": u32(sizes["context"]),
        "embedding_length": u32(sizes["hidden"]), "feed_forward_length": u32(sizes["inner"]),
        "attention.head_count": u32(sizes["heads"]), "attention.head_count_kv": u32(sizes["kv_heads"]),
        "attention.key_length": u32(sizes["full_head"]), "attention.value_length": u32(sizes["full_head"]),
        "attention.key_length_swa": u32(sizes["head"]), "attention.value_length_swa": u32(sizes["head"]),
        "rope.dimension_count": u32(sizes["full_head"]), "rope.dimension_count_swa": u32(sizes["head"]),
        "rope.freq_base": number(1e6), "rope.freq_base_swa": number(1e4),
        "attention.layer_norm_rms_epsilon": number(1e-6), "final_logit_softcapping": number(30.0),
        "attention.sliding_window": u32(sizes["window"]), "attention.shared_kv_layers": u32(sizes["shared"]),
        "attention.sliding_window_pattern": listed(7, [bytes([not full(sizes, i)]) for i in range(sizes["layers"])]),
        "embedding_length_per_layer_input": u32(sizes["input"]),
    }
    tokens_of = {
        "model": (8, text("gemma4")), "tokens": listed(8, [text(token) for token in tokens]),
        "token_type": listed(5, [struct.pack("<i", kind_of(token, special)) for token in tokens]),
        "merges": listed(8, [text(" ".join(merge)) for merge in tokenizer["model"]["merges"]]),
        "bos_token_id": u32(2), "eos_token_id": u32(106), "unknown_token_id": u32(3), "padding_token_id": u32(0),
        "add_bos_token": truth(True), "add_space_prefix": truth(False),
    }
    yield "general.architecture", (8, text("gemma4"))
    yield "general.name", (8, text("random, with the sizes of Gemma 4 E4B"))
    yield "general.file_type", u32(15)
    yield from ((f"gemma4.{key}", value) for key, value in own.items())
    yield from ((f"tokenizer.ggml.{key}", value) for key, value in tokens_of.items())
    yield "tokenizer.chat_template", (8, text(template))


def header(sizes, all_tensors, seed):
    keys = [*metadata(sizes), ("general.description", (8, text(f"synthetic, seed {seed}")))]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(all_tensors), len(keys))]
    for key, (kind, value) in keys:
        parts += (text(key), struct.pack("<I", kind), value)
    at = 0
    for tensor in all_tensors:
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        parts += (text(tensor.name), struct.pack("<I", len(tensor.shape)), shape, struct.pack("<IQ", tensor.form, at))
        at += tensor.length + tensor.padding
    head = b"".join(parts)
    return head + bytes(-len(head) % ALIGNMENT)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--hollow", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    sizes = SMALL if args.small else REAL
    all_tensors = list(tensors(sizes))
    head = header(sizes, all_tensors, args.seed)
    length = sum(tensor.length + tensor.padding for tensor in all_tensors)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    if args.file.exists():
        with open(args.file, "rb") as file:
            same = file.read(len(head)) == head and args.file.stat().st_size == len(head) + length
        if not same:
            fail(f"{args.file} is something else: other sizes, or another seed; name another file, or remove this one")
    elif args.hollow:
        with open(args.file, "wb") as file:
            # The first tensor is no random one, and is looked at.
            file.write(head + all_tensors[0].kind)
            file.truncate(len(head) + length)
    else:
        args.file.with_name(args.file.name + PARTIAL).unlink(missing_ok=True)
        need_room(args.file.parent, length)
        progress = Progress(sum(tensor.length for tensor in all_tensors))
        write_tensors(args.file, head, all_tensors, Numbers(args.seed), progress)
    print(args.file)


if __name__ == "__main__":
    main()
