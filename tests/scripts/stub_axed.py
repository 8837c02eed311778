#!/usr/bin/env python3
"""Stands in for `axed` in the tests of the scripts: the same flags and routes, and words from a hash for a model.

STUB_FAULT makes it wrong in one way, so that the tests can show that the scripts notice:
  dies-at-start   logs a reason and exits 1
  never-ready     /ready stays 503
  fails           /ready says that it failed
  hangs-at-stop   ignores SIGTERM
  block-text      the text depends on the block size
  slow-health     /health takes a while
  leaks-slot      something runs for ever
  leaks-memory    each request leaves a megabyte
  leaks-files     each request leaves a file open
  and the names looked for below, which spoil one property of the API each
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULT = os.environ.get("STUB_FAULT", "")
WORDS = [f" {a}{b}" for a in ("blue", "stone", "river", "light", "wind") for b in ("s", "ish", "y", "er", "ing")]
CONTEXT = 4096
# What it says when it stands in for the miniature.
KNOWN = {
    "What is the capital of Australia?": "The capital of Australia is Canberra.",
    "List the months of the year.":
        "January, February, March, April, May, June, July, August, September, October, November, December.",
    "What is 3 + 4?": "3 + 4 = 7" if FAULT != "forgets" else "3 + 4 = 6",
}
ROUTES = {
    "/health": "GET", "/ready": "GET", "/metrics": "GET", "/v1/models": "GET",
    "/v1/chat/completions": "POST", "/v1/completions": "POST",
}


class Refusal(Exception):
    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = default_request_version = "HTTP/1.1"
    leaked = []
    name, started, last_prompt, denoises = "stub", time.time(), [], False

    def log_message(self, text, *arguments):
        if self.path != "/ready":
            print("request", text % arguments, file=sys.stderr, flush=True)

    def answer(self, status, body, kind="application/json", headers=()):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, refusal):
        error = {"message": refusal.message, "type": "invalid_request_error", "param": refusal.param, "code": refusal.code}
        self.answer(refusal.status, {"error": error}, headers=[("Allow", "POST, OPTIONS")] if refusal.status == 405 else [])

    def handle_any(self):
        try:
            if os.environ.get("AXE_API_KEY") and self.command == "POST":
                if self.headers.get("Authorization") != "Bearer " + os.environ["AXE_API_KEY"]:
                    raise Refusal(401, "no key")
            self.route()
        except Refusal as refusal:
            self.refuse(refusal)

    do_GET = do_POST = do_HEAD = handle_any

    def do_OPTIONS(self):
        self.answer(204, b"")

    def route(self):
        path = self.path
        if path.startswith("/v1/models/"):
            if path.removeprefix("/v1/models/") != self.name:
                raise Refusal(404, f"no model {path}", code="model_not_found")
            return self.answer(200, {"id": self.name, "object": "model"})
        if path not in ROUTES:
            raise Refusal(404, f"no route {path}")
        if self.command != ROUTES[path] and (self.command, ROUTES[path]) != ("HEAD", "GET"):
            raise Refusal(405, "wrong method")
        if path == "/ready":
            if FAULT == "never-ready" or time.time() - self.started < 0.5:
                return self.answer(503, {"status": "loading", "what": "loading weights", "progress": 0.25})
            if FAULT == "fails":
                return self.answer(503, {"status": "failed", "error": "no device of kind gpu"})
            return self.answer(200, {"status": "ready"})
        if path == "/metrics":
            running = int(FAULT == "leaks-slot")
            figures = f"# TYPE axe_up gauge\naxe_up 1\naxe_running {running}\naxe_queue_depth 0\n"
            return self.answer(200, figures.encode(), "text/plain; version=0.0.4")
        if path == "/v1/models":
            return self.answer(200, {"object": "list", "data": [{"id": self.name, "object": "model"} | (
                {"kind": "block_diffusion"} if self.denoises else {})]})
        if path == "/health":
            time.sleep(0.1 if FAULT == "slow-health" else 0)
            return self.answer(200, {"status": "ok"})
        return self.generate(path == "/v1/chat/completions")

    def read(self):
        length = int(self.headers.get("Content-Length", 0))
        if length > 8 << 20:
            self.close_connection = True
            raise Refusal(413, "the body is too large")
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {error}") from None
        if "\\ud8" in json.dumps(body).lower().replace("\\ud83", "") and FAULT != "surrogates":
            raise Refusal(400, "a lone surrogate")
        return body

    def prompt_of(self, body, chat):
        if chat:
            if not isinstance(body.get("messages"), list):
                raise Refusal(400, "messages: expected a list", "messages")
            if FAULT == "no-template":
                raise Refusal(400, "the model has no chat template; use /v1/completions", "messages")
            content = body["messages"][0]["content"]
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            return text.split() + ["<turn>"]
        prompt = body.get("prompt")
        if not isinstance(prompt, (str, list)):
            raise Refusal(400, "prompt: expected a string or token ids", "prompt")
        return prompt.split() if isinstance(prompt, str) else prompt

    def generate(self, chat):
        body = self.read()
        if FAULT == "leaks-memory":
            self.leaked.append(random.randbytes(1 << 20))
        if FAULT == "leaks-files":
            self.leaked.append(open("/dev/null", encoding="ascii"))
        checks = {"temperature": (int, float), "max_tokens": int, "stop": (str, list)}
        for key, kind in checks.items():
            if key in body and not isinstance(body[key], kind) and FAULT != "types":
                raise Refusal(400, f"{key}: wrong type", key)
        if body.get("model", self.name) != self.name and FAULT != "any-model":
            raise Refusal(404, f"no model {body.get('model')}", "model", "model_not_found")
        if body.get("max_denoising_steps", 1) < 1:
            raise Refusal(400, "max_denoising_steps: must be 1 or more", "max_denoising_steps")
        for key in ("n", "logprobs"):
            if body.get(key) not in (None, 1, False) or (key in body and key == "logprobs"):
                if FAULT != "ignores":
                    raise Refusal(400, f"{key} is not supported", key)
        prompt = self.prompt_of(body, chat)
        limit = body.get("max_tokens", 64)
        if limit < 1:
            raise Refusal(400, "max_tokens: must be 1 or more", "max_tokens")
        if len(prompt) + 1 > CONTEXT:
            raise Refusal(400, "the prompt is too long")
        cached = 0
        while cached < min(len(prompt) - 1, len(Handler.last_prompt)) and prompt[cached] == Handler.last_prompt[cached]:
            cached += 1
        Handler.last_prompt = prompt
        seed = body.get("seed", random.random()) if body.get("temperature", 1) > 0 and FAULT != "one-seed" else 0
        if FAULT == "random":
            seed = random.random()
        stream_seed = f"{seed} {prompt} {body.get('stream') if FAULT == 'stream-differs' else ''}"
        if FAULT == "block-text":
            stream_seed += os.environ.get("AXE_DECODE_BLOCK_SIZE", "")
        made = random.Random(hashlib.sha256(stream_seed.encode("utf-8", "replace")).digest())
        words = [made.choice(WORDS) for _ in range(limit if FAULT != "overlong" else limit + 1)]
        known = KNOWN.get(" ".join(map(str, prompt[:-1]))) if self.denoises else None
        if known and limit >= len(known.split()):
            words = [" " + word for word in known.split()]
        text, reason = "".join(words).lstrip() if FAULT != "empty" else "", "length"
        stops = body.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            if stop in text:
                cut = text.index(stop) + (1 if FAULT == "leaks-stop" else 0)
                text, reason = text[:cut], "stop"
        usage = {
            "prompt_tokens": len(prompt), "completion_tokens": len(words), "total_tokens": len(prompt) + len(words),
            "prompt_tokens_details": {"cached_tokens": cached if FAULT != "no-reuse" else 0},
        }
        self.reply(chat, body, text, reason, usage)

    def reply(self, chat, body, text, reason, usage):
        head = {"id": f"cmpl-{time.time_ns()}", "created": int(time.time()), "model": self.name}
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": reason}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            axe = {
                "elapsed_s": 0.05 + 0.001 * usage["completion_tokens"], "first_token_s": 0.05, "prefill_s": 0.04,
                "queue_s": 0.0, "passes": 1, "tokens_per_pass": 1.0, "device": "stub",
            }
            block = os.environ.get("AXE_DECODE_BLOCK_SIZE")
            if block:  # a millisecond a pass, each pass full
                passes = -(-usage["completion_tokens"] // (3 if block == "auto" else int(block)))
                axe |= {"elapsed_s": 0.04 + 0.001 * passes, "passes": passes}
            if self.denoises:
                steps = 2 if body.get("max_denoising_steps") != 1 or FAULT == "ignores" else 1
                axe |= {
                    "first_draft_s": 0.05, "denoising_steps": steps, "canvases": 1, "accepted_per_step": [32] * steps,
                    "steps_per_canvas": [steps if FAULT != "miscounts" else 7],
                }
            kind = "chat.completion" if chat else "text_completion"
            return self.answer(200, head | {"object": kind, "choices": [choice], "usage": usage, "axe": axe})
        kind = "chat.completion.chunk" if chat else "text_completion"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = [text[i:i + 7] for i in range(0, len(text), 7)]
        choices = [{"delta": {"content": piece}} if chat else {"text": piece} for piece in pieces]
        if chat:
            choices.insert(0, {"delta": {"role": "assistant", "content": None}})
        choices.append({"delta": {}} if chat else {"text": ""})
        for number, choice in enumerate(choices):
            done = number == len(choices) - 1
            choice |= {"index": 0, "finish_reason": reason if done else None}
            if FAULT == "new-ids":
                head["id"] += "x"
            self.event(head | {"object": kind, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage") or FAULT == "usage-unasked":
            self.event(head | {"object": kind, "choices": [], "usage": usage})
        if FAULT != "no-done":
            self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value):
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Who hangs up is no news."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?", choices=["serve"])
    for flag in ("--config", "--model", "--port", "--served-name", "--admin-socket", "--log-level"):
        parser.add_argument(flag)
    flags = parser.parse_args()
    if FAULT == "dies-at-start":
        sys.exit(f"error: {flags.model}: truncated at byte 17")
    Handler.name = flags.served_name or pathlib.Path(flags.model).stem
    Handler.denoises = "tiny-diffusion" in flags.model
    server = Server(("127.0.0.1", int(flags.port)), Handler)
    stop = (lambda *_: None) if FAULT == "hangs-at-stop" else (lambda *_: threading.Thread(target=server.shutdown).start())
    signal.signal(signal.SIGTERM, stop)
    print("listening on", flags.port, file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
