"""Copies by the copy engine on torch's current stream, for the adapters: what they enumerate themselves."""

from __future__ import annotations

from collections.abc import Sequence

from kvraw.adapters import tensors
from kvraw.adapters.found import raise_found
from kvraw.engines import copy_engine
from kvraw.engines.aside import in_order
from kvraw.engines.copy_engine import Descriptors
from kvraw.engines.device_state import device_state
from kvraw.errors import DriverError
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.inflight import Operation

__all__ = ["enqueue"]


def enqueue(
    d: Descriptors,
    device: int,
    *,
    pageable: bool = False,
    edges: Sequence[int] = (),
    refs: object = None,
    most: int | None = None,
    raising: bool = True,
) -> None:
    """Enqueue copies by the copy engine on the device's current stream; no copy spans one of `edges`.

    `pageable` says that pageable memory takes part; the ranges `on_host` are looked up for it, and for more edges.
    `most` is the most descriptors that the driver is given at once. What kernels of earlier operations on the device
    found is raised first, unless the caller did.

    Raises
    ------
    BoundsError
        A kernel of an earlier operation found it.
    DriverError
        The driver refused; `index` is the failing copy, where it told. Copies before it may have been enqueued.
    """
    if not len(d):
        return
    stream, step = tensors.current_stream(device), most or len(d)
    if raising:
        raise_found(device, stream)
    with DeviceScope(device):

        def work(operation: Operation, capturing: bool) -> None:
            for begin in range(0, len(d), step):
                part = d
                if step < len(d):
                    part = Descriptors(*(v[begin : begin + step] for v in (d.dst, d.src, d.sizes)))
                try:
                    copy_engine.enqueue(part, operation.stream, capturing=capturing, pageable=pageable, edges=edges)
                except DriverError as error:
                    if error.index is None or not begin:
                        raise
                    raise error.at(begin + error.index) from error

        in_order(device_state(device), stream, work, pageable=pageable, refs=refs)
