"""The CPU engine: numba kernels over host memory on threads of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvraw import config
from kvraw.arrays import U64
from kvraw.engines.operands import Operands
from kvraw.plan import CopyPlan, Side
from kvraw.runtime.cgroup import usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["CpuPlan", "copy_batch", "in_parts", "threads", "warm_up"]

_SPLIT_BYTES = 1 << 20  # less is done by the calling thread: handing work over takes tens of microseconds
_STREAM_BYTES = 8 << 20  # above about a last-level cache's share, stores go past the caches
_NO_INDEX = np.zeros(0, np.int64)

_lock = threading.RLock()
_pool: ThreadPoolExecutor | None = None
_pool_key = (0, 0)


def threads() -> int:
    """Threads of the CPU engine: `KVRAW_CPU_THREADS`, else the cores this process may use, at most 8."""
    return config.CPU_THREADS.get() or min(usable_cores(), 8)


def _kernels() -> ModuleType:
    try:
        from kvraw.engines import cpu_kernels
    except ImportError as error:
        raise ImportError(f"the CPU engine needs numba, which cannot be imported: {error}") from error
    return cpu_kernels


def _executor(workers: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # at the exit of the process, this raises as `submit` does

    global _pool, _pool_key
    with _lock:
        key = (os.getpid(), workers)  # a forked child has none of its parent's threads
        if _pool is None or _pool_key != key:
            _pool, _pool_key = ThreadPoolExecutor(workers, thread_name_prefix="kvraw-cpu"), key
        return _pool


class _Crew:
    """Stretches of work that the calling thread and those of the pool take, one after the other."""

    def __init__(self, work: Callable[[int, int], None], stretches: list[tuple[int, int]]) -> None:
        self._work: Callable[[int, int], None] | None = work
        self._left = deque(stretches)
        self._changed = threading.Condition()
        self._busy = 0
        self.errors: list[BaseException] = []

    def _next(self) -> tuple[int, int] | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def help_out(self) -> None:
        """Do what is left; on a thread of the pool, however late it gets to it."""
        while True:
            with self._changed:
                stretch, work = self._next(), self._work
                if stretch is None or work is None:
                    return
                self._busy += 1
            try:
                work(*stretch)
            except BaseException as error:
                self.errors.append(error)
            del work  # what it holds is the caller's alone once this thread is no longer busy
            with self._changed:
                self._busy -= 1
                if not self._busy:
                    self._changed.notify_all()

    def lead(self) -> None:
        """Do what is left; on the calling thread."""
        work = self._work
        assert work is not None
        while (stretch := self._next()) is not None:
            work(*stretch)

    def dismiss(self) -> None:
        """Begin nothing more, and wait for what is under way: also where a signal raises meanwhile, and then raise."""
        raised = None
        while True:
            try:
                with self._changed:
                    self._left.clear()
                    while self._busy:
                        self._changed.wait()
                    self._work = None  # a thread may still have this crew in its queue
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised


def _run(work: Callable[[int, int], None], bounds: list[int]) -> None:
    """Do each stretch between neighbouring bounds, on several threads; none goes on once this returns or raises."""
    stretches = list(itertools.pairwise(bounds))
    if len(stretches) == 1:
        work(*stretches[0])
        return
    crew = _Crew(work, stretches)
    helpers: list[Future[None]] = []
    try:
        # At the exit of the process, and where no thread can be had, this thread does what the others would.
        with contextlib.suppress(RuntimeError):
            pool = _executor(threads() - 1)
            for _ in stretches[1:]:
                helpers.append(pool.submit(crew.help_out))
        crew.lead()
    finally:
        try:
            for helper in helpers:
                helper.cancel()
        finally:
            crew.dismiss()
    if crew.errors:
        raise crew.errors[0]


def in_parts(work: Callable[[int, int], None], count: int, most: int) -> None:
    """Do units 0 to `count` by stretches, on at most `most` of the engine's threads."""
    parts = max(1, min(threads(), count, most))
    _run(work, [count * k // parts for k in range(parts + 1)])


class CpuPlan:
    """A copy plan made ready for the CPU engine."""

    def __init__(self, plan: CopyPlan) -> None:
        self.plan = plan
        self._table = np.array([self._row(plan.src_flat), self._row(plan.dst_flat)], np.int64)
        dims = [(d.size, d.src, d.dst, d.src_table, d.dst_table) for d in reversed(plan.dims)]
        # The kernel steps the last dimension by strides alone, so a dimension of tables must not come last.
        if dims and (dims[-1][3] or dims[-1][4]):
            dims.append((1, 0, 0, 0, 0))
        if len(dims) > 4:
            raise AssertionError("a plan has at most four dimensions, and tables fold outermost")
        one = (1, 0, 0, 0, 0)
        self._dims = np.array([*([dims[0]] if dims else [one]), *[one] * (4 - max(len(dims), 1)), *dims[1:]], np.int64)

    @staticmethod
    def _row(side: Side) -> tuple[int, ...]:
        return side.outer, side.inner, side.page, side.table_outer, int(side.skip_negative), 0

    def copy(self, src: Operands, dst: Operands, first: int, count: int) -> None:
        """Carry the plan out for items `first` to `first + count`; returns when it is done."""
        plan, table = self.plan, self._table.copy()
        table[:, 5] = src.host_index is not None, dst.host_index is not None
        src_index = _NO_INDEX if src.host_index is None else src.host_index
        dst_index = _NO_INDEX if dst.host_index is None else dst.host_index
        units, nbytes = count * int(self._dims[0, 0]), count * plan.item_bytes
        stream = nbytes >= _STREAM_BYTES
        kernel = _kernels().copy_items

        def work(begin: int, end: int) -> None:
            kernel(
                table,
                self._dims,
                src.bases,
                dst.bases,
                src_index,
                dst_index,
                first,
                begin,
                end,
                plan.run_bytes,
                stream,
            )

        in_parts(work, units, nbytes // _SPLIT_BYTES)


def copy_batch(dst: U64, src: U64, sizes: U64, *, in_order: bool = False) -> None:
    """Copy every (dst, src, nbytes) of three vectors; each copy may overlap itself, and another if `in_order`."""
    total = int(sizes.sum())
    stream = total >= _STREAM_BYTES
    kernel = _kernels().copy_batch
    parts = 1 if in_order else max(1, min(threads(), len(sizes), total // _SPLIT_BYTES))
    bounds = [0, len(sizes)]
    if parts > 1:
        done = np.cumsum(sizes)
        cuts = np.searchsorted(done, [total * k // parts for k in range(1, parts)])
        bounds = [0, *(int(c) for c in cuts), len(sizes)]

    def work(begin: int, end: int) -> None:
        kernel(dst, src, sizes, begin, end, stream)

    _run(work, bounds)


def warm_up() -> None:
    """Compile the kernels now (about a second without a cache on disk)."""
    a = np.arange(256, dtype=np.uint8)
    b = np.zeros_like(a)
    at = np.array([a.ctypes.data], np.uint64)
    to = np.array([b.ctypes.data], np.uint64)
    copy_batch(to, at, np.array([256], np.uint64))
    CpuPlan(CopyPlan(Side(0), Side(0), 1, 1, 1, 1, 256)).copy(Operands(at), Operands(to), 0, 1)
