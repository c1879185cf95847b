"""A transfer plan: what is computed once for many stores or loads of one cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvraw import config
from kvraw.arrays import IndexVector, index_vector
from kvraw.cache import PagedCache
from kvraw.checks import NotPicklable, integer
from kvraw.chunks import ChunkTable
from kvraw.copying import cpu, reference
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound_copy import BoundCopy
from kvraw.copying.call import Call
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.operands import Operands, check_distinct, check_host_index, require_index
from kvraw.copying.planner import Choice, Neighbour, RateLimit
from kvraw.copying.repeat import RepeatedCalls
from kvraw.copying.transfer import Transfer
from kvraw.errors import BoundsError, LayoutError, PlacementError
from kvraw.layouts.formats import ChunkLayout
from kvraw.layouts.geometry import chunk_side, copy_plan, find_chunk_layout
from kvraw.runtime.context import DeviceScope, reset_error
from kvraw.runtime.host.usage import HostWork
from kvraw.runtime.stream import stream_handle

__all__ = ["Direction", "TransferPlan"]

GPU_ENGINES = ("kernel", "copy", "staged")
_NOTHING = Choice("none", "there is nothing to copy", 0.0)

Direction = Literal["store", "load"]


class TransferPlan(NotPicklable):
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
        Order of a chunk's axes, see `kvraw.layouts.formats.CHUNK_LAYOUTS`.
    engine : str, optional
        For a cache on a GPU "kernel", "copy", "staged" or "auto", for one on the host "cpu", "reference" or "auto";
        default: `KVRAW_ENGINE`, else "auto", which takes the fastest for each call on a GPU and "cpu" on the host.
    check : bool
        Check indices against the cache, on the host where they are there, else in the kernel, which leaves a bad one
        out: its bytes stay as they were, or become zeros where a store goes through staging slots.
    distinct : bool
        Refuse what would be written twice: in a load ids on the host, in a store chunks that begin at one address. With
        False, which writer wins is left open; so it is where chunks overlap each other, or the cache, in part.
    ctas : int, optional
        Most thread blocks of any kernel; 0: none, the copy engine alone.
    neighbour : "busy" or "idle", optional
        What the GPU does beside the copy. "busy": other work, so the engine is taken that costs least together with
        what that work loses, and kernels over the link keep to a rate. "idle": the fastest. Default: `KVRAW_NEIGHBOUR`.
    max_rate : float
        Most bytes a second over the link, which kernels alone keep to and all that copy the same way share; 0: any.

    Raises
    ------
    LayoutError, PlacementError
        The parts do not fit together, or a load's cache is read-only; says which.
    BoundsError
        `ctas` is negative, or `max_rate` is one that no kernel can keep to.

    Examples
    --------
    >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> plan = kvraw.TransferPlan(cache, "store", chunk_tokens=32)
    >>> chunk = np.zeros(plan.chunk_bytes, np.uint8)
    >>> for ids in ([3, 1], [5, 0]):
    ...     plan([chunk], ids).wait()
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
        distinct: bool = True,
        ctas: int | None = None,
        neighbour: Neighbour | None = None,
        max_rate: float = 0.0,
    ) -> None:
        if direction not in ("store", "load") or by not in ("block", "slot"):
            raise LayoutError(f"direction is {direction!r} and by {by!r}; must be store or load, and block or slot")
        self.cache, self.direction, self.by, self.check = cache, direction, by, check
        self._distinct = distinct and check
        self.chunk_tokens = chunk_tokens = integer("chunk_tokens", chunk_tokens)
        self.chunk_layout = find_chunk_layout(chunk_layout)
        self.step = 1 if by == "slot" else cache.geometry.block_size
        paged, flat = cache.layout.side(by), chunk_side(self.chunk_layout, cache.geometry, chunk_tokens, by)
        store = self._store = direction == "store"
        if not store:
            cache.require_writable()
        self.plan = copy_plan(cache.geometry, *((paged, flat) if store else (flat, paged)), by)
        self.chunk_bytes = cache.chunk_bytes(chunk_tokens)
        if ctas is not None and integer("ctas", ctas) < 0:
            raise BoundsError(f"ctas is {ctas}, must be >= 0")
        limit = RateLimit.of(neighbour, max_rate)
        named = self._allowed(engine)
        self._ids_name = "slots" if by == "slot" else "block_ids"
        self._per_chunk, self._paged = chunk_tokens // self.step, paged
        self._done = Choice(named, "the cache is in host memory", 0.0)
        self._cpu: cpu.CpuPlan | None = None
        self._gpu: BoundCopy | None = None
        self._repeat: RepeatedCalls | None = None
        self._state: DeviceState | None = None
        if cache.device is not None:
            names = (self._ids_name, "chunks") if store else ("chunks", self._ids_name)
            self._gpu = BoundCopy(
                self.plan,
                engine=named,
                ctas=ctas,
                check=check,
                distinct=distinct and not store,
                index_names=names,
                limit=limit,
            )
            self._table = AddressTable(cache.bases, cache.bases, False)
            self._repeat = RepeatedCalls(
                self._gpu, cache.device, self._table, self.chunk_bytes, store, store and self._distinct
            )
        elif named == "cpu":
            self._cpu = cpu.CpuPlan(self.plan)

    def _allowed(self, engine: str | None) -> str:
        """The engine that was asked for; on the host never "auto"."""
        named = engine or config.ENGINE.get()
        if named not in config.ENGINES:
            raise LayoutError(f"engine is {named!r}, must be one of {', '.join(config.ENGINES)}")
        device = self.cache.device
        if device is None:
            if named in GPU_ENGINES and engine is not None:  # what is asked of every plan holds where it can
                raise PlacementError(f"the cache is in host memory; the {named} engine takes a cache on a GPU")
            return "cpu" if named in ("auto", *GPU_ENGINES) else named
        if named not in ("auto", *GPU_ENGINES):
            if engine is None:
                return "auto"
            raise PlacementError(f"engine is {named!r}, but the cache is memory of device {device}")
        return named

    def __call__(
        self,
        chunks: Sequence[Any],
        ids: Any,
        *,
        skip: int = 0,
        stream: Any = None,
        side: bool = False,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Transfer:
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
        side : bool
            Copy on a stream of kvraw's own, behind what `stream` was given. A load makes `stream` wait for it; after a
            store `stream` goes on, and whatever overwrites the blocks, or ids on the device, must wait
            (`Transfer.wait_on`, `Transfer.wait`).
        on_error : callable, optional
            Receives what kernels find in ids on the device, once it is known, where nobody waits for the transfer.

        Returns
        -------
        Transfer
            To wait for.

        Raises
        ------
        BoundsError
            Bad ids, too few chunks, chunks of the wrong size, duplicate ids in a load or chunks in a store; nothing is
            moved.
        ClosedError
            A chunk's pool is closed.
        PlacementError
            A chunk lies where the engine cannot reach it, a store's is read-only, or the stream is another device's.
        """
        repeat = self._repeat
        if repeat is not None and skip == 0 and type(skip) is int and not side:
            done = repeat(chunks, ids, stream, self.cache)
            if done is not None:
                completion, choice = done
                return Transfer((completion,), choice.engine, self.cache.device, self, choice)
        index = index_vector(self._ids_name, ids)
        row = ChunkTable(chunks, self.chunk_bytes, self._store)
        if type(skip) is not int or skip < 0:
            skip = self._leading(skip)
        self._check(row, index, skip)
        count = index.count - skip
        if self._gpu is not None:
            handle = stream_handle(stream, self.cache.device)
            if count <= 0:
                return Transfer((), _NOTHING.engine, plan=self, choice=_NOTHING)
            return self._enqueue(row, index, skip, count, handle, side, on_error)
        engine = self._done.engine
        if index.host is None:
            raise PlacementError(f"{self._ids_name} lie on a device; the {engine} engine takes them on the host")
        row.require_host(engine)
        if count > 0:
            paged, flat = Operands(self.cache.bases, index), Operands(row.addresses)
            src, dst = (paged, flat) if self.direction == "store" else (flat, paged)
            work = HostWork()  # another thread may free chunks or close their pool meanwhile
            try:
                row.mark_used(work.use)
                if self._cpu is not None:
                    self._cpu.copy(src, dst, skip, count)
                else:
                    reference.copy(self.plan, src, dst, skip, count)
            finally:
                work.ended = True
        return Transfer((), engine, plan=self, choice=self._done)

    def _leading(self, skip: object) -> int:
        name = f"skip_{'tokens' if self.by == 'slot' else 'blocks'} (of a plan: skip)"
        found = integer(name, skip)
        if found < 0:
            raise BoundsError(f"{name} is {found}, must be >= 0")
        return found

    def _check(self, row: ChunkTable, index: IndexVector, skip: int) -> None:
        if index.count > len(row) * self._per_chunk:
            raise BoundsError(
                f"chunks has {len(row)} chunks of {self._per_chunk} {self.by}s each, too few for {index.count} "
                f"{self._ids_name}"
            )
        if index.host is not None and self.check and self._gpu is None:
            check_host_index(self._ids_name, index.host, self._paged, skip)
            if self._distinct and not self._store:
                check_distinct(self._ids_name, index.host, skip)
        if self._store and self._distinct and len(set(row.starts)) != len(row.starts):
            row.require_distinct(skip // self._per_chunk, -(-index.count // self._per_chunk))

    def _enqueue(
        self,
        row: ChunkTable,
        index: IndexVector,
        skip: int,
        count: int,
        stream: int,
        side: bool,
        on_error: Callable[[Exception], None] | None,
    ) -> Transfer:
        device = self.cache.device
        assert device is not None
        assert self._gpu is not None
        assert self._repeat is not None
        require_index(self._ids_name, index, device)
        with DeviceScope(device):
            chunks = row.on_device(device)
            state = device_state(device)
            if state is not self._state:
                self._require_context(state)
            capturing = state.owner.stream_capturing(stream)
            own = state.side_stream(self.direction).handle if side and not capturing else stream
            operation = state.completions.begin(own, captured=capturing)
            try:
                # What a graph uses is its owner's to keep: it is never known to be over.
                if not capturing:
                    row.mark_used(operation)
                if own != stream:
                    operation.follow(stream)
                if capturing:
                    call = Call.of_chunks(self._table, chunks, self._store, index, skip, count, True, on_error)
                    choice = self._gpu.enqueue(state, operation, call)
                else:
                    choice = self._repeat.run(state, operation, chunks, index, skip, on_error, row.one_pool)
                completion = operation.commit((self.cache, row.owners, index.owner))
            except BaseException:
                operation.abort()
                raise
            if own != stream and self.direction == "load":
                completion.hold(stream)
        return Transfer((completion,), choice.engine, device, self, choice)

    @property
    def repeated(self) -> RepeatedCalls | None:
        """What enqueues calls for chunks of which it is known where they lie; None on the host."""
        return self._repeat

    def _require_context(self, state: DeviceState) -> None:
        """Raise `ClosedError` where the device's context is not the one any more that the cache was made in."""
        if state.generation != self.cache.generation:
            raise reset_error(self.cache.device, "the cache")
        self._state = state

    def explain(self) -> str:
        """Say what the plan does; what carries out a call, its `Transfer.explain` says.

        Returns
        -------
        str
            A few lines.
        """
        return self.describe(self._done if self._gpu is None else None)

    def describe(self, choice: Choice | None) -> str:
        """The plan, and what was chosen for a call."""
        p = self.plan
        lines = [
            f"{self.direction} by {self.by}: {self.cache.layout.format.name} <-> {self.chunk_layout.name}, "
            f"{self.chunk_tokens} tokens per chunk",
            f"per {self.by}: {p.runs_per_item} runs of {p.run_bytes} bytes, {p.item_bytes} bytes in all "
            f"({' x '.join(str(d.size) for d in reversed(p.dims)) or '1'} after folding)",
        ]
        if choice is not None:
            lines.insert(1, f"engine {choice.engine}: {choice.reason}")
        if self._gpu is not None:
            rate = self._gpu.chooser.limit.rate(self.cache.device or 0, self.direction)
            ctas = self._gpu.kernel.most_ctas(True, 0, rate > 0)
            lines.append(
                f"kernels take up to {p.width()} bytes per access, on at most {ctas} thread blocks over the link"
                + (f", at {rate / 1e9:.1f} GB/s" if rate else "")
            )
            if choice is not None and choice.microseconds:
                lines.append(f"predicted: {choice.microseconds:.0f} us")
        if self._cpu is not None:
            lines.append(f"{cpu.threads()} threads")
        return "\n".join(lines)
