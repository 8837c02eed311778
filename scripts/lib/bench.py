"""Measures decode and prefill of axed, and of llama.cpp beside it. Started by scripts/bench.sh, which sets it up.

Rounds are paired: in each round both sides do the same work, one right after the other, and who begins alternates.
While one side works the other one idles, which is checked. Figures are medians over the rounds; the ratio is the
median of the rounds' ratios. Both sides tell their own times:
  prefill   512 prompt tokens never seen before, over the time until the prompt is encoded
  decode    the tokens after the first, over the time after the first token
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from client import Client

TICKS = os.sysconf("SC_CLK_TCK")


def prompt(length, seed):
    """Token ids that are plain text in every vocabulary of a usual size, different from the first one on."""
    numbers = random.Random(seed)
    return [numbers.randrange(1000, 30000) for _ in range(length)]


def cpu_seconds(pid):
    """Processor time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def machine_seconds():
    """Busy processor time of the whole machine so far."""
    fields = [int(word) for word in pathlib.Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / TICKS


class Axed:
    """The daemon built here, on a port and in a folder of its own."""

    def __init__(self, binary, model, folder, port, name="axed", settings=None):
        self.name = name
        self.log = pathlib.Path(folder, f"{name}.log")
        arguments = [binary, "--model", model, "--port", str(port), "--admin-socket", str(pathlib.Path(folder, f"{name}.sock"))]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | (settings or {}),
            )
        self.client = Client(f"http://127.0.0.1:{port}", timeout=600)
        self.pid = self.process.pid

    def wait(self):
        began = time.monotonic()
        while time.monotonic() - began < 600:
            if self.process.poll() is not None:
                sys.exit("error: axed ended before it was ready:\n" + self.log.read_text(encoding="utf-8", errors="replace")[-2000:])
            with contextlib.suppress(OSError):
                if self.client.get("/ready").status == 200:
                    self.model = self.client.get("/v1/models").json()["data"][0]["id"]
                    return
            time.sleep(0.1)
        sys.exit("error: axed was not ready after 600 s")

    def run(self, ids, tokens):
        """Returns (prompt tokens a second, output tokens a second)."""
        body = {"model": self.model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self.client.post("/v1/completions", body)
        if reply.status != 200:
            sys.exit(f"error: axed answered {reply.status}: {reply.body[:500]!r}")
        answer = reply.json()
        axe, usage = answer["axe"], answer["usage"]
        self.device = axe["device"]
        if usage["completion_tokens"] != tokens:
            sys.exit(f"error: axed made {usage['completion_tokens']} tokens, {tokens} were asked for")
        encoded = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        decode_s = axe["elapsed_s"] - axe["queue_s"] - axe["first_token_s"]
        return encoded / axe["prefill_s"], (tokens - 1) / decode_s if tokens > 1 else None

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python, model, threads, folder, name="llama.cpp", speculation="none", context=2048):
        self.name = name
        self.log = pathlib.Path(folder, f"{name}.log")
        command = [python, str(pathlib.Path(__file__).with_name("bench_peer.py")), model, str(threads), speculation, str(context)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.pid = self.process.pid

    def wait(self):
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("error: llama.cpp ended:\n" + self.log.read_text(encoding="utf-8", errors="replace")[-2000:])
        return json.loads(line)

    def ask(self, request):
        """The timings of a request, with the text."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        timings = self.read()
        if "error" in timings or timings["predicted_n"] != request["tokens"]:
            sys.exit(f"error: {self.name} answered {timings}")
        return timings

    def run(self, ids, tokens):
        timings = self.ask({"prompt": ids, "tokens": tokens})
        # Its own figure counts the first token, which costs no time of decoding.
        decode = (tokens - 1) / (timings["predicted_ms"] / 1000) if tokens > 1 else None
        return timings["prompt_per_second"], decode

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(sides, options):
    """All rounds: for each side's name its lists of prefill and decode rates, and how quiet the machine was."""
    rates = {side.name: {"prefill": [], "decode": []} for side in sides}
    idle_shares, other_shares = [0.0], [0.0]
    for side in sides:
        side.run(prompt(64, "warm-up"), 8)
    for number in range(options.rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        for what, length, tokens in (("prefill", options.prefill, 1), ("decode", 16, options.decode)):
            for side in order:
                time.sleep(0.3)  # threads of the side before may spin for a moment after their work
                before, began = {s.pid: cpu_seconds(s.pid) for s in sides}, time.monotonic()
                machine = machine_seconds()
                prefill, decode = side.run(prompt(length, f"{number} {what}"), tokens)
                took = time.monotonic() - began
                used = {s.pid: cpu_seconds(s.pid) - before[s.pid] for s in sides}
                rates[side.name][what].append(prefill if what == "prefill" else decode)
                idle_shares.append(sum(seconds for pid, seconds in used.items() if pid != side.pid) / took)
                other_shares.append(max(0.0, machine_seconds() - machine - sum(used.values())) / took)
                print(f"    round {number + 1} {what:<8}{side.name:<10}{rates[side.name][what][-1]:8.1f} t/s", file=sys.stderr)
    return rates, max(idle_shares), statistics.median(other_shares[1:])


def summarise(rates, size):
    """Medians, and for each kind of work the ratio of the first side to the second."""
    figures = {}
    for what in ("prefill", "decode"):
        lists = {name: rates[name][what] for name in rates}
        figures[what] = {name: round(statistics.median(values), 1) for name, values in lists.items()}
        if len(lists) == 2:
            ours, theirs = lists.values()
            figures[what]["ratio"] = round(statistics.median(a / b for a, b in zip(ours, theirs)), 2)
    figures["decode_gbytes_per_s"] = {
        name: round(rate * size / 1e9, 2) for name, rate in figures["decode"].items() if name != "ratio"
    }
    return figures


def bench_model(spec, options):
    name, quantisation, path = spec.split("=", 2)
    print(f"==> {name}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="axe-bench-") as folder, contextlib.ExitStack() as stack:
        sides = [Axed(options.axed, path, folder, options.port)]
        stack.callback(sides[0].close)
        if options.peer_python:
            sides.append(Peer(options.peer_python, path, options.threads, folder))
            stack.callback(sides[1].close)
        for side in sides:
            side.wait()
        rates, idle, others = measure(sides, options)
        size = os.path.getsize(path)
        return {
            "model": name, "quantisation": quantisation, "file_bytes": size, "device": sides[0].device,
            **summarise(rates, size), "rounds": rates,
            "idle_side_cpu": round(idle, 3), "other_processes_cpu": round(others, 3),
        }


def show(result, options):
    """One table for people."""
    print(f"\n{result['model']} {result['quantisation']}, {options.rounds} paired rounds, {options.threads} threads a side")
    print(f"  device {result['device']}, runtime {options.runtime}, build {options.build}" + (f", peer {options.peer_version}" if options.peer_python else ""))
    names = list(result["rounds"])
    head = "".join(f"{name:>14}" for name in names) + (f"{'ratio':>9}" if len(names) == 2 else "")
    print(f"  {'':<26}{head}")
    for title, key in ((f"prefill {options.prefill} tokens, t/s", "prefill"), (f"decode {options.decode} tokens, t/s", "decode")):
        row = "".join(f"{result[key][name]:>14.1f}" for name in names)
        print(f"  {title:<26}{row}" + (f"{result[key]['ratio']:>8.2f}x" if "ratio" in result[key] else ""))
    row = "".join(f"{result['decode_gbytes_per_s'][name]:>14.2f}" for name in names)
    print(f"  {'decode, GB/s of weights':<26}{row}")
    if result["idle_side_cpu"] > 0.05:
        print(f"  warning: the side that should have idled used up to {result['idle_side_cpu']:.2f} processors")
    if result["other_processes_cpu"] > 0.1:
        print(f"  warning: other processes used {result['other_processes_cpu']:.2f} processors meanwhile; the figures are low and noisy")
    sys.stdout.flush()


def write_report(report, where):
    """Writes a report as JSON to a file, or to standard output for `-`."""
    text = json.dumps(report, indent=2)
    if where == "-":
        print(text)
    else:
        pathlib.Path(where).write_text(text + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="see scripts/bench.sh --help")
    parser.add_argument("--axed", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--peer-python", default="")
    parser.add_argument("--peer-version", default="")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--prefill", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--build", required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--json", default="")
    parser.add_argument("models", nargs="+", metavar="NAME=QUANTISATION=FILE")
    options = parser.parse_args()
    # Both sides take as many threads as there are processors that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    results = []
    for spec in options.models:
        results.append(bench_model(spec, options))
        show(results[-1], options)
    if options.json:
        report = {
            "build": options.build, "runtime": options.runtime, "threads": options.threads,
            "peer": options.peer_version if options.peer_python else None,
            "prefill_tokens": options.prefill, "decode_tokens": options.decode, "results": results,
        }
        write_report(report, options.json)


if __name__ == "__main__":
    main()
