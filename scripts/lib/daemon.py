"""A daemon of its own for a test or a measurement: start, wait, ask, stop.

environment:
    AXE_TEST_DAEMON       the program to start (target/release/axed, else target/debug/axed)
    AXE_DEVICE_CACHE_DIR  where it keeps compiled kernels (.axe/cache)
"""

import os
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MINIATURE = ROOT / "tests/fixtures/tiny-diffusion"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def program():
    named = os.environ.get("AXE_TEST_DAEMON")
    choices = [pathlib.Path(named)] if named else [ROOT / "target" / kind / "axed" for kind in ("release", "debug")]
    for choice in choices:
        if choice.is_file():
            return choice
    raise AssertionError(f"there is no daemon to test; build one: {', '.join(map(str, choices))}")


class Daemon:
    """A daemon on a port of its own; `settings` are variables of its configuration, as AXE_SERVER_QUEUE_CAPACITY."""

    def __init__(self, folder, name, model=MINIATURE, **settings):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder, self.name, self.model = pathlib.Path(folder), name, model
        self.log = self.folder / f"{name}.log"
        self.socket = self.folder / f"{name}.sock"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AXE_", "NVIDIA_"))}
        cache = os.environ.get("AXE_DEVICE_CACHE_DIR", str(ROOT / ".axe/cache"))
        self.environment = inherited | {"AXE_DEVICE_CACHE_DIR": cache} | settings
        self.start()

    def start(self):
        """Starts it, anew if it was stopped, on the same port."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [program(), "--model", self.model, "--port", str(self.port), "--admin-socket", self.socket],
                # A folder without a daemon.toml.
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def wait(self):
        """Until it takes requests. The kernels of a new build are compiled first."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.get("/ready")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError(f"the daemon did not get ready:\n{self.log.read_text()[-3000:]}")

    def figure(self, name):
        """A figure of /metrics by its full name."""
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")

    def kill(self):
        """Ends it at once, in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
