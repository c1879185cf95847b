"""Caches with strides of their own on a device, each engine against plain indexing: on the emulator and on a GPU."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from tests.helpers.random_caches import RandomCache, axes_named


class OnDevice:
    """An array of a buffer's copy on a device."""

    def __init__(self, array: Any, shift: int) -> None:
        strides = tuple(int(s) for s in array.strides)
        self.__cuda_array_interface__ = {
            "data": (array.__array_interface__["data"][0] + shift, False),
            "shape": array.shape,
            "strides": strides,
            "typestr": array.dtype.str,
            "version": 3,
        }


class Copies:
    """Copies of a random cache's buffers on a device."""

    def __init__(self, made: RandomCache, device: int) -> None:
        self.made, self.device, self.stream = made, device, kvraw.Stream(device)
        self.pool = kvraw.HostPool(1 << 20, device=device)
        self.mirrors = [self.pool.chunks(1, b.nbytes)[0] for b in made.buffers]
        self.memory = [kvraw.DeviceBuffer(b.nbytes, device) for b in made.buffers]
        for mirror, buffer in zip(self.mirrors, made.buffers, strict=True):
            mirror.numpy()[:] = buffer.view(np.uint8)
        self._copy([(m.address, c.address, c.nbytes) for m, c in zip(self.memory, self.mirrors, strict=True)])

    def _copy(self, moves: list[tuple[int, int, int]]) -> None:
        with DeviceScope(self.device):
            for dst, src, nbytes in moves:
                driver().memcpy_async(dst, src, nbytes, self.stream.handle)
        self.stream.synchronize()

    def now(self) -> list[bytes]:
        self._copy([(c.address, m.address, c.nbytes) for m, c in zip(self.memory, self.mirrors, strict=True)])
        return [c.numpy().tobytes() for c in self.mirrors]

    def tensors(self, tensors: Any) -> Any:
        if isinstance(tensors, dict):
            return {name: self.tensors(x) for name, x in tensors.items()}
        if not isinstance(tensors, np.ndarray):
            return type(tensors)(map(self.tensors, tensors))
        first = tensors.__array_interface__["data"][0]
        for buffer, memory in zip(self.made.buffers, self.memory, strict=True):
            begin = buffer.__array_interface__["data"][0]
            if begin <= first < begin + buffer.nbytes:
                return OnDevice(tensors, memory.address - begin)
        raise AssertionError("a tensor in no buffer")

    def close(self) -> None:
        for memory in self.memory:
            memory.close()
        self.pool.close()
        self.stream.close()


@pytest.mark.parametrize("engine", ["kernel", "copy", "staged"])
@pytest.mark.parametrize("seed", range(12))
def test_axes_named(device: int, engine: str, seed: int) -> None:
    r = Random(seed)
    made = axes_named(r)
    s, copies = made.sizes, Copies(made, device)
    cache = kvraw.PagedCache.from_tensors(copies.tensors(made.tensors), **made.hints)
    assert cache.device == device
    ids = r.sample(range(s["B"]), s["B"])
    slots = r.sample(range(s["B"] * s["T"]), s["B"] * s["T"])
    calls = [(kvraw.store, kvraw.load, ids, [b for b in ids for _ in range(s["T"])], list(range(s["T"])) * s["B"])]
    if engine != "staged":
        places = [n // s["T"] for n in slots], [n % s["T"] for n in slots]
        calls.append((kvraw.store_slots, kvraw.load_slots, slots, *places))
    for store, load, index, blocks, tokens in calls:
        outer, chunk, after = copies.pool.chunks(3, cache.chunk_bytes(len(blocks)))
        for c in (outer, chunk, after):
            c.numpy()[:] = 90
        store(cache, [chunk], index, stream=copies.stream, engine=engine).wait()
        assert chunk.numpy().tobytes() == made.stored(blocks, tokens).tobytes()
        assert copies.now() == [b.tobytes() for b in made.buffers]
        chunk.numpy()[:] = np.frombuffer(r.randbytes(chunk.nbytes), np.uint8)
        load(cache, [chunk], index, stream=copies.stream, engine=engine).wait()
        made.put(blocks, tokens, chunk.numpy().view(made.buffers[0].dtype).reshape(made.stored(blocks, tokens).shape))
        assert copies.now() == [b.tobytes() for b in made.buffers]
        assert set(outer.numpy()) == set(after.numpy()) == {90}
    copies.close()
