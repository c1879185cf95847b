"""Store and load: blocks of a paged cache to chunks and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvraw import config
from kvraw.arrays import ASK_DRIVER, IndexVector, index_vector, is_pointer, tensor_view
from kvraw.cache import PagedCache, require_host
from kvraw.engines import cpu, reference
from kvraw.engines.device_state import device_state
from kvraw.engines.kernel import KernelPlan
from kvraw.engines.operands import Operands, check_host_index, check_table
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.formats import ChunkLayout
from kvraw.layout import chunk_side, copy_plan, find_chunk_layout
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.inflight import Completion
from kvraw.runtime.memory import locate
from kvraw.runtime.pool import HostChunk, HostPool
from kvraw.runtime.stream import stream_handle

__all__ = ["Transfer", "TransferPlan", "load", "load_slots", "store", "store_slots"]

Direction = Literal["store", "load"]


@dataclass(frozen=True, slots=True)
class _Chunk:
    address: int
    nbytes: int | None
    device: int | None
    pool: HostPool | None
    owner: object


def _chunk(at: int, chunk: Any) -> _Chunk:
    if isinstance(chunk, HostChunk):
        chunk.pool.view(chunk.address, chunk.nbytes)  # raises where the pool is closed
        return _Chunk(chunk.address, chunk.nbytes, None, chunk.pool, chunk)
    if is_pointer(chunk):
        return _Chunk(int(chunk), None, ASK_DRIVER, None, None)
    view = tensor_view(chunk)
    if not view.contiguous:
        raise LayoutError(f"chunks[{at}] has shape {view.shape}, strides {view.strides} bytes; must be contiguous")
    return _Chunk(view.address, view.nbytes, view.device, None, view.owner)


class Transfer:
    """A store or a load that was enqueued (GPU) or is done (CPU)."""

    __slots__ = ("_completion", "plan")

    def __init__(self, plan: TransferPlan, completion: Completion | None) -> None:
        self.plan = plan
        self._completion = completion

    def done(self) -> bool:
        """Whether the copy is over; never waits."""
        return self._completion is None or self._completion.done()

    def wait(self) -> None:
        """Wait on the host until the copy is over, with the GIL released.

        Raises
        ------
        BoundsError
            The kernel met an index out of bounds (indices that lie on the device); such entries were left out.
        """
        if self._completion is not None:
            self._completion.wait()
            if self._completion.error is not None:
                raise self._completion.error


class TransferPlan:
    """What is computed once for many stores or loads of one cache: call it with chunks and ids.

    Parameters
    ----------
    cache : PagedCache
        The cache; borrowed and kept.
    direction : "store" or "load"
        Cache to chunks, or chunks to cache.
    chunk_tokens : int
        Tokens per chunk; a multiple of the block size, by blocks.
    by : "block" or "slot"
        What indices count: blocks, or slots (block * block_size + offset; negative: leave out).
    chunk_layout : str
        Order of a chunk's axes, see `kvraw.formats.CHUNK_LAYOUTS`.
    engine : str, optional
        "kernel", "cpu" or "reference"; default: `KVRAW_ENGINE`, else "kernel" for a cache on a GPU and "cpu" for one on
        the host.
    check : bool
        Check indices against the cache, on the host where they are there, else in the kernel.
    ctas : int, optional
        Most thread blocks of the kernel engine.

    Raises
    ------
    LayoutError, PlacementError
        The parts do not fit together; says which.
    """

    def __init__(
        self,
        cache: PagedCache,
        direction: Direction,
        *,
        chunk_tokens: int,
        by: Literal["block", "slot"] = "block",
        chunk_layout: str | ChunkLayout = "2LTD",
        engine: str | None = None,
        check: bool = True,
        ctas: int | None = None,
    ) -> None:
        if direction not in ("store", "load") or by not in ("block", "slot"):
            raise LayoutError(f"direction is {direction!r} and by {by!r}; must be store or load, and block or slot")
        self.cache, self.direction, self.by, self.check = cache, direction, by, check
        self.chunk_tokens = chunk_tokens
        self.chunk_layout = find_chunk_layout(chunk_layout)
        self.step = 1 if by == "slot" else cache.geometry.block_size
        paged, flat = cache.layout.side(by), chunk_side(self.chunk_layout, cache.geometry, chunk_tokens, by)
        store = direction == "store"
        self.plan = copy_plan(cache.geometry, *((paged, flat) if store else (flat, paged)), by)
        self.chunk_bytes = cache.chunk_bytes(chunk_tokens)
        self.engine, self.reason = self._choose(engine)
        if ctas is not None and ctas <= 0:
            raise BoundsError(f"ctas is {ctas}, must be positive")
        self._ids_name = "slots" if by == "slot" else "block_ids"
        self._cpu = cpu.CpuPlan(self.plan) if self.engine == "cpu" else None
        names = (self._ids_name, "chunks") if store else ("chunks", self._ids_name)
        self._kernel = (
            KernelPlan(self.plan, ctas=ctas, check=check, names=names) if self.engine == "kernel" else None
        )

    def _choose(self, engine: str | None) -> tuple[str, str]:
        named = engine or config.ENGINE.get()
        if named not in ("auto", "kernel", "cpu", "reference"):
            raise LayoutError(f"engine is {named!r}, must be one of auto, kernel, cpu, reference")
        device = self.cache.device
        if named == "auto":
            return ("cpu", "the cache is in host memory") if device is None else ("kernel", "the cache is on a GPU")
        if named != "kernel" and device is not None:
            raise PlacementError(f"engine is {named!r}, but the cache is memory of device {device}; use 'kernel'")
        return named, "asked for" if engine else f"{config.ENGINE.name} is set"

    def __call__(self, chunks: Sequence[Any], ids: Any, *, skip: int = 0, stream: Any = None) -> Transfer:
        """Copy; on a GPU, enqueue the copy.

        Parameters
        ----------
        chunks : sequence
            Chunks in order: `HostChunk`, tensors or arrays of any library, or addresses. Borrowed until the copy is over.
        ids : object
            Block ids or slots: list, array, or CPU or CUDA tensor. Entry i belongs to block (token) i of the row of chunks.
        skip : int
            Leading entries to leave out; chunk bytes (store) or cache blocks (load) that belong to them stay untouched.
        stream : object
            Stream of the cache's device that the copy is enqueued on: it sees what the stream was given before, and what
            the stream is given later sees it. Not needed by the CPU engine, which returns when the copy is done.

        Raises
        ------
        BoundsError
            Bad ids, too few chunks, chunks of the wrong size, duplicate ids in a load; nothing is moved.
        ClosedError
            A chunk's pool is closed.
        PlacementError
            A chunk lies where the engine cannot reach it.
        """
        index = index_vector(self._ids_name, ids)
        items = [_chunk(at, c) for at, c in enumerate(chunks)]
        self._check(items, index, skip)
        count = index.count - skip
        if self.engine == "kernel":
            handle = stream_handle(stream)
            return Transfer(self, self._enqueue(items, index, skip, count, handle) if count > 0 else None)
        if index.host is None:
            raise PlacementError(f"{self._ids_name} lie on a device; the {self.engine} engine takes them on the host")
        for at, item in enumerate(items):
            if item.device == ASK_DRIVER:
                require_host(f"chunks[{at}] =", [item.address], self.chunk_bytes)
            elif item.device is not None:
                raise PlacementError(
                    f"chunks[{at}] is memory of device {item.device}; the {self.engine} engine takes host memory"
                )
        if count > 0:
            src, dst = self._operands(np.array([i.address for i in items], np.uint64), index)
            copy = self._cpu.copy if self._cpu else lambda *a: reference.copy(self.plan, *a)
            copy(src, dst, skip, count)
        return Transfer(self, None)

    def _operands(self, addresses: np.ndarray, index: IndexVector) -> tuple[Operands, Operands]:
        paged, flat = Operands(self.cache.bases, index), Operands(addresses)
        return (paged, flat) if self.direction == "store" else (flat, paged)

    def _check(self, items: list[_Chunk], index: IndexVector, skip: int) -> None:
        if skip < 0:
            raise BoundsError(f"skip is {skip}, must be >= 0")
        per_chunk = self.chunk_tokens // self.step
        if index.count > len(items) * per_chunk:
            raise BoundsError(
                f"chunks has {len(items)} chunks of {per_chunk} {self.by}s each, too few for {index.count} "
                f"{self._ids_name}"
            )
        for at, item in enumerate(items):
            if item.nbytes is not None and item.nbytes != self.chunk_bytes:
                raise BoundsError(
                    f"chunks[{at}] has {item.nbytes} bytes, must have {self.chunk_bytes} ({self.chunk_tokens} tokens)"
                )
            if not 0 < item.address < 2**64:
                raise BoundsError(f"chunks[{at}] is {item.address:#x}, must be in (0, 2**64)")
        paged = self.cache.layout.side(self.by)
        check_table("pointers", self.cache.bases, paged, self.plan, index.count)
        if index.host is not None and self.check:
            check_host_index(self._ids_name, index.host, paged, skip)
            if self.direction == "load":
                used = np.sort(index.host[skip:])
                twice = used[1:][(used[1:] == used[:-1]) & (used[1:] >= 0)]
                if twice.size:
                    raise BoundsError(f"{self._ids_name} has {twice[0]} more than once; a load writes each once")

    def _enqueue(self, items: list[_Chunk], index: IndexVector, skip: int, count: int, stream: int) -> Completion:
        assert self._kernel is not None
        device = self.cache.device
        link = False
        addresses = np.empty(len(items), np.uint64)
        if device is None:
            raise PlacementError("the cache is in host memory; the kernel engine takes a cache on a GPU")
        if index.device not in (None, ASK_DRIVER, device):
            raise PlacementError(f"{self._ids_name} lie on device {index.device}, the cache on device {device}")
        pools = {id(i.pool): i.pool for i in items if i.pool is not None}
        with DeviceScope(device):
            for pool in pools.values():
                pool.pin(device)
            for at, item in enumerate(items):
                if item.pool is not None:
                    addresses[at], link = item.address + item.pool.device_shift, True
                    continue
                where = locate(item.address, self.chunk_bytes)
                if not where.device_address:
                    raise PlacementError(
                        f"chunks[{at}] at {item.address:#x} is pageable host memory; the kernel engine takes pinned, "
                        f"host-registered or device memory (HostPool gives pinned chunks)"
                    )
                addresses[at], link = where.device_address, link or where.device is None
            src, dst = self._operands(addresses, index)
            refs = (self.cache, *(i.owner for i in items))
            completion = self._kernel.launch(
                device_state(device), stream, src, dst, skip, count, link=link, refs=refs
            )
        for pool in pools.values():
            pool.borrow(completion)
        return completion

    def explain(self) -> str:
        """What the plan does and why, in a line or two each."""
        p = self.plan
        lines = [
            f"{self.direction} by {self.by}: {self.cache.layout.format.name} <-> {self.chunk_layout.name}, "
            f"{self.chunk_tokens} tokens per chunk",
            f"engine {self.engine}: {self.reason}",
            f"per {self.by}: {p.runs_per_item} runs of {p.run_bytes} bytes, {p.item_bytes} bytes in all "
            f"({' x '.join(str(d.size) for d in reversed(p.dims)) or '1'} after folding)",
        ]
        if self._kernel is not None:
            lines.append(f"accesses of up to {p.width()} bytes, at most {self._kernel.most_ctas(True, 0)} thread blocks")
        if self._cpu is not None:
            lines.append(f"{cpu.threads()} threads")
        return "\n".join(lines)


_plans_lock = threading.Lock()


def _plan_for(cache: PagedCache, chunks: Sequence[Any], chunk_tokens: int | None, key: tuple[Any, ...]) -> TransferPlan:
    direction, by, chunk_layout, engine, check, ctas = key
    if chunk_tokens is None:
        first = _chunk(0, chunks[0]) if len(chunks) else None
        nbytes = None if first is None else first.nbytes
        if first is not None and nbytes is None:
            raise LayoutError("chunks are addresses; pass chunk_tokens=")
        token = cache.geometry.token_bytes
        nbytes = nbytes or token * cache.geometry.block_size
        if nbytes % token:
            raise BoundsError(f"chunks[0] has {nbytes} bytes, must be a multiple of {token}, the bytes of a token")
        chunk_tokens = nbytes // token
    full = (*key, chunk_tokens, config.ENGINE.get())
    with _plans_lock:
        plans = cache.__dict__.setdefault("_plans", {})
        plan = plans.get(full)
        if plan is None:
            plan = plans[full] = TransferPlan(
                cache,
                direction,
                chunk_tokens=chunk_tokens,
                by=by,
                chunk_layout=chunk_layout,
                engine=engine,
                check=check,
                ctas=ctas,
            )
        return plan  # type: ignore[no-any-return]


def store(
    cache: PagedCache,
    chunks: Sequence[Any],
    block_ids: Any,
    *,
    skip_blocks: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
) -> Transfer:
    """Copy blocks of a cache to chunks; see `TransferPlan` for the arguments and errors.

    `chunk_tokens` defaults to what the chunks' size says. The plan is kept with the cache and used again.
    """
    plan = _plan_for(cache, chunks, chunk_tokens, ("store", "block", chunk_layout, engine, check, ctas))
    return plan(chunks, block_ids, skip=skip_blocks, stream=stream)


def load(
    cache: PagedCache,
    chunks: Sequence[Any],
    block_ids: Any,
    *,
    skip_blocks: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
) -> Transfer:
    """Copy chunks to blocks of a cache; see `TransferPlan` for the arguments and errors."""
    plan = _plan_for(cache, chunks, chunk_tokens, ("load", "block", chunk_layout, engine, check, ctas))
    return plan(chunks, block_ids, skip=skip_blocks, stream=stream)


def store_slots(
    cache: PagedCache,
    chunks: Sequence[Any],
    slots: Any,
    *,
    skip_tokens: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
) -> Transfer:
    """Copy single tokens of a cache to chunks, by slot mapping; a negative slot leaves its token out."""
    plan = _plan_for(cache, chunks, chunk_tokens, ("store", "slot", chunk_layout, engine, check, ctas))
    return plan(chunks, slots, skip=skip_tokens, stream=stream)


def load_slots(
    cache: PagedCache,
    chunks: Sequence[Any],
    slots: Any,
    *,
    skip_tokens: int = 0,
    stream: Any = None,
    chunk_tokens: int | None = None,
    chunk_layout: str = "2LTD",
    engine: str | None = None,
    check: bool = True,
    ctas: int | None = None,
) -> Transfer:
    """Copy chunks to single tokens of a cache, by slot mapping; a negative slot leaves its token out."""
    plan = _plan_for(cache, chunks, chunk_tokens, ("load", "slot", chunk_layout, engine, check, ctas))
    return plan(chunks, slots, skip=skip_tokens, stream=stream)
