"""Store and load: blocks of a paged cache to chunks and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvraw import config
from kvraw.arrays import ASK_DRIVER, U64, IndexVector, index_vector
from kvraw.cache import PagedCache
from kvraw.chunks import ChunkRow, chunk_bytes
from kvraw.engines import cpu, reference
from kvraw.engines.device_state import device_state
from kvraw.engines.kernel import KernelPlan
from kvraw.engines.operands import Operands, check_distinct, check_host_index
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.formats import ChunkLayout
from kvraw.layout import chunk_side, copy_plan, find_chunk_layout
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.inflight import Completion
from kvraw.runtime.stream import stream_handle

__all__ = ["Transfer", "TransferPlan", "load", "load_slots", "store", "store_slots"]

Direction = Literal["store", "load"]


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
        self._per_chunk, self._paged = chunk_tokens // self.step, paged
        self._cpu = cpu.CpuPlan(self.plan) if self.engine == "cpu" else None
        names = (self._ids_name, "chunks") if store else ("chunks", self._ids_name)
        self._kernel = KernelPlan(self.plan, ctas=ctas, check=check, names=names) if self.engine == "kernel" else None

    def _choose(self, engine: str | None) -> tuple[str, str]:
        named = engine or config.ENGINE.get()
        if named not in ("auto", "kernel", "cpu", "reference"):
            raise LayoutError(f"engine is {named!r}, must be one of auto, kernel, cpu, reference")
        device = self.cache.device
        if named == "auto":
            return ("cpu", "the cache is in host memory") if device is None else ("kernel", "the cache is on a GPU")
        if named == "kernel" and device is None:
            raise PlacementError("the cache is in host memory; the kernel engine takes a cache on a GPU")
        if named != "kernel" and device is not None:
            raise PlacementError(f"engine is {named!r}, but the cache is memory of device {device}; use 'kernel'")
        return named, "asked for" if engine else f"{config.ENGINE.name} is set"

    def __call__(self, chunks: Sequence[Any], ids: Any, *, skip: int = 0, stream: Any = None) -> Transfer:
        """Copy; on a GPU, enqueue the copy.

        Parameters
        ----------
        chunks : sequence
            Chunks in order: `HostChunk`, tensors or arrays of any library, or addresses. Borrowed until the copy is
            over.
        ids : object
            Block ids or slots: list, array, or CPU or CUDA tensor. Entry i belongs to block (token) i of the row of
            chunks.
        skip : int
            Leading entries to leave out; chunk bytes (store) or cache blocks (load) of theirs stay untouched.
        stream : object
            Stream of the cache's device that the copy is enqueued on: it sees what the stream was given before, and
            what the stream is given later sees it. Not needed by the CPU engine, which returns when the copy is done.

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
        row = ChunkRow(chunks, self.chunk_bytes)
        self._check(row, index, skip)
        count = index.count - skip
        if self._kernel is not None:
            handle = stream_handle(stream)
            return Transfer(self, self._enqueue(row, index, skip, count, handle) if count > 0 else None)
        if index.host is None:
            raise PlacementError(f"{self._ids_name} lie on a device; the {self.engine} engine takes them on the host")
        row.require_host(self.engine)
        if count > 0:
            src, dst = self._operands(row.addresses, index)
            if self._cpu is not None:
                self._cpu.copy(src, dst, skip, count)
            else:
                reference.copy(self.plan, src, dst, skip, count)
        return Transfer(self, None)

    def _operands(self, addresses: U64, index: IndexVector) -> tuple[Operands, Operands]:
        paged, flat = Operands(self.cache.bases, index), Operands(addresses)
        return (paged, flat) if self.direction == "store" else (flat, paged)

    def _check(self, row: ChunkRow, index: IndexVector, skip: int) -> None:
        if skip < 0:
            raise BoundsError(f"skip is {skip}, must be >= 0")
        if index.count > len(row) * self._per_chunk:
            raise BoundsError(
                f"chunks has {len(row)} chunks of {self._per_chunk} {self.by}s each, too few for {index.count} "
                f"{self._ids_name}"
            )
        if index.host is not None and self.check:
            check_host_index(self._ids_name, index.host, self._paged, skip)
            if self.direction == "load":
                check_distinct(self._ids_name, index.host, skip)

    def _enqueue(self, row: ChunkRow, index: IndexVector, skip: int, count: int, stream: int) -> Completion:
        assert self._kernel is not None
        device = self.cache.device
        assert device is not None
        if index.device not in (None, ASK_DRIVER, device):
            raise PlacementError(f"{self._ids_name} lie on device {index.device}, the cache on device {device}")
        with DeviceScope(device):
            addresses, link = row.on_device(device)
            src, dst = self._operands(addresses, index)
            state = device_state(device)
            operation = state.books.begin(stream)
            try:
                self._kernel.enqueue(state, operation, src, dst, skip, count, link=link)
            except BaseException:
                operation.abort()
                raise
            completion = operation.commit((self.cache, row.owners, index.owner))
        for pool in row.pools:
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
            lines.append(
                f"accesses of up to {p.width()} bytes, at most {self._kernel.most_ctas(True, 0)} thread blocks"
            )
        if self._cpu is not None:
            lines.append(f"{cpu.threads()} threads")
        return "\n".join(lines)


def _plan_for(
    cache: PagedCache,
    direction: Direction,
    by: Literal["block", "slot"],
    chunks: Sequence[Any],
    chunk_tokens: int | None,
    chunk_layout: str,
    engine: str | None,
    check: bool,
    ctas: int | None,
) -> TransferPlan:
    """The plan for these arguments, kept with the cache."""
    nbytes = chunk_bytes(chunks[0]) if chunk_tokens is None and len(chunks) else None
    key = (direction, by, chunk_tokens, nbytes, chunk_layout, engine, check, ctas)
    plan: TransferPlan | None = cache.plans.get(key)
    if plan is None:
        geometry = cache.geometry
        if chunk_tokens is None:
            if nbytes is None and len(chunks):
                raise LayoutError("chunks are addresses; pass chunk_tokens=")
            nbytes = nbytes or geometry.block_size * geometry.token_bytes
            if nbytes % geometry.token_bytes:
                raise BoundsError(
                    f"chunks[0] has {nbytes} bytes, must be a multiple of {geometry.token_bytes}, the bytes of a token"
                )
            chunk_tokens = nbytes // geometry.token_bytes
        plan = TransferPlan(
            cache,
            direction,
            chunk_tokens=chunk_tokens,
            by=by,
            chunk_layout=chunk_layout,
            engine=engine,
            check=check,
            ctas=ctas,
        )
        cache.plans[key] = plan
    return plan


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
    plan = _plan_for(cache, "store", "block", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
    plan = _plan_for(cache, "load", "block", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
    plan = _plan_for(cache, "store", "slot", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
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
    plan = _plan_for(cache, "load", "slot", chunks, chunk_tokens, chunk_layout, engine, check, ctas)
    return plan(chunks, slots, skip=skip_tokens, stream=stream)
