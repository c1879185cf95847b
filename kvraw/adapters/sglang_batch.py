"""Copies by the copy engine on torch's current stream, for the adapters: what they enumerate themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvraw.adapters import captures, tensors
from kvraw.engines import copy_engine
from kvraw.engines.aside import in_order
from kvraw.engines.copy_engine import Descriptors
from kvraw.engines.device_state import device_state
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.inflight import Operation

__all__ = ["enqueue", "holder"]


def enqueue(
    d: Descriptors,
    device: int,
    *,
    pageable: bool = False,
    on_host: Sequence[tensors.Span] = (),
    edges: Sequence[int] = (),
    refs: object = None,
    most: int | None = None,
) -> None:
    """Enqueue copies by the copy engine on the device's current stream; no copy spans one of `edges`.

    `pageable` says that pageable memory takes part; the ranges `on_host` are looked up for it, and for more edges.
    `most` is the most descriptors that the driver is given at once.

    Raises
    ------
    DriverError
        The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
    """
    if not len(d):
        return
    stream, step = tensors.current_stream(device), most or len(d)
    with DeviceScope(device):
        if on_host:
            found, more = tensors.look_over(on_host)
            pageable, edges = pageable or found, (*edges, *more)

        def work(operation: Operation, capturing: bool) -> None:
            for begin in range(0, len(d), step):
                part = d
                if step < len(d):
                    part = Descriptors(*(v[begin : begin + step] for v in (d.dst, d.src, d.sizes)))
                try:
                    copy_engine.enqueue(part, operation.stream, capturing=capturing, pageable=pageable, edges=edges)
                except DriverError as error:
                    raise _of_copy(error, copy_engine.split(part, edges), d) from None

        captures.keep(device, in_order(device_state(device), stream, work, pageable=pageable, refs=refs))


def _of_copy(error: DriverError, given: Descriptors, d: Descriptors) -> DriverError:
    """The driver's error about what it was given, with the number of the failing copy among `d`."""
    k = error.index
    if k is not None:
        k = holder(d, given, k)
    return DriverError(error.name, error.code, error.call, index=k)


def holder(d: Descriptors, made: Descriptors, at: int) -> int | None:
    """Which of some copies begins where copy `at` among those made of them does, or holds its first byte."""
    dst, src = made.dst[at], made.src[at]
    inside = (d.dst <= dst) & (dst - d.dst < d.sizes) & (d.src <= src) & (src - d.src < d.sizes)
    begins = inside & (d.dst == dst) & (d.src == src)
    found = np.flatnonzero(begins if begins.any() else inside)
    return int(found[0]) if len(found) else None
