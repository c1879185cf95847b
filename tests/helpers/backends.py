"""Carries out a laid case on one engine and hands both arenas back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvraw
from kvraw.layouts.geometry import Geometry
from tests.helpers.cases import Case, Laid

Result = tuple[np.ndarray, np.ndarray]


def geometry(laid: Laid) -> Geometry:
    c = laid.case
    s = c.shape
    return Geometry(s.nl, s.nb, s.bs, s.nh, c.hs, c.element, planes=c.planes, block_stride=laid.block_stride)


def run(cache: kvraw.PagedCache, chunks: list[object], case: Case, engine: str | None, stream: object = None,
        ids: object = None, neighbour: str | None = None) -> kvraw.Transfer:  # fmt: skip
    function = getattr(kvraw, case.direction + ("_slots" if case.by == "slot" else ""))
    skip = {"skip_tokens" if case.by == "slot" else "skip_blocks": case.skip}
    return function(
        cache,
        chunks,
        list(case.ids) if ids is None else ids,
        chunk_tokens=case.chunk_tokens,
        chunk_layout=case.layout,
        engine=engine,
        stream=stream,
        neighbour=neighbour,
        **skip,
    )


def on_host(engine: str) -> Callable[[Laid], Result]:
    def backend(laid: Laid) -> Result:
        paged, chunks = laid.paged.data.copy(), laid.chunks.data.copy()
        base, to = int(paged.ctypes.data), int(chunks.ctypes.data)
        cache = kvraw.PagedCache.from_pointers([base + o for o in laid.paged.offsets], laid.case.format, geometry(laid))
        views = [chunks[o : o + laid.chunk_bytes] for o in laid.chunks.offsets]
        assert [int(v.ctypes.data) for v in views] == [to + o for o in laid.chunks.offsets]
        run(cache, list(views), laid.case, engine).wait()
        return paged, chunks

    return backend


def on_device(laid: Laid, device: int = 0, ids_on_device: bool = False, engine: str | None = None) -> Result:
    """An engine, through whichever driver is installed: cache in device memory, chunks in pinned memory.

    "paced" is the kernel engine beside other work; every other engine is as on an idle GPU.
    """
    from kvraw.runtime.context import DeviceScope
    from kvraw.runtime.driver import driver

    d = driver()
    engine, neighbour = ("kernel", "busy") if engine == "paced" else (engine, "idle")
    size = len(laid.paged.data)
    room = size + len(laid.chunks.data) + (1 << 14)
    with (
        kvraw.Stream(device) as stream,
        kvraw.DeviceBuffer(size, device) as memory,
        kvraw.HostPool(room, device=device) as pool,
        DeviceScope(device),
    ):
        (mirror,), (row,) = pool.chunks(1, size), pool.chunks(1, len(laid.chunks.data))
        mirror.numpy()[:], row.numpy()[:] = laid.paged.data, laid.chunks.data
        d.memcpy_async(memory.address, mirror.address, size, stream.handle)
        ids = DeviceIds(laid.case.ids, device, stream) if ids_on_device else None
        bases = [memory.address + o for o in laid.paged.offsets]
        cache = kvraw.PagedCache.from_pointers(bases, laid.case.format, geometry(laid), device=device)
        run(cache, [row.address + o for o in laid.chunks.offsets], laid.case, engine, stream, ids, neighbour).wait()
        d.memcpy_async(mirror.address, memory.address, size, stream.handle)
        stream.synchronize()
        return mirror.numpy().copy(), row.numpy().copy()


class DeviceIds:
    """Index values in device memory, as a foreign library would hand them over."""

    def __init__(self, ids: tuple[int, ...], device: int, stream: kvraw.Stream, dtype: str = "int64") -> None:
        from kvraw.runtime.context import DeviceScope
        from kvraw.runtime.driver import driver

        self.host = np.array(ids, dtype)
        self.dtype = dtype
        self.memory = kvraw.DeviceBuffer(max(self.host.nbytes, 8), device)
        with DeviceScope(device):
            driver().memcpy_async(self.memory.address, int(self.host.ctypes.data), self.host.nbytes, stream.handle)
            stream.synchronize()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.host.shape,
            "typestr": self.host.dtype.str,
            "data": (self.memory.address, False),
            "version": 3,
        }


def device_ids(ids: tuple[int, ...], device: int, stream: kvraw.Stream, dtype: str = "int64") -> DeviceIds:
    return DeviceIds(ids, device, stream, dtype)
