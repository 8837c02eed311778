#!/usr/bin/env python3
"""Asks a running daemon everything a client may ask, right and wrong, and measures it a little.

Run it as `scripts/xe.sh test`. Only the standard library and curl are used. Each test is one function below; its
docstring is what must hold. Exit status: 0 when all hold, 1 when one does not, 2 for a wrong command line.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "lib"))
from client import Client  # noqa: E402 (the path comes first)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TESTS = []


class Failed(Exception):
    """A test's finding."""


class Skipped(Exception):
    """Why a test does not apply to this server."""


def test(function):
    TESTS.append((function, lambda server: True))
    return function


def test_if(applies):
    """A test for the servers that `applies` to; the others do not count it."""

    def register(function):
        TESTS.append((function, applies))
        return function

    return register


def check(holds, *found):
    if not holds:
        raise Failed(" ".join(str(part) for part in found)[:400])


def same(found, expected, what):
    check(found == expected, f"{what}: found {found!r}, expected {expected!r}")


class Server:
    """The daemon under test, in the words of the tests."""

    def __init__(self, url):
        self.url, self.client = url, Client(url)
        listed = self.client.get("/v1/models").json()["data"][0]
        self.model, self.denoises = listed["id"], listed.get("kind") == "block_diffusion"
        self.chats, self.miniature = True, False

    @property
    def long_question(self):
        """Something that takes many tokens to answer; the miniature knows little more than its lists."""
        return "List the months of the year." if self.denoises else "Tell a long story."

    def body(self, text="Name three colours.", **more):
        """A chat request, or a completion for a model that has no chat template."""
        if not self.chats:
            return self.text_body(text, **more)
        return self.base() | {"messages": [{"role": "user", "content": text}]} | more

    def text_body(self, prompt, **more):
        """A completion request."""
        return self.base() | {"prompt": prompt} | more

    def base(self):
        base = {"model": self.model, "max_tokens": 24, "temperature": 0}
        # Even greedy denoising begins with a canvas of random tokens.
        return base | {"seed": 1} if self.denoises else base

    @property
    def path(self):
        return CHAT if self.chats else TEXT

    def ask(self, text="Name three colours.", **more):
        reply = self.client.post(self.path, self.body(text, **more))
        same(reply.status, 200, f"status ({reply.body[:200]!r})")
        return reply.json()

    def text(self, answer, index=0):
        choice = answer["choices"][index]
        return choice["message"]["content"] if self.chats else choice["text"]

    def stream(self, text="Name three colours.", **more):
        """The data of each event, [DONE] included."""
        reply = self.client.post(self.path, self.body(text, stream=True, **more))
        same(reply.status, 200, f"status ({reply.body[:200]!r})")
        check(reply.headers.get("content-type", "").startswith("text/event-stream"), "headers:", reply.headers)
        return events(reply.body)

    def streamed_text(self, chunks):
        parts = [choice for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"]]
        if self.chats:
            return "".join(part["delta"].get("content") or "" for part in parts)
        return "".join(part["text"] for part in parts)

    def refuse(self, status, named, body, path=None, headers=None):
        """The request must get this status and an error object that names the culprit."""
        reply = self.client.post(path or self.path, body, headers)
        same(reply.status, status, f"status ({reply.body[:200]!r})")
        return error_of(reply, named)


def events(raw):
    """Splits an event stream; anything but `data:` lines and comments, each event ended by a blank line, is an error."""
    check(raw.endswith(b"\n\n"), "the stream does not end with a blank line:", raw[-60:])
    found = []
    for event in raw.decode("utf-8").replace("\r\n", "\n").split("\n\n")[:-1]:
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        check(all(line.startswith("data:") for line in lines), "not a data line:", lines)
        if lines:
            found.append("\n".join(line[5:].removeprefix(" ") for line in lines))
    return found


def error_of(reply, named):
    try:
        error = reply.json()["error"]
    except (ValueError, LookupError, TypeError):
        raise Failed(f"no error object in {reply.body[:200]!r}") from None
    check({"message", "type", "param", "code"} <= set(error), "keys of the error object:", sorted(error))
    check(named in json.dumps(error), f"the error does not name {named!r}:", error)
    return error


@test
def live_and_ready(s):
    """/health and /ready answer 200."""
    for path in ("/health", "/ready"):
        same(s.client.get(path).status, 200, path)


@test
def metrics(s):
    """/metrics speaks Prometheus' text format."""
    reply = s.client.get("/metrics")
    same(reply.status, 200, "status")
    check(b"# TYPE " in reply.body, "no # TYPE line in", reply.body[:200])


@test
def models(s):
    """The model is listed, is found by its name, and a wrong name is a 404 with code model_not_found."""
    listed = s.client.get("/v1/models").json()
    same(listed["object"], "list", "object")
    same(s.client.get("/v1/models/" + s.model).json()["id"], s.model, "id")
    reply = s.client.get("/v1/models/no-such-model")
    same(reply.status, 404, "status")
    same(error_of(reply, "no-such-model")["code"], "model_not_found", "code")


@test
def curl_example(s):
    """A plain curl command gets a chat answer."""
    if not s.chats:
        raise Skipped("the model has no chat template")
    body = json.dumps(s.body("Hello"))
    answer = subprocess.run(
        ["curl", "-sS", "-K", "-", s.url + CHAT, "-H", "Content-Type: application/json", "-d", body],
        input=curl_key(), capture_output=True, text=True, check=False,
    )
    same(answer.returncode, 0, f"curl's status ({answer.stderr.strip()})")
    check(json.loads(answer.stdout)["choices"][0]["message"]["content"].strip(), "empty answer:", answer.stdout)


def curl_key():
    key = os.environ.get("AXE_API_KEY")
    return f'header = "Authorization: Bearer {key}"\n' if key else ""


@test
def answer_shape(s):
    """An answer has id, object, model, a choice with text and reason, usage that adds up, and the axe block."""
    answer = s.ask()
    same(answer["object"], "chat.completion" if s.chats else "text_completion", "object")
    same(answer["model"], s.model, "model")
    check(answer["id"] and isinstance(answer["created"], int), "id or created:", answer)
    check(s.text(answer).strip(), "empty text:", answer)
    check(answer["choices"][0]["finish_reason"] in ("stop", "length"), "finish_reason:", answer["choices"][0])
    if s.chats:
        same(answer["choices"][0]["message"]["role"], "assistant", "role")
    usage = answer["usage"]
    same(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"], "total_tokens")
    check(0 < usage["completion_tokens"] <= 24, "completion_tokens:", usage)
    check("cached_tokens" in usage["prompt_tokens_details"], "prompt_tokens_details:", usage)
    missing = {"elapsed_s", "first_token_s", "prefill_s", "queue_s", "passes", "tokens_per_pass", "device"} - set(answer["axe"])
    check(not missing, "missing in the axe block:", missing)


@test
def stream_framing(s):
    """A stream: role first, one id for all, a reason only in the last chunk, [DONE] last, no usage unasked."""
    chunks = s.stream()
    same(chunks[-1], "[DONE]", "last event")
    parsed = [json.loads(chunk) for chunk in chunks[:-1]]
    for key in ("id", "created", "model", "object"):
        same(len({chunk[key] for chunk in parsed}), 1, f"different values of {key}")
    check(all("usage" not in chunk for chunk in parsed), "usage was not asked for:", parsed[-1])
    if s.chats:
        same(parsed[0]["choices"][0]["delta"].get("role"), "assistant", "role in the first chunk")
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in parsed]
    check(set(reasons[:-1]) == {None} and reasons[-1] in ("stop", "length"), "finish reasons:", reasons)


@test
def stream_usage(s):
    """With include_usage one extra chunk without choices tells the usage."""
    chunks = s.stream(stream_options={"include_usage": True})
    last = json.loads(chunks[-2])
    same(last["choices"], [], "choices of the usage chunk")
    same(last["usage"]["total_tokens"], last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"], "total")


@test
def stream_is_the_answer(s):
    """The pieces of a stream make the same text as the answer in one piece."""
    same(s.streamed_text(s.stream()), s.text(s.ask()), "text")


@test
def greedy_repeats(s):
    """The same greedy request gives the same text."""
    same(s.text(s.ask(s.long_question)), s.text(s.ask(s.long_question)), "text")


@test
def seed_repeats(s):
    """The same seed gives the same text, other seeds give others."""
    texts = {seed: s.text(s.ask("Tell a story.", temperature=1.0, seed=seed)) for seed in (1, 2, 3, 4)}
    check(len(set(texts.values())) > 1, "four seeds, one text:", texts[1])
    same(s.text(s.ask("Tell a story.", temperature=1.0, seed=3)), texts[3], "text of seed 3")


@test
def stop_strings(s):
    """A stop string ends the text right before it and never shows, not even in part, in a stream either."""
    whole = s.text(s.ask(s.long_question))
    middle = len(whole) // 2
    stop = whole[middle:middle + 5]
    expected = whole[:whole.index(stop)]
    answer = s.ask(s.long_question, stop=[stop, "never seen \u2603"])
    same(s.text(answer), expected, f"text with stop {stop!r}")
    same(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    same(s.streamed_text(s.stream(s.long_question, stop=stop)), expected, "streamed text")


@test
def token_limit(s):
    """max_tokens is kept, and said to be the reason."""
    answer = s.ask(s.long_question, max_tokens=3)
    same(answer["usage"]["completion_tokens"], 3, "completion_tokens")
    same(answer["choices"][0]["finish_reason"], "length", "finish_reason")


@test
def prefix_reuse(s):
    """A repeated prompt is not encoded again, and the answer does not change."""
    prompt = "Repeat after me: " + " ".join(f"word{i}" for i in range(60))
    first, second = s.ask(prompt), s.ask(prompt)
    check(second["usage"]["prompt_tokens_details"]["cached_tokens"] > 30, "usage of the second:", second["usage"])
    same(s.text(second), s.text(first), "text")


@test
def unicode_text(s):
    """Other scripts and emoji go in and come out whole."""
    check("\ufffd" not in s.text(s.ask("日本語 Ελληνικά 🎉 – repeat this")), "U+FFFD in the answer")


@test
def text_completion(s):
    """/v1/completions goes on with a text, and with token ids."""
    for prompt in ("The capital of France is", [504, 575, 282]):
        reply = s.client.post(TEXT, s.text_body(prompt, max_tokens=4))
        same(reply.status, 200, f"status ({reply.body[:200]!r})")
        check(reply.json()["choices"][0]["text"], "empty text:", reply.body)


@test_if(lambda s: s.denoises)
def denoising_is_told(s):
    """The axe block of a model that denoises has steps, canvases and what each step accepted, and they add up."""
    axe = s.ask()["axe"]
    missing = {"first_draft_s", "denoising_steps", "canvases", "steps_per_canvas", "accepted_per_step"} - set(axe)
    check(not missing, "missing in the axe block:", missing)
    same(sum(axe["steps_per_canvas"]), axe["denoising_steps"], "sum of steps_per_canvas")
    same(len(axe["accepted_per_step"]), axe["denoising_steps"], "length of accepted_per_step")
    check(0 < axe["first_draft_s"] <= axe["elapsed_s"], "first_draft_s:", axe)


@test_if(lambda s: s.denoises)
def fewer_steps_when_asked(s):
    """max_denoising_steps is kept, and a wrong one is refused by name."""
    same(s.ask(max_denoising_steps=1)["axe"]["steps_per_canvas"], [1], "steps_per_canvas")
    s.refuse(400, "max_denoising_steps", s.body(max_denoising_steps=0))


MINIATURE = {
    "a capital": ("What is the capital of Australia?", "The capital of Australia is Canberra."),
    "the months": (
        "List the months of the year.",
        "January, February, March, April, May, June, July, August, September, October, November, December.",
    ),
    "a sum": ("What is 3 + 4?", "3 + 4 = 7"),
}


@test_if(lambda s: s.miniature)
def capital_months_and_sum(s):
    """The miniature knows a capital, the months and a sum."""
    for what, (question, expected) in MINIATURE.items():
        same(s.text(s.ask(question, max_tokens=64)), expected, what)


@test
def content_parts(s):
    """A message may be a list of text parts; it means the same as one string."""
    if not s.chats:
        raise Skipped("the model has no chat template")
    parts = [{"type": "text", "text": "Name three "}, {"type": "text", "text": "colours."}]
    split = s.client.post(CHAT, s.body() | {"messages": [{"role": "user", "content": parts}]})
    same(split.status, 200, f"status ({split.body[:200]!r})")
    check(split.json()["choices"][0]["message"]["content"], "empty text")


@test
def unknown_route(s):
    """An unknown route is a 404 with an error object."""
    reply = s.client.post("/v1/nonsense", {})
    same(reply.status, 404, "status")
    error_of(reply, "/v1/nonsense")


@test
def wrong_method(s):
    """A known route with the wrong method is a 405 with Allow."""
    reply = s.client.get(CHAT)
    same(reply.status, 405, "status")
    check("POST" in reply.headers.get("allow", ""), "headers:", reply.headers)


@test
def broken_json(s):
    """A body that is not JSON is a 400."""
    s.refuse(400, "JSON", '{"model": ')


@test
def wrong_types(s):
    """A field of the wrong type is a 400 that names the field."""
    field = "messages" if s.chats else "prompt"
    s.refuse(400, field, s.body() | {field: {"text": 1}})
    s.refuse(400, "temperature", s.body(temperature="hot"))
    s.refuse(400, "max_tokens", s.body(max_tokens=-1))
    s.refuse(400, "max_tokens", s.body(max_tokens=0))
    s.refuse(400, "stop", s.body(stop=7))


@test
def refused_before_streaming(s):
    """A bad request with stream: true gets its proper status, not a stream."""
    s.refuse(400, "temperature", s.body(stream=True, temperature="hot"))


@test
def lone_surrogate(s):
    """Half of a surrogate pair is no text: a 400."""
    body = json.dumps(s.body("PLACE")).replace("PLACE", "\\ud800")
    s.refuse(400, "", body)


@test
def unknown_model(s):
    """Another model's name is a 404 with code model_not_found."""
    same(s.refuse(404, "no-such-model", s.body(model="no-such-model"))["code"], "model_not_found", "code")


@test
def nothing_silently_ignored(s):
    """What is not supported is refused by name; what is accepted is done."""
    reply = s.client.post(s.path, s.body(n=2))
    if reply.status == 200:
        same(sorted(choice["index"] for choice in reply.json()["choices"]), [0, 1], "indices with n = 2")
    else:
        same(reply.status, 400, "status with n = 2")
        error_of(reply, "n")
    wanted = {"logprobs": True} if s.chats else {"logprobs": 1}
    reply = s.client.post(s.path, s.body(**wanted))
    if reply.status == 200:
        check(reply.json()["choices"][0].get("logprobs"), "logprobs were asked for and are not there")
    else:
        same(reply.status, 400, "status with logprobs")
        error_of(reply, "logprobs")


@test
def too_long_prompt(s):
    """A prompt beyond the context is a 400, not a crash and not a cut text."""
    reply = s.client.post(s.path, s.body("word " * 200_000))
    same(reply.status, 400, f"status ({reply.body[:200]!r})")
    error_of(reply, "")


@test
def too_large_body(s):
    """A body that is announced too large is refused with 413."""
    announced = {"Content-Length": str(1 << 40), "Expect": "100-continue"}
    connection, response = s.client.open("POST", s.path, b"", announced)
    same(response.status, 413, "status")
    connection.close()


@test
def head_and_preflight(s):
    """HEAD works, and a browser's preflight needs no key."""
    same(s.client.call("HEAD", "/health").status, 200, "HEAD /health")
    asks = {"Origin": "http://localhost", "Access-Control-Request-Method": "POST", "Authorization": ""}
    check(s.client.call("OPTIONS", CHAT, headers=asks).status in (200, 204), "OPTIONS was refused")


@test
def disconnect_frees_the_slot(s):
    """Who hangs up does not keep the next one waiting."""
    connection, response = s.client.open("POST", s.path, s.body("Tell a very long story.", stream=True, max_tokens=1500))
    response.read(20)
    response.close()
    connection.close()
    began = time.monotonic()
    s.ask("Hi", max_tokens=1)
    took = time.monotonic() - began
    check(took < 3.0, f"the next answer took {took:.1f} s")


@test
def still_well(s):
    """After all this, a good request works."""
    check(s.text(s.ask()).strip(), "empty text")
    same(s.client.get("/ready").status, 200, "/ready")


def run_tests(server, only):
    """Runs the tests whose name contains `only`; prints a line for each; returns (passed, failed, skipped)."""
    counts = {"ok": 0, "FAILED": 0, "skipped": 0}
    for function, applies in TESTS:
        if only not in function.__name__ or not applies(server):
            continue
        began = time.monotonic()
        try:
            function(server)
            verdict, why = "ok", ""
        except Skipped as reason:
            verdict, why = "skipped", str(reason)
        except Failed as finding:
            verdict, why = "FAILED", str(finding)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this test's failure)
            verdict, why = "FAILED", f"{type(error).__name__}: {error}"
        counts[verdict] += 1
        seconds = time.monotonic() - began
        print(f"  {function.__name__.replace('_', ' '):<28} {verdict:<8} {seconds:6.2f} s")
        if why:
            print(f"      {why}" + (f"\n      what must hold: {function.__doc__}" if verdict == "FAILED" else ""))
        sys.stdout.flush()
    return counts["ok"], counts["FAILED"], counts["skipped"]


def measure(server, rounds):
    """Time to the first token, prompt and output rates as the server itself reports them: medians over the rounds."""
    figures = {"ttft_ms": [], "prefill_tps": [], "decode_tps": []}
    for number in range(rounds):
        words = " ".join(f"word{(i * 7 + number) % 97}" for i in range(120))
        answer = server.ask(f"{number} {words}. {server.long_question}", max_tokens=64)
        axe, usage = answer["axe"], answer["usage"]
        encoded = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        figures["ttft_ms"].append(1000 * axe["first_token_s"])
        figures["prefill_tps"].append(encoded / axe["prefill_s"])
        if server.denoises:
            # All tokens of a canvas come at once, behind its last step.
            denoising_s = axe["elapsed_s"] - axe["queue_s"] - axe["prefill_s"]
            figures["decode_tps"].append(usage["completion_tokens"] / denoising_s)
        elif usage["completion_tokens"] > 1:
            decode_s = axe["elapsed_s"] - axe["queue_s"] - axe["first_token_s"]
            figures["decode_tps"].append((usage["completion_tokens"] - 1) / decode_s)
    return {
        "device": axe["device"], "rounds": rounds, "prompt_tokens": usage["prompt_tokens"],
        **{key: round(statistics.median(values), 1) for key, values in figures.items() if values},
    }


def main():
    parser = argparse.ArgumentParser(prog="scripts/xe.sh test", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the daemon (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="WORD", help="only the tests with this in their name; no benchmark")
    parser.add_argument("--miniature", action="store_true", help="the model is tiny-diffusion: ask it what it knows")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the benchmark (default: %(default)s; 0: none)")
    parser.add_argument("--json", action="store_true", help="the benchmark's figures and the counts as one JSON line at the end")
    options = parser.parse_args()

    try:
        server = Server(options.url)
    except (OSError, ValueError, LookupError) as error:
        sys.exit(f"error: {options.url}/v1/models does not answer as it should: {error}")
    server.miniature = options.miniature
    probe = server.client.post(CHAT, server.body("Hi", max_tokens=1))
    server.chats = not (probe.status == 400 and b"template" in probe.body)

    print(f"{server.model} at {options.url}" + ("" if server.chats else " (no chat template: asked for completions)"))
    passed, failed, skipped = run_tests(server, options.only.replace(" ", "_"))
    figures = {}
    if options.rounds > 0 and not options.only:
        try:
            figures = measure(server, options.rounds)
            print(
                f"\n  device        {figures['device']}\n  first token   {figures['ttft_ms']} ms"
                f" ({figures['prompt_tokens']} tokens of prompt)\n  prefill       {figures['prefill_tps']} tokens/s"
                f"\n  decode        {figures.get('decode_tps', '-')} tokens/s   (medians of {figures['rounds']})"
            )
        except (Failed, LookupError, ZeroDivisionError) as error:
            failed += 1
            print(f"\n  the benchmark FAILED: {type(error).__name__}: {error}")
    if options.json:
        print(json.dumps({"passed": passed, "failed": failed, "skipped": skipped, "bench": figures}))
    print(f"\n{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
