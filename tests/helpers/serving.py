"""A cache server and workers of it, in this process and in others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kvraw
from kvraw.multiprocess import CacheClient, CacheKey, EngineDrivenContextMetadata, EngineWorker, MemoryLayoutDesc
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.service import Service

ROOT = Path(__file__).parents[2]
LAYERS, BLOCKS, BLOCK, HEADS, DIM, TOKENS = 2, 24, 4, 2, 8, 8
CHUNK = 2 * LAYERS * TOKENS * HEADS * DIM * 2
METADATA = EngineDrivenContextMetadata(
    MemoryLayoutDesc(((2, LAYERS, TOKENS, HEADS * DIM),), ("int16",)), BLOCK, False, TOKENS
)


class HostCache:
    """A cache of random bytes in host memory."""

    def __init__(self, seed: int) -> None:
        shape = (2, BLOCKS, BLOCK, HEADS, DIM * 2)
        rng = np.random.default_rng(seed)
        self.layers = [rng.integers(0, 256, shape, np.uint8).view(np.int16) for _ in range(LAYERS)]
        self.cache = kvraw.PagedCache.from_tensors(self.layers, axes="PBTHD")

    def blocks(self, ids: list[int]) -> bytes:
        return b"".join(layer[:, ids].tobytes() for layer in self.layers)


def key(first: int, chunks: int, start: int = 0, salt: str = "") -> CacheKey:
    """Of tokens that no other `first` has."""
    tokens = list(range(first * 1000, first * 1000 + chunks * TOKENS))
    return CacheKey("model", 1, 0, tokens, start * TOKENS, chunks * TOKENS, cache_salt=salt)


def worker(cache: kvraw.PagedCache, endpoint: str, **options: Any) -> EngineWorker:
    return EngineWorker.connect(cache, endpoint, chunk_tokens=TOKENS, **options)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


class Asker:
    """Asks a service in this process, as one of its clients."""

    def __init__(self, service: Service, name: bytes, chunk_bytes: int = 4096, shared: bool = True) -> None:
        self.service, self.name, self._next = service, name, 0
        assert type(self.ask(m.Register(name=name.decode(), chunk_bytes=chunk_bytes, shared=shared))) is m.Registered

    def ask(self, message: m.Request, *payload: Any) -> Any:
        self._next += 1
        message.id = message.id or self._next
        frames = self.service.handle(self.name, [m.encode(message), *payload])
        reply = m.decode_reply(frames[0])
        assert reply.id == message.id
        self.frames = frames[1:]
        return reply

    def code(self, message: m.Request, *payload: Any) -> str:
        """The error that a request is answered by; "" where there is none."""
        reply = self.ask(message, *payload)
        return reply.code if type(reply) is m.Error else ""


class Child:
    """A process of Python that runs code and talks by lines."""

    def __init__(self, code: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import sys\nfrom tests.helpers.serving import *\n" + code, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> str:
        """Say something, and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


class Server:
    """`kvraw serve` as a process."""

    def __init__(self, folder: Path, *options: str, mib: int = 8) -> None:
        self.endpoint = f"ipc://{folder}/s.sock"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvraw", "serve", "--json", f"--mib={mib}", "--endpoint", self.endpoint, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.ready = self.process.stderr.readline()
        assert "listening" in self.ready, self.ready + self.process.stderr.read()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Its exit status and its output."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err

    def segments(self) -> list[str]:
        return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"kvraw-{self.process.pid}-"))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


def stats(endpoint: str) -> dict[str, float]:
    with CacheClient(endpoint) as client:
        reply: m.StatsReply = client.request(m.Stats())
        return reply.values
