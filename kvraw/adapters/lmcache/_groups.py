"""Planned transfers of whole object groups: staging copies and launches in order, checked before any is enqueued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvraw.adapters.deferred_errors import error_sink, pending, pending_of, raise_pending
from kvraw.adapters.lmcache._copies import check_alignment
from kvraw.adapters.lmcache._objects import object_side, reach
from kvraw.adapters.lmcache._paged import Counts, from_pointers
from kvraw.adapters.lmcache._place import current_stream, device_index
from kvraw.adapters.lmcache._planned import pieces, run_on_host, stages, tables_of
from kvraw.adapters.lmcache._recorders import KERNEL, STAGING, Phase
from kvraw.adapters.lmcache._types import (
    ArgumentError,
    BatchStep,
    KernelGroupSpec,
    LaunchVar,
    direction_of,
    format_of,
)
from kvraw.addresses import FIRST, TOP
from kvraw.copying.device_state import DeviceState, device_state
from kvraw.copying.indexed import IndexedLaunch
from kvraw.copying.steps import BoundSteps, Step, cut_at_ends, enqueue_steps
from kvraw.memo import Memo
from kvraw.prepared import DeviceTable, Reached
from kvraw.runtime.context import DeviceScope, at_reset
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import held_at, pinned_at

__all__ = ["execute_object_group_transfer"]

_MOST = 256
_LONGEST = 3 * 1024  # words of copies in a program, which gives the GIL to nobody


class _Group:
    """What all plans share whose kernel group has these counts, this table and these objects."""

    def __init__(self, at: int, spec: KernelGroupSpec, to_host: bool, device: int | None) -> None:
        d, number = spec.shape_desc, format_of(spec.engine_kv_format)
        self.to_host, self.device, self.table = to_host, device, spec.paged_buffer_ptrs
        self.objects = tuple(spec.lmcache_objects_ptrs)
        tokens, block_size = int(spec.lmcache_chunk_size), int(d.bs)
        if tokens <= 0 or block_size <= 0 or tokens % block_size:
            raise ArgumentError(
                f"kernel group {at}: lmcache_chunk_size is {tokens}, must be a positive multiple of {block_size}"
            )
        if not self.objects or not all(self.objects):
            raise ArgumentError(f"kernel group {at}: lmcache_objects_ptrs is empty or holds a null address")
        if not self.table:
            raise ArgumentError(f"kernel group {at}: paged_buffer_ptrs is null")
        c = Counts(d.nl, 0, d.nb, d.bs, d.nh, d.hs, int(d.element_size), getattr(d, "block_stride_elems", 0))
        # The layout is that of any table: its addresses are on the device, and only their number is known here.
        self._shape = shape = from_pointers(number, np.ones(2 * max(c.layers, 1), np.uint64), c, int(d.kv_size), device)
        self.per_object, layers = tokens // block_size, shape.geometry.layers
        self.copies = shape.copies("block", to_host, lambda part: object_side(part, layers, tokens), tokens)
        self._found: tuple[Sequence[DeviceTable | Reached], list[Reached]] | None = None
        self.launch: IndexedLaunch | None = None
        self.ids = (0, 0, 0)  # where ids lay, as `held_at`

    def learn(self, state: DeviceState, ids: int) -> None:
        """Bind the launch, where the tables are known for good, and note where ids lie."""
        self.ids = held_at(ids, state.device) if ids else (0, 0, 0)
        if self._found is None or not self.copies.kernel or self.launch is not None:
            return
        (table,), (objects,) = self._found
        if isinstance(table, DeviceTable) and len(objects.seen) <= _MOST:
            kernel, seen = self.copies.each[0].kernel, objects.seen
            if self.to_host:
                self.launch = IndexedLaunch(state, kernel, (table, seen), (8, 0), link=False)
            else:
                self.launch = IndexedLaunch(state, kernel, (seen, table), (0, 8), link=False)

    def ends(self, stream: int | None) -> tuple[Sequence[DeviceTable | Reached], list[Reached]]:
        """The tables of each part, and the objects; `stream` as for `tables_of`."""
        if self._found is not None:
            return self._found
        parts = self._shape.parts
        row = reach(self.objects, 1, self.device)
        objects = [row.plus(p.at) for p in parts]
        tables = tables_of("paged_buffer_ptrs", self.table, self._shape, stream)
        # Host memory is looked up each time, device memory once; and what was read out of a table is as old as that.
        if self.device is not None and stream is not None and not row.link and len(parts) == 1:
            self._found = tables, objects
        return tables, objects


_known: Memo[tuple[object, ...], _Group] = Memo(_MOST)
at_reset(_known.clear)


def _group(at: int, spec: KernelGroupSpec, to_host: bool, device: int | None) -> _Group:
    d = spec.shape_desc
    key = (
        *(device, to_host, format_of(spec.engine_kv_format), spec.lmcache_chunk_size, spec.paged_buffer_ptrs),
        *(d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size, getattr(d, "block_stride_elems", 0)),
        *spec.lmcache_objects_ptrs,
    )
    found = _known.get(key)
    if found is None:
        found = _known.keep(key, _Group(at, spec, to_host, device))
    if spec.block_ids_capacity < 0 or (spec.block_ids_capacity and not spec.block_ids_base):
        raise ArgumentError(f"kernel group {at}: block_ids_base is null")
    return found


def _items(group: _Group, spec: KernelGroupSpec, launch: LaunchVar) -> tuple[int, int]:
    """Which items of its ids a launch copies, checked: the first, and how many; none where there is nothing to copy."""
    total, count, at = launch.total_blocks, launch.num_objects, launch.block_ids_offset
    if not 1 <= count <= len(group.objects):
        raise ArgumentError(
            f"num_objects is {count}, must be in [1, {len(group.objects)}] for kernel group {launch.group_idx}"
        )
    if at < 0 or total < 0 or at + total > spec.block_ids_capacity:
        raise ArgumentError(
            f"block_ids_offset is {at}, total_blocks {total}: must lie within the {spec.block_ids_capacity} "
            f"ids of kernel group {launch.group_idx}"
        )
    if total > count * group.per_object:
        raise ArgumentError(f"total_blocks is {total}, {count} objects hold {count * group.per_object} blocks")
    skip = launch.skip_prefix_n_blocks
    if skip < 0:
        skip = 0
    return skip, max(total - skip, 0)


def _launches(
    group: _Group, ends: tuple[Sequence[Any], Sequence[Any]], spec: KernelGroupSpec, launch: LaunchVar
) -> list[Any]:
    """The copies of a launch, ready; none where there is nothing to copy."""
    first, count = _items(group, spec, launch)
    if not count:
        return []
    return pieces(group.copies, group.device, ends, (spec.block_ids_base, launch.block_ids_offset), first, count)


class _Repeats:
    """Plans whose groups were carried out before, as one program: what is staged and launched, in which order."""

    def __init__(self) -> None:
        self._programs: Memo[tuple[object, ...], BoundSteps] = Memo(_MOST)
        self._pinned: dict[int, tuple[int, int, int, int]] = {}
        self._states: dict[int, DeviceState] = {}

    def clear(self) -> None:
        """Forget all."""
        self._programs.clear()
        self._pinned.clear()
        self._states.clear()

    def learn(
        self, to_host: bool, state: DeviceState, specs: Sequence[KernelGroupSpec], steps: Sequence[BatchStep]
    ) -> None:
        """Note what a plan found out that was carried out step by step."""
        self._states[state.device] = state
        for at, spec in enumerate(specs):
            _group(at, spec, to_host, state.device).learn(state, spec.block_ids_base)
        copy = next((c for step in steps for c in step.staging if c.nbytes), None)
        if copy is not None:
            self._pinned[state.device] = pinned_at(copy.dest if to_host else copy.src)

    def run(
        self,
        to_host: bool,
        device: int,
        alignment: int,
        specs: Sequence[KernelGroupSpec],
        steps: Sequence[BatchStep],
    ) -> bool:
        """Enqueue a plan; False: it must be looked at, and carried out step by step."""
        state = self._states.get(device)
        if state is None or state.was_reset or state.owner is not driver() or pending(state):
            return False
        groups = [_group(at, spec, to_host, device) for at, spec in enumerate(specs)]
        launches = [group.launch for group in groups]
        if None in launches:
            return False
        begin, end, _, number = self._pinned.get(device, (0, 0, 0, 0))
        copies: list[int] = []
        asked: list[int] = []
        jobs: list[tuple[int, int, int]] = []
        order: list[tuple[int, tuple[int, ...]]] = []
        for step in steps:
            before, chosen = len(copies), list[int]()
            for c in step.staging:
                dest, src, nbytes, offset = c.dest, c.src, c.nbytes, c.host_offset
                host, there = (dest, src) if to_host else (src, dest)
                if not (nbytes > 0 <= offset and begin <= host <= end - nbytes and FIRST <= there <= TOP - nbytes):
                    return False
                if offset % alignment + nbytes <= alignment:
                    copies += (dest, src, nbytes)
                else:
                    for at, size in cut_at_ends(nbytes, offset, alignment):
                        copies += (dest + at, src + at, size)
            for launch in step.launches:
                k = launch.group_idx
                if not 0 <= k < len(groups):
                    return False
                first, count = _items(groups[k], specs[k], launch)
                base, last = specs[k].block_ids_base, launch.block_ids_offset + first + count
                if count:
                    if not groups[k].ids[0] <= base <= groups[k].ids[1] - 8 * last:
                        return False
                    chosen.append(k)
                    jobs.append((base + 8 * launch.block_ids_offset, first, count))
            order.append(((len(copies) - before) // 3, tuple(chosen)))
        if copies:
            asked += (copies[0] if to_host else copies[1], number)
        for group, spec in zip(groups, specs, strict=True):
            if spec.block_ids_capacity:
                asked += (spec.block_ids_base, group.ids[2])
        if not (copies or jobs) or not all(asked) or len(copies) > _LONGEST:
            return False
        key = (to_host, len(asked), *order, *map(id, launches))
        program = self._programs.get(key)
        if program is None or program.state is not state:
            chosen_launches = [one for one in launches if one is not None]
            program = BoundSteps(state, chosen_launches, order, not to_host, len(asked) // 2)
            self._programs.keep(key, program)
        return program.enqueue(current_stream(device), asked, copies, jobs, pending_of(device)) is not None


_repeats = _Repeats()
at_reset(_repeats.clear)


def execute_object_group_transfer(
    direction: Any,
    device: Any,
    host_buffer_alignment: int,
    kernel_group_specs: Sequence[KernelGroupSpec],
    batch_steps: Sequence[BatchStep],
    phase_timing_enabled: bool = False,
    session_id: str = "",
) -> None:
    """Carry out a plan on the current stream of `device`: every step after the one before it.

    In a step, the staging copies come before the launches from host to device, and behind them to the host. The whole
    plan is checked before any of it is enqueued. With `phase_timing_enabled`, `pop_completed_phase_timings` tells how
    long each part took on a GPU, under `session_id`.

    Raises
    ------
    ArgumentError, BoundsError
        A group, a number of objects, or a range of ids out of bounds; says which.
    """
    to_host, where = direction_of(direction), device_index(device)
    alignment = check_alignment(host_buffer_alignment)
    if where is None:
        for step in _plan(to_host, None, kernel_group_specs, batch_steps, None):
            run_on_host(step, copies_first=not to_host)
        return
    if not phase_timing_enabled and _repeats.run(to_host, where, alignment, kernel_group_specs, batch_steps):
        return
    with DeviceScope(where):
        stream, state = current_stream(where), device_state(where)
        capturing = raise_pending(state, stream)
        session = session_id if phase_timing_enabled else None
        plan = _plan(to_host, where, kernel_group_specs, batch_steps, None if capturing else stream, session)
        options: dict[str, Any] = {"alignment": alignment, "capturing": capturing, "copies_first": not to_host}
        enqueue_steps(state, stream, plan, error_sink(where, capturing), **options)
        if not capturing and not phase_timing_enabled:
            _repeats.learn(to_host, state, kernel_group_specs, batch_steps)


def _plan(
    to_host: bool,
    device: int | None,
    specs: Sequence[KernelGroupSpec],
    steps: Sequence[BatchStep],
    stream: int | None,
    session: str | None = None,
) -> list[Step]:
    """Everything that the plan does, in order, checked: staging copies, and copies that are ready.

    With a session, each part of it stands between the ends that time it.
    """
    groups = [_group(at, spec, to_host, device) for at, spec in enumerate(specs)]
    ends = [group.ends(stream) for group in groups]
    work: list[Step] = []
    for step in steps:
        staging: list[Any] = stages((c.dest, c.src, c.nbytes, c.host_offset) for c in step.staging)
        launches: list[Any] = []
        for launch in step.launches:
            at = launch.group_idx
            if not 0 <= at < len(groups):
                raise ArgumentError(f"group_idx is {at}, must be in [0, {len(groups)})")
            launches += _launches(groups[at], ends[at], specs[at], launch)
        if session is not None and device is not None:
            part = to_host, device, sum(stage[2] for stage in staging), session
            launches, staging = Phase.around(launches, KERNEL, *part), Phase.around(staging, STAGING, *part)
        work.append(Step(staging, launches))
    return work
