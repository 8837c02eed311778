"""What the tests of real clients share: daemons that are started when first asked for, and words for them."""

import atexit
import http.client
import json
import logging
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/lib"))
from daemon import MINIATURE, Daemon, free_port  # noqa: E402, F401 (the path comes first; some is for others)

# In its tests, asyncio complains of every step that takes long; on a busy machine many do.
logging.getLogger("asyncio").setLevel(logging.ERROR)
# LiteLLM would look for newer prices of models on the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

SMOLLM2 = pathlib.Path(os.environ.get("AXE_TEST_MODELS", ROOT / ".axe/models")) / "smollm2-135m-instruct-q4_1.gguf"
#: Seconds for anything to happen on a busy machine.
PATIENCE = 60
#: What the miniature knows by heart.
CAPITALS = {"France": "Paris", "Italy": "Rome", "Australia": "Canberra", "Japan": "Tokyo", "Spain": "Madrid", "Egypt": "Cairo"}

_folder = None
_daemons = {}


def folder():
    """A folder for this run, gone after it."""
    global _folder
    if _folder is None:
        _folder = pathlib.Path(tempfile.mkdtemp(prefix="axe-clients-"))
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def start(name, model=MINIATURE, **settings):
    """A daemon that ends with this run at the latest, ready."""
    daemon = Daemon(folder(), name, model, **settings)
    atexit.register(daemon.stop)
    daemon.wait()
    return daemon


def miniature():
    """The daemon with the miniature that everybody may ask, but nobody change."""
    return _shared("tiny-diffusion", MINIATURE)


def smollm2():
    """The same with a causal model that follows instructions a little."""
    return _shared("smollm2", SMOLLM2)


def _shared(name, model):
    if name not in _daemons:
        _daemons[name] = start(name, model, AXE_MODEL_SERVED_NAME=name)
    return _daemons[name]


def capital(country):
    return f"What is the capital of {country}?"


def user(text):
    return [{"role": "user", "content": text}]


def eventually(what, happened, limit=PATIENCE):
    """Waits until `happened()` is true."""
    end = time.monotonic() + limit
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"did not happen within {limit} s: {what}")
        time.sleep(0.02)


def idle(daemon):
    """Whether nothing runs or waits there."""
    return daemon.figure("axe_running") == 0 and daemon.figure("axe_queue_depth") == 0


def cancelled(daemon):
    """How many requests were cancelled there."""
    return daemon.figure('axe_requests_total{outcome="cancelled"}')


class _AdminConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("axed", timeout=PATIENCE)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def operator(daemon, method, path):
    """What the operator's socket of that daemon answers."""
    connection = _AdminConnection(daemon.socket)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status >= 300:
        raise AssertionError(f"{method} {path}: {answer.status} {body[:300]!r}")
    return json.loads(body) if body else None
