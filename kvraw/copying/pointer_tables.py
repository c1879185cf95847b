"""Tables of addresses that lie on a device: how what they hold is aligned, learnt once for each without waiting."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from kvraw.copying.device_state import DeviceState, Upload
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import at_reset
from kvraw.runtime.stream import capturing

__all__ = ["UNKNOWN", "ask_for_bits", "device_table_bits", "first_address", "known_bits"]


class _Table:
    """What is known of one pointer table on a device."""

    __slots__ = ("asked", "bits", "first", "pending", "ref", "state")

    def __init__(self, tensor: Any, key: int, state: tuple[int, int]) -> None:
        self.ref = weakref.ref(tensor, lambda _: _tables.pop(key, None))
        self.state = state
        self.bits, self.first, self.asked = 8, 0, False
        self.pending: Completion | None = None  # what brings the answer


_tables: dict[int, _Table] = {}  # by id: tensors compare by element
at_reset(_tables.clear)


UNKNOWN = -1


def known_bits(group: Iterable[Any]) -> int:
    """Alignment of the addresses in tables, as all of them or-ed together, mod 16; `UNKNOWN` where it must be asked.

    0 where there are none on the device.
    """
    bits = 0
    for t in group:
        if t.is_cuda:
            table = _tables.get(id(t))
            try:
                now = t._version, t.data_ptr()
            except RuntimeError:  # made in inference mode: nothing tells when it is changed
                bits |= 8
                continue
            if table is None or table.pending is not None or not table.asked or table.state != now:
                return UNKNOWN
            if table.ref() is not t:
                return UNKNOWN
            bits |= table.bits
    return bits & 15


def ask_for_bits(group: Iterable[Any], state: DeviceState, stream: int) -> int:
    """The same, or 8 bytes until it is known: `device_table_bits`."""
    bits = 0
    for t in group:
        if t.is_cuda:
            bits |= device_table_bits(t, state, stream)
    return bits & 15


def first_address(tensor: Any) -> int:
    """The first address of a table on a device, where `known_bits` knows the table; else 0."""
    table = _tables.get(id(tensor))
    return 0 if table is None or table.ref() is not tensor else table.first


def _learn(table: _Table, upload: Upload, count: int) -> Exception | None:
    table.bits = int(np.bitwise_or.reduce(upload.words[:count]))
    table.first = int(upload.words[0]) if count else 0
    return None


def device_table_bits(tensor: Any, state: DeviceState, stream: int) -> int:
    """Alignment of the addresses in a table on the device, as all of them or-ed together.

    The table is copied to the host behind what the stream was given, once in its life, without waiting. Until the copy
    is there the answer is 8 bytes, which is what the peers' kernels demand. The device's context is current.
    """
    key = id(tensor)
    table = _tables.get(key)
    try:
        now = tensor._version, int(tensor.data_ptr())  # other memory may be put into it in place
    except RuntimeError:  # made in inference mode: nothing tells when it is changed
        return 8
    if table is None or table.state != now or table.ref() is not tensor:
        table = _tables[key] = _Table(tensor, key, now)
    elif table.asked:
        pending = table.pending
        if pending is not None and not capturing(stream, state.device) and pending.done():
            table.pending = None
        return table.bits
    if not capturing(stream, state.device):
        count = int(tensor.numel())
        operation = state.completions.begin(stream)
        upload = state.take_upload(count)
        operation.on_done(partial(_learn, table, upload, count))
        operation.on_done(partial(state.give_upload, upload))
        try:
            operation.enqueued.append(stream)
            upload.fetch(int(tensor.data_ptr()), count * 8, stream)
        except BaseException:
            operation.abort()
            raise
        table.pending = operation.commit(tensor)
        table.asked = True
    return table.bits
