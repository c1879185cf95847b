"""CacheBlend's retrieval as a plan: staging copies, keys turned to new positions, tokens scattered to their slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvraw.adapters.lmcache._blend_groups import Group, address_of, group_of
from kvraw.adapters.lmcache._copies import check_alignment, copy_on_host
from kvraw.adapters.lmcache._place import current_stream, device_index, raise_seen, watch
from kvraw.adapters.lmcache._planned import Stage, enqueue_stage, pieces, stages
from kvraw.adapters.lmcache._types import ArgumentError, CBGroupSpec, StagingCopy
from kvraw.arrays import I64, U64
from kvraw.engines.device_state import DeviceState, device_state
from kvraw.prepared import Copy, Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.inflight import Operation

__all__ = ["execute_cb_retrieve_plan_flat"]


class _Step(NamedTuple):
    """What a step stages, the latest step before it that uses what is written then (-1: none), and what follows."""

    staging: list[Stage]
    behind: int
    work: list[Any]


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


def _runs(rows: list[tuple[int, ...]], tokens: int) -> Iterator[tuple[list[int], int, int]]:
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


def _work(
    groups: list[Group],
    specs: Sequence[CBGroupSpec],
    stream: int | None,
    ropes: I64,
    scatters: I64,
    at: tuple[int, int],
) -> tuple[list[Any], list[tuple[int, int]]]:
    """Rotations and scatters of a step, ready, and the (group, slot) that they use; `at` is where its rows begin."""
    for name, rows, first in (("ropes", ropes, at[0]), ("scatters", scatters, at[1])):
        bad = (rows[:, 0] < 0) | (rows[:, 0] >= len(groups))
        if bad.any():
            k = int(np.argmax(bad))
            raise ArgumentError(f"{name}[{first + k}]: group_idx is {rows[k, 0]}, must be in [0, {len(groups)})")
    work: list[Any] = []
    used = []
    for number, (group, spec) in enumerate(zip(groups, specs, strict=True)):
        mine = [(k, *row[1:]) for k, row in enumerate(scatters.tolist()) if row[0] == number]
        filled: dict[int, int] = {}
        for k, slot, offset, count in mine:
            what = f"scatters[{at[1] + k}]"
            group.slot(what, slot)
            if not 0 <= count <= group.tokens:
                raise ArgumentError(f"{what}: n_tok is {count}, must be in [0, {group.tokens}], the tokens of a slot")
            if offset < 0 or offset + count > spec.slot_mapping_capacity:
                raise ArgumentError(
                    f"{what}: slot_mapping_offset is {offset}, n_tok {count}: must lie within the "
                    f"{spec.slot_mapping_capacity} slots of group {number}"
                )
            filled[slot] = max(filled.get(slot, 0), count)
        turns = [(k, *row[1:]) for k, row in enumerate(ropes.tolist()) if row[0] == number]
        used += [(number, slot) for slot in {row[1] for row in (*turns, *mine)}]
        if group.keys is not None and turns:
            need = max(max(old, new) for _, _, old, new in turns) + group.tokens
            limit = group.keys.limit(group.device, need)
            for k, slot, old, new in turns:
                tokens = filled.get(slot, group.tokens)  # what no scatter reads need not turn
                if old != new and tokens:
                    work.append(group.turn(f"ropes[{at[0] + k}]", slot, old, new, tokens, limit))
                else:
                    group.slot(f"ropes[{at[0] + k}]", slot)
        table, slots = group.ends(stream) if mine else (None, None)
        for chosen, offset, count in _runs([row for row in mine if row[3]], group.tokens):
            assert slots is not None
            ids = address_of(spec.slot_mapping_base), offset
            row = Reached(slots.host[chosen], slots.seen[chosen], slots.link, slots.edges)
            work += pieces(group.copies, group.device, ([table], [row]), ids, 0, count)
    return work, used


def _behind(groups: list[Group], staged: list[list[Stage]], used: list[list[tuple[int, int]]]) -> list[int]:
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
) -> list[_Step]:
    """Every step, checked and ready."""
    copies, turns, moves = _staging(staging), _table("ropes", ropes, 4), _table("scatters", scatters, 4)
    ends = _table("step_offsets", step_offsets, 3)
    parts = list(_parts(ends, (len(copies), len(turns), len(moves))))
    groups = [group_of(at, spec, device) for at, spec in enumerate(specs)]
    staged = [stages(map(tuple, copies[part[0]].tolist())) for part in parts]
    done = [
        _work(groups, specs, stream, turns[part[1]], moves[part[2]], (part[1].start, part[2].start)) for part in parts
    ]
    behind = _behind(groups, staged, [used for _, used in done])
    return [_Step(copies, after, work) for copies, after, (work, _) in zip(staged, behind, done, strict=True)]


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
            for stage in step.staging:
                copy_on_host(*stage[:3])
            for one in step.work:
                one()
        return
    with DeviceScope(where):
        stream = current_stream(where)
        capturing = raise_seen(where, stream)
        steps = _plan(where, group_specs, None if capturing else stream, *tables)
        state = device_state(where)
        operation = state.books.begin(stream, captured=capturing)
        try:
            _enqueue(state, operation, steps, alignment, capturing)
            completion = operation.commit((tuple(group_specs), tables))
        except BaseException:
            operation.abort()
            raise
        watch(where, Copy(completion, "kernel"))


def _enqueue(state: DeviceState, operation: Operation, steps: list[_Step], alignment: int, capturing: bool) -> None:
    """Enqueue all steps; the copies on a stream of their own, unless a capture is in progress."""
    d, stream = state.owner, operation.stream
    own = stream if capturing else state.side_stream("load").handle
    operation.enqueued += {stream, own}

    def event_behind(on: int) -> int:
        event = state.books.take_event()
        operation.then(partial(state.books.give_event, event))
        d.event_record(event, on)
        return event

    if own != stream:
        d.stream_wait_event(own, event_behind(stream))
    over: dict[int, int] = {}
    waited = {step.behind for step in steps}
    for number, step in enumerate(steps):
        if own != stream and step.behind >= 0:
            d.stream_wait_event(own, over[step.behind])
        for stage in step.staging:
            enqueue_stage(stage, alignment, own)
        if own != stream and step.staging:
            d.stream_wait_event(stream, event_behind(own))
        for one in step.work:
            one.enqueue(state, operation, capturing)
        if own != stream and number in waited:
            over[number] = event_behind(stream)
