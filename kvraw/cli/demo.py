"""`kvraw demo`: a model's cache blocks go to chunks and come back, and every byte is compared.

What to expect is worked out with plain numpy indexing of shaped arrays; nothing of kvraw's layouts takes part in it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

import kvraw
from kvraw import config
from kvraw.cli.models import Model
from kvraw.errors import DriverNotFoundError, LayoutError, UnsupportedDriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

__all__ = ["rows", "run"]

Bytes = npt.NDArray[np.uint8]

CHUNK_TOKENS = 256
GUARD_BYTES = 4096  # before, between and behind the layers' tensors
WIPED, UNUSED = 0xA5, 0x5A  # what wiped blocks hold before the load, and chunks before the store
ROUNDS = 7


class _Place:
    """Where the cache lies: in `image` itself, or in device memory that `image` is the host's copy of."""

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


class _Truth:
    """The cache as it was filled, and where memory differs from what it must be."""

    def __init__(self, filled: Bytes, geometry: kvraw.Geometry, ids: npt.NDArray[np.int64]) -> None:
        g = geometry
        self.filled, self.ids = filled, ids
        self.row = g.heads * g.head_size * g.element_size
        self.shape = (g.planes, g.blocks, g.block_size, self.row)  # of one layer's tensor
        self.size = g.planes * g.blocks * g.block_size * self.row
        self.layers = self.tensors(filled)

    def tensors(self, image: Bytes) -> list[Bytes]:
        """The layers' tensors of an image of the cache, each behind guard bytes."""
        starts = range(GUARD_BYTES, len(image) - GUARD_BYTES, self.size + GUARD_BYTES)
        return [image[at : at + self.size].reshape(self.shape) for at in starts]

    def cache_difference(self, image: Bytes) -> str | None:
        """First byte of the cache that is not as it was filled, guard blocks and guard bytes included."""
        step = self.size + GUARD_BYTES
        for layer in range(len(self.layers) + 1):  # guard bytes and the tensor behind them; at last guard bytes alone
            part = slice(layer * step, (layer + 1) * step)
            found, right = image[part], self.filled[part]
            if np.array_equal(found, right):
                continue
            at = int(np.argmax(found != right))
            where = f"guard bytes before layer {layer}, byte {at}"
            if at >= GUARD_BYTES:
                plane, block, token, byte = np.unravel_index(at - GUARD_BYTES, self.shape)
                guard = "" if block in self.ids else " (a guard block)"
                where = f"cache layer {layer}, plane {plane}, block {block}{guard}, token {token}, byte {byte}"
            return f"{where}: is {found[at]:#04x}, must be {right[at]:#04x}"
        return None

    def chunk_difference(self, chunks: list[kvraw.HostChunk]) -> str | None:
        """First byte of the chunks that is not what the blocks held, in their order; behind the last block, untouched."""
        planes, _, block_size, _ = self.shape
        per_chunk = CHUNK_TOKENS // block_size
        for number, chunk in enumerate(chunks):
            ids = self.ids[number * per_chunk : (number + 1) * per_chunk]
            found = chunk.numpy().reshape(planes, len(self.layers), CHUNK_TOKENS, self.row)
            for layer, tensor in enumerate(self.layers):
                right = np.full((planes, CHUNK_TOKENS, self.row), UNUSED, np.uint8)
                right[:, : len(ids) * block_size] = tensor[:, ids].reshape(planes, -1, self.row)
                if not np.array_equal(found[:, layer], right):
                    at = np.unravel_index(int(np.argmax(found[:, layer] != right)), right.shape)
                    return (
                        f"chunk {number}, plane {at[0]}, layer {layer}, token {at[1]}, byte {at[2]}: "
                        f"is {found[:, layer][at]:#04x}, must be {right[at]:#04x}"
                    )
        return None


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
        if named == "kernel" or device is not None:
            raise
        return None, f"in host memory, on the CPU engine, because there is no GPU here: {error}"
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
        truth = _Truth(image.copy(), geometry, ids)
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
            wrong = truth.chunk_difference(chunks) or truth.cache_difference(image)
            if wrong:
                difference = f"after the {way}: {wrong}"
                break
        plan = kvraw.store(cache, chunks, [], stream=place.stream, engine=engine).plan
        # One copy of as many bytes between the same memories; last, because it overwrites them.
        begin, whole = chunks[0].address, pool.view(chunks[0].address, moved).nbytes
        plain = {
            "store": _seconds(lambda: place.copy(begin, place.address, whole)),
            "load": _seconds(lambda: place.copy(place.address, begin, whole)),
        }
        explained = plan.explain().splitlines()
    return {
        "ok": difference is None,
        "difference": difference,
        "model": dataclasses.asdict(model),
        "device": device,
        "place": place_text,
        "engine": plan.engine,
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
    shape = f"{m['layers']} layers, KV heads x size {m['heads']} x {m['head_size']}, {m['element_size']} bytes per element"
    moved = f"{blocks['moved']} scattered blocks of {m['block_size']} tokens <-> {chunks['count']} chunk(s) of "
    out = [
        ("model", f"{m['name']}: {shape}{rank} ({m['config']})"),
        ("cache", report["place"]),
        ("moved", f"{moved}{chunks['tokens']} tokens, {mib['moved']} each way; {blocks['guard']} guard blocks"),
        *[("plan" if at == 0 else "", line) for at, line in enumerate(report["plan"])],
    ]
    for way, speed in report["speed"].items():
        plain = f"{speed['ratio']:.2f} of one {report['plain_copy']} ({speed['plain_copy_gb_per_s']:.1f} GB/s)"
        out.append((way, f"{speed['gb_per_s']:.1f} GB/s, {plain}"))
    same = f"every byte is equal: {mib['cache']} of cache with its guards, {mib['chunks']} of chunks"
    return [*out, ("result", same if report["ok"] else f"WRONG, {report['difference']}")]
