"""Which transfers are measured beside the loop, and a row of figures for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

import kvraw
from kvraw.bench.beside.adapter_doors import LMCacheBlocks, LMCacheSlots, SGLang, VLLMBatch, VLLMBlocks
from kvraw.bench.beside.decode import DecodeLoop, Steps
from kvraw.bench.beside.doors import OneCopy, Planned, Pooled, PooledByPage
from kvraw.bench.beside.ground import Case, Ground, Lane, Maker
from kvraw.bench.beside.peers import OWN
from kvraw.errors import LayoutError

__all__ = ["DOORS", "ENGINES", "ROWS", "SIZES", "WAYS", "Flow", "Selection", "Wanted", "measure", "select"]

MIB = 1 << 20
ENGINES = ("auto", "kernel", "staged", "copy")
ROWS = (256, 2 << 10, 32 << 10, 2 << 20)
SIZES = (1, 8, 32, 256)  # MiB
WAYS = ("store", "load", "both")
ALONE, WARM = 0.15, 0.06  # seconds of the decode alone around each row, and of the row ahead of what counts
WARM_CALLS = 6
DRIFT, DRIFTS = 0.5, 3  # percent that the decode alone may differ around a row, else it is repeated; at most so often
KVRAW = "kvraw"


@dataclass(frozen=True, slots=True)
class Door:
    """A door as it is measured.

    Attributes
    ----------
    maker : callable
        Makes its lane; takes a module where `peer` says whose.
    rows : tuple of int
        Rows that it can have, the one of the default selection first.
    ways : tuple of str
        Directions that it has.
    peer : str
        Whose own module has the same operation: "lmcache" or "sglang".
    engines : tuple of str
        Engines to choose between; empty: the door chooses itself.
    """

    maker: Callable[..., Lane]
    rows: tuple[int, ...]
    ways: tuple[str, ...] = WAYS
    peer: str = ""
    engines: tuple[str, ...] = ()


_TOKENS = (2 << 10, 256)
DOORS: MappingProxyType[str, Door] = MappingProxyType(
    {
        "copy": Door(OneCopy, (0,)),
        "plan": Door(Planned, (32 << 10, 256, 2 << 10, 2 << 20), engines=ENGINES),
        "pool.layer_first": Door(Pooled, (32 << 10, 2 << 10, 256), ("store", "load"), engines=("auto",)),
        "pool.page_first": Door(PooledByPage, (32 << 10, 2 << 10, 256), ("store", "load"), engines=("auto",)),
        "lmcache.blocks": Door(LMCacheBlocks, (32 << 10, 256, 2 << 10), peer="lmcache"),
        "lmcache.slots": Door(LMCacheSlots, _TOKENS, peer="lmcache"),
        "sglang.all_layers": Door(
            partial(SGLang, layout="layer_first", whole=True), _TOKENS, ("store", "load"), peer="sglang"
        ),
        "sglang.layer_first": Door(partial(SGLang, layout="layer_first"), _TOKENS, ("load", "both"), peer="sglang"),
        "sglang.page_first": Door(partial(SGLang, layout="page_first"), _TOKENS, ("store", "load"), peer="sglang"),
        "sglang.page_head": Door(partial(SGLang, layout="page_head"), _TOKENS, ("store", "load"), peer="sglang"),
        "sglang.head_groups": Door(partial(SGLang, layout="head_groups"), _TOKENS, ("store", "load"), peer="sglang"),
        "vllm.batch": Door(VLLMBatch, (32 << 10, 2 << 10, 256, 2 << 20)),
        "vllm.blocks": Door(VLLMBlocks, (2 << 20, 32 << 10, 2 << 10, 256), ("store", "load")),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row to be measured: the door, its engine or module, "store", "load" or "both", bytes, bytes of a run."""

    door: str
    engine: str
    way: str
    nbytes: int
    row: int
    in_flight: int = 1


@dataclass(frozen=True, slots=True)
class Selection:
    """What the options choose; what is None is chosen here.

    Attributes
    ----------
    doors, engines, ways : sequence of str or None
        Of `DOORS` (or what stands ahead of the dot), `ENGINES` (with the most thread blocks: "kernel x2") and `WAYS`.
    sizes, rows : sequence of int or None
        MiB of a transfer, bytes of a run.
    in_flight : sequence of int
        Transfers that are under way at once.
    """

    doors: Sequence[str] | None = None
    engines: Sequence[str] | None = None
    ways: Sequence[str] | None = None
    sizes: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    in_flight: Sequence[int] = (1,)


def _named(asked: Sequence[str] | None) -> list[str]:
    if asked is None:
        return list(DOORS)
    found = []
    for name in asked:
        fit = [door for door in DOORS if door == name or door.startswith(f"{name}.")]
        if not fit:
            raise LayoutError(f"door {name!r} is unknown; there are {', '.join(DOORS)}")
        found += fit
    return list(dict.fromkeys(found))


def _check(name: str, asked: Sequence[Any] | None, there: Sequence[Any]) -> None:
    for one in asked or ():
        if one not in there:
            raise LayoutError(f"{name} {one!r} is unknown; there are {', '.join(map(str, there))}")


def select(chosen: Selection, peers: Sequence[str] = ()) -> list[Wanted]:
    """The rows of a selection, in the order of `DOORS`; `peers` are those whose modules are there.

    Without options: every door with transfers of 32 MiB and the rows that it is used with most, plans by every engine,
    and of `auto` every row and every size.

    Raises
    ------
    LayoutError
        There is no such door, engine, way, size or row, or nothing fits all of them.
    """
    _check("engine", [e.partition(" x")[0] for e in chosen.engines or ()], ENGINES)
    _check("way", chosen.ways, WAYS)
    _check("row", chosen.rows, ROWS)
    swept = chosen.sizes is None and chosen.rows is None and chosen.engines is None
    out: list[Wanted] = []
    for name in _named(chosen.doors):
        door = DOORS[name]
        engines: Sequence[str] = [KVRAW, *([door.peer] if door.peer in peers else [])]
        if door.engines:
            engines = [e for e in chosen.engines or door.engines if e.partition(" x")[0] in door.engines]
        ways = [w for w in chosen.ways or WAYS if w in door.ways]
        rows = [r for r in chosen.rows or door.rows[:1] if r in door.rows or name == "copy"]
        cells = list(product(rows, chosen.sizes or (32,), engines, ways))
        if swept and name == "plan":
            cells += product(door.rows[1:], (32,), ("auto",), ways)
        if swept and name in ("copy", "plan"):
            cells += product(
                door.rows[:1], [s for s in SIZES if s != 32], engines[:1], [w for w in ways if w != "both"]
            )
        for row, mib, engine, way in cells:
            nbytes = mib * MIB
            least = {"copy": 1, "plan": 2 * row if row < 2 * MIB else row}.get(name, row)
            if nbytes >= least:
                out += [
                    Wanted(name, engine, way, nbytes, nbytes if name == "copy" else row, n) for n in chosen.in_flight
                ]
    out = list(dict.fromkeys(out))
    if not out:
        raise LayoutError("no door has such engines, ways, sizes and rows together")
    return out


def maker_of(wanted: Wanted, modules: Mapping[str, Any]) -> Maker:
    """What makes the lanes of a row: `modules` are the peers' own."""
    door = DOORS[wanted.door]
    if not door.peer:
        return door.maker
    return partial(door.maker, module=OWN[door.peer] if wanted.engine == KVRAW else modules[wanted.engine])


class Flow:
    """Calls of a lane, at most so many under way, and what they took.

    Attributes
    ----------
    calls : int
        Calls that are over.
    host : list of float
        Seconds of each call on the host.
    seconds : float
        From the first call to the end of the last.
    """

    def __init__(self, lane: Lane, in_flight: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lane, self._in_flight, self._clock = lane, in_flight, clock
        self.calls, self.host, self.seconds = 0, [], 0.0  # type: tuple[int, list[float], float]
        self._pending: deque[Any] = deque()
        self._at, self._begun = 0, 0.0

    def restart(self) -> None:
        """Count from here on; nothing is under way."""
        self.calls, self.host, self.seconds, self._begun = 0, [], 0.0, self._clock()

    def advance(self, on: bool) -> bool:
        """Look at what is under way, and make one call more if there is room; whether anything happened."""
        moved = False
        while self._pending and self._pending[0].done():
            self._pending.popleft()
            self.calls += 1
            self.seconds = self._clock() - self._begun
            moved = True
        if on and len(self._pending) < self._in_flight:
            begin = self._clock()
            self._pending.append(self.lane.call(self._at))
            self.host.append(self._clock() - begin)
            self._at += 1
            moved = True
        return moved

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._pending

    @property
    def gb_per_s(self) -> float:
        """What was moved, in 10**9 bytes a second."""
        return self.calls * self.lane.moved / self.seconds / 1e9 if self.seconds else 0.0


def run_flows(flows: Sequence[Flow], going: Callable[[], bool]) -> None:
    """Let transfers go on while `going` says so, then wait for the last ones."""
    for flow in flows:
        flow.restart()
    on = True
    while on or not all(flow.idle for flow in flows):
        on = on and going()
        if not sum(flow.advance(on) for flow in flows):
            time.sleep(0)  # gives the GIL away, as an engine's thread would


def over(value: float, alone: float) -> float:
    """Percent that a value lies over what it is alone."""
    return 100 * (value / alone - 1)


def figures(wanted: Wanted, flows: Sequence[Flow], beside: Steps, around: Sequence[Steps]) -> dict[str, Any]:
    """The row: rates of both directions, and the step beside them against the mean of the medians around it.

    Its p99 is compared with the p99 of all steps alone around it.
    """
    alone = float(np.mean([one.p50 for one in around]))
    tail = Steps([t for one in around for t in one.times]).p99
    host = [t for flow in flows for t in flow.host]
    return {
        "door": wanted.door,
        "engine": wanted.engine,
        "way": wanted.way,
        "bytes": flows[0].lane.moved,
        "row_bytes": wanted.row,
        "in_flight": wanted.in_flight,
        "chosen": getattr(flows[0].lane, "chosen", None),
        "gb_per_s": min(flow.gb_per_s for flow in flows),
        "store_gb_per_s": next((f.gb_per_s for f in flows if f.lane.way == "store"), None),
        "load_gb_per_s": next((f.gb_per_s for f in flows if f.lane.way == "load"), None),
        "calls": sum(flow.calls for flow in flows),
        "host_p50_microseconds": float(np.median(host)) * 1e6,
        "steps": len(beside.times),
        "starved": beside.starved,
        "p50_milliseconds": beside.p50,
        "p99_milliseconds": beside.p99,
        "alone_p50_milliseconds": [one.p50 for one in around],
        "alone_p99_milliseconds": tail,
        "p50_percent": over(beside.p50, alone),
        "p99_percent": over(beside.p99, tail),
        "error": None,
    }


def median_row(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several rounds: each figure is the median of theirs."""
    row = dict(found[len(found) // 2])
    for name, value in row.items():
        if isinstance(value, float):
            row[name] = float(np.median([one[name] for one in found]))
    row["starved"] = sum(one["starved"] for one in found)
    row["steps"] = sum(one["steps"] for one in found)
    row["calls"] = sum(one["calls"] for one in found)
    row["alone_p50_milliseconds"] = [t for one in found for t in one["alone_p50_milliseconds"]]
    return row


def failed(wanted: Wanted, error: Exception) -> dict[str, Any]:
    """The row of a door that could not be measured."""
    return {
        "door": wanted.door,
        "engine": wanted.engine,
        "way": wanted.way,
        "bytes": wanted.nbytes,
        "row_bytes": wanted.row,
        "in_flight": wanted.in_flight,
        "error": f"{type(error).__name__}: {error}",
    }


def lanes(ground: Ground, wanted: Wanted, maker: Maker) -> list[Lane]:
    """The lanes of a row: one, or one of each direction."""
    ways = ("store", "load") if wanted.way == "both" else (wanted.way,)
    made: list[Lane] = []
    try:
        for way in ways:
            made.append(maker(ground, Case(wanted.door, wanted.engine, way, wanted.nbytes, wanted.row)))  # type: ignore[arg-type]
    except BaseException:
        for lane in made:
            lane.close()
        raise
    return made


def measure(
    loop: DecodeLoop,
    ground: Ground,
    rows: Sequence[Wanted],
    modules: Mapping[str, Any],
    seconds: float,
    rounds: int,
    tick: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Measure rows, each as soon as it is done: compared, warmed up, beside the loop; the loop alone between.

    A door that fails is a row with an error, and the next one is measured.
    """
    before: Steps | None = None
    for wanted in rows:
        tick(f"{wanted.door} {wanted.engine} {wanted.way}")
        with ExitStack() as stack:
            try:
                made = lanes(ground, wanted, maker_of(wanted, modules))
                for lane in made:
                    stack.callback(lane.close)
                for lane in made:
                    lane.verify()
                    for at in range(WARM_CALLS):
                        lane.call(at)
                    ground.settle()
                flows = [Flow(lane, wanted.in_flight) for lane in made]
                expected = loop.steps(WARM, partial(run_flows, flows)).p50
                found = []
                for _ in range(rounds):
                    for _ in range(DRIFTS):
                        first = before or loop.steps(ALONE)
                        beside = loop.steps(seconds, partial(run_flows, flows), expected)
                        after = before = loop.steps(ALONE)
                        if abs(over(after.p50, first.p50)) <= DRIFT:
                            break  # else clocks, or the memory's refresh, changed meanwhile: once more
                    found.append(figures(wanted, flows, beside, (first, after)))
                row = median_row(found)
            except (kvraw.KvrawError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                before = None
                row = failed(wanted, error)
            ground.settle()
        yield row
