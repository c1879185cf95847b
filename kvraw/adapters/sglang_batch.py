"""Copies by the copy engine on torch's current stream, for the adapters: what they enumerate themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvraw import config
from kvraw.adapters import tensors
from kvraw.engines import copy_engine
from kvraw.engines.copy_engine import Descriptors
from kvraw.engines.device_state import device_state
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

__all__ = ["enqueue", "holder"]

_MANY = 512  # copies from which on the cap on those of one call is worth a look


def enqueue(
    d: Descriptors,
    device: int,
    *,
    pageable: bool = False,
    on_host: Sequence[int] = (),
    edges: Sequence[int] = (),
    refs: object = None,
    most: int | None = None,
) -> None:
    """Enqueue copies by the copy engine on the device's current stream; no copy spans one of `edges`.

    `pageable` says that pageable memory takes part, which is also asked of the addresses `on_host`; `most` is the most
    descriptors that the driver is given at once.

    Raises
    ------
    DriverError
        The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
    """
    if not len(d):
        return
    stream, step = tensors.current_stream(device), most or len(d)
    if len(d) > _MANY:
        step = min(step, config.MAX_BATCH.get())
    with DeviceScope(device):
        state, capturing = device_state(device), driver().stream_capturing(stream)
        pageable = pageable or not tensors.all_pinned(on_host)
        # The batch call refuses the legacy default stream: a stream of ours takes the copies in its place in the order.
        aside = stream in copy_engine.LEGACY and not capturing and not pageable
        own = state.side_stream("copy").handle if aside else stream
        operation = state.books.begin(own, captured=capturing)
        try:
            if aside:
                operation.follow(stream)
            operation.enqueued.append(own)
            for begin in range(0, len(d), step):
                part = d
                if step < len(d):
                    part = Descriptors(*(v[begin : begin + step] for v in (d.dst, d.src, d.sizes)))
                try:
                    copy_engine.enqueue(part, own, capturing=capturing, pageable=pageable, edges=edges)
                except DriverError as error:
                    raise _of_copy(error, copy_engine.split(part, edges), d) from None
        except BaseException:
            operation.abort()
            raise
        completion = operation.commit(refs)
        if aside:
            completion.wait_on(stream)


def _of_copy(error: DriverError, given: Descriptors, d: Descriptors) -> DriverError:
    """The driver's error about what it was given, with the number of the failing copy among `d`."""
    k = error.index
    if k is not None:
        k = holder(d, given, k) if len(given) <= config.MAX_BATCH.get() else None
    return DriverError(error.name, error.code, error.call, index=k)


def holder(d: Descriptors, made: Descriptors, at: int) -> int | None:
    """Which of some copies begins where copy `at` among those made of them does, or holds its first byte."""
    dst, src = made.dst[at], made.src[at]
    inside = (d.dst <= dst) & (dst - d.dst < d.sizes) & (d.src <= src) & (src - d.src < d.sizes)
    begins = inside & (d.dst == dst) & (d.src == src)
    found = np.flatnonzero(begins if begins.any() else inside)
    return int(found[0]) if len(found) else None
