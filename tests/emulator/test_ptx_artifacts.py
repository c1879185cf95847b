"""The committed artifacts in the interpreter: all their instructions are tested, and a copy moves the right bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import kvraw.ptx
from tests.emulator import test_ptx_access, test_ptx_control, test_ptx_float, test_ptx_integer
from tests.emulator.ptx_compile import accepted
from tests.emulator.ptx_frame import PtxFaultError
from tests.emulator.ptx_memory import Memory
from tests.emulator.ptx_run import Module

ARTIFACTS = sorted(Path(kvraw.ptx.__file__).parent.glob("*.ptx"))
TESTED = frozenset(test_ptx_access.TESTED | test_ptx_control.TESTED | test_ptx_float.TESTED | test_ptx_integer.TESTED)
DIMS, WORDS = 4, 448
INDEX_INLINE, INDEX_I64, TABLE_INLINE, SKIP_NEGATIVE, CHECK = 1, 2, 8, 16, 32


def ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def divider(d: int) -> tuple[int, int]:
    shift = ceil_log2(d)
    return -(-(1 << (63 + shift)) // d), shift


class Side:
    """The fields of a CopySide in copy_args.h."""

    def __init__(self, table: int, index: int, limit: int, page: int, outer: int, inner: int, flags: int) -> None:
        self.table, self.index, self.limit, self.page = table, index, limit, page
        self.outer, self.inner, self.flags = outer, inner, flags
        self.stride = [0] * DIMS

    def pack(self) -> bytes:
        magic, shift = divider(self.page)
        words = [
            self.table,
            self.index,
            self.limit,
            self.page,
            magic,
            self.outer,
            self.inner,
            0,
            *self.stride,
            *[0] * DIMS,
        ]
        return struct.pack("<16Q2I", *(w % (1 << 64) for w in words), shift, self.flags)


def argument_block(src: Side, dst: Side, sizes: list[int], items: int, run_vectors: int, status: int, words: list[int],
                   pace: int = 0, slack: int = 0, cost: int = 0, mean: int = 0, credit: int = 0,
                   other: int = 0, extra: int = 0):  # fmt: skip
    sizes = [*sizes, *[1] * (DIMS - len(sizes))]
    per_segment = min(run_vectors, 128)
    split = -(-run_vectors // per_segment)
    dividers = [divider(n) for n in sizes]
    split_magic, split_shift = divider(split)
    segments = items * int(np.prod(sizes)) * split
    block = src.pack() + dst.pack()
    block += struct.pack("<4Q4Q", *sizes, *(m for m, _ in dividers))
    block += struct.pack("<6Q", split, split_magic, run_vectors, segments, 0, status)
    block += struct.pack("<7Q", pace, slack, cost, mean, credit, other, extra)
    block += struct.pack("<4I", *(s for _, s in dividers))
    block += struct.pack("<4I", split_shift, per_segment, -(-(1 << 31) // per_segment), 0)
    return block + struct.pack(f"<{WORDS}Q", *words, *[0] * (WORDS - len(words)))


class Copy:
    """Blocks of one guarded array to objects of another, in two rows per item, by inline tables and indices."""

    def __init__(self, vector: int, items: int, run_vectors: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.run, self.items = run_vectors * vector, items
        self.blocks, self.guard = items + 3, 64
        row = self.run + vector  # rows are padded on both sides
        self.pitch_src, self.pitch_dst = 2 * row + 2 * vector, 2 * row
        self.row = row
        self.src = self.aligned(rng.integers(0, 256, self.blocks * self.pitch_src + 2 * self.guard, dtype=np.uint8))
        self.dst = self.aligned(rng.integers(0, 256, self.blocks * self.pitch_dst + 2 * self.guard, dtype=np.uint8))
        self.status = np.zeros(2, np.uint64)
        self.memory = Memory()
        inside = slice(self.guard, -self.guard)
        self.memory.add_array(self.src[inside], "source", writable=False)
        self.memory.add_array(self.dst[inside], "destination")
        self.memory.add_array(self.status, "status")
        self.src_index = rng.permutation(self.blocks)[:items]
        self.dst_index = rng.permutation(self.blocks)[:items]
        words = [self.src[inside].ctypes.data, self.dst[inside].ctypes.data, *self.src_index, *self.dst_index]
        flags = INDEX_INLINE | TABLE_INLINE | CHECK
        src = Side(0, 2, self.blocks, 1, self.pitch_src, 0, flags)
        dst = Side(1, 2 + items, self.blocks, 1, self.pitch_dst, 0, flags)
        src.stride[0] = dst.stride[0] = row
        self.sides = src, dst
        self.words = [int(w) for w in words]
        self.run_vectors = run_vectors

    @staticmethod
    def aligned(data: np.ndarray) -> np.ndarray:
        room = np.zeros(len(data) + 16, np.uint8)
        view = room[-room.ctypes.data % 16 :][: len(data)]
        view[:] = data
        return view

    def params(self, **pace: int) -> bytes:
        status = self.status.ctypes.data
        return argument_block(*self.sides, [2], self.items, self.run_vectors, status, self.words, **pace)

    def expected(self) -> np.ndarray:
        want = self.dst.copy()
        for i, o in zip(self.src_index, self.dst_index, strict=True):
            for r in range(2):
                a = self.guard + int(i) * self.pitch_src + r * self.row
                b = self.guard + int(o) * self.pitch_dst + r * self.row
                want[b : b + self.run] = self.src[a : a + self.run]
        return want


def module(vector: int, kind: str = "copy") -> Module:
    return Module(next(p for p in ARTIFACTS if p.stem == f"{kind}_v{vector}").read_text())


def test_artifacts_exist():
    assert {f"copy_v{n}" for n in (16, 8, 4, 2, 1)} <= {p.stem for p in ARTIFACTS}


@pytest.mark.parametrize("path", ARTIFACTS, ids=lambda p: p.stem)
def test_every_instruction_of_the_artifact_has_its_own_test(path):
    untested = Module(path.read_text()).instructions() - TESTED
    assert not untested, f"no semantics test for {sorted(untested)}"


def test_every_accepted_instruction_has_its_own_test():
    assert not accepted() - TESTED, sorted(accepted() - TESTED)
    assert not TESTED - accepted(), sorted(TESTED - accepted())


@pytest.mark.parametrize("vector", [16, 8, 4, 2, 1])
@pytest.mark.parametrize(
    ("grid", "block", "items", "run_vectors"),
    [(1, 64, 5, 7), (2, 64, 40, 33), (2, 1024, 12, 300), (3, 128, 33, 128), (1, 32, 1, 1)],
)
def test_copy_moves_the_bytes_and_nothing_else(vector, grid, block, items, run_vectors):
    copy = Copy(vector, items, run_vectors)
    want, source = copy.expected(), copy.src.copy()
    module(vector).run(f"kvraw_copy_v{vector}", grid, block, copy.params(), copy.memory, seed=3)
    np.testing.assert_array_equal(copy.dst, want)
    np.testing.assert_array_equal(copy.src, source)
    assert not copy.status.any()


def test_copy_reports_an_index_out_of_bounds():
    copy = Copy(16, 6, 5)
    copy.words[2 + 6 + 3] = copy.blocks + 9  # the destination of item 3
    want = copy.expected()
    lost = int(copy.dst_index[3])
    start = copy.guard + lost * copy.pitch_dst
    want[start : start + copy.pitch_dst] = copy.dst[start : start + copy.pitch_dst]
    module(16).run("kvraw_copy_v16", 1, 64, copy.params(), copy.memory)
    np.testing.assert_array_equal(copy.dst, want)
    assert copy.status.tolist() == [(3 + 1) << 1 | 1, copy.blocks + 9]


def test_copy_past_the_end_names_kernel_line_lane_and_address():
    copy = Copy(16, 6, 5)
    copy.sides[1].outer += 16
    copy.words[2 + 6 + 2] = copy.blocks - 1
    with pytest.raises(PtxFaultError, match="out of bounds; the nearest range is destination") as caught:
        module(16).run("kvraw_copy_v16", 1, 64, copy.params(), copy.memory)
    error = caught.value
    lines = next(p for p in ARTIFACTS if p.stem == "copy_v16").read_text().splitlines()
    assert error.kernel == "kvraw_copy_v16"
    assert error.text in lines[error.line - 1]
    assert error.text.startswith("@p st.global")
    assert (error.cta, error.address is not None) == (0, True)


def test_copy_through_a_misaligned_base_is_refused():
    copy = Copy(16, 6, 5)
    copy.words[0] += 8
    with pytest.raises(PtxFaultError, match=r"access of 16 bytes at 0x[0-9a-f]+ is misaligned"):
        module(16).run("kvraw_copy_v16", 1, 64, copy.params(), copy.memory)
