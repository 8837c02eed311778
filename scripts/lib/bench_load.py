"""Loads a daemon with clients of every manner at once, and judges what it costs. Started by scripts/bench.sh load.

Each client asks again and again, each time in a manner drawn at random: whole answers, streams, streams that are left,
requests that are left before their answer, readers and writers that are slow, and bytes that are no HTTP. Meanwhile a
process of its own asks /health, twenty times a second. Bounds, each of which fails the run when it is broken:

  health      99 of 100 answers of /health within 20 ms
  outcomes    a request that is in order is answered, or refused with 429; garbage gets 4xx or a closed connection
  slots       afterwards nothing runs or waits, and a request is answered at once
  memory      resident memory after it is at most 2 % and 8 MiB over that after the same load for a while before
  descriptors as many open as before
"""

import argparse
import asyncio
import collections
import contextlib
import http.client
import json
import multiprocessing
import os
import pathlib
import random
import socket
import statistics
import struct
import sys
import tempfile
import time

from daemon import Daemon

#: Seconds for any one request to end.
PATIENCE = 120
#: Milliseconds in which 99 of 100 questions about health must be answered.
HEALTH_MS = 20
#: What resident memory may grow by, of what it was, and besides.
GROWTH, SLACK = 0.02, 8 << 20
QUESTIONS = ["Name three fruits.", "What is the capital of France?", "Count to ten.", "Write two lines about rain.", "Say hello."]


class Wrong(Exception):
    """An answer that should not be."""


class Connection:
    """One request on a socket of its own."""

    def __init__(self, port, receive_buffer=None):
        self.port, self.receive_buffer = port, receive_buffer

    async def __aenter__(self):
        plain = socket.socket()
        plain.setblocking(False)
        if self.receive_buffer:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.port))
            # A small limit, so that a slow reader leaves the rest to the system, which tells the daemon.
            self.reader, self.writer = await asyncio.open_connection(sock=plain, limit=1 << 16)
        except BaseException:
            plain.close()
            raise
        return self

    async def __aexit__(self, *_):
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def reset(self):
        """What a client that crashes does: the connection is reset, not closed."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def send(self, body, pieces=1, pause=0.0):
        body = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: axe\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        step = -(-len(data) // pieces)
        for at in range(0, len(data), step):
            self.writer.write(data[at:at + step])
            await self.writer.drain()
            await asyncio.sleep(pause)

    async def status(self):
        """The status and the headers' names in lower case."""
        line = await self.reader.readline()
        if not line.startswith(b"HTTP/1.1 "):
            raise Wrong(f"no status line, but {line[:60]!r}")
        headers = {}
        while (more := await self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = more.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    async def answer(self):
        """The outcome of a request that is answered in one piece."""
        status, headers = await self.status()
        body = json.loads(await self.reader.readexactly(int(headers["content-length"])))
        if status == 200:
            if not body["choices"][0]["finish_reason"]:
                raise Wrong("no reason for the end")
            return "answered"
        if status == 429 and "retry-after" in headers:
            return "refused (429)"
        raise Wrong(f"{status} {body}")

    async def events(self, pause=0.0):
        """The data of each event of a chunked stream, as it comes; or nothing after a refusal."""
        status, headers = await self.status()
        if status != 200:
            if status == 429 and "retry-after" in headers:
                return
            raise Wrong(f"{status} for a stream")
        text = b""
        while (line := await self.reader.readline()) and (size := int(line, 16)):
            text += (await self.reader.readexactly(size + 2))[:-2]
            while b"\n\n" in text:
                event, text = text.split(b"\n\n", 1)
                if event.startswith(b"data: "):
                    yield event[6:]
                elif not event.startswith(b":"):
                    raise Wrong(f"an event that is none: {event[:60]!r}")
            await asyncio.sleep(pause)


class Load:
    """What one run's clients do, and what came of it."""

    def __init__(self, port, seed):
        self.port, self.seed = port, seed
        self.outcomes = collections.Counter()
        self.times = collections.defaultdict(list)
        self.wrong = []

    def body(self, chance, stream, tokens):
        return {
            "messages": [{"role": "user", "content": chance.choice(QUESTIONS)}], "stream": stream,
            "max_tokens": tokens, "seed": chance.randrange(1 << 30),
        }

    async def whole(self, chance):
        async with Connection(self.port) as connection:
            await connection.send(self.body(chance, False, chance.randrange(1, 12)))
            return await connection.answer()

    async def stream(self, chance, tokens=None, pause=0.0, receive_buffer=None):
        async with Connection(self.port, receive_buffer) as connection:
            await connection.send(self.body(chance, True, tokens or chance.randrange(1, 12)))
            last = None
            async for last in connection.events(pause):
                if b'"error"' in last:
                    raise Wrong(last.decode())
            if last is None:
                return "refused (429)"
            if last != b"[DONE]":
                raise Wrong(f"a stream without its end: {last[:80]!r}")
            return "answered"

    async def slow_reader(self, chance):
        return await self.stream(chance, tokens=24, pause=0.05, receive_buffer=2048)

    async def slow_writer(self, chance):
        async with Connection(self.port) as connection:
            await connection.send(self.body(chance, False, 2), pieces=20, pause=0.05)
            return await connection.answer()

    async def left_stream(self, chance):
        async with Connection(self.port) as connection:
            await connection.send(self.body(chance, True, 400))
            wanted = chance.randrange(4)
            async for _ in connection.events():
                wanted -= 1
                if wanted < 0:
                    break
            if chance.random() < 0.5:
                connection.reset()
            return "left"

    async def left_wait(self, chance):
        async with Connection(self.port) as connection:
            await connection.send(self.body(chance, chance.random() < 0.5, 400))
            await asyncio.sleep(chance.random())
            if chance.random() < 0.5:
                connection.reset()
            return "left"

    async def garbage(self, chance):
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: axe\r\nContent-Type: application/json\r\n"
        junk = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400)))
        data = chance.choice([
            junk,
            junk + b"\r\n\r\n",
            head + b"Content-Length: 40\r\n\r\n" + junk[:40].ljust(40, b"{"),
            head + b"Content-Length: 1000\r\n\r\n{",
            head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            head + b"Content-Length: -1\r\n\r\n{}",
            head + b"X: " + junk.hex().encode() * 200 + b"\r\n\r\n",
            b"GET /v1/" + junk.hex().encode() + b" HTTP/1.1\r\nHost: axe\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + junk,
            head + b'Content-Length: 16\r\n\r\n{"messages": 3} ',
        ])
        async with Connection(self.port) as connection:
            connection.writer.write(data)
            # The daemon may have closed it already.
            with contextlib.suppress(OSError):
                await connection.writer.drain()
                connection.writer.write_eof()
                line = await connection.reader.readline()
                if not line:
                    return "closed"
                if line.split()[1:2] and line.split()[1][:1] == b"4":
                    return "refused (4xx)"
                raise Wrong(f"garbage got {line[:80]!r}")
            return "closed"

    #: Manners, and how often each is taken.
    MANNERS = {"whole": 4, "stream": 4, "left_stream": 3, "left_wait": 3, "garbage": 4, "slow_reader": 1, "slow_writer": 1}

    async def client(self, number, end):
        chance = random.Random(f"{self.seed} {number}")
        while time.monotonic() < end:
            manner = chance.choices(list(self.MANNERS), list(self.MANNERS.values()))[0]
            began = time.monotonic()
            try:
                outcome = await asyncio.wait_for(getattr(self, manner)(chance), PATIENCE)
            except (Wrong, OSError, EOFError, ValueError, LookupError, asyncio.TimeoutError) as error:
                outcome = "wrong"
                self.wrong.append(f"{manner}: {error!r}")
            self.times[manner].append(time.monotonic() - began)
            self.outcomes[manner, outcome] += 1

    async def run(self, clients, seconds):
        end = time.monotonic() + seconds
        await asyncio.gather(*(self.client(number, end) for number in range(clients)))


def ask_health(port, stop, times):
    """A process that asks /health on one connection and keeps the milliseconds of each answer."""
    connection, found = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE), []
    while not stop.is_set():
        began = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        found.append(1000 * (time.perf_counter() - began) if answer.status == 200 else float("inf"))
        time.sleep(0.05)
    times.put(found)


def load(port, clients, seconds, seed):
    """One run: the load, and the times of /health in milliseconds."""
    stop, times = multiprocessing.Event(), multiprocessing.Queue()
    asker = multiprocessing.Process(target=ask_health, args=(port, stop, times), daemon=True)
    asker.start()
    result = Load(port, seed)
    try:
        asyncio.run(result.run(clients, seconds))
    finally:
        stop.set()
    health = times.get(timeout=30)
    asker.join()
    return result, health


def resident(pid):
    """Bytes of memory that the process has."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def calm(daemon, limit, most=None):
    """Waits until nothing runs or waits, and as few descriptors are open; returns memory, descriptors and what is wrong."""
    pid, end = daemon.process.pid, time.monotonic() + limit
    figures = lambda: (daemon.figure("axe_running"), daemon.figure("axe_queue_depth"))
    while time.monotonic() < end and (any(figures()) or (most is not None and descriptors(pid) > most)):
        time.sleep(0.2)
    # Memory of large requests goes back after half a second.
    time.sleep(1)
    running, waiting = figures()
    # To ask for them was a connection, too, which the daemon may be about to close.
    end = time.monotonic() + 2
    while most is not None and descriptors(pid) > most and time.monotonic() < end:
        time.sleep(0.05)
    faults = [f"slots: {running:.0f} run and {waiting:.0f} wait after the end"] if running or waiting else []
    return resident(pid), descriptors(pid), faults


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm", type=float, help="seconds of the same load before it counts (a sixth of --seconds)")
    parser.add_argument("--health-ms", type=float, default=HEALTH_MS)
    parser.add_argument("--settle", type=float, default=15, help="seconds in which all must have ended after the load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build", default="")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="axe-load-") as folder:
        daemon = Daemon(folder, "axed", pathlib.Path(options.model).resolve())
        try:
            daemon.wait()
            faults = measure(daemon, options)
        finally:
            daemon.stop()
    for fault in faults:
        print(f"BROKEN  {fault}")
    sys.exit(bool(faults))


def measure(daemon, options):
    """Runs, prints, and returns what is not as it must be."""
    idle = calm(daemon, options.settle)
    warm = options.warm if options.warm is not None else options.seconds / 6
    load(daemon.port, options.clients, warm, f"warm {options.seed}")
    before = calm(daemon, options.settle, idle[1])
    if before[2]:
        return before[2]
    began = time.monotonic()
    result, health = load(daemon.port, options.clients, options.seconds, options.seed)
    took = time.monotonic() - began
    during = resident(daemon.process.pid), descriptors(daemon.process.pid)
    after = calm(daemon, options.settle, before[1])
    faults = after[2]
    probe = Load(daemon.port, 0)
    began = time.monotonic()
    outcome = asyncio.run(asyncio.wait_for(probe.whole(random.Random(0)), PATIENCE))
    at_once = time.monotonic() - began
    if outcome != "answered" or at_once > 5:
        faults.append(f"slots: a request afterwards was {outcome} after {at_once:.1f} s")
    if result.wrong:
        faults.append(f"outcomes: {len(result.wrong)} went wrong, as {result.wrong[0][:300]}")
    p99 = quantile(health, 0.99)
    if not p99 <= options.health_ms:
        faults.append(f"health: p99 is {p99:.1f} ms, more than {options.health_ms:g}")
    if after[0] > before[0] * (1 + GROWTH) + SLACK:
        faults.append(f"memory: {mib(before[0])} before, {mib(after[0])} after")
    if after[1] > before[1]:
        faults.append(f"descriptors: {before[1]} before, {after[1]} after")

    print(f"{options.clients} clients for {took:.0f} s, {pathlib.Path(options.model).name}, {options.build}".rstrip(", "))
    print(f"\n{'manner':14}{'outcome':16}{'requests':>9}{'p50, s':>9}{'p99, s':>9}")
    for (manner, outcome), count in sorted(result.outcomes.items()):
        times = result.times[manner]
        print(f"{manner:14}{outcome:16}{count:9}{quantile(times, 0.5):9.2f}{quantile(times, 0.99):9.2f}")
    print(f"\n/health, ms   p50 {statistics.median(health):.2f}   p99 {p99:.2f}   most {max(health):.2f}   ({len(health)} asked)")
    print(f"{'':14}{'idle':>10}{'before':>10}{'at the end':>12}{'after':>10}")
    print(f"{'resident':14}{mib(idle[0]):>10}{mib(before[0]):>10}{mib(during[0]):>12}{mib(after[0]):>10}")
    print(f"{'descriptors':14}{idle[1]:>10}{before[1]:>10}{during[1]:>12}{after[1]:>10}")
    print(f"afterwards    a request took {at_once:.2f} s")
    if options.json:
        facts = {
            "clients": options.clients, "seconds": took, "outcomes": {" ".join(key): n for key, n in result.outcomes.items()},
            "health_ms": health, "resident": [idle[0], before[0], during[0], after[0]],
            "descriptors": [idle[1], before[1], during[1], after[1]], "at_once_s": at_once, "faults": faults,
        }
        pathlib.Path(options.json).write_text(json.dumps(facts), encoding="utf-8")
    return faults


def mib(size):
    return f"{size / (1 << 20):.1f} MiB"


if __name__ == "__main__":
    main()
