"""Measures block decoding of axed at several block sizes, and llama.cpp beside it. Started by scripts/bench.sh.

Every text of scripts/prompts is answered by every side with the same number of tokens: as many as axed needs to come to an
end, --tokens at most. Rounds are paired: in each round all sides do the same work one
right after the other, in an order that turns, and those that wait idle. A round begins with new processes, so that no
side has seen a text before; a text nobody measures warms them up. Sides tell their own times:
  time        from the end of the prompt's encoding to the last token, all texts of a set together
  tok/s       tokens after each text's first over that time
  tok/pass    tokens over the passes that made them; of llama.cpp tokens over tokens less accepted guesses
Figures are medians over the rounds, and ratios medians of the rounds' ratios: over axed with block size 1, and over the
better of llama.cpp's plain decoding and its own kinds of n-gram speculation, chosen for each set.

axed must write the same text at every block size, or this fails: block decoding changes nothing but the time.
"""

import argparse
import contextlib
import os
import pathlib
import re
import socket
import statistics
import sys
import tempfile
import time

from bench import Axed, Peer, cpu_seconds, machine_seconds, write_report

SETS = ("prose", "code", "editing", "extraction", "chat")
# llama.cpp's speculation without a second model, as it is set up by default; plain decoding first.
PEERS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
WARM_UP = "The river is wide and slow where it meets the sea, and the old ferry"
SEED = 1
# Answers that end at once say nothing about speed.
FEWEST = 8


class Text:
    """A prompt in both its forms: messages for models that chat, a text to continue for those that do not."""

    def __init__(self, path):
        self.name = path.stem
        parts = re.split(r"^@(\w+)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        sections = dict(zip(parts[1::2], (part.strip("\n") for part in parts[2::2])))
        if parts[0].strip() or not {"chat", "raw"} >= set(sections) - {"material"} or "chat" not in sections:
            sys.exit(f"error: {path}: expected the sections @chat and, if need be, @material and @raw")
        material = sections.get("material", "")
        chat = sections["chat"].replace("{material}", material)
        self.messages = turns(chat)
        self.raw = sections.get("raw", chat).replace("{material}", material)

    def request(self, chats):
        return {"messages": self.messages} if chats else {"prompt": self.raw}


def turns(text):
    """Messages of a conversation, which ends with the name before what is still to be said; a text in which nobody is named
    is one message."""
    parts = re.split(r"^(User|Assistant): ", text.removesuffix("Assistant:"), flags=re.MULTILINE)
    if len(parts) == 1:
        return [{"role": "user", "content": text}]
    return [{"role": who.lower(), "content": what.strip()} for who, what in zip(parts[1::2], parts[2::2])]


def read_sets(folder, names, quick):
    """Texts by set."""
    sets = {}
    for name in names:
        paths = sorted(pathlib.Path(folder, name).glob("*.txt"))
        if not paths:
            sys.exit(f"error: there are no prompts in {pathlib.Path(folder, name)}")
        sets[name] = [Text(path) for path in (paths[:1] if quick else paths)]
    return sets


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Blocks(Axed):
    """axed at one block size."""

    def __init__(self, options, model, folder, size):
        self.size, self.temperature = size, options.temperature
        settings = {"AXE_DECODE_BLOCK_SIZE": size, "AXE_MODEL_CONTEXT_LENGTH": str(options.context)}
        super().__init__(options.axed, model, folder, free_port(), f"axed-{size}", settings)

    def ask(self, request, tokens, to_the_end=False):
        """The answer, its text, and its figures in the words of this bench."""
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        body = request | {
            "model": self.model, "max_tokens": tokens, "temperature": self.temperature, "seed": SEED,
            "ignore_eos": not to_the_end,
        }
        reply = self.client.post(path, body)
        if reply.status != 200:
            sys.exit(f"error: {self.name} answered {reply.status}: {reply.body[:500]!r}")
        answer = reply.json()
        axe, usage, choice = answer["axe"], answer["usage"], answer["choices"][0]
        self.device = axe["device"]
        return {
            "text": choice["message"]["content"] if "messages" in request else choice["text"],
            "ended": choice["finish_reason"] == "stop",
            "prompt": usage["prompt_tokens"], "tokens": usage["completion_tokens"],
            "seconds": axe["elapsed_s"] - axe["queue_s"] - axe["prefill_s"], "passes": axe["passes"],
        }

    def chats(self):
        """Whether the model has a chat template."""
        body = {"model": self.model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
        return self.client.post("/v1/chat/completions", body).status == 200


class Llama(Peer):
    """llama.cpp with one kind of speculation."""

    def __init__(self, options, model, folder, kind):
        self.size, self.temperature = kind, options.temperature
        name = "llama.cpp" if kind == "none" else f"llama.cpp-{kind}"
        super().__init__(options.peer_python, model, options.threads, folder, name, kind, options.context)

    def ask(self, request, tokens):
        timings = super().ask(request | {"tokens": tokens, "temperature": self.temperature, "seed": SEED})
        return {
            "text": timings.get("text"), "prompt": timings["prompt_n"] + timings.get("cache_n", 0),
            "tokens": timings["predicted_n"], "seconds": timings["predicted_ms"] / 1000,
            "passes": timings["predicted_n"] - timings.get("draft_n_accepted", 0),
        }


@contextlib.contextmanager
def started(make):
    """Sides that are ready, in a folder of their own; ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="axe-bench-") as folder, contextlib.ExitStack() as stack:
        sides = []
        for maker in make:
            sides.append(maker(folder))
            stack.callback(sides[-1].close)
        for side in sides:
            side.wait()
        yield sides


def lengths(options, model, sets):
    """Whether the model chats, and for each text how many tokens its answer takes to come to an end."""
    # By itself, so that nothing else runs while it times its passes.
    with started([lambda folder: Blocks(options, model, folder, "auto")]) as (side,):
        chats, tokens = side.chats(), {}
        for name, texts in sets.items():
            for text in texts:
                answer = side.ask(text.request(chats), options.tokens, to_the_end=True)
                # The end token itself is none of the text.
                count = answer["tokens"] - answer["ended"]
                if answer["prompt"] + options.tokens > options.context:
                    sys.exit(f"error: {name}/{text.name} has {answer['prompt']} tokens; --context {options.context} is too short")
                if count < FEWEST:
                    print(f"    {name}/{text.name} is left out: its answer has {count} tokens", file=sys.stderr)
                else:
                    tokens[name, text.name] = count
        for name in sets:
            if not any(of == name for of, _ in tokens):
                sys.exit(f"error: the model has no answer to any text of the set {name}")
        return chats, tokens


class Quiet:
    """Whether the machine did nothing else."""

    def __init__(self):
        self.idle, self.others = [0.0], []

    def watch(self, sides, side, work):
        time.sleep(0.2)  # threads of the side before may spin for a moment after their work
        before, began, machine = {s.pid: cpu_seconds(s.pid) for s in sides}, time.monotonic(), machine_seconds()
        result = work()
        took = max(time.monotonic() - began, 1e-3)
        used = {s.pid: cpu_seconds(s.pid) - before[s.pid] for s in sides}
        self.idle.append(sum(seconds for pid, seconds in used.items() if pid != side.pid) / took)
        self.others.append(max(0.0, machine_seconds() - machine - sum(used.values())) / took)
        return result


def one_round(number, sides, sets, chats, tokens, written, quiet):
    """For each set and side tokens, tokens after the first, seconds and passes, all texts together."""
    for side in sides:
        side.ask({"prompt": WARM_UP}, 8)
    figures = {}
    for name, texts in sets.items():
        sums = {side.name: {"tokens": 0, "later": 0, "seconds": 0.0, "passes": 0} for side in sides}
        for index, text in enumerate(texts):
            count = tokens.get((name, text.name))
            if count is None:
                continue
            turn = (number + index) % len(sides)
            prompts = {}
            for side in sides[turn:] + sides[:turn]:
                answer = quiet.watch(sides, side, lambda side=side: side.ask(text.request(chats), count))
                if answer["tokens"] != count:
                    sys.exit(f"error: {side.name} made {answer['tokens']} tokens of {name}/{text.name}, {count} were asked for")
                prompts[side.name] = answer["prompt"]
                if isinstance(side, Blocks) and written.setdefault((name, text.name), answer["text"]) != answer["text"]:
                    sys.exit(f"error: {name}/{text.name}: with block size {side.size} axed writes another text")
                of = sums[side.name]
                of["tokens"] += count
                of["later"] += count - 1
                of["seconds"] += answer["seconds"]
                of["passes"] += answer["passes"]
            if len(set(prompts.values())) > 1:
                sys.exit(f"error: the prompt {name}/{text.name} does not have the same tokens on all sides: {prompts}")
        figures[name] = sums
        told = ", ".join(f"{side} {of['later'] / of['seconds']:.1f}" for side, of in sums.items())
        print(f"    round {number + 1} {name:<11}{told} t/s", file=sys.stderr)
    return figures


def rows(rounds, name, blocks, peers):
    """The lines of a set's table. Each round's rate of one side is compared with that of another."""
    rates = {side: [r[name][side]["later"] / r[name][side]["seconds"] for r in rounds] for side in rounds[0][name]}
    median = {side: statistics.median(values) for side, values in rates.items()}
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(rates[a], rates[b]))  # noqa: E731
    base = "axed-1" if "1" in blocks else None
    best = max(peers, key=median.get) if peers else None
    table = []
    for side, values in rates.items():
        ours = side.startswith("axed-")
        first = rounds[0][name][side]
        table.append({
            "engine": "axed" if ours else side.split("-")[0], "block": side.removeprefix("axed-") if ours else
            (side.removeprefix("llama.cpp").lstrip("-") or "plain"),
            "tokens": first["tokens"],
            "seconds": round(statistics.median(r[name][side]["seconds"] for r in rounds), 3),
            "tokens_per_s": round(median[side], 2),
            "tokens_per_pass": round(statistics.median(r[name][side]["tokens"] / r[name][side]["passes"] for r in rounds), 2),
            "over_one": round(ratio(side, base), 3) if ours and base else None,
            "over_peer": round(ratio(side, best), 3) if ours and best else None,
            "best_peer": side == best,
        })
    return table


def bench_model(spec, sets, options):
    name, quantisation, model = spec.split("=", 2)
    print(f"==> {name}", file=sys.stderr)
    chats, tokens = lengths(options, model, sets)
    make = [lambda folder, size=size: Blocks(options, model, folder, size) for size in options.blocks]
    if options.peer_python:
        make += [lambda folder, kind=kind: Llama(options, model, folder, kind) for kind in PEERS]
    rounds, written, quiet = [], {}, Quiet()
    for number in range(options.rounds):
        with started(make) as sides:
            rounds.append(one_round(number, sides, sets, chats, tokens, written, quiet))
            device, peers = sides[0].device, [side.name for side in sides if isinstance(side, Llama)]
    return {
        "model": name, "quantisation": quantisation, "chat": chats, "device": device,
        "sets": {of: rows(rounds, of, options.blocks, peers) for of in sets},
        "texts": {f"{of}/{text}": count for (of, text), count in tokens.items()}, "rounds": rounds,
        "idle_sides_cpu": round(statistics.median(quiet.idle), 3), "other_processes_cpu": round(statistics.median(quiet.others), 3),
    }


def show(result, options):
    """The table for people."""
    form = "through its template" if result["chat"] else "texts to continue"
    print(f"\n{result['model']} {result['quantisation']}, {form}, {options.rounds} paired rounds, {options.threads} threads a side")
    print(f"  temperature {options.temperature:g}, context {options.context}, device {result['device']}, runtime {options.runtime}, "
          f"build {options.build}" + (f", peer {options.peer_version}" if options.peer_python else ""))
    print(f"  {'set':<12}{'engine':<11}{'B':<14}{'tokens':>7}{'time':>9}{'tok/s':>9}{'tok/pass':>10}{'over B=1':>10}{'over llama.cpp':>16}")
    times = lambda value: "" if value is None else f"{value:.2f}x"  # noqa: E731
    for name, table in result["sets"].items():
        for row in table:
            mark = " *" if row["best_peer"] else ""
            print(f"  {name:<12}{row['engine']:<11}{row['block'] + mark:<14}{row['tokens']:>7}{row['seconds']:>8.2f}s{row['tokens_per_s']:>9.1f}"
                  f"{row['tokens_per_pass']:>10.2f}{times(row['over_one']):>10}{times(row['over_peer']):>16}")
    if options.peer_python:
        print("  * the better of llama.cpp on this set, which axed is compared with")
    if result["idle_sides_cpu"] > 0.05:
        print(f"  warning: sides that should have idled used {result['idle_sides_cpu']:.2f} processors")
    if result["other_processes_cpu"] > 0.1:
        print(f"  warning: other processes used {result['other_processes_cpu']:.2f} processors meanwhile; the figures are low and noisy")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description="see scripts/bench.sh --help")
    parser.add_argument("--axed", required=True)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-version", default="")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--blocks", default="1,4,8,16,auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--build", required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--json", default="")
    parser.add_argument("models", nargs="+", metavar="NAME=QUANTISATION=FILE")
    options = parser.parse_args()
    options.blocks = options.blocks.split(",")
    # Both sides take as many threads as there are processors that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    sets = read_sets(options.prompts, options.sets.split(","), options.quick)
    # What passes cost is timed anew, on the machine and the program as they are.
    cache = os.environ.get("AXE_DEVICE_CACHE_DIR")
    if not cache:
        parser.error("AXE_DEVICE_CACHE_DIR is not set: start this by scripts/bench.sh block-scaling")
    for kept in pathlib.Path(cache).glob("widths-*.json"):
        kept.unlink(missing_ok=True)
    results = []
    for spec in options.models:
        results.append(bench_model(spec, sets, options))
        show(results[-1], options)
    if options.json:
        report = {
            "build": options.build, "runtime": options.runtime, "threads": options.threads,
            "peer": options.peer_version if options.peer_python else None, "temperature": options.temperature,
            "context": options.context, "most_tokens": options.tokens, "results": results,
        }
        write_report(report, options.json)


if __name__ == "__main__":
    main()
