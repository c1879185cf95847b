"""memcpy_batch between host addresses."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvraw
from kvraw.addresses import TOP
from tests.helpers.profile import examples


@given(st.lists(st.integers(0, 700), max_size=40), st.randoms(use_true_random=False), st.integers(0, 63))
@settings(max_examples=examples(100), deadline=None)
def test_copies_what_a_loop_copies(sizes: list[int], random: object, shift: int) -> None:
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    src = rng.integers(0, 256, sum(sizes) + 64 * len(sizes) + 200, dtype=np.uint8)
    dst = rng.integers(0, 256, len(src), dtype=np.uint8)
    want, at, to, froms, tos = dst.copy(), shift, 64, [], []
    order = rng.permutation(len(sizes))
    spots = {}
    for k in order:
        spots[int(k)] = to
        to += sizes[k] + int(rng.integers(0, 64))
    for k, n in enumerate(sizes):
        want[spots[k] : spots[k] + n] = src[at : at + n]
        froms.append(int(src.ctypes.data) + at)
        tos.append(int(dst.ctypes.data) + spots[k])
        at += n
    kvraw.memcpy_batch(tos, froms, sizes).wait()
    np.testing.assert_array_equal(dst, want)


def test_large_copies_go_past_the_caches_and_stay_right() -> None:
    rng = np.random.default_rng(3)
    src, dst = rng.integers(0, 256, (24 << 20) + 1, dtype=np.uint8), np.zeros((24 << 20) + 200, np.uint8)
    parts = np.array([1, 4095, 8 << 20, (4 << 20) + 3, 191, 192, 65], np.uint64)
    starts = np.concatenate([[0], np.cumsum(parts)[:-1]]).astype(np.uint64)
    for shift in (0, 1, 63):
        dst[:] = 7
        kvraw.memcpy_batch(starts + np.uint64(dst.ctypes.data + shift), starts + np.uint64(src.ctypes.data), parts)
        total = int(parts.sum())
        np.testing.assert_array_equal(dst[shift : shift + total], src[:total])
        assert (dst[:shift] == 7).all()
        assert (dst[shift + total :] == 7).all()


def test_an_entry_may_overlap_itself() -> None:
    a = np.arange(200, dtype=np.uint8)
    kvraw.memcpy_batch([a.ctypes.data + 10], [a.ctypes.data], [150])
    np.testing.assert_array_equal(a[10:160], np.arange(150))


@pytest.mark.parametrize("size", [1, 2, 64, 191, 192, 4096, (8 << 20) + 5])
@pytest.mark.parametrize("apart", [-1, 0, 1])
@pytest.mark.parametrize("forward", [True, False])
def test_an_entry_whose_ends_touch_or_overlap_by_a_byte(size: int, apart: int, forward: bool) -> None:
    """Large ones take another way, past the caches, which is right only for ends that do not overlap."""
    a = np.random.default_rng(size).integers(0, 256, 2 * size + 66, dtype=np.uint8)
    low, high = 33, 33 + size + apart
    to, at = (high, low) if forward else (low, high)
    want = a.copy()
    want[to : to + size] = a[at : at + size]
    kvraw.memcpy_batch([a.ctypes.data + to], [a.ctypes.data + at], [size])
    np.testing.assert_array_equal(a, want)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([1], [1, 2], [1]), kvraw.BoundsError, "have 1, 2 and 1 entries"),
        (([1], [1], [-1]), kvraw.BoundsError, r"sizes\[0\] is -1"),
        (([0], [1], [1]), kvraw.BoundsError, r"dst\[0\] is 0 \(null\)"),
        (([8192], [2**64 - 1], [2]), kvraw.BoundsError, r"src\[0\] is 0xffffffffffffffff, no address of 2 bytes"),
        (([1.0], [1], [1]), TypeError, "dst holds float64"),
        (([2**64], [1], [1]), kvraw.BoundsError, r"dst\[0\] is 18446744073709551616"),
    ],
)
def test_bad_vectors(args: tuple[list[object], ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kvraw.memcpy_batch(*args)


def test_nothing_is_a_no_op() -> None:
    for vectors in (([], [], []), ([0, 5], [0, 5], [0, 0])):
        copy = kvraw.memcpy_batch(*vectors)
        assert copy.done()
        assert copy.wait() is None  # type: ignore[func-returns-value]


NOWHERE = st.one_of(
    st.integers(0, 4095), st.integers(2**63, 2**64 - 1), st.sampled_from([2**63 - 1, 2**64 - 64, TOP, TOP + 4096])
)


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["dst", "src", "sizes"]), NOWHERE, st.booleans())
@settings(max_examples=examples(150), deadline=None)
def test_what_no_process_has_is_named_by_the_callers_entry(
    before: int, behind: int, side: str, bad: int, array: bool
) -> None:
    """Such as sizes of 2**63 and more; entries of no bytes, ahead of it, count."""
    a = np.zeros(64, np.uint8)
    at = int(a.ctypes.data)
    if side == "sizes" and bad < TOP:
        bad = 2**64 - 1 - bad
    args = {name: [at] * (before + 1 + behind) for name in ("dst", "src")}
    args["sizes"] = [0] * before + [64] + [0] * behind
    args[side][before] = bad
    given_ = [np.array(args[n], np.uint64) if array else args[n] for n in ("dst", "src", "sizes")]
    name = side if side != "sizes" or bad >= TOP else "dst"
    with pytest.raises(kvraw.BoundsError, match=rf"^{name}\[{before}\] is "):
        kvraw.memcpy_batch(*given_)


@pytest.mark.parametrize("bad", [8, 4095, TOP - 64, TOP, 2**63 - 64, 2**63, 2**64 - 4096])
def test_caches_and_chunks_that_no_process_has(bad: int) -> None:
    a = np.zeros(4096, np.uint8)
    at, g = int(a.ctypes.data), kvraw.Geometry(1, 2, 4, 2, 16, 2)
    with pytest.raises(kvraw.BoundsError, match=r"pointers\[0\]"):
        kvraw.PagedCache.from_pointers([bad], 1, g)
    cache = kvraw.PagedCache.from_pointers([at], 1, g)
    for use in (kvraw.store, kvraw.load):
        with pytest.raises(kvraw.BoundsError, match=rf"chunks\[1\] is {bad:#x}, no address"):
            use(cache, [at + 2048, bad], [0, 1], chunk_tokens=4)
    plan = kvraw.TransferPlan(cache, "store", chunk_tokens=4).plan
    with pytest.raises(kvraw.BoundsError, match=r"dst\[0\] is 0x"):
        kvraw.PreparedCopy(plan, device=None)([at], [bad], 1, src_index=[0])
    with pytest.raises(kvraw.BoundsError, match="address is 0x"):
        kvraw.HostPool.from_pointer(bad, 4096)


def test_addresses_end_where_those_of_this_machine_do() -> None:
    """The highest mapping lies below it; nothing can be mapped there, whoever asks for it."""
    ends = [int(line.split()[0].split("-")[1], 16) for line in Path("/proc/self/maps").read_text().splitlines()]
    assert max(end for end in ends if end < 1 << 63) <= TOP
    assert TOP & (TOP - 1) == 0
    if TOP == 1 << 47:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fixed = 0x100000 | 0x22  # MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS
        for bit in range(47, 63):
            assert libc.mmap(1 << bit, 4096, 0, fixed, -1, 0) == 2**64 - 1


@pytest.mark.parametrize("blocks", [3, 1 << 20, 1 << 40])
def test_a_geometry_of_more_than_is_mapped(blocks: int) -> None:
    """The counts are the caller's; that no memory is there, the kernel of the system knows."""
    nbytes = 2 * 2 * 4 * 2 * 16 * 2
    memory, page = mmap.mmap(-1, 3 * mmap.PAGESIZE), mmap.PAGESIZE
    at = int(np.frombuffer(memory, np.uint8).ctypes.data)
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    assert not libc.munmap(at + 2 * page, page)
    start = at + 2 * page - nbytes
    kvraw.PagedCache.from_pointers([start], 1, kvraw.Geometry(1, 2, 4, 2, 16, 2))
    with pytest.raises(kvraw.BoundsError, match=r"pointers\[0\] is 0x\w+"):
        kvraw.PagedCache.from_pointers([start], 1, kvraw.Geometry(1, blocks, 4, 2, 16, 2))
    # What was unmapped above is mapped again, so that the end of the object takes nobody else's memory.
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert libc.mmap(at + 2 * page, page, 3, 0x100000 | 0x22, -1, 0) == at + 2 * page
