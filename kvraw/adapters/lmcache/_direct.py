"""Copies of whole blocks straight between an engine's cache and host memory, by the copy engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvraw.adapters.deferred_errors import raise_pending
from kvraw.adapters.lmcache._copies import check_alignment, check_range
from kvraw.adapters.lmcache._objects import object_side
from kvraw.adapters.lmcache._paged import Counts, Paged, from_pointers
from kvraw.adapters.lmcache._place import current_stream, device_index
from kvraw.adapters.lmcache._types import (
    ArgumentError,
    DirectCopyGroupSpec,
    DirectCopyObject,
    direction_of,
    format_of,
)
from kvraw.arrays import U64, index_vector, pointer_vector
from kvraw.copying import copy_engine, cpu
from kvraw.copying.addresses import resolve
from kvraw.copying.device_state import device_state
from kvraw.copying.operands import Operands, check_host_index
from kvraw.copying.submission import submit_as_one
from kvraw.errors import BoundsError
from kvraw.layouts.formats import FORMATS
from kvraw.runtime.completion import Operation
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver_or_none

__all__ = ["batch_memcpy_supported", "direct_copy_format_supported", "execute_direct_copy_transfer"]


def batch_memcpy_supported() -> bool:
    """Whether the driver copies many pieces in one call."""
    found = driver_or_none()
    return found is not None and found.batch_supported()


def direct_copy_format_supported(engine_kv_format: Any) -> bool:
    """Whether a block of a format is few long runs, in the order of an object's."""
    return FORMATS[format_of(engine_kv_format)].direct


@dataclass(frozen=True, slots=True)
class _Group:
    spec: DirectCopyGroupSpec
    paged: Paged
    per_chunk: int
    nbytes: int
    ids: Any

    @classmethod
    def of(cls, at: int, spec: DirectCopyGroupSpec, device: int | None) -> _Group:
        d, number = spec.shape_desc, format_of(spec.engine_kv_format)
        if not direct_copy_format_supported(number):
            raise ArgumentError(f"group {at}: format {number} cannot be copied block by block")
        tokens, bs = int(spec.slots_per_chunk), int(d.bs)
        if tokens <= 0 or bs <= 0 or tokens % bs:
            raise ArgumentError(f"group {at}: slots_per_chunk is {tokens}, must be a positive multiple of {bs}")
        c = Counts(d.nl, 0, d.nb, bs, d.nh, d.hs, int(d.element_size), getattr(d, "block_stride_elems", 0))
        addresses = pointer_vector(f"group {at}: paged_layer_ptrs", spec.paged_layer_ptrs)
        paged = from_pointers(number, addresses, c, int(d.kv_size), device)
        if len(addresses) != len(paged.addresses):
            raise ArgumentError(f"group {at} has {len(addresses)} addresses, must have {len(paged.addresses)}")
        ids = index_vector(f"group {at}: block_ids", spec.block_ids)
        g = paged.geometry
        return cls(spec, paged, tokens // bs, g.layers * g.planes * tokens * paged.row, ids)

    def descriptors(self, at: int, obj: DirectCopyObject, to_host: bool) -> copy_engine.Descriptors | None:
        skip, begin = obj.skip_prefix_n_blocks[at], obj.chunk_idx * self.per_chunk
        if not 0 <= skip <= self.per_chunk:
            raise BoundsError(f"skip_prefix_n_blocks[{at}] is {skip}, must be in [0, {self.per_chunk}]")
        if obj.chunk_idx < 0 or begin + self.per_chunk > self.ids.count:
            raise BoundsError(f"chunk_idx is {obj.chunk_idx}, group {at} has ids for {self.ids.count} blocks")
        if not 0 <= self.spec.byte_offset_in_object <= obj.nbytes - self.nbytes:
            raise BoundsError(
                f"group {at} takes {self.nbytes} bytes at {self.spec.byte_offset_in_object} of an object of "
                f"{obj.nbytes} bytes"
            )
        values = self.ids.host[begin : begin + self.per_chunk]
        ids = index_vector("block_ids", values)
        part = self.paged.parts[0]
        tokens = self.per_chunk * part.layout.geometry.block_size
        plan = self.paged.ready(
            ("direct", to_host, tokens),
            lambda: part.plan(object_side(part, part.layout.geometry.layers, tokens), "block", to_host),
        )
        paged_side = plan.src if to_host else plan.dst
        check_host_index(f"group {at}: block_ids of chunk {obj.chunk_idx}", values, paged_side, skip)
        if skip == self.per_chunk:
            return None
        region = Operands(np.array([obj.host_ptr + self.spec.byte_offset_in_object], np.uint64))
        cache = Operands(self.paged.reached()[0].host, ids)
        ends = (cache, region) if to_host else (region, cache)
        return copy_engine.describe(plan, *ends, skip, self.per_chunk - skip, cache.bases)


def _edges(obj: DirectCopyObject, alignment: int) -> U64:
    """Addresses inside an object where one registration may end and the next begin."""
    first = alignment - obj.host_offset % alignment
    return pointer_vector("edges", np.arange(first, max(obj.nbytes, first), alignment) + obj.host_ptr)


def execute_direct_copy_transfer(
    direction: Any,
    device: Any,
    host_buffer_alignment: int,
    group_specs: Sequence[DirectCopyGroupSpec],
    objects: Sequence[DirectCopyObject],
) -> None:
    """Copy blocks between the caches of `group_specs` and objects, with one batch of copies per object.

    The copies of an object run in no order among themselves, and in the order of the current stream of `device`
    otherwise. Everything is checked before anything is enqueued.
    """
    to_host, where = direction_of(direction), device_index(device)
    alignment = check_alignment(host_buffer_alignment)
    groups = [_Group.of(at, spec, where) for at, spec in enumerate(group_specs)]
    work: list[copy_engine.Descriptors] = []
    for obj in objects:
        check_range("host_ptr", obj.host_ptr, obj.nbytes, obj.host_offset)
        if len(obj.skip_prefix_n_blocks) != len(groups):
            raise ArgumentError(
                f"skip_prefix_n_blocks has {len(obj.skip_prefix_n_blocks)} entries, must have one per group"
            )
        found = [d for at, g in enumerate(groups) if (d := g.descriptors(at, obj, to_host)) is not None]
        if found:
            dst, src, sizes = (np.concatenate([getattr(d, name) for d in found]) for name in ("dst", "src", "sizes"))
            work.append(copy_engine.split(copy_engine.Descriptors(dst, src, sizes), _edges(obj, alignment)))
    if where is None:
        for d in work:
            cpu.copy_batch(d.dst, d.src, d.sizes)
        return
    if not work:
        return
    with DeviceScope(where):
        stream = current_stream(where)
        state = device_state(where)
        raise_pending(state, stream)
        pageable = resolve(pointer_vector("host_ptr", [o.host_ptr for o in objects])).pageable

        def enqueue(operation: Operation, capturing: bool) -> None:
            for d in work:
                copy_engine.enqueue(d, operation.stream, capturing=capturing, pageable=pageable)

        submit_as_one(state, stream, enqueue, pageable=pageable)
