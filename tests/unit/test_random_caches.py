"""Random caches: each is read right or refused, and refused never where its axes are named.

KVRAW_TEST_CACHES is the number of caches, 2,000 where it is not set.
"""

from __future__ import annotations

import os
import sys
from random import Random
from typing import Any

import numpy as np
import pytest

import kvraw
from tests.helpers.random_caches import GUARD, RandomCache, axes_named, engine_shape

COUNT = int(os.environ.get("KVRAW_TEST_CACHES", "2000"))
KINDS = {
    "axes": axes_named,
    "hinted": lambda r: engine_shape(r, True),
    "no hint": lambda r: engine_shape(r, False),
}


def _as_torch(tensors: Any) -> Any:
    torch = pytest.importorskip("torch")
    if isinstance(tensors, dict):
        return {name: _as_torch(x) for name, x in tensors.items()}
    return torch.from_numpy(tensors) if isinstance(tensors, np.ndarray) else type(tensors)(map(_as_torch, tensors))


def _chunk(made: RandomCache, tokens: int, r: Random) -> tuple[Any, Any]:
    """A chunk for this many tokens between guards, and all of it."""
    s, dtype = made.sizes, made.buffers[0].dtype
    n = s["P"] * s["L"] * tokens * s["H"] * s["D"]
    whole = np.frombuffer(r.randbytes((n + 2 * GUARD) * dtype.itemsize), np.uint8).copy()
    inner = whole[GUARD * dtype.itemsize : (GUARD + n) * dtype.itemsize].view(dtype)
    return inner.reshape(s["P"], s["L"], tokens, s["H"], s["D"]), whole


def _check(made: RandomCache, cache: kvraw.PagedCache, r: Random) -> None:
    """Store and load, by block and by slot: all of the memory of both sides is as plain indexing leaves it."""
    s, g = made.sizes, cache.geometry
    counts = g.layers, g.planes, g.blocks, g.block_size, g.heads, g.head_size
    assert counts == tuple(s[a] for a in "LPBTHD")
    ids = r.sample(range(s["B"]), r.randint(1, s["B"]))
    by_block = [b for b in ids for _ in range(s["T"])], [t for _ in ids for t in range(s["T"])]
    slots = r.sample(range(s["B"] * s["T"]), r.randint(1, s["B"] * s["T"]))
    by_slot = [n // s["T"] for n in slots], [n % s["T"] for n in slots]
    for store, load, index, (blocks, tokens) in (
        (kvraw.store, kvraw.load, ids, by_block),
        (kvraw.store_slots, kvraw.load_slots, slots, by_slot),
    ):
        before = [b.tobytes() for b in made.buffers]
        chunk, whole = _chunk(made, len(blocks), r)
        expected = whole.copy()
        first = chunk.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        expected[first : first + chunk.nbytes] = made.stored(blocks, tokens).ravel().view(np.uint8)
        store(cache, [chunk], index).wait()
        assert whole.tobytes() == expected.tobytes()
        assert [b.tobytes() for b in made.buffers] == before
        chunk, whole = _chunk(made, len(blocks), r)
        kept = whole.tobytes()
        load(cache, [chunk], index).wait()
        after = [b.tobytes() for b in made.buffers]
        for buffer, bytes_before in zip(made.buffers, before, strict=True):
            buffer.view(np.uint8)[:] = np.frombuffer(bytes_before, np.uint8)
        made.put(blocks, tokens, chunk)
        assert after == [b.tobytes() for b in made.buffers]
        assert whole.tobytes() == kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_read_right_or_refused(kind: str, library: str) -> None:
    read = refused = 0
    for seed in range(COUNT // 6 + 1):
        r = Random(f"{kind} {library} {seed}")
        made = KINDS[kind](r)
        tensors = _as_torch(made.tensors) if library == "torch" else made.tensors
        try:
            cache = kvraw.PagedCache.from_tensors(tensors, **made.hints)
        except kvraw.LayoutError:
            assert kind != "axes", (seed, made.hints)
            refused += 1
            continue
        read += 1
        try:
            _check(made, cache, r)
        except (AssertionError, kvraw.KvrawError) as error:
            raise AssertionError(f"seed {seed}: {made.hints}, {made.sizes} read as {cache!r}") from error
    sys.stdout.write(f"{kind}, {library}: {read} read, {refused} refused\n")
    assert read > COUNT // 120
