"""Planned transfers of whole object groups: staging copies and launches in order, checked before any is enqueued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvraw.adapters.lmcache._blocks import host_ids, object_side, reach
from kvraw.adapters.lmcache._copies import check_alignment, check_range, copy_on_host, enqueue_split
from kvraw.adapters.lmcache._paged import Counts, Paged, from_pointers
from kvraw.adapters.lmcache._place import current_stream, device_index, raise_seen, watch
from kvraw.adapters.lmcache._types import ArgumentError, BatchStep, KernelGroupSpec, direction_of, format_of
from kvraw.arrays import U64, IndexVector
from kvraw.engines.device_state import device_state
from kvraw.prepared import Copy, DeviceTable, PreparedCopy, Reached
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.memory import PinnedBuffer

__all__ = ["execute_object_group_transfer"]

_known: dict[int, int] = {}
_bits: dict[tuple[int, int, int], int] = {}


def _table_bits(address: int, entries: int, device: int, stream: int | None) -> int:
    """The bits that are set in any address of a table on the device, to tell the alignment.

    The table is read once, behind what the stream was given, which may still be writing it; the host waits for that.
    Without a stream (a capture is in progress) an unknown table is taken as aligned to 8 bytes.
    """
    key = (device, address, entries)
    if key not in _bits and stream is not None:
        with PinnedBuffer(entries * 8, device) as copy:
            driver().memcpy_async(copy.address, address, entries * 8, stream)
            driver().stream_synchronize(stream)
            _bits[key] = int(np.bitwise_or.reduce(_words(copy.address, entries))) % 16
        if len(_bits) > 4096:
            _bits.pop(next(iter(_bits)))
    return _bits.get(key, 8)


def _words(address: int, count: int) -> U64:
    return host_ids(address, count).view(np.uint64)


class _Group:
    """A kernel group made ready for its launches."""

    def __init__(self, at: int, spec: KernelGroupSpec, to_host: bool, device: int | None, stream: int | None) -> None:
        d, number = spec.shape_desc, format_of(spec.engine_kv_format)
        self.at, self.spec, self.to_host, self.device = at, spec, to_host, device
        tokens, self.block_size = int(spec.lmcache_chunk_size), int(d.bs)
        if tokens <= 0 or self.block_size <= 0 or tokens % self.block_size:
            raise ArgumentError(
                f"kernel group {at}: lmcache_chunk_size is {tokens}, must be a positive multiple of {self.block_size}"
            )
        if not spec.lmcache_objects_ptrs or not all(spec.lmcache_objects_ptrs):
            raise ArgumentError(f"kernel group {at}: lmcache_objects_ptrs is empty or holds a null address")
        if spec.block_ids_capacity < 0 or (spec.block_ids_capacity and not spec.block_ids_base):
            raise ArgumentError(f"kernel group {at}: block_ids_base is null")
        c = Counts(d.nl, 0, d.nb, d.bs, d.nh, d.hs, int(d.element_size), getattr(d, "block_stride_elems", 0))
        # The layout is that of any table: its addresses are on the device, and only their number is known here.
        shape = from_pointers(number, np.ones(2 * max(c.layers, 1), np.uint64), c, int(d.kv_size), device)
        self.per_object, self.layers = tokens // self.block_size, shape.geometry.layers
        self.copies = shape.copies("block", to_host, lambda part: object_side(part, self.layers, tokens), tokens)
        self.tables = self._tables(shape, stream)
        found = reach(spec.lmcache_objects_ptrs, 1, device)
        self.objects = [
            Reached(found.host + np.uint64(part.at), found.seen + np.uint64(part.at), found.link)
            for part in shape.parts
        ]

    def _tables(self, shape: Paged, stream: int | None) -> list[Any]:
        entries = len(shape.addresses)
        if not self.spec.paged_buffer_ptrs:
            raise ArgumentError(f"kernel group {self.at}: paged_buffer_ptrs is null")
        if self.device is None:
            addresses = _words(self.spec.paged_buffer_ptrs, entries)
            bases = [part.bases(addresses) for part in shape.parts]
            return [Reached(b, b, False) for b in bases]
        if len(shape.parts) > 1:
            raise ArgumentError(f"kernel group {self.at}: the format takes several layouts, which a plan cannot hold")
        bits = _table_bits(self.spec.paged_buffer_ptrs, entries, self.device, stream)
        return [DeviceTable(self.spec.paged_buffer_ptrs, entries, bits)]

    def launches(self, launch: Any) -> list[tuple[PreparedCopy, Any, Any, int, dict[str, Any]]]:
        """The arguments of each copy of a launch, or none where there is nothing to copy."""
        total, count, at = launch.total_blocks, launch.num_objects, launch.block_ids_offset
        if not 1 <= count <= len(self.spec.lmcache_objects_ptrs):
            raise ArgumentError(
                f"num_objects is {count}, must be in [1, {len(self.spec.lmcache_objects_ptrs)}] for kernel group "
                f"{self.at}"
            )
        if at < 0 or total < 0 or at + total > self.spec.block_ids_capacity:
            raise ArgumentError(
                f"block_ids_offset is {at}, total_blocks {total}: must lie within the {self.spec.block_ids_capacity} "
                f"ids of kernel group {self.at}"
            )
        if total > count * self.per_object:
            raise ArgumentError(f"total_blocks is {total}, {count} objects hold {count * self.per_object} blocks")
        skip = max(launch.skip_prefix_n_blocks, 0)
        if total <= skip:
            return []
        where = self.spec.block_ids_base + at * 8
        if self.device is None:
            ids = IndexVector(host_ids(where, total), 0, total)
        else:
            ids = IndexVector(None, where, total, 8, self.device)
        found = []
        for copy, table, objects in zip(self.copies, self.tables, self.objects, strict=True):
            ends, name = ((table, objects), "src_index") if self.to_host else ((objects, table), "dst_index")
            found.append((copy, *ends, total - skip, {name: ids, "first": skip}))
        return found


def _staging(step: BatchStep) -> list[tuple[int, int, int, int]]:
    out = []
    for copy in step.staging:
        for name, address in (("dest", copy.dest), ("src", copy.src)):
            check_range(f"staging copy: {name}", address, copy.nbytes, copy.host_offset)
        out.append((copy.dest, copy.src, copy.nbytes, copy.host_offset))
    return out


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
    plan is checked before any of it is enqueued. `phase_timing_enabled` and `session_id` are accepted and not used.

    Raises
    ------
    ArgumentError, BoundsError
        A group, a number of objects, or a range of ids out of bounds; says which.
    """
    to_host, where = direction_of(direction), device_index(device)
    alignment = check_alignment(host_buffer_alignment)
    if where is None:
        _run(_plan(to_host, None, kernel_group_specs, batch_steps, None, copy_on_host, alignment))
        return
    with DeviceScope(where):
        stream = current_stream(where)
        raise_seen(where, stream)
        capturing = driver().stream_capturing(stream)
        state = device_state(where)
        reading = None if capturing else stream
        work = _plan(to_host, where, kernel_group_specs, batch_steps, reading, None, alignment)
        operation = state.books.begin(stream, captured=capturing)
        try:
            for kind, args in work:
                if kind == "stage":
                    operation.enqueued.append(stream)
                    dest, src, nbytes, offset = args
                    enqueue_split(dest, src, nbytes, offset, alignment, stream)
                else:
                    args.enqueue(state, operation, capturing)
        except BaseException:
            operation.abort()
            raise
        watch(where, Copy(operation.commit(None), "kernel"))


def _plan(
    to_host: bool,
    device: int | None,
    specs: Sequence[KernelGroupSpec],
    steps: Sequence[BatchStep],
    stream: int | None,
    copy: Callable[[int, int, int], None] | None,
    alignment: int,
) -> list[tuple[str, Any]]:
    """Everything that the plan does, in order, checked."""
    groups = [_Group(at, spec, to_host, device, stream) for at, spec in enumerate(specs)]
    work: list[tuple[str, Any]] = []
    for step in steps:
        staging: list[tuple[str, Any]] = []
        launches: list[tuple[str, Any]] = []
        for args in _staging(step):
            if args[2]:
                staging.append(("stage", args if copy is None else partial(copy, *args[:3])))
        for launch in step.launches:
            if not 0 <= launch.group_idx < len(groups):
                raise ArgumentError(f"group_idx is {launch.group_idx}, must be in [0, {len(groups)})")
            for prepared, src, dst, count, index in groups[launch.group_idx].launches(launch):
                if device is None:
                    launches.append(("launch", partial(prepared, src, dst, count, **index)))
                else:
                    launches.append(("launch", prepared.ready(src, dst, count, **index)))
        work += launches + staging if to_host else staging + launches
    return work


def _run(work: list[tuple[str, Any]]) -> None:
    for _, one in work:
        one()
