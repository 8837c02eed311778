"""Routers before two daemons, with the configurations of docs/routers: LiteLLM's proxy, HAProxy and nginx.

A daemon is killed in mid-stream. What it was streaming must end with an error, and not look complete; what it had not
begun to answer must be answered by the other one.
"""

import asyncio
import os
import pathlib
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request

import openai
from support import PATIENCE, ROOT, cancelled, eventually, folder, free_port, idle, smollm2, start, user

KEY = "sk-for-the-tests"
STORY = user("Write a long story.")
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
HELLO = {"messages": user("Say hello."), "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


def setUpModule():
    global daemons
    # Streams that wait in a queue stay silent for longer than any test makes them wait.
    settings = {"AXE_MODEL_SERVED_NAME": "axe", "AXE_SERVER_PING_INTERVAL_S": "60"}
    daemons = [start(f"card{number}", smollm2().model, **settings) for number in range(2)]
    for daemon in daemons:
        unittest.addModuleCleanup(daemon.stop)


def answered(daemon):
    """How many requests it answered to their full length since it started."""
    return daemon.figure('axe_requests_total{outcome="length"}')


class Router:
    """The tests that every router passes."""

    #: The file in docs/routers.
    CONFIG = ""
    #: Changes to that file that the place of the test asks for.
    CHANGES = ()

    @classmethod
    def setUpClass(cls):
        cls.place = folder() / cls.__name__
        cls.place.mkdir(exist_ok=True)
        port = free_port()
        text = (ROOT / "docs/routers" / cls.CONFIG).read_text()
        ports = {8000: port, 8081: daemons[0].port, 8082: daemons[1].port}
        changes = [(f"127.0.0.1:{old}", f"127.0.0.1:{new}") for old, new in ports.items() if f"127.0.0.1:{old}" in text]
        for old, new in (*changes, *cls.CHANGES):
            assert old in text, f"{cls.CONFIG} has no {old!r}"
            text = text.replace(old, new)
        config = cls.place / cls.CONFIG
        config.write_text(text)
        cls.url = f"http://127.0.0.1:{port}"
        cls.check(config)
        with open(cls.place / "log", "wb") as log:
            cls.process = subprocess.Popen(
                cls.command(config, port), cwd=cls.place, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"LITELLM_MASTER_KEY": KEY},
            )
        cls.addClassCleanup(cls.end)
        eventually(f"{cls.CONFIG} works", cls.answers, 3 * PATIENCE)

    @classmethod
    def end(cls):
        cls.process.terminate()
        try:
            cls.process.wait(20)
        except subprocess.TimeoutExpired:
            cls.process.kill()
            cls.process.wait()

    @classmethod
    def answers(cls):
        """Whether models are listed through it."""
        if cls.process.poll() is not None:
            raise AssertionError(f"{cls.CONFIG} ended:\n{(cls.place / 'log').read_text()[-3000:]}")
        request = urllib.request.Request(f"{cls.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def setUp(self):
        eventually("both daemons are idle", lambda: all(map(idle, daemons)))

    async def asyncSetUp(self):
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)
        self.addAsyncCleanup(self.client.close)

    async def asyncTearDown(self):
        """Whatever happened, the next test finds both daemons alive, and the router knows it."""
        for daemon in daemons:
            if daemon.process.poll() is not None:
                daemon.start()
                await asyncio.to_thread(daemon.wait)
                await self.until_it_serves(daemon)

    async def until_it_serves(self, daemon):
        """Asks until a daemon that came back gets requests: routers leave it out for a while, and may try it too early."""
        served, end = answered(daemon), time.monotonic() + PATIENCE
        while answered(daemon) == served:
            self.assertLess(time.monotonic(), end, "the daemon that came back gets no requests")
            replies = await asyncio.gather(*(self.whole() for _ in range(4)), return_exceptions=True)
            for odd in replies:
                if isinstance(odd, Exception) and not isinstance(odd, openai.APIError):
                    raise odd

    async def until(self, what, happened):
        await asyncio.to_thread(eventually, what, happened)

    async def begin(self):
        """A stream without end, after its first word."""
        stream = await self.client.chat.completions.create(model="axe", messages=STORY, stream=True, **ENDLESS)
        self.addAsyncCleanup(stream.close)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                return stream
        self.fail("the stream ended")

    async def whole(self):
        reply = await self.client.chat.completions.create(model="axe", **HELLO)
        return reply.choices[0].message.content, reply.choices[0].finish_reason

    async def streamed(self):
        stream = await self.client.chat.completions.create(model="axe", stream=True, **HELLO)
        chunks = [chunk.choices[0] async for chunk in stream if chunk.choices]
        return "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason

    async def end_of(self, stream):
        """The error that a stream ends with."""
        try:
            async for chunk in stream:
                self.assertIsNone(chunk.choices[0].finish_reason if chunk.choices else None, "no reply must look complete")
        except (openai.APIError, openai.APIConnectionError) as error:
            return error
        return self.fail("the stream ended as if it were complete")

    async def test_answers_and_streams_pass(self):
        text, reason = await self.whole()
        self.assertTrue(text)
        self.assertEqual(reason, "length")
        self.assertEqual(await self.streamed(), (text, reason))

    async def test_a_stream_is_not_held_up(self):
        """What a router collects before it passes it on comes only when the daemon is done."""
        words = 0
        stream = await self.begin()
        async for chunk in stream:
            words += bool(chunk.choices and chunk.choices[0].delta.content)
            if words == 20:
                break
        self.assertEqual(sorted(daemon.figure("axe_running") for daemon in daemons), [0, 1])
        await stream.close()

    async def test_the_idle_daemon_gets_the_next_request(self):
        streams = [await self.begin(), await self.begin()]
        self.assertEqual([daemon.figure("axe_running") for daemon in daemons], [1, 1])
        for stream in streams:
            await stream.close()

    async def test_who_leaves_frees_the_slot(self):
        before = sum(map(cancelled, daemons))
        stream = await self.begin()
        await stream.close()
        await self.until("the slot is free", lambda: all(map(idle, daemons)))
        self.assertEqual(sum(map(cancelled, daemons)), before + 1)

    async def test_what_is_wrong_is_told_by_the_daemon(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            await self.client.chat.completions.create(model="axe", messages=STORY, temperature=1, max_tokens=0)
        self.assertIn("max_tokens", str(caught.exception))

    async def test_a_daemon_that_is_told_to_end_loses_nothing(self):
        ending, other = daemons
        before = [answered(daemon) for daemon in daemons]
        asked = [asyncio.create_task(ask()) for ask in (self.whole, self.streamed) * 8]
        await self.until("both are at work", lambda: answered(ending) > before[0])
        ending.process.terminate()
        later = [asyncio.create_task(ask()) for ask in (self.whole, self.streamed) * 4]
        answers = await asyncio.gather(*asked, *later)
        self.assertEqual(answers, [answers[0]] * len(answers))
        await asyncio.to_thread(ending.process.wait, PATIENCE)
        self.assertGreater(answered(other), before[1])

    async def test_a_daemon_dies_in_mid_stream_and_comes_back(self):
        streams = [await self.begin(), await self.begin()]
        waiting = [asyncio.create_task(ask()) for ask in (self.whole, self.streamed) * 3]
        await self.until("six wait", lambda: sum(daemon.figure("axe_queue_depth") for daemon in daemons) == 6)
        dying, other = daemons
        self.assertGreaterEqual(dying.figure("axe_queue_depth"), 2)
        dying.kill()
        ends = [asyncio.create_task(self.end_of(stream)) for stream in streams]
        done, going_on = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE)
        self.assertEqual((len(done), len(going_on)), (1, 1), "one stream breaks off, and only one")
        self.assertIsInstance(done.pop().result(), openai.APIError)
        # The other daemon takes over what waited, and new requests besides.
        await self.until("all wait at the other", lambda: other.figure("axe_queue_depth") == 6)
        going_on.pop().cancel()
        for stream in streams:
            await stream.close()
        expected = await self.whole()
        self.assertEqual(await asyncio.gather(*waiting), [expected] * 6)
        self.assertEqual(await self.streamed(), expected)
        dying.start()
        await asyncio.to_thread(dying.wait)
        await self.until_it_serves(dying)
        self.assertEqual(await asyncio.gather(*(self.whole() for _ in range(4))), [expected] * 4)


class LiteLLM(Router, unittest.IsolatedAsyncioTestCase):
    CONFIG = "litellm.yaml"

    @classmethod
    def check(cls, config):
        """It has no way to check a configuration."""

    @classmethod
    def command(cls, config, port):
        return [pathlib.Path(sys.executable).with_name("litellm"), "--config", config, "--host", "127.0.0.1", "--port", str(port)]


class HAProxy(Router, unittest.IsolatedAsyncioTestCase):
    CONFIG = "haproxy.cfg"

    @classmethod
    def check(cls, config):
        subprocess.run(["/usr/sbin/haproxy", "-c", "-q", "-f", config], check=True)

    @classmethod
    def command(cls, config, port):
        return ["/usr/sbin/haproxy", "-db", "-f", config]


class Nginx(Router, unittest.IsolatedAsyncioTestCase):
    CONFIG = "nginx.conf"
    # Where Debian's nginx would write, only root may.
    KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    CHANGES = (("http {", "http {\n" + "".join(f"{kind}_temp_path tmp;\n" for kind in KINDS) + "access_log off;"),)
    WORDS = ("/usr/sbin/nginx", "-e", "stderr", "-g", "daemon off; pid nginx.pid;")

    @classmethod
    def check(cls, config):
        subprocess.run([*cls.WORDS, "-q", "-t", "-p", cls.place, "-c", config], check=True)

    @classmethod
    def command(cls, config, port):
        return [*cls.WORDS, "-p", cls.place, "-c", config]


if __name__ == "__main__":
    unittest.main()
