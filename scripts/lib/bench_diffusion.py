"""Measures denoising steps of axed, and of PyTorch beside it. Started by scripts/bench.sh, which sets it up.

Rounds are paired: in each round axed and every number type of PyTorch time the same checkpoint, one process after the
other, in an order that turns. Figures are medians over the rounds; a ratio is the median of the rounds' ratios. A step
is one of a canvas after its first: the decoder over all positions, conditioned on the step before, the head, and the
choice of tokens. Memory is the process's resident memory at most: for axed mapped weights and the OpenCL runtime
included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

VARIANTS = {
    "axed": {},
    "axed q8": {"AXE_MODEL_DENSE": "q8"},
    "axed fma": {"AXE_DEVICE_MATRIX_UNIT": "false"},
}


def run(command, env=None):
    """The JSON object that a command prints last."""
    done = subprocess.run(command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)


def axed(args, variant):
    command = [args.axed, "bench-denoise", "--model", args.model, "--prompt", str(args.prompt), "--steps", str(args.steps)]
    found = run([*command, "--json"], VARIANTS[variant] | {"AXE_DEVICE_THREADS": str(args.threads)})
    return {"step_s": found["step_s"], "encode_s": found["encode_s"], "resident": found["peak_resident_bytes"],
            "device": found["device_bytes"]}


def torch(args, dtype):
    command = [args.peer_python, args.peer_script, "time", args.model, "--dtype", dtype, "--experts", "eager",
               "--threads", str(args.threads), "--prompt", str(args.prompt), "--steps", str(args.steps), "--rounds", "1"]
    found = run(command, {"OMP_NUM_THREADS": str(args.threads)})
    return {"step_s": found["step_s"], "encode_s": found.get("encoder_s"), "resident": found["peak_rss_mib"] << 20, "device": None}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axed", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-script")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--build", default="")
    parser.add_argument("--runtime", default="")
    parser.add_argument("--json")
    args = parser.parse_args()

    sides = {name: lambda name=name: axed(args, name) for name in VARIANTS}
    if args.peer_python:
        sides |= {f"torch {dtype}": lambda dtype=dtype: torch(args, dtype) for dtype in ("bfloat16", "float32")}
    rounds = []
    for index in range(args.rounds):
        names = list(sides)
        names = names[index % len(names):] + names[:index % len(names)]
        found = {name: sides[name]() for name in names}
        rounds.append(found)
        print(f"round {index + 1}: " + ", ".join(f"{n} {found[n]['step_s']:.3f} s" for n in sides), file=sys.stderr)

    print(f"axed {args.build}; {args.runtime}; {args.threads} threads, {args.rounds} rounds, "
          f"prompt {args.prompt}, medians")
    print(f"{'':16} {'step':>9} {'encode':>9} {'resident':>10}")
    for name in sides:
        def median(key, name=name):
            values = [r[name][key] for r in rounds if r[name][key] is not None]
            return statistics.median(values) if values else None
        encode = median("encode_s")
        print(f"{name:16} {median('step_s'):7.3f} s {f'{encode:7.3f} s' if encode else '        -'} "
              f"{median('resident') / 2**20:6.0f} MiB")
    if args.peer_python:
        peers = [name for name in sides if name.startswith("torch")]
        best = min(peers, key=lambda name: statistics.median(r[name]["step_s"] for r in rounds))
        for name in VARIANTS:
            faster = statistics.median(r[best]["step_s"] / r[name]["step_s"] for r in rounds)
            memory = statistics.median(r[name]["resident"] / r[best]["resident"] for r in rounds)
            print(f"{name} beside {best}, the better of PyTorch: {faster:.2f}x as fast, {memory:.2f} of the memory")
    if args.json:
        text = json.dumps({"build": args.build, "runtime": args.runtime, "rounds": rounds}, indent=1)
        if args.json == "-":
            print(text)
        else:
            with open(args.json, "w", encoding="utf-8") as out:
                out.write(text + "\n")


if __name__ == "__main__":
    main()
