"""Copies that keep to a rate, beside a decode loop on a GPU: `python -m benchmarks.paced [CASE ...] [--json FILE]`.

The decode is a CUDA graph of 32 layers' matrix products (weights of an 8B model, batch 32, bf16), replayed step after
step; beside it transfers of 32 MiB by the copy kernel go on, by ids on the device, each enqueued when the one before is
over, or two at a time. The decode alone is measured ahead of each. A line says the case (direction, bytes of a run, the
GB/s that it is paced to, thread blocks and threads), the GB/s of each transfer (bytes counted once), and by how much a
step takes longer than the decode's median alone. Needs torch; takes a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvraw
from kvraw.arrays import IndexVector
from kvraw.copying.device_state import device_state
from kvraw.copying.kernel import KernelPlan
from kvraw.copying.operands import Operands
from kvraw.copying.pace import paced_rate
from kvraw.copying.plan import CopyPlan, Side
from kvraw.runtime.context import DeviceScope

NBYTES = 32 << 20
HIDDEN, WIDE, LAYERS, BATCH = 4096, 14336, 32, 32
RUNS = (256, 2 << 10, 32 << 10)
AHEAD = 2  # steps that the host is ahead of the GPU


class Decode:
    """A decode step as a graph."""

    def __init__(self) -> None:
        torch.manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.01

        shapes = (HIDDEN, HIDDEN + 2048), (HIDDEN, HIDDEN), (HIDDEN, 2 * WIDE), (WIDE, HIDDEN)
        self.weights = [[weight(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.x = torch.randn(BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                self._step()
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.out = self._step()

    def _step(self) -> torch.Tensor:
        h = self.x
        for qkv, o, up, down in self.weights:
            h = h + (h @ qkv)[:, :HIDDEN] @ o
            h = h + torch.nn.functional.silu((h @ up)[:, :WIDE]) @ down * 0 + h * 0.1
        return h

    def run(self, starts: list[Callable[[], Any]], steps: int) -> tuple[float, float, list[float]]:
        """Step p50 and p99 in ms beside transfers that each of `starts` begins, and the GB/s of each."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        going: list[Any] = [None] * len(starts)
        count = [0] * len(starts)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.cuda.stream(self.stream):
            events[0].record(self.stream)
        for step in range(steps):
            with torch.cuda.stream(self.stream):
                self.graph.replay()
                events[step + 1].record(self.stream)
            last = step == steps - 1
            while not events[max(0, step + 1 - AHEAD)].query() or (last and not events[steps].query()):
                idle = True
                for k, start in enumerate(starts):
                    if going[k] is None or going[k].done():
                        going[k], idle = start(), False
                        count[k] += 1
                if idle:
                    time.sleep(10e-6)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        times = sorted(events[k].elapsed_time(events[k + 1]) for k in range(5, steps))
        rates = [n * NBYTES / seconds / 1e9 for n in count]
        return times[len(times) // 2], times[int(len(times) * 0.99)], rates


class Transfers:
    """Rows of one size between device memory and a pinned pool, by the copy kernel and ids on the device."""

    def __init__(self, run: int) -> None:
        tokens, heads, layers = (32, 8, 1) if run < 2048 else (1, 1, 32)
        row = run * tokens * heads
        self.item = row * layers
        self.count = NBYTES // self.item
        # Small runs are rows of heads that the host has token-major, so that they do not fold into longer ones.
        paged = Side(row, layer=self.count * row, token=run, head=run * tokens, limit=self.count)
        flat = Side(self.item, layer=row, token=run * heads, head=run, limit=self.count)
        self.counts = {"layers": layers, "planes": 1, "tokens": tokens, "heads": heads, "run": run}
        self.sides = paged, flat
        self.device = torch.randint(0, 255, (2 * NBYTES,), dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(2 * NBYTES, dtype=torch.uint8, pin_memory=True)
        self.ids = torch.from_numpy(np.random.default_rng(0).permutation(self.count)).to("cuda")

    def start(self, way: str, rate: float = 0.0, ctas: int | None = None, threads: int = 1024, part: int = 0) -> Any:
        """What enqueues one, on a stream of its own; `part` says which of two memories."""
        store = way == "store"
        kernel = KernelPlan(CopyPlan(*self.sides[:: 1 if store else -1], **self.counts), ctas=ctas, threads=threads)
        stream = kvraw.Stream(0)  # torch has 32 streams, and hands them out again
        bases = [np.array([t.data_ptr() + part * NBYTES], np.uint64) for t in (self.device, self.host)]
        ends = [Operands(bases[0], IndexVector(None, self.ids.data_ptr(), self.count)), Operands(bases[1])]
        if not store:
            ends.reverse()
        with DeviceScope(0):
            state = device_state(0)

        def enqueue() -> Any:
            with DeviceScope(0):
                operation = state.completions.begin(stream.handle)
                kernel.enqueue(state, operation, *ends, 0, self.count, link=True, rate=rate, way=way)
                return operation.commit(None)

        return enqueue

    def check(self, enqueue: Any, part: int = 0) -> None:
        """Compare the bytes of a store."""
        self.host.zero_()
        torch.cuda.synchronize()
        enqueue().wait()
        at = slice(part * NBYTES, (part + 1) * NBYTES)
        layers, tokens, heads = (self.counts[k] for k in ("layers", "tokens", "heads"))
        shape = (layers, self.count, heads, tokens, self.counts["run"])
        want = self.device[at].view(shape)[:, self.ids].permute(1, 0, 3, 2, 4)
        assert torch.equal(want.reshape(-1).cpu(), self.host[at]), "bytes differ"


def starts(sizes: dict[int, Transfers], case: str) -> list[Any]:
    """The transfers of a case: "store 256 40 2x1024" and more of them behind a "+"."""
    out = []
    for part, text in enumerate(case.split("+")):
        way, run, gbs, grid = text.split()
        ctas, threads = map(int, grid.split("x"))
        out.append(sizes[int(run)].start(way, float(gbs) * 1e9, ctas, threads, part))
    return out


def cases() -> list[str]:
    """What is measured: direction, bytes of a run, GB/s (0: no pace), thread blocks and threads."""
    stores = [f"store {run} {gbs} 2x768" for run in RUNS for gbs in (0, 30, 35, 38, 40, 45)]
    shapes = [f"store 32768 40 {grid}" for grid in ("1x1024", "2x256", "2x512", "2x1024", "3x512", "4x256", "4x1024")]
    loads = [f"load {run} {gbs} 2x1024" for run in RUNS for gbs in (0, 46)]
    loads += [f"load 32768 0 {grid}" for grid in ("2x512", "1x1024", "4x1024", "16x1024")]
    two = [
        f"{one}+{one}"
        for one in (
            *(f"store {run} 40 2x512" for run in RUNS),
            "store 32768 40 1x1024",
            "store 32768 40 2x256",
            "store 32768 0 2x512",
        )
    ]
    two += ["load 32768 0 2x1024+load 32768 0 2x1024", "load 32768 46 2x1024+load 32768 46 2x1024"]
    both = [f"store 32768 {a} 2x512+load 32768 {b} 2x1024" for a, b in ((25, 0), (30, 0), (35, 0), (30, 30), (35, 35))]
    return [*stores, *shapes, *loads, *two, *both]


def idle(sizes: dict[int, Transfers]) -> list[tuple[str, float]]:
    """GB/s on an idle GPU, ten transfers one after another."""
    out = []
    for way in ("store", "load"):
        for run, made in sizes.items():
            for ctas, gbs in ((None, 0), (2, 0), (2, 40)):
                enqueue = made.start(way, gbs * 1e9, ctas)
                enqueue().wait()
                begin = time.perf_counter()
                for pending in [enqueue() for _ in range(10)]:
                    pending.wait()
                name = f"{way} {run} {gbs} {ctas or 16}x1024"
                out.append((name, 10 * NBYTES / (time.perf_counter() - begin) / 1e9))
    return out


def measure(decode: Decode, sizes: dict[int, Transfers], case: str, steps: int = 80) -> dict[str, Any]:
    """Measure one case, and print it."""
    going = starts(sizes, case)
    decode.run(going, 6)
    alone = decode.run([], 25)
    p50, p99, rates = decode.run(going, steps)
    more = [100 * (a / alone[0] - 1) for a in (p50, p99)]
    gbs = " + ".join(f"{rate:.1f}" for rate in rates)
    print(f"{case:52} {gbs:>12} {more[0]:+7.1f} {more[1]:+7.1f}", flush=True)
    return {"case": case, "gbs": rates, "p50": more[0], "p99": more[1]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help='such as "store 256 40 2x512+load 32768 0 2x1024"; default: many')
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    kvraw.warm_up(device=0)
    sizes = {run: Transfers(run) for run in RUNS}
    for made in sizes.values():
        for gbs in (0, 40):
            made.check(made.start("store", gbs * 1e9, 2))
    print(f"{torch.cuda.get_device_name(0)}; by default stores are paced to {paced_rate('store') / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    if not options.cases:
        for name, rate in idle(sizes):
            rows.append({"case": f"idle: {name}", "gbs": rate})
            print(f"idle: {name}: {rate:.1f} GB/s", flush=True)
    decode = Decode()
    decode.run([], 20)
    print(f"decode alone: {decode.run([], 60)[0]:.3f} ms a step")
    print(f"{'':52} {'GB/s':>12} {'p50 %':>7} {'p99 %':>7}")
    rows += [measure(decode, sizes, case, options.steps) for case in options.cases or cases()]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
