"""The adapter beside LMCache's own module: on a GPU its compiled one, on the CPU its Python fallback.

``python -m benchmarks.lmcache_ops PATH``, where PATH is ``c_ops.*.so`` of LMCache's wheel for this Python (a GPU), or
nothing where LMCache can be imported (the CPU).
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import kvraw.adapters.lmcache as ours

Timing = tuple[float, float]  # seconds of the whole, seconds of the call


def in_a_row(work: Callable[[], None], calls: int = 6, rounds: int = 7) -> float:
    """Median time of one of several calls in a row on the stream, which has one call more to do ahead of the first."""
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def timed(work: Callable[[], None], device: str, rounds: int = 40) -> Timing:
    """Time of a call, on a GPU of one of several in a row; and what it takes to return, the stream idle ahead of it.

    The first calls of a kind, which bind programs, are left out.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(12):
        work()
        wait()
    whole, call = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        call.append(time.perf_counter() - start)
        wait()
        whole.append(time.perf_counter() - start)
    return in_a_row(work) if device == "cuda" else statistics.median(whole), statistics.median(call)


def row(name: str, nbytes: int, timings: list[Timing]) -> None:
    cells = " | ".join(f"{nbytes / t / 1e9:7.2f} GB/s {c * 1e6:7.0f} us" for t, c in timings)
    print(f"{name:28s} | {cells} | {timings[0][0] / min(t for t, _ in timings[1:]):.2f} x")


class Setting:
    """Paged tensors of a model's shape, four objects, and what both modules are handed."""

    def __init__(self, device: str, layers: int, blocks: int) -> None:
        self.device, self.layers, self.blocks, self.bs, self.heads, self.hs = device, layers, blocks, 16, 8, 128
        shape = (2, blocks, self.bs, self.heads, self.hs)
        self.paged = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(layers)]
        self.table = torch.tensor([p.data_ptr() for p in self.paged], device=device)
        self.ids = torch.randperm(blocks)[:64]
        self.there = self.ids.to(device)
        self.slots = torch.randperm(blocks * self.bs)[:1024].to(device)
        self.place = torch.device(device, 0) if device == "cuda" else torch.device(device)

    def objects(self, device: str, tokens: int = 256, count: int = 4) -> list[Any]:
        pin = self.device == "cuda" and device == "cpu"
        shape = (2, self.layers, tokens, self.heads * self.hs)
        return [torch.zeros(shape, dtype=torch.bfloat16, device=device, pin_memory=pin) for _ in range(count)]

    def describe(self, module: Any) -> Any:
        d = module.PageBufferShapeDesc()
        d.kv_size, d.nl, d.nb, d.bs, d.nh, d.hs, d.element_size = (
            2, self.layers, self.blocks, self.bs, self.heads, self.hs, 2,
        )  # fmt: skip
        return d

    def blocks_of(self, module: Any, way: str, format: str, objects: list[Any]) -> Callable[[], None]:
        direction, number = getattr(module.TransferDirection, way), getattr(module.EngineKVFormat, format)
        described, places = self.describe(module), [o.data_ptr() for o in objects]
        if module is not ours and self.device == "cpu":
            places, described.dtype = objects, torch.bfloat16
        return lambda: module.multi_layer_block_kv_transfer(
            self.table, places, self.there, self.place, direction, described, 256, number, 0
        )

    def blocks_with_host_ids(self, way: str, format: str, objects: list[Any]) -> Callable[[], None]:
        described, ids = self.describe(ours), self.ids.tolist()
        number, direction = getattr(ours.EngineKVFormat, format), getattr(ours.TransferDirection, way)
        return lambda: ours.multi_layer_block_kv_transfer(
            self.table, objects, ids, self.place, direction, described, 256, number, 0
        )

    def slots_of(self, module: Any, way: str, tokens: Any) -> Callable[[], None]:
        direction, number = getattr(module.TransferDirection, way), module.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        return lambda: module.multi_layer_kv_transfer(
            tokens, self.table, self.slots, self.place, self.blocks * self.bs, direction, number, self.bs, self.hs
        )

    def layer_of(self, module: Any, op: str, tokens: Any) -> Callable[[], None]:
        """The operations on one layer; theirs of flash copy slots that ours leaves out alike: there are none."""
        fmt, way = module.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS, module.TransferDirection.D2H
        keys, values = self.paged[0][0], self.paged[0][1]
        if op == "layer":
            return lambda: module.single_layer_kv_transfer(tokens[:, 0], self.paged[0], self.slots, way, fmt, False)
        if op == "layer of two tensors":
            return lambda: module.single_layer_kv_transfer_sgl(tokens[:, 0], keys, values, self.slots, way, False)
        flash = module.load_and_reshape_flash if op == "flash D2H" else module.reshape_and_cache_back_flash
        return lambda: flash(tokens, keys, values, self.slots, 0)

    def plan_of(self, module: Any, way: str, host: list[Any], staging: list[Any]) -> Callable[[], None]:
        direction, number = getattr(module.TransferDirection, way), module.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS

        def work() -> None:
            group = module.KernelGroupSpec(
                self.table.data_ptr(), [s.data_ptr() for s in staging], self.describe(module), 256, number,
                self.there.data_ptr(), len(self.ids),
            )  # fmt: skip
            ends = [(h.data_ptr(), s.data_ptr()) for h, s in zip(host, staging, strict=True)]
            copies = [
                module.StagingCopy(*(e if way == "D2H" else e[::-1]), host[0].nbytes, k * host[0].nbytes)
                for k, e in enumerate(ends)
            ]
            steps = [module.BatchStep(copies, [module.LaunchVar(0, 0, 64, 4, 0)]) for _ in range(4)]
            module.execute_object_group_transfer(direction, self.place, 1 << 26, [group], steps)

        return work

    def retrieval(self, host: list[Any], slots: list[Any]) -> Callable[[], None]:
        """CacheBlend's: 16 chunks in steps of two, keys turned and tokens scattered; two of four slots by turns."""
        angles = torch.zeros((8192, self.hs), dtype=torch.bfloat16, device=self.device)
        mapping = torch.randperm(self.blocks * self.bs)[: 16 * 256].to(self.device)
        bfloat16 = 15  # torch's number of the type
        spec = ours.CBGroupSpec(
            self.table, slots, self.layers, 256, self.heads * self.hs, 2, ours.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
            self.blocks * self.bs, self.bs, self.hs, mapping, len(mapping), angles, self.hs, self.heads, self.hs,
            bfloat16, True,
        )  # fmt: skip
        staging = np.array([(slots[k % 4].data_ptr(), host[k % 4].data_ptr(), host[0].nbytes, 0) for k in range(16)])
        ropes = np.array([(0, k % 4, 256 * k + 7, 256 * k) for k in range(16)])
        scatters = np.array([(0, k % 4, 256 * k, 256) for k in range(16)])
        ends = np.repeat(np.arange(2, 17, 2)[:, None], 3, axis=1)
        return lambda: ours.execute_cb_retrieve_plan_flat(self.place, 1 << 26, [spec], staging, ropes, scatters, ends)


def main() -> None:
    gpu = len(sys.argv) > 1
    if gpu:
        spec = importlib.util.spec_from_file_location("lmcache.c_ops", sys.argv[1])
        assert spec is not None
        assert spec.loader is not None
        theirs: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)
    else:
        import lmcache.python_ops_fallback as theirs
    device = "cuda" if gpu else "cpu"
    s = Setting(device, *((32, 4096) if gpu else (8, 256)))
    print(f"{'':28s} | LMCache | kvraw{' | kvraw, ids on the host' if gpu else ''} | ratio")
    for place in ("cpu", "cuda") if gpu else ("cpu",):
        objects = s.objects(place)
        nbytes = sum(o.nbytes for o in objects)
        rows = s.objects(place, 1024, 1)[0]
        for way in ("D2H", "H2D"):
            for format in ("NL_X_TWO_NB_BS_NH_HS", "NL_X_TWO_NB_NH_BS_HS"):
                works = [s.blocks_of(m, way, format, objects) for m in (theirs, ours)]
                works += [s.blocks_with_host_ids(way, format, objects)] * gpu
                name = f"blocks {'HND' if 'NH_BS' in format else 'NHD'} {way} {place}"
                row(name, nbytes, [timed(w, device) for w in works])
            timings = [timed(s.slots_of(m, way, rows), device) for m in (theirs, ours)]
            row(f"slots {way} {place}", rows.nbytes, timings)
        for op in ("layer", "layer of two tensors", "flash D2H", "flash H2D") if place == device else ():
            timings = [timed(s.layer_of(m, op, rows), device) for m in (theirs, ours)]
            row(f"{op} {place}", rows.nbytes // s.layers, timings)
    if gpu:
        host, staging = s.objects("cpu"), s.objects("cuda")
        for way in ("D2H", "H2D"):
            timings = [timed(s.plan_of(m, way, host, staging), device) for m in (theirs, ours)]
            row(f"plan of 4 steps {way}", 16 * host[0].nbytes, timings)
        seconds, call = timed(s.retrieval(host, staging), device)
        rate = 16 * host[0].nbytes / seconds / 1e9
        print(f"retrieval of 16 chunks, keys turned (0.5.2 has none): {rate:.2f} GB/s, {call * 1e6:.0f} us")
    a = torch.zeros(1 << 20, dtype=torch.uint8)
    b = torch.zeros_like(a)
    src, dst = ([t.data_ptr() + 64 * k for k in range(4096)] for t in (a, b))
    for name, count in (("4096 host copies of 64 B", 4096), ("a host copy of 64 B", 1)):
        pieces = src[:count], dst[:count], [64] * count
        timings = [timed(partial(m.batched_memcpy, *pieces), "cpu", 100) for m in (theirs, ours)]
        row(name, count * 64, timings)
    for module in (theirs, ours) if gpu else ():
        stream = torch.cuda.current_stream().cuda_stream
        _, seconds = timed(partial(module.record_completion_on_stream, stream, "kind", b"payload"), device, 100)
        module.drain_recorded_completions()
        print(f"a completion recorded: {seconds * 1e6:.1f} us")


if __name__ == "__main__":
    main()
