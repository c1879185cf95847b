"""The staged engine for any host side: items lie in a slot as densely as the order of the host's bytes allows.

A kernel packs items into a slot or unpacks them; the copies between slot and host are those of a copy plan of their
own, which the copy engine carries out. Where the host's side is a row of chunks that are covered whole, `staged` does
it with fewer and larger copies, known ahead of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvraw import config
from kvraw.arrays import U64
from kvraw.copying import copy_engine
from kvraw.copying.addresses import AddressTable
from kvraw.copying.bound import BoundCall, CallKind, IdCheck, ItemStep, bind_items
from kvraw.copying.call import Call
from kvraw.copying.copy_engine import DescriptorPlan, Descriptors
from kvraw.copying.device_state import DeviceState
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.operands import Operands
from kvraw.copying.plan import CopyPlan, Side
from kvraw.copying.staging_ring import StagingRing, StagingSlot
from kvraw.runtime.completion import Operation

__all__ = ["StagedItems", "packed_side"]

# A share of a slot: the first step of a store and the last of a load, whose packing and unpacking nothing overlaps.
_SMALL_SHARE = 16


def packed_side(plan: CopyPlan, host: Side, items: int) -> Side:
    """A side for `items` items without gaps, in the order in which the host's side has them."""
    axes = [
        ("layer", plan.layers, host.table_layer, host.layer),
        ("plane", plan.planes, host.table_plane, host.plane),
        ("token", plan.tokens, 0, host.token),
        ("head", plan.heads, 0, host.head),
        ("outer", items, host.table_outer if host.page == 1 else 0, host.inner if host.page > 1 else host.outer),
    ]
    step = plan.run
    strides: dict[str, int] = {}
    for name, count, _, _ in sorted(axes, key=lambda axis: axis[2:]):
        strides[name] = step
        step *= count
    return Side(**strides)  # type: ignore[arg-type]  # these are numbers


class StagedItems:
    """A copy plan made ready to go through staging slots, item by item.

    Parameters
    ----------
    plan : CopyPlan
        What to copy.
    store : bool
        The host's side is the destination.
    slot_bytes : int
        Bytes of a staging slot, which holds an item at least.
    ctas : int, optional
        Most thread blocks of the kernels.
    check : bool
        Check indices that lie on the device, in the kernels.
    names : tuple of str
        What errors call the source's and the destination's index.
    """

    def __init__(
        self,
        plan: CopyPlan,
        store: bool,
        slot_bytes: int,
        *,
        ctas: int | None = None,
        check: bool = True,
        names: tuple[str, str] = ("src_index", "dst_index"),
    ) -> None:
        self._store, self._check = store, check
        self.items = slot_bytes // plan.item_bytes
        host = plan.dst if store else plan.src
        slot = packed_side(plan, host, self.items)
        self._step, self._nbytes = slot.outer, self.items * plan.item_bytes
        self.kernel = KernelPlan(
            replace(plan, dst=slot) if store else replace(plan, src=slot), ctas=ctas, check=check, names=names
        )
        self._copies = DescriptorPlan(replace(plan, src=slot) if store else replace(plan, dst=slot))
        self._bases: dict[tuple[int, int], Operands] = {}

    def _steps(self, first: int, count: int) -> list[tuple[int, int]]:
        """First item and items of each step."""
        end, few = first + count, max(1, self.items // _SMALL_SHARE)
        steps = [(at, min(self.items, end - at)) for at in range(first, end, self.items)]
        at = 0 if self._store else len(steps) - 1
        begin, many = steps[at]
        if many >= 2 * few:
            middle = few if self._store else many - few
            steps[at : at + 1] = [(begin, middle), (begin + middle, many - middle)]
        return steps

    def _slot_side(self, slot: int, first: int) -> Operands:
        """A slot as the side whose item `first` begins where the slot does."""
        found = self._bases.get((slot, first))
        if found is None:
            if len(self._bases) > 256:
                self._bases.clear()
            base = (slot - first * self._step) % 2**64
            found = self._bases[slot, first] = Operands(np.array([base], np.uint64), None, None, base & 15)
        return found

    def _moves(self, call: Call, slot: int, first: int, count: int) -> Descriptors:
        """The copies between a slot and the host for the items of a step."""
        host, there = call.side(int(self._store), on_device=False), self._slot_side(slot, first)
        ends = (there, host) if self._store else (host, there)
        return self._copies(*ends, first, count, edges=call.edges)

    def enqueue(
        self,
        state: DeviceState,
        ring: StagingRing,
        operation: Operation,
        call: Call,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Enqueue a call; the operation's stream waits for all of it, and the device's context is current.

        Where the kernel is to check indices on the device, a store clears the slots first: what belongs to a bad index
        becomes zeros. Where nobody waits for the operation, `on_error` receives what kernels find.
        """
        stream, copies, packs = operation.stream, ring.copies.handle, ring.packs.handle
        d, completions, store = state.owner, state.completions, self._store
        steps = self._steps(call.first, call.count)
        paged = call.side(1 - int(store), on_device=True)
        clear = store and self._check and paged.index is not None and paged.index.host is None

        def pack(at: int, slot: StagingSlot, on: int) -> None:
            first, count = steps[at]
            if clear:
                d.memset_async(slot.address, 0, self._nbytes, on)
            there = self._slot_side(slot.address, first)
            src, dst = (paged, there) if store else (there, paged)
            self.kernel.enqueue(state, operation, src, dst, first, count, link=False, stream=on, on_error=on_error)

        def move(at: int, slot: StagingSlot) -> None:
            found = self._moves(call, slot.address, *steps[at])
            copy_engine.enqueue(found, copies, capturing=False, edges=call.edges, cut=True)

        with ring.lock:
            operation.enqueued += [stream, copies, packs]
            start = completions.take_event()
            operation.on_done(functools.partial(completions.give_event, start))
            d.event_record(start, stream)
            d.stream_wait_event(packs if store else copies, start)
            ring.enqueue(stream, store, len(steps), pack, move)

    def moves(self, ring: StagingRing, call: Call) -> list[Descriptors] | None:
        """The copies of each slot for a program, from the ring's next one on; None: not in calls of a batch each."""
        steps = self._steps(call.first, call.count)
        found = [
            self._moves(call, slot.address, *step) for slot, step in zip(ring.coming(len(steps)), steps, strict=True)
        ]
        most = config.MAX_BATCH.get()
        return found if all(len(one) <= most for one in found) else None

    def bind(
        self, state: DeviceState, ring: StagingRing, checks: tuple[IdCheck, IdCheck], call: Call
    ) -> BoundCall | None:
        """The program of calls like this one, from the ring's next slot on; None where it goes step by step.

        The device's context is current, and the ring's lock held.
        """
        store = int(self._store)
        steps = self._steps(call.first, call.count)
        slots = ring.coming(len(steps))
        if not state.owner.batch_supported() or not all(slot.used for slot in slots):
            return None
        table, indexed = call.tables[1 - store], tuple(k for k in (0, 1) if call.indices[k] is not None)
        assert isinstance(table, AddressTable)
        ready: list[ItemStep] = []
        for slot, (first, count) in zip(slots, steps, strict=True):
            row = self._slot_side(slot.address, first)
            tables: tuple[U64 | int, U64 | int] = (len(table), row.bases) if store else (row.bases, len(table))
            bits = table.alignment | row.bits
            own = tuple(k for k in indexed if k == 1 - store)
            launch = self.kernel.bind(state, tables, own, first, count, bits, link=False)
            if launch is None:
                return None
            ready.append(ItemStep(launch, first))
        kind = CallKind(checks, indexed, call.first, call.count)
        return bind_items(state, ring, ready, kind, call, self._store)
