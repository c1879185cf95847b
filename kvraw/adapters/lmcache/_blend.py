"""CacheBlend's retrieval as a plan: staging copies, keys turned to new positions, tokens scattered to their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvraw.adapters.deferred_errors import error_sink, raise_pending
from kvraw.adapters.lmcache._blend_groups import Group, address_of, group_of
from kvraw.adapters.lmcache._copies import check_alignment
from kvraw.adapters.lmcache._place import current_stream, device_index
from kvraw.adapters.lmcache._planned import pieces, run_on_host, stages
from kvraw.adapters.lmcache._types import ArgumentError, CBGroupSpec, StagingCopy
from kvraw.arrays import I64, U64
from kvraw.copying.device_state import device_state
from kvraw.copying.steps import Step, StepCopy, enqueue_steps
from kvraw.runtime.context import DeviceScope

__all__ = ["execute_cb_retrieve_plan_flat"]


def _table(name: str, given: Any, columns: int) -> I64:
    rows = np.asarray(given)
    if not rows.size:
        return np.zeros((0, columns), np.int64)
    if rows.ndim != 2 or rows.shape[1] != columns or rows.dtype.kind not in "iu":
        raise ArgumentError(f"{name} has shape {rows.shape} of {rows.dtype}, must be integers [n, {columns}]")
    return rows.astype(np.int64)


def _staging(given: Any) -> I64:
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], StagingCopy):
        given = [(address_of(c.dest), address_of(c.src), c.nbytes, c.host_offset) for c in given]
    return _table("staging", given, 4)


def _parts(ends: I64, lengths: tuple[int, int, int]) -> Iterator[tuple[slice, ...]]:
    """The rows of each table that a step takes."""
    before = [0, 0, 0]
    for step, row in enumerate(ends.tolist()):
        if not all(a <= b <= n for a, b, n in zip(before, row, lengths, strict=True)):
            raise ArgumentError(
                f"step_offsets[{step}] is {row}, must be at least {before} and at most {list(lengths)}, each"
            )
        yield tuple(slice(a, b) for a, b in zip(before, row, strict=True))
        before = row
    if before != list(lengths):
        raise ArgumentError(f"step_offsets ends at {before}, must end at {list(lengths)}, the rows of the tables")


def _runs(rows: list[list[int]], tokens: int) -> Iterator[tuple[list[int], int, int]]:
    """Slots whose tokens follow each other in the mapping, as one: the slots, where it begins, and its tokens."""
    slots: list[int] = []
    begin = end = 0
    for _, slot, offset, count in rows:
        if slots and offset == end and (end - begin) == len(slots) * tokens:
            slots.append(slot)
            end += count
            continue
        if slots:
            yield slots, begin, end - begin
        slots, begin, end = [slot], offset, offset + count
    if slots:
        yield slots, begin, end - begin


def _require(name: str, rows: I64, bad: Any, text: Callable[..., str]) -> None:
    if bad.any():
        at = int(np.argmax(bad))
        raise ArgumentError(f"{name}[{at}]: {text(*rows[at].tolist())}")


def _check(groups: list[Group], specs: Sequence[CBGroupSpec], ropes: I64, scatters: I64) -> None:
    """Check the rows of a plan against its groups."""
    slots, tokens = (np.array([n(g) for g in groups], np.int64) for n in (lambda g: len(g.slots), lambda g: g.tokens))
    capacity = np.array([s.slot_mapping_capacity for s in specs], np.int64)
    for name, rows in (("ropes", ropes), ("scatters", scatters)):
        group, slot = rows[:, 0], rows[:, 1]
        bad = (group < 0) | (group >= len(groups))
        _require(name, rows, bad, lambda g, *_: f"group_idx is {g}, must be in [0, {len(groups)})")
        bad = (slot < 0) | (slot >= slots[group])
        _require(name, rows, bad, lambda g, s, *_: f"slot_idx is {s}, must be in [0, {slots[g]})")
    group, offset, count = scatters[:, 0], scatters[:, 2], scatters[:, 3]

    def too_many(g: int, _: int, __: int, n: int) -> str:
        return f"n_tok is {n}, must be in [0, {tokens[g]}], the tokens of a slot"

    def outside(g: int, _: int, at: int, n: int) -> str:
        return f"slot_mapping_offset is {at}, n_tok {n}: must lie within the {capacity[g]} slots of group {g}"

    _require("scatters", scatters, (count < 0) | (count > tokens[group]), too_many)
    _require("scatters", scatters, (offset < 0) | (offset > capacity[group] - count), outside)


class _Taken:
    """A group as a plan uses it: what is looked up once for all steps.

    Attributes
    ----------
    limit : int
        Positions that its keys may take.
    most : dict
        The most tokens that any step scatters of a slot.
    """

    def __init__(
        self, number: int, group: Group, spec: CBGroupSpec, stream: int | None, ropes: I64, scatters: I64
    ) -> None:
        self.number, self.group, self.mapping = number, group, address_of(spec.slot_mapping_base)
        turns, mine = ropes[ropes[:, 0] == number], scatters[scatters[:, 0] == number]
        self.ends = group.ends(stream) if len(mine) else None
        self.limit = 0
        if group.keys is not None and len(turns):
            self.limit = group.keys.limit(group.device, int(turns[:, 2:].max()) + group.tokens)
        self.most: dict[int, int] = {}
        for _, slot, _, count in mine.tolist():
            self.most[slot] = max(self.most.get(slot, 0), count)

    def work(self, ropes: list[list[int]], scatters: list[list[int]], at: int) -> tuple[list[Any], set[int]]:
        """Rotations and scatters of a step, ready, and the slots that they use; `at` is where its ropes begin."""
        group, number = self.group, self.number
        mine = [row for row in scatters if row[0] == number]
        used, filled = {row[1] for row in mine}, dict[int, int]()
        for _, slot, _, count in mine:
            filled[slot] = max(filled.get(slot, 0), count)
        work: list[Any] = []
        for k, (of, slot, old, new) in enumerate(ropes, at):
            if of != number or group.keys is None:
                continue
            used.add(slot)
            # What no scatter reads need not turn; and may not, where it would take a position that there is not.
            tokens = self.most.get(slot, group.tokens)
            if group.device is None or max(old, new) + tokens > self.limit:
                tokens = filled.get(slot, tokens)
            if old != new and tokens:
                work.append(group.turn(f"ropes[{k}]", slot, old, new, tokens, self.limit))
        for chosen, offset, count in _runs([row for row in mine if row[3]], group.tokens):
            assert self.ends is not None
            ends = self.ends.tables, self.ends.rows(chosen)
            work += pieces(group.copies, group.device, ends, (self.mapping, offset), 0, count)
        return work, used


def _behind(groups: list[Group], staged: list[list[StepCopy]], used: list[set[tuple[int, int]]]) -> list[int]:
    """For each step, the latest step before it that uses a slot which it stages anew; -1 where there is none."""
    places = [(number, slot) for number, group in enumerate(groups) for slot in range(len(group.slots))]
    start = np.array([groups[g].slots[slot] for g, slot in places], np.uint64)
    end = start + np.array([groups[g].nbytes for g, _ in places], np.uint64)
    at, last, found = {place: k for k, place in enumerate(places)}, np.full(len(places), -1), []
    for step, copies in enumerate(staged):
        dest: U64 = np.array([c[0] for c in copies], np.uint64)[:, None]
        past = dest + np.array([c[2] for c in copies], np.uint64)[:, None]
        touched = ((dest < end) & (past > start)).any(0)
        found.append(int(last[touched].max(initial=-1)))
        last[[at[place] for place in used[step]]] = step
    return found


def _plan(
    device: int | None,
    specs: Sequence[CBGroupSpec],
    stream: int | None,
    staging: Any,
    ropes: Any,
    scatters: Any,
    step_offsets: Any,
) -> list[Step]:
    """Every step, checked and ready."""
    copies, turns, moves = _staging(staging), _table("ropes", ropes, 4), _table("scatters", scatters, 4)
    ends = _table("step_offsets", step_offsets, 3)
    parts = list(_parts(ends, (len(copies), len(turns), len(moves))))
    groups = [group_of(at, spec, device) for at, spec in enumerate(specs)]
    _check(groups, specs, turns, moves)
    staged = [stages(map(tuple, copies[part[0]].tolist())) for part in parts]
    taken = [
        _Taken(at, group, spec, stream, turns, moves)
        for at, (group, spec) in enumerate(zip(groups, specs, strict=True))
    ]
    works: list[list[Any]] = []
    used: list[set[tuple[int, int]]] = []
    for _, ropes_of, scatters_of in parts:
        found = [t.work(turns[ropes_of].tolist(), moves[scatters_of].tolist(), ropes_of.start) for t in taken]
        works.append([one for work, _ in found for one in work])
        used.append({(at, slot) for at, (_, slots) in enumerate(found) for slot in slots})
    behind = _behind(groups, staged, used)
    return [Step(copies, work, after) for copies, after, work in zip(staged, behind, works, strict=True)]


def execute_cb_retrieve_plan_flat(
    device: Any,
    host_buffer_alignment: int,
    group_specs: Sequence[CBGroupSpec],
    staging: Any,
    ropes: Any,
    scatters: Any,
    step_offsets: Any,
) -> None:
    """Carry out a retrieval on the current stream of `device`: of each step the copies, then turns, then scatters.

    The copies go on a stream of their own, ahead of the kernels, and wait for those that still use what they write.
    The whole plan is checked before any of it is enqueued.

    Parameters
    ----------
    staging : array of int64 [n, 4]
        Destination, source, bytes, offset in the host buffer; or `StagingCopy` objects.
    ropes : array of int64 [n, 4]
        Group, slot, and the position that its first token has and is to have. Equal ones leave the keys as they are.
    scatters : array of int64 [n, 4]
        Group, slot, where its slots begin in the mapping, and its tokens.
    step_offsets : array of int64 [steps, 3]
        Where the rows of a step end in each of the three.

    Raises
    ------
    ArgumentError, BoundsError
        A table, a group or a range does not fit; says which.
    PlacementError
        Something lies where a kernel cannot reach it.
    """
    where, alignment = device_index(device), check_alignment(host_buffer_alignment)
    tables = staging, ropes, scatters, step_offsets
    if where is None:
        for step in _plan(None, group_specs, None, *tables):
            run_on_host(step)
        return
    with DeviceScope(where):
        stream, state = current_stream(where), device_state(where)
        capturing = raise_pending(state, stream)
        steps = _plan(where, group_specs, None if capturing else stream, *tables)
        options: dict[str, Any] = {"alignment": alignment, "capturing": capturing, "ahead": True}
        refs = tuple(group_specs), tables
        enqueue_steps(state, stream, steps, error_sink(where, capturing), **options, refs=refs)
