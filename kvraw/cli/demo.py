"""`kvraw demo`: a model's cache blocks go to chunks and come back, and every byte is compared (see `truth`)."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import kvraw
from kvraw import config
from kvraw.cli.models import Model
from kvraw.cli.truth import CHUNK_TOKENS, GUARD_BYTES, UNUSED, Truth
from kvraw.errors import DriverNotFoundError, LayoutError, UnsupportedDriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

__all__ = ["rows", "run"]

ROUNDS = 7
WIPED = 0xA5  # what wiped blocks hold before the load


class _Place:
    """The cache's memory: `image` itself, or device memory that `image` is the host's copy of."""

    def __init__(self, image: kvraw.HostChunk, device: int | None, stack: ExitStack) -> None:
        self.image, self.device = image, device
        self.address, self.stream = image.address, None
        if device is not None:
            memory, self.stream = kvraw.DeviceBuffer(image.nbytes, device), kvraw.Stream(device)
            self.address = memory.address
            stack.callback(memory.close)
            stack.callback(self.stream.close)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """One plain copy, waited for: the measure of this machine."""
        if self.stream is None or self.device is None:
            ctypes.memmove(dst, src, nbytes)
            return
        with DeviceScope(self.device):
            driver().memcpy_async(dst, src, nbytes, self.stream.handle)
            self.stream.synchronize()

    def upload(self) -> None:
        """Make the cache what the image is."""
        if self.device is not None:
            self.copy(self.address, self.image.address, self.image.nbytes)

    def download(self) -> None:
        """Make the image what the cache is."""
        if self.device is not None:
            self.copy(self.image.address, self.address, self.image.nbytes)


def _seconds(work: Callable[[], None]) -> float:
    """Median time of `work`, after a warm-up."""
    times = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _choose(engine: str | None, device: int | None) -> tuple[int | None, str]:
    """The device that the cache goes to (None: host memory), and why."""
    named = engine or config.ENGINE.get()
    if named in ("cpu", "reference"):
        if device is not None:
            raise LayoutError(f"device is {device}, but the {named} engine takes a cache in host memory")
        return None, "in host memory, which the engine that was asked for takes"
    try:
        found = driver()
    except (DriverNotFoundError, UnsupportedDriverError) as error:
        if named in ("kernel", "copy", "staged") or device is not None:
            raise
        return None, f"in host memory, on the CPU engine, because no GPU can be used here: {error}"
    device = device or 0
    with DeviceScope(device):  # tells of a device that is not there
        return device, f"on GPU {device}, {found.device_name(device)}"


def run(model: Model, mib: int, engine: str | None = None, device: int | None = None, seed: int = 0) -> dict[str, Any]:
    """Store, wipe, load, compare; what was moved, by what, how fast, and the first difference if there is one.

    Parameters
    ----------
    model : Model
        Whose cache to build.
    mib : int
        About how much to move each way. Host memory in use is about three times as much, or that of one chunk more.
    engine : str, optional
        As for `kvraw.store`; "kernel" and "auto" put the cache on a GPU, "auto" only where there is one.
    device, seed : int
        The GPU; what the cache's bytes and the block ids are drawn from.
    """
    device, place_text = _choose(engine, device)
    block_bytes = model.block_size * model.geometry(0).token_bytes
    count = max(1, (mib << 20) // block_bytes)
    geometry = model.geometry(count + max(2, count // 16))
    chunk_bytes = CHUNK_TOKENS * geometry.token_bytes
    chunk_count = -(-count * model.block_size // CHUNK_TOKENS)
    moved = count * block_bytes
    tensor_bytes = geometry.blocks * block_bytes // geometry.layers
    image_bytes = geometry.layers * (tensor_bytes + GUARD_BYTES) + GUARD_BYTES
    random = np.random.default_rng(seed)
    ids = random.permutation(geometry.blocks)[:count]

    with ExitStack() as stack:
        pool = stack.enter_context(
            kvraw.HostPool(image_bytes + chunk_count * chunk_bytes + 4096, device=device, pin=device is not None)
        )
        (held,) = pool.chunks(1, image_bytes)
        chunks = pool.chunks(chunk_count, chunk_bytes)
        place = _Place(held, device, stack)
        image = held.numpy()
        for at in range(0, image_bytes, 16 << 20):
            part = image[at : at + (16 << 20)]
            part[:] = np.frombuffer(random.bytes(len(part)), np.uint8)
        for chunk in chunks:
            chunk.numpy()[:] = UNUSED
        truth = Truth(image.copy(), geometry, ids)
        starts = [place.address + GUARD_BYTES + k * (tensor_bytes + GUARD_BYTES) for k in range(geometry.layers)]
        cache = kvraw.PagedCache.from_pointers(starts, model.format, geometry, device=device)

        def timed(move: Callable[..., kvraw.Transfer]) -> float:
            return _seconds(lambda: move(cache, chunks, ids, stream=place.stream, engine=engine).wait())

        seconds, difference = {}, None
        for way, move in (("store", kvraw.store), ("load", kvraw.load)):
            if way == "load":
                for tensor in truth.tensors(image):
                    tensor[:, ids] = WIPED
            place.upload()
            seconds[way] = timed(move)
            place.download()
            wrong = truth.chunk_difference([c.numpy() for c in chunks]) or truth.cache_difference(image)
            if wrong:
                difference = f"after the {way}: {wrong}"
                break
        last = kvraw.store(cache, chunks, ids, stream=place.stream, engine=engine)
        last.wait()
        # One copy of as many bytes between the same memories: the chunks of a new pool lie in a row. Last, because it
        # overwrites what was compared.
        begin = pool.view(chunks[0].address, moved).ctypes.data
        plain = {
            "store": _seconds(lambda: place.copy(begin, place.address, moved)),
            "load": _seconds(lambda: place.copy(place.address, begin, moved)),
        }
        explained = last.explain().splitlines()
    return {
        "ok": difference is None,
        "difference": difference,
        "model": dataclasses.asdict(model),
        "device": device,
        "place": place_text,
        "engine": last.engine,
        "plan": explained,
        "blocks": {"cache": geometry.blocks, "moved": count, "guard": geometry.blocks - count, "bytes": block_bytes},
        "chunks": {"count": chunk_count, "tokens": CHUNK_TOKENS, "bytes": chunk_bytes},
        "bytes": {"moved": moved, "cache": image_bytes, "chunks": chunk_count * chunk_bytes},
        "plain_copy": "memmove" if device is None else "cuMemcpyAsync",
        "speed": {
            way: {
                "gb_per_s": moved / taken / 1e9,
                "plain_copy_gb_per_s": moved / plain[way] / 1e9,
                "ratio": plain[way] / taken,
            }
            for way, taken in seconds.items()
        },
    }


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report as text."""
    m, blocks, chunks, size = report["model"], report["blocks"], report["chunks"], report["bytes"]
    mib = {name: f"{value / 2**20:.1f} MiB" for name, value in size.items()}
    rank = f", one rank of {m['tensor_parallel']}" if m["tensor_parallel"] > 1 else ""
    shape = f"{m['layers']} layers, {m['heads']} KV head(s) of {m['head_size']} x {m['element_size']} bytes"
    moved = f"{blocks['moved']} scattered blocks of {m['block_size']} tokens <-> {chunks['count']} chunk(s) of "
    out = [
        ("model", f"{m['name']}: {shape}{rank} ({m['config']})"),
        ("cache", report["place"]),
        ("moved", f"{moved}{chunks['tokens']} tokens, {mib['moved']} each way; {blocks['guard']} guard blocks"),
        *[("plan" if at == 0 else "", line) for at, line in enumerate(report["plan"])],
    ]
    for way, speed in report["speed"].items():
        plain = f"{speed['ratio']:.2f} of one {report['plain_copy']} ({speed['plain_copy_gb_per_s']:.1f} GB/s)"
        out.append((way, f"{speed['gb_per_s']:.1f} GB/s (median of {ROUNDS}), {plain}"))
    same = f"every byte is equal: {mib['cache']} of cache with its guards, {mib['chunks']} of chunks"
    return [*out, ("result", same if report["ok"] else f"WRONG, {report['difference']}")]
