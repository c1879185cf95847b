"""Ceilings of this machine: plain copies, measured in the same run as the engines."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import kvraw
from kvraw.bench.workload import fill, fill_device
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver
from kvraw.runtime.timing import Pace, stream_seconds, wall_seconds

__all__ = ["Ceilings", "measure"]

Ceilings = dict[str, float | None]  # GB/s, bytes counted once; None where there is no such thing here


def measure(device: int | None, nbytes: int, pace: Pace) -> Ceilings:
    """Bandwidth of one copy of `nbytes`.

    Returns
    -------
    dict
        ``store`` and ``load``: by the copy engine, device to host and host to device (host memory: one memmove);
        ``both``: the two at once; ``device``: between device memory.
    """
    return _host(nbytes, pace) if device is None else _gpu(device, nbytes, pace)


def _host(nbytes: int, pace: Pace) -> Ceilings:
    with kvraw.HostPool(2 * nbytes, pin=False) as pool:
        fill(pool.view(pool.address, pool.nbytes))
        seconds = wall_seconds(lambda: ctypes.memmove(pool.address, pool.address + nbytes, nbytes), pace)
    rate = nbytes / seconds / 1e9
    return {"store": rate, "load": rate, "both": None, "device": None}


def _gpu(device: int, nbytes: int, pace: Pace) -> Ceilings:
    d = driver()
    with ExitStack() as stack:
        stack.enter_context(DeviceScope(device))
        down, up = (stack.enter_context(kvraw.Stream(device)) for _ in range(2))
        pool = stack.enter_context(kvraw.HostPool(2 * nbytes, device=device))
        fill(pool.view(pool.address, pool.nbytes))
        memory = [kvraw.DeviceBuffer(nbytes, device) for _ in range(2)]
        for buffer in memory:
            stack.callback(buffer.close)
            fill_device(buffer, down)
        a, b = memory[0].address, memory[1].address

        def store() -> None:
            d.memcpy_async(pool.address, a, nbytes, down.handle)

        def load() -> None:
            d.memcpy_async(b, pool.address + nbytes, nbytes, up.handle)

        def both() -> None:
            store()
            load()

        seconds = {
            "store": stream_seconds(store, down.handle, pace),
            "load": stream_seconds(load, up.handle, pace),
            "both": stream_seconds(both, down.handle, pace, up.handle) / 2,
            "device": stream_seconds(lambda: d.memcpy_async(b, a, nbytes, down.handle), down.handle, pace),
        }
    return {name: nbytes / taken / 1e9 for name, taken in seconds.items()}
