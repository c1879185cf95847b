"""Which engine carries out a call of a copy: what can, what the model of time says, and what was asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvraw import config
from kvraw.arrays import I64, IndexVector
from kvraw.copying.addresses import AddressTable
from kvraw.copying.call import Call
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import kernels_barred
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.planner import DIRECTIONS, Choice, Profile, RateLimit, Seconds, best, profile_for
from kvraw.copying.staged_cuts import MOST_BASES, packed_side
from kvraw.errors import DriverError, PlacementError

__all__ = ["Chooser", "chunk_bytes", "joined_items"]

_MOST = 4096
_WAYS = {(False, True): "store", (True, False): "load"}  # by whether source and destination are host memory


def chunk_bytes(plan: CopyPlan, side: Side) -> int:
    """Bytes of a chunk, where a side is a row of chunks that the plan covers whole, without gaps; 0: it is not."""
    if side.table_outer != 1 or side.outer or side.table_layer or side.table_plane:
        return 0
    counts = (plan.layers, plan.planes, plan.tokens, plan.heads, side.page)
    nbytes = plan.run
    for stride, count in sorted(zip((*side.strides(), side.inner), counts, strict=True)):
        if count > 1:
            if stride != nbytes:
                return 0
            nbytes *= count
    return nbytes


class _Joins(NamedTuple):
    """How copies grow where items follow each other: whether they do, and the most items of one."""

    does: bool
    most: int

    @classmethod
    def of(cls, plan: CopyPlan, *sides: Side) -> _Joins:
        step = all(s.inner + s.outer * (s.page == 1) == plan.run_bytes for s in (plan.src_flat, plan.dst_flat))
        return cls(step, min((s.page for s in sides if s.page > 1), default=1 << 62))

    def run(self, items: int) -> int:
        """Items of a copy, of so many that follow each other."""
        return max(1, min(items, self.most)) if self.does else 1


def joined_items(count: int, *indices: I64 | None) -> int:
    """Items that follow each other on average, by their indices; None: all do."""
    apart: np.ndarray | bool = False
    for ids in indices:
        if ids is not None and count > 1:
            apart = apart | (ids[1:] - ids[:-1] != 1)
    return count // (1 + int(np.count_nonzero(apart)))


class Chooser:
    """The engine of each call of a copy plan on a GPU.

    Parameters
    ----------
    plan : CopyPlan
        What is copied.
    engine : str
        "auto", "kernel", "copy" or "staged".
    where_possible : bool
        `engine` is a wish: where it cannot carry a call out, another does.
    ctas : int, optional
        Most thread blocks; 0: no kernel at all.
    limit : RateLimit, optional
        Whether the GPU has other work, from which the copy is to take little, and the bytes a second that it may move;
        default: that of `KVRAW_NEIGHBOUR`.
    """

    def __init__(
        self,
        plan: CopyPlan,
        engine: str,
        *,
        where_possible: bool = False,
        ctas: int | None = None,
        limit: RateLimit | None = None,
    ) -> None:
        self.plan, self.engine, self._where_possible, self._ctas = plan, engine, where_possible, ctas
        self.limit = RateLimit.of(None) if limit is None else limit
        src, dst = plan.src, plan.dst
        self._negative = src.skip_negative, dst.skip_negative
        self._page = max(src.page, dst.page)
        self._joins = _Joins.of(plan, src, dst)
        # Bytes of a chunk, where the destination (a store) or the source (a load) is a row of them.
        self.chunk_bytes = {"store": chunk_bytes(plan, dst), "load": chunk_bytes(plan, src)}
        self._moves: dict[str, tuple[int, _Joins]] = {}
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._varying: set[tuple[object, ...]] = set()  # keys of calls whose engine depends on neighbouring items
        fixed = ctas != 0 and (engine == "kernel" or (engine == "copy" and not self.limit.most))
        self._fixed = Choice(engine, "asked for", 0.0) if fixed else None

    def choose(self, state: DeviceState, call: Call) -> Choice:
        """The engine of a call; the device's context is current.

        Raises
        ------
        PlacementError
            The engine that was asked for cannot carry it out; says why.
        """
        src, dst = call.src, call.dst
        links, known = (src.link, dst.link), call.host_ids and call.host_tables
        pageable = src.pageable or dst.pageable
        plain = known and not call.capturing and (links[0] or links[1]) and (not pageable or self.engine == "copy")
        if plain and self._fixed is not None:
            return self._fixed  # asked for, and nothing speaks against it
        gaps = (False, False)
        if (self._negative[0] or self._negative[1]) and (links[0] or links[1]):
            gaps = self._gaps(call, 0), self._gaps(call, 1)
        key = self._key(call, gaps)
        choice = self._choices.get(key)
        if choice is not None:
            return choice
        if key not in self._varying:
            most = call.count if known and call.count > 1 else 1
            found = self._decide(state, call, gaps, (most, most), " at best" if self._joins.run(most) > 1 else "")
            if not self._depends(found.engine, call):
                return self._keep(key, found)  # however neighbouring the items are
            self._varying.add(key)
        ids = [None if i is None or i.host is None else i.host[call.first : call.end] for i in call.indices]
        both = joined_items(call.count, *ids) if known else 1
        joined = both, joined_items(call.count, ids[links.index(True)]) if True in links else 1
        key = (*key, joined)
        return self._choices.get(key) or self._keep(key, self._decide(state, call, gaps, joined))

    def _key(self, call: Call, gaps: tuple[bool, bool]) -> tuple[object, ...]:
        """What the choice depends on, but for which items are neighbours."""
        src, dst = call.src, call.dst
        return (
            *(call.count, call.first % self._page, src.link, dst.link, call.capturing, call.host_ids),
            *(call.host_tables, gaps, src.pageable or dst.pageable, call.src_index is None, call.dst_index is None),
        )

    def settled_choice(self, call: Call, joined: int | None = None) -> Choice | None:
        """The engine of calls like one that was enqueued, where it is the same whatever their ids are.

        With `joined`, that of calls between a cache and chunks with as many `joined_items`.
        """
        if self._negative[0] or self._negative[1]:
            return None
        if self._fixed is not None:
            return self._fixed
        key = self._key(call, (False, False))
        return self._choices.get(key if joined is None else (*key, (joined, call.count)))

    def _gaps(self, call: Call, side: int) -> bool:
        """Whether items of a side are, or may be, left out."""
        index = call.indices[side]
        if not self._negative[side] or index is None:
            return False
        return index.host is None or bool((index.host[call.first : call.end] < 0).any())

    def _depends(self, engine: str, call: Call) -> bool:
        """Whether the choice of an engine depends on which items are neighbours."""
        if engine == "copy":
            return self._joins.does and call.count > 1 and call.host_ids and call.host_tables
        return engine == "staged" and not self.rows(call) and self._move(self.way(call)).does and call.count > 1

    def _keep(self, key: tuple[object, ...], choice: Choice) -> Choice:
        if len(self._choices) > _MOST:
            self._choices.clear()
            self._varying.clear()
        self._choices[key] = choice
        return choice

    @staticmethod
    def way(call: Call) -> str:
        """By which side is host memory: "store" or "load"; empty where both are, or none is."""
        return _WAYS.get((call.src.link, call.dst.link), "")

    def rows(self, call: Call) -> int:
        """Bytes of a chunk, where the host's side is a row of chunks that go through staging slots whole; else 0."""
        way = self.way(call)
        if not way:
            return 0
        host, other = (1, 0) if way == "store" else (0, 1)
        table = call.tables[other]
        fits = call.indices[host] is None and call.indices[other] is not None and isinstance(table, AddressTable)
        return self.chunk_bytes[way] if fits and len(table) <= MOST_BASES else 0

    def _host_side(self, way: str) -> Side:
        return self.plan.dst if way == "store" else self.plan.src

    def _move(self, way: str) -> _Joins:
        return self._moved(way)[1]

    def _moved(self, way: str) -> tuple[int, _Joins]:
        """Bytes of a copy between the host's side and a staging slot, and how it grows."""
        found = self._moves.get(way)
        if found is None:
            host = self._host_side(way)
            items = max(1, config.STAGING_SLOT.get() // self.plan.item_bytes)
            p = self.plan
            plan = CopyPlan(packed_side(p, host, items), host, p.layers, p.planes, p.tokens, p.heads, p.run)
            found = self._moves[way] = plan.run_bytes, _Joins.of(plan, host)
        return found

    def _staged_barred(self, call: Call, gaps: tuple[bool, bool]) -> str:
        """Why a call cannot go through staging slots; empty where it can."""
        way = self.way(call)
        if not way:
            return f"both sides are {'host' if call.src.link else 'device'} memory"
        host = 1 if way == "store" else 0
        index: IndexVector | None = call.indices[host]
        if call.capturing:
            return "a stream capture is in progress"
        if index is not None and index.host is None:
            return "the host's addresses are by ids on the device"
        if gaps[1 - host] and way == "store":
            return "ids are or may be left out, and whole chunks would overwrite their bytes"
        if gaps[host]:
            return "ids of the host's side are left out"
        if call.src.pageable or call.dst.pageable:
            return "pageable memory takes part"
        if self.rows(call):
            return "" if self.whole_chunks(call)[1] else "no chunk is covered whole"
        slot = config.STAGING_SLOT.get()
        if self.plan.item_bytes > slot:
            return f"an item of {self.plan.item_bytes} bytes does not fit a staging slot of {slot} bytes"
        return ""

    def whole_chunks(self, call: Call) -> tuple[int, int]:
        """First chunk that is covered whole, and how many are."""
        page = self._host_side(self.way(call)).page
        begin = -(-call.first // page)
        return begin, max(0, call.end // page - begin)

    def _seconds(self, profile: Profile, call: Call, joined: tuple[int, int], rate: float) -> dict[str, Seconds]:
        """Per engine, the time that a call takes by the model, and what it costs with what others lose by it."""
        plan, way = self.plan, self.way(call)
        nbytes, run, busy = call.count * plan.item_bytes, plan.run_bytes, self.limit.busy and bool(way)

        def seconds(engine: str, run: int) -> Seconds:
            return max(
                profile.seconds(engine, d, run, nbytes, rate, busy=busy) for d in ((way,) if way else DIRECTIONS)
            )

        found = {
            "kernel": seconds("kernel", run),
            "copy": seconds("copy", run * self._joins.run(joined[0])),
            "staged": seconds("staged", run),
        }
        if way and not self.rows(call):  # the copies of a slot are as long as the host's side has it
            moved, joins = self._moved(way)
            found["staged"] = max(found["staged"], seconds("copy", moved * joins.run(joined[1])))
        return found

    def _decide(
        self,
        state: DeviceState,
        call: Call,
        gaps: tuple[bool, bool],
        joined: tuple[int, int],
        copy_note: str = "",
    ) -> Choice:
        profile, way = profile_for(state.device), self.way(call)
        rate = self.limit.rate(state.device, way) if way else 0.0
        seconds = self._seconds(profile, call, joined, rate)
        busy = self.limit.busy and bool(way)
        barred = {}
        if self.limit.most and way:
            barred["copy"] = barred["staged"] = "max_rate is kept by kernels alone"
        if not (call.src.link or call.dst.link):
            barred["copy"] = "both sides are device memory"
        if not (call.host_ids and call.host_tables):
            barred["copy"] = "the ids lie on the device" if not call.host_ids else "a table lies on the device"
        if call.capturing:
            barred["copy"] = "a stream capture is in progress"
        if why := self._staged_barred(call, gaps):
            barred["staged"] = why
        if call.src.pageable or call.dst.pageable:
            barred["kernel"] = "pageable memory takes part"
        if self._ctas == 0:
            barred["kernel"] = barred["staged"] = "ctas=0 allows no kernel"
        named = self.engine
        if self._where_possible and named in barred:
            named = "auto"
        named = "copy" if named == "auto" and ("kernel" in barred and "staged" in barred) else named
        found = best({e: s for e, s in seconds.items() if e not in barred} or seconds, busy=busy)
        reason = "asked for"
        if named == "auto" and found != "copy" and (no_kernel := kernels_barred(state.owner, self.plan.width())):
            named, reason = "copy", no_kernel
            barred = {"copy": f"{barred['copy']}, and {no_kernel}"} if "copy" in barred else {}
        if named != "auto":
            # Slower, but right; a rate that it does not keep to is neither.
            soft = named == "copy" and call.host_ids and call.host_tables and not (self.limit.most and way)
            ends = named == "staged" and bool(self.rows(call)) and not self.whole_chunks(call)[1]  # by the kernel
            if named in barred and not soft and not ends:
                raise PlacementError(f"engine is {named!r}, but {barred[named]}")
            return Choice(named, reason, seconds[named].alone * 1e6, rate if named == "kernel" else 0.0)
        if found == "staged":
            try:
                state.arena.ring(self.way(call))  # takes the device memory: only where it is to be used
            except (PlacementError, DriverError) as error:
                if isinstance(error, DriverError) and error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                barred["staged"] = str(error)
                found = best({e: s for e, s in seconds.items() if e not in barred}, busy=busy)
        others = [
            f"{e} {barred[e]}" if e in barred else f"{e} {s.alone * 1e6:.0f} us{copy_note if e == 'copy' else ''}"
            for e, s in seconds.items()
            if e != found
        ]
        why = "the fastest by the model, a kernel only by a margin"
        if busy:
            why = "the cheapest by the model, beside other work"
        rate = rate if found == "kernel" else 0.0
        kept = f", at {rate / 1e9:.0f} GB/s" if rate else ""
        why = f"{why}{kept} ({profile.source}); {'; '.join(others)}"
        return Choice(found, why, seconds[found].alone * 1e6, rate)
