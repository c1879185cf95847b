"""The CPU engine: numba kernels over host memory on threads of its own."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvraw import config
from kvraw.arrays import U64
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side
from kvraw.errors import ForkError
from kvraw.runtime import fork
from kvraw.runtime.cgroup import usable_cores

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["CpuPlan", "copy_batch", "in_parts", "threads", "warm_up"]

_SPLIT_BYTES = 1 << 20  # less is done by the calling thread: handing work over takes tens of microseconds
_STREAM_BYTES = 8 << 20  # above about a last-level cache's share, stores go past the caches
_NO_INDEX = np.zeros(0, np.int64)

_lock = fork.lock()
_pool: ThreadPoolExecutor | None = None
_pool_key = (0, 0)


def threads() -> int:
    """Threads of the CPU engine: `KVRAW_CPU_THREADS`, else the cores this process may use, at most 8."""
    return config.CPU_THREADS.get() or min(usable_cores(), 8)


@functools.cache
def _kernels() -> ModuleType:
    try:
        with fork.undivided():
            from kvraw.copying import cpu_kernels
    except ImportError as error:
        raise ImportError(f"the CPU engine needs numba, which cannot be imported: {error}") from error
    return cpu_kernels


def _executor(workers: int) -> ThreadPoolExecutor:
    with fork.undivided():
        from concurrent.futures import ThreadPoolExecutor  # at the exit of the process, this raises as `submit` does

    global _pool, _pool_key
    with _lock:
        key = (os.getpid(), workers)  # a forked child has none of its parent's threads
        if _pool is None or _pool_key != key:
            _pool, _pool_key = ThreadPoolExecutor(workers, thread_name_prefix="kvraw-cpu"), key
        return _pool


class _Crew:
    """Stretches of work that the calling thread and those of the pool take, one after the other.

    A thread of the pool may end anywhere, as where memory is short. So nobody waits for its word alone: it is busy
    while it stands in `_busy`, its future is not over and this process is the one that it was begun in; and a stretch
    is done where it says so.
    """

    def __init__(self, work: Callable[[int, int], None], stretches: list[tuple[int, int]]) -> None:
        self._work: Callable[[int, int], None] | None = work
        self._stretches = stretches
        self._left = deque(range(len(stretches)))
        self._done = bytearray(len(stretches))
        self._busy: set[int] = set()
        self._helpers: list[Future[None]] = []
        self._ended = threading.Event()
        self._epoch = fork.epoch()
        self.errors: list[BaseException] = []

    def _next(self) -> int | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def call(self, pool: ThreadPoolExecutor) -> None:
        """Have a thread of the pool help, as soon as it can."""
        self._helpers.append(pool.submit(self.help_out, len(self._helpers)))

    def help_out(self, me: int) -> None:
        """Do what is left; on a thread of the pool, however late it gets to it."""
        try:
            # Busy before it looks whether there is work: who clears the work away looks afterwards whether anyone is.
            self._busy.add(me)
            work = self._work
            while work is not None and (k := self._next()) is not None:
                work(*self._stretches[k])
                self._done[k] = 1
        except BaseException as error:
            self.errors.append(error)
        finally:
            work = None  # what it holds is the caller's alone once this thread is no longer busy
            self._busy.discard(me)
            self._ended.set()

    def lead(self) -> None:
        """Do what is left; on the calling thread."""
        work = self._work
        assert work is not None
        while (k := self._next()) is not None:
            work(*self._stretches[k])
            self._done[k] = 1

    def dismiss(self) -> None:
        """Begin nothing more, and wait for what is under way: also where a signal raises meanwhile, and then raise."""
        raised: BaseException | None = None
        while True:
            try:
                self._left.clear()
                self._work = None  # a thread may still have this crew in its queue
                while self._under_way():
                    self._ended.clear()
                    if self._under_way():
                        self._ended.wait(0.05)
                break
            except MemoryError as error:  # of the waiting
                raised = raised or error
                time.sleep(0.001)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def _under_way(self) -> bool:
        if self._epoch != fork.epoch():  # a signal handler forked: the threads are the parent's
            return False
        busy = self._busy
        for me, helper in enumerate(self._helpers):
            if me in busy and not helper.done():
                return True
        return len(self._helpers) in busy  # `submit` was interrupted

    def require_done(self) -> None:
        """Raise what a thread met, or where one ended without a word."""
        if self._epoch != fork.epoch():
            raise ForkError("the process was forked in the midst of a copy of the CPU engine; this is the child")
        if self.errors:
            raise self.errors[0]
        if not all(self._done):
            raise MemoryError("a thread of the CPU engine ended before its part was done")


def _run(work: Callable[[int, int], None], bounds: list[int]) -> None:
    """Do each stretch between neighbouring bounds, on several threads; none goes on once this returns or raises."""
    stretches = list(itertools.pairwise(bounds))
    if len(stretches) == 1:
        work(*stretches[0])
        return
    # Nothing to do, but to compile: at most one thread does, and none of the pool's, which may lack the memory for it.
    work(bounds[0], bounds[0])
    crew = _Crew(work, stretches)
    try:
        # At the exit of the process, and where no thread can be had, this thread does what the others would.
        with contextlib.suppress(RuntimeError, MemoryError):
            pool = _executor(threads() - 1)
            for _ in stretches[1:]:
                crew.call(pool)
        crew.lead()
    finally:
        crew.dismiss()
    crew.require_done()


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
