"""Random files of a model's size: numbers, files that are whole or not there, and progress. Standard library only."""

import hashlib
import os
import random
import shutil
import statistics
import struct
import sys
import time
import typing

# Random bytes that are repeated; a prime, so that rows of no matrix begin at the same place again and again.
PERIOD = 8_388_593
CHUNK = 1 << 24
PARTIAL = ".partial"


def f32(value):
    return struct.pack("<f", value)


def bf16(value):
    """The nearest bf16."""
    bits = struct.unpack("<I", f32(value))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def f16(value):
    return struct.pack("<e", value)


def normal(deviation, form):
    """256 numbers that are spread as normal ones are, in the bytes that `form` makes."""
    spread = statistics.NormalDist(0.0, deviation)
    return tuple(form(spread.inv_cdf((index + 0.5) / 256)) for index in range(256))


def even(least, most, form):
    """256 numbers at even distances."""
    return tuple(form(least + (most - least) * index / 255) for index in range(256))


class Blocks(typing.NamedTuple):
    """Blocks of random bytes between one of 256 heads and the tail that belongs to it."""

    heads: tuple
    length: int
    tails: tuple


class Numbers:
    """Endless random bytes, and what is made of them: numbers picked from a list of 256, or blocks."""

    def __init__(self, seed):
        self.seed = seed
        self.codes = random.Random(seed).randbytes(PERIOD)
        self.made = {None: (self.codes, 1)}

    def stream(self, kind):
        """What repeats, and how many bytes of it belong together."""
        if kind not in self.made:
            self.made[kind] = self.blocks(kind) if isinstance(kind, Blocks) else self.picked(kind)
        return self.made[kind]

    def picked(self, numbers):
        width = len(numbers[0])
        out = bytearray(width * PERIOD)
        for at in range(width):
            out[at::width] = self.codes.translate(bytes(number[at] for number in numbers))
        return bytes(out), width

    def blocks(self, kind):
        heads, length, tails = kind
        parts = []
        for at in range(0, PERIOD - length, length):
            which = self.codes[at]
            parts += (heads[which], self.codes[at:at + length], tails[which])
        return b"".join(parts), len(heads[0]) + length + len(tails[0])

    def chunks(self, name, kind, length):
        """The bytes of the tensor of that name. `kind`: None for plain random bytes, the list that numbers are picked from,
        `Blocks`, or the very bytes."""
        if isinstance(kind, bytes):
            yield kind
            return
        source, unit = self.stream(kind)
        start = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8], "little")
        at = start % (len(source) // unit) * unit
        view = memoryview(source)
        while length:
            part = view[at:at + min(length, CHUNK)]
            yield part
            length -= len(part)
            at = (at + len(part)) % len(source)


class Progress:
    """A bar on a terminal; elsewhere a line for every tenth."""

    def __init__(self, total):
        self.total, self.done, self.written, self.began, self.told = max(total, 1), 0, 0, time.monotonic(), 0
        self.shown = 0.0

    def skip(self, count):
        self.done += count
        self.show()

    def add(self, count):
        self.done += count
        self.written += count
        self.show()

    def show(self):
        now, share = time.monotonic(), self.done / self.total
        rate = self.written / max(now - self.began, 1e-3)
        left = (self.total - self.done) / rate if rate else 0.0
        text = f"{100 * share:5.1f} % of {self.total / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
        if sys.stderr.isatty():
            if now - self.shown > 0.2 or share == 1:
                filled = int(30 * share)
                end = "\n" if share == 1 else ""
                print(f"\r[{'#' * filled}{' ' * (30 - filled)}] {text}  ", end=end, file=sys.stderr, flush=True)
                self.shown = now
        elif int(10 * share) > self.told:
            self.told = int(10 * share)
            print(f"    {text}", file=sys.stderr, flush=True)


def fail(text):
    sys.exit(f"error: {text}")


def write_whole(path, chunks):
    """Writes a file under another name until it is whole."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "wb", buffering=0) as file:
        for chunk in chunks:
            while len(chunk):
                chunk = chunk[file.write(chunk):]
        os.fsync(file.fileno())
        # What was written is not read again by this program, and others want the memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.replace(partial, path)


def need_room(folder, count):
    """Ends here if the disk would be full."""
    spare = 1 << 30
    free = shutil.disk_usage(folder).free
    if count and free < count + spare:
        fail(f"{folder} has {free >> 20} MiB free, and {count + spare >> 20} MiB are needed; name a folder on another disk, "
             "or fewer layers (--layers)")


def write_tensors(path, head, tensors, numbers, progress):
    """Writes a file of `head` and the tensors, one behind the other; each has `name`, `kind` and `length`, and may have
    `padding`, bytes of nothing behind it."""

    def content():
        yield memoryview(head)
        for tensor in tensors:
            for chunk in numbers.chunks(tensor.name, tensor.kind, tensor.length):
                yield chunk
                progress.add(len(chunk))
            yield bytes(tensor.padding)

    write_whole(path, content())


def vocabulary(tokenizer, count):
    """The tokens of the miniature's tokenizer, and made-up ones up to `count`."""
    tokens = tokenizer["model"]["vocab"]
    for token in range(len(tokens), count):
        tokens[f"<unused{token}>"] = token
