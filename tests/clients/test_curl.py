"""Plain curl, for what libraries hide: the bytes of HTTP and of event streams, and what the log keeps to itself."""

import json
import re
import subprocess
import unittest

from support import PATIENCE, SMOLLM2, capital, eventually, folder, miniature, start, user

CHAT = "/v1/chat/completions"
JSON = ("-H", "Content-Type: application/json")
ROUTES = {
    "/health": "GET", "/ready": "GET", "/metrics": "GET", "/v1/models": "GET", "/v1/models/tiny-diffusion": "GET",
    CHAT: "POST", "/v1/completions": "POST", "/tokenize": "POST", "/detokenize": "POST",
}


def curl(*words, body=None):
    """What curl prints."""
    if body is not None:
        words = ("--data-binary", "@-", *JSON, *words)
    text = body if isinstance(body, (str, type(None))) else json.dumps(body)
    data = None if text is None else text.encode()
    done = subprocess.run(
        ["curl", "-sS", "--max-time", str(PATIENCE), *words], input=data, capture_output=True, check=False)
    if done.returncode:
        raise AssertionError(f"curl ended with {done.returncode}: {done.stderr}")
    return done.stdout.decode()


def status(*words, body=None):
    return int(curl("-o", folder() / "body", "-w", "%{http_code}", *words, body=body))


def headers_of(text):
    """The last head that `curl -i` printed, names in lower case."""
    head = [part for part in text.replace("\r\n", "\n").split("\n\n") if part.startswith("HTTP/")][-1]
    return dict((name.lower(), value) for name, value in (line.split(": ", 1) for line in head.split("\n")[1:] if ": " in line))


class Bytes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.url = miniature().url

    def chat(self, **more):
        return {"model": "tiny-diffusion", "messages": user(capital("Australia")), "seed": 1} | more

    def test_an_event_stream_is_framed_as_readers_expect(self):
        text = curl("-N", "-i", self.url + CHAT, body=self.chat(stream=True, stream_options={"include_usage": True}))
        headers = headers_of(text)
        self.assertEqual(headers["content-type"], "text/event-stream")
        self.assertEqual((headers["cache-control"], headers["x-accel-buffering"]), ("no-cache", "no"))
        body = text.split("\r\n\r\n", 1)[1]
        self.assertTrue(body.endswith("data: [DONE]\n\n"))
        *events, rest = body.split("\n\n")
        self.assertEqual(rest, "")
        for event in events:
            self.assertRegex(event, r"\A(data: [^\n]+|:[^\n]*)\Z")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        self.assertEqual(chunks[0]["choices"][0]["delta"]["role"], "assistant")
        self.assertEqual(chunks[-2]["choices"][0], {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"})
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertTrue(all(chunk["usage"] is None for chunk in chunks[:-1]))
        self.assertEqual(len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}), 1)

    def test_pings_fill_the_silence(self):
        daemon = start("pings", SMOLLM2, AXE_SERVER_PING_INTERVAL_S="0.05")
        self.addCleanup(daemon.stop)
        # A prompt that takes a while to read.
        text = curl("-N", daemon.url + "/v1/completions", body={"prompt": "hi " * 3000, "stream": True, "max_tokens": 2})
        self.assertRegex(text, r"\A(: ping\n\n)+data: ")
        self.assertTrue(text.endswith("data: [DONE]\n\n"))

    def test_every_route_knows_its_methods(self):
        for path, method in ROUTES.items():
            with self.subTest(path=path):
                self.assertEqual(status("-X", "OPTIONS", self.url + path), 204)
                self.assertEqual(status("-I", self.url + path), 200 if method == "GET" else 405)
                wrong = curl("-i", "-X", "DELETE", self.url + path)
                self.assertRegex(wrong, r"\AHTTP/1.1 405 ")
                self.assertIn(method, headers_of(wrong)["allow"])
                preflight = curl("-i", "-X", "OPTIONS", "-H", "Origin: http://page.example", "-H",
                                 f"Access-Control-Request-Method: {method}", self.url + path)
                self.assertEqual(headers_of(preflight)["access-control-allow-origin"], "*")

    def test_bodies_come_in_every_way(self):
        for words in ((), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue"), ("--http1.0",)):
            with self.subTest(words=words):
                answer = json.loads(curl(*words, self.url + CHAT, body=self.chat()))
                self.assertEqual(answer["choices"][0]["message"]["content"], "The capital of Australia is Canberra.")

    def test_what_is_no_json_is_told_so(self):
        self.assertEqual(status("-H", "Content-Type: text/plain", "--data-binary", "{}", self.url + CHAT), 415)
        for body in ("", "{", "[]", '{"a": "\\ud800"}', "\x00"):
            self.assertEqual(status(self.url + CHAT, body=body), 400, body)
        self.assertEqual(status(self.url + CHAT, body='"' + "x" * (9 << 20) + '"'), 413)
        self.assertEqual(status("-H", "Expect: 100-continue", self.url + CHAT, body='"' + "x" * (9 << 20) + '"'), 413)

    def test_a_connection_is_kept_and_text_is_packed(self):
        words = [word for _ in range(3) for word in ("-o", str(folder() / "body"), self.url + "/v1/models")]
        self.assertEqual(curl("-w", "%{num_connects}\n", *words).split(), ["1", "0", "0"])
        packed = curl("-i", "--compressed", self.url + "/metrics")
        self.assertEqual(headers_of(packed)["content-encoding"], "gzip")
        self.assertIn("axe_running", packed)


class Log(unittest.TestCase):
    def test_unknown_fields_are_named_and_keys_and_texts_are_not(self):
        daemon = start("log", AXE_API_KEY="key-that-nobody-may-see", AXE_LOG_LEVEL="trace")
        self.addCleanup(daemon.stop)
        body = {"messages": user("words-that-nobody-may-see"), "seed": 1, "field_of_another_server": "value-that-nobody-may-see"}
        right = ("-H", "Authorization: Bearer key-that-nobody-may-see", daemon.url + CHAT)
        self.assertEqual(status(*right, body=body), 200)
        self.assertEqual(status("-H", "x-api-key: key-that-nobody-may-see", daemon.url + CHAT, body=body), 200)
        self.assertEqual(status("-H", "Authorization: Bearer wrong-key-that-nobody-may-see", daemon.url + CHAT, body=body), 401)
        self.assertEqual(status(*right, body='{"messages": "words-that-nobody-may-see"}'), 400)
        eventually("the log has the field", lambda: "field_of_another_server" in daemon.log.read_text())
        self.assertEqual(re.findall(r".*nobody-may-see.*", daemon.log.read_text()), [])


if __name__ == "__main__":
    unittest.main()
