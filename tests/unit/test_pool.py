"""HostPool: chunks, holes, double frees, lifetimes; unpinned where there is no GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvraw


def test_chunks_are_aligned_disjoint_and_writable() -> None:
    with kvraw.HostPool(1 << 20) as pool:
        chunks = pool.chunks(10, 5000)
        spans = sorted((c.address, c.address + c.nbytes) for c in chunks)
        assert all(a % 4096 == 0 for a, _ in spans)
        assert all(x[1] <= y[0] for x, y in itertools.pairwise(spans))
        for at, chunk in enumerate(chunks):
            chunk.numpy()[:] = at
        assert all((c.numpy() == at).all() for at, c in enumerate(chunks))
        assert chunks[0].numpy(np.int16).shape == (2500,)


def test_random_frees_coalesce() -> None:
    rng = random.Random(5)
    with kvraw.HostPool(256 * 4096) as pool:
        live: list[kvraw.HostChunk] = []
        for _ in range(2000):
            if live and rng.random() < 0.5:
                live.pop(rng.randrange(len(live))).free()
            else:
                with contextlib.suppress(MemoryError):
                    live += pool.chunks(rng.randrange(1, 4), rng.randrange(1, 9 * 4096))
            used = sum(-(-c.nbytes // 4096) * 4096 for c in live)
            assert pool.info()["free"] == pool.nbytes - used
            assert pool.info()["chunks"] == len(live)
        pool.free(live)
        assert pool.info()["largest_hole"] == pool.nbytes


def test_what_does_not_fit_says_why_and_takes_nothing() -> None:
    with kvraw.HostPool(8 * 4096) as pool:
        a, b, c = pool.chunks(3, 2 * 4096)
        b.free()
        with pytest.raises(
            MemoryError, match=r"3 chunks of 8192 bytes: 16384 of 32768 bytes are free, the largest hole is 8192"
        ):
            pool.chunks(3, 8192)
        assert pool.info()["free"] == 4 * 4096
        assert pool.info()["chunks"] == 2
        assert a.address < c.address


def test_double_free_and_foreign_chunks() -> None:
    with kvraw.HostPool(1 << 16) as pool, kvraw.HostPool(1 << 16) as other:
        (a,) = pool.chunks(1, 100)
        (b,) = other.chunks(1, 100)
        with pytest.raises(ValueError, match="not a live chunk"):
            pool.free([b])
        a.free()
        with pytest.raises(ValueError, match="freed twice"):
            a.free()


def test_a_view_outlives_its_pool() -> None:
    pool = kvraw.HostPool(1 << 20)
    (chunk,) = pool.chunks(1, 1 << 19)
    view = chunk.numpy()
    view[:] = 42
    pool.close()
    del pool, chunk
    gc.collect()
    assert (view == 42).all()


@pytest.mark.parametrize(("count", "nbytes"), [(-1, 8), (1, 0), (1, -5)])
def test_bad_requests(count: int, nbytes: int) -> None:
    with kvraw.HostPool(4096) as pool, pytest.raises(kvraw.BoundsError, match=r"count is .*nbytes"):
        pool.chunks(count, nbytes)


def test_bad_sizes() -> None:
    with pytest.raises(kvraw.BoundsError, match="nbytes is 0"):
        kvraw.HostPool(0)
    with pytest.raises(MemoryError, match="cannot map"):
        kvraw.HostPool(1 << 60)


@pytest.mark.parametrize(
    "take", [np.asarray, lambda chunk: np.asarray(chunk)[1000:], np.from_dlpack, lambda c: c.numpy()]
)
def test_what_other_libraries_make_of_a_chunk_outlives_the_pool(take: Callable[[Any], np.ndarray]) -> None:
    pool = kvraw.HostPool(32 << 20)
    (chunk,) = pool.chunks(1, 16 << 20)
    chunk.numpy()[:] = 7
    array, address = take(chunk), chunk.address
    pool.close()
    del pool, chunk
    gc.collect()
    assert (array == 7).all()
    del array
    gc.collect()
    assert not mapped(address)


def mapped(address: int) -> bool:
    """Whether the process has memory there."""
    spans = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@pytest.mark.parametrize("bad", [1.5, 2.0, "2", True, None])
def test_what_is_no_integer_leaves_a_pool_as_it_was(bad: Any) -> None:
    with kvraw.HostPool(4 * 4096) as pool:
        before = pool.info()
        for name, call in (
            ("count", lambda: pool.chunks(bad, 8)),
            ("nbytes", lambda: pool.chunks(1, bad)),
            ("nbytes", lambda: pool.view(pool.address, bad)),
            ("nbytes", lambda: kvraw.HostPool(bad)),
            ("nbytes", lambda: kvraw.HostPool.from_pointer(pool.address, bad)),
            *([("limit", lambda: kvraw.HostPool(4096, limit=bad))] if bad is not None else []),
        ):
            with pytest.raises(TypeError, match=f"{name} is .*, must be an integer"):
                call()
        assert pool.info() == before
        (chunk,) = pool.chunks(np.int8(1), np.int16(8192))  # type: ignore[arg-type]
        assert type(chunk.nbytes) is int
        pool.free([chunk])
        assert pool.info()["largest_hole"] == 4 * 4096


def test_a_chunk_that_is_freed_while_a_call_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody else's by the time that the call notes what it uses."""
    cache = kvraw.PagedCache.from_tensors([np.ones((2, 8, 4, 2, 16), np.int16)], kv_layout="NHD", block_size=4)
    nbytes, real = cache.chunk_bytes(8), kvraw.HostPool.mark_used
    for direction in (kvraw.store, kvraw.load):
        pool, other = kvraw.HostPool(4 * nbytes + 4096, pin=False), kvraw.HostPool(8192, pin=False)
        chunk, kept = (*pool.chunks(1, nbytes), *other.chunks(1, nbytes))
        taken: list[kvraw.HostChunk] = []

        def mark_used(
            self: kvraw.HostPool,
            use: object,
            *,
            pool: kvraw.HostPool = pool,
            chunk: kvraw.HostChunk = chunk,
            taken: list[kvraw.HostChunk] = taken,
        ) -> None:
            if self is pool and not taken:
                chunk.free()
                taken += pool.chunks(1, nbytes)
                taken[0].numpy()[:] = 0xEE
            real(self, use)  # type: ignore[arg-type]

        monkeypatch.setattr(kvraw.HostPool, "mark_used", mark_used)
        for row in ([chunk], [kept, chunk]):
            with pytest.raises(kvraw.ClosedError, match="was given back to its pool"):
                direction(cache, row, [1, 2, 3, 4][: 2 * len(row)])
        assert taken[0].address == chunk.address
        assert (taken[0].numpy() == 0xEE).all()
        monkeypatch.setattr(kvraw.HostPool, "mark_used", real)
        assert pool.info()["in_flight"] == 0
        pool.free(taken)  # nothing that was refused holds it up
        pool.close()


def test_what_is_kept_for_lengths_of_chunks_is_bounded() -> None:
    cache = kvraw.PagedCache.from_tensors(
        [np.zeros((2, 64, 16, 1, 8), np.int8)], kv_layout="NHD", num_heads=1, block_size=16
    )
    big, kept = np.zeros(cache.chunk_bytes(700), np.uint8), 0
    with kvraw.HostPool(1 << 16, pin=False) as pool:
        for n in range(1, 700):
            kvraw.store_slots(cache, [big[: cache.chunk_bytes(n)]], [1])
            kept = max(kept, len(cache.plans))
            pool.free(pool.chunks(1, n))
        assert kept <= 128
        (chunk,) = pool.chunks(1, 700)
        assert list(pool._kinds) == [700]
        assert pool.chunks(1, 700)[0].kind is chunk.kind
