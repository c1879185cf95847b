"""The adapters' operations on a GPU: `python -m benchmarks.sglang_ops [--json FILE] [--beside MODULE]`.

`--beside` names an importable module with the same operations, measured in the same run; needs torch. GB/s count bytes
once and are medians of event times; host time is the median over calls with an idle stream.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvraw.adapters import sglang, vllm

MIB = 1 << 20


def gpu_seconds(work: Callable[[], object], rounds: int, calls: int = 1) -> float:
    """Median device time of one call."""
    times = []
    for k in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        if k >= 2:
            times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def host_seconds(work: Callable[[], object], rounds: int = 100) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times[10:])


def table(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in layers], dtype=torch.uint64, device="cuda")


def pinned(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


class Setting:
    """Pools of rows of one size, on the device and pinned; tables, and random tokens of whole pages."""

    def __init__(self, row: int, total: int, layers: int = 32, page: int = 16) -> None:
        self.row, self.layers, self.page, self.heads = row, layers, page, max(1, row // 256)
        count = total // (row * layers * 2) // page * page
        self.tokens, self.moved = count * 2, count * row * layers * 2
        self.device = [torch.zeros(layers, self.tokens, row, dtype=torch.uint8, device="cuda") for _ in "kv"]
        self.host = [pinned(layers, self.tokens, row) for _ in "kv"]
        self.tables = [table(list(t)) for t in self.device], [table(list(t)) for t in self.host]
        rng = torch.Generator().manual_seed(0)
        starts = [torch.randperm(self.tokens // page, generator=rng)[: count // page] * page for _ in range(2)]
        self.index = [(s[:, None] + torch.arange(page)).flatten() for s in starts]
        self.ids = [i.cuda() for i in self.index]

    def operations(self) -> dict[str, tuple[str, Callable[..., list[Any]], int]]:
        """Name, and arguments of an operation for it; bytes that it moves."""
        s, n, d = self.row, self.layers, self.row * self.layers
        (dk, dv), (hk, hv), (tdk, tdv), (thk, thv) = self.device, self.host, *self.tables
        flat = [t.view(-1) for t in (hk, hv)]
        return {
            "all_layer D2H": ("transfer_kv_all_layer", lambda: [tdk, thk, tdv, thv, *self.ids, s, n], self.moved),
            "all_layer H2D": ("transfer_kv_all_layer", lambda: [thk, tdk, thv, tdv, *self.ids, s, n], self.moved),
            "lf->pf D2H": (
                "transfer_kv_all_layer_lf_pf",
                lambda: [tdk, flat[0], tdv, flat[1], *self.ids, s, d, n],
                self.moved,
            ),
            "pf->lf H2D, a layer": (
                "transfer_kv_per_layer_pf_lf",
                lambda: [flat[0], dk[3], flat[1], dv[3], *self.ids, 3, s, d],
                self.moved // n,
            ),
            "lf->ph D2H": (
                "transfer_kv_all_layer_lf_ph",
                lambda: [tdk, flat[0], tdv, flat[1], *self.ids, s, d, n, self.page, self.heads],
                self.moved,
            ),
            "ph->lf H2D, a layer": (
                "transfer_kv_per_layer_ph_lf",
                lambda: [flat[0], dk[3], flat[1], dv[3], *self.ids, 3, s, d, self.page, self.heads],
                self.moved // n,
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--beside")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 512, 576, 1152, 2048, 8192])
    options = parser.parse_args()
    peers: dict[str, Any] = {"kvraw": sglang}
    if options.beside:
        peers["beside"] = importlib.import_module(options.beside)
    results: list[dict[str, object]] = []

    def note(**row: Any) -> None:
        results.append(row)
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    big, host = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"), pinned(256 * MIB)
    for name, a, b in (("D2H", host, big), ("H2D", big, host)):
        copy = gpu_seconds(partial(a.copy_, b, non_blocking=True), options.rounds)
        note(what=f"ceiling {name}", rate=256 * MIB / copy / 1e9)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for row in options.rows:
            setting = Setting(row, options.mib * MIB)
            for what, (name, arguments, moved) in setting.operations().items():
                found: dict[str, float] = {}
                for peer, module in peers.items():
                    for quota in (2, 16):
                        args = [*arguments(), quota, 32]
                        seconds = gpu_seconds(partial(getattr(module, name), *args), options.rounds)
                        found[f"{peer} {quota}"] = moved / seconds / 1e9
                note(what=what, row=row, **found)
        small = Setting(1152, 4 * MIB)
        for what, (name, arguments, _) in small.operations().items():
            args = [*arguments(), 2, 32]
            found = {p: host_seconds(partial(getattr(m, name), *args)) * 1e6 for p, m in peers.items()}
            note(what=f"host us: {what}", **found)
        direct(peers, options, note)
        swaps(options, note)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


def direct(peers: dict[str, Any], options: Any, note: Callable[..., None]) -> None:
    """The copy engine's operations: time on the device, and on the host per descriptor."""
    setting, page = Setting(1024, options.mib * MIB), 64
    n, flat = setting.layers, [list(t) for t in setting.device]
    pages = [t.view(-1)[: setting.tokens // page * page * n * 1024].view(-1, n, page, 1024) for t in setting.host]
    starts = [torch.randperm(setting.tokens // page)[: setting.tokens // page // 2] * page for _ in range(2)]
    index = [(s[:, None] + torch.arange(page)).flatten() for s in starts]
    moved, count = len(index[0]) * 1024 * n * 2, len(starts[0]) * n * 2
    calls = {
        "direct": ("transfer_kv_direct", [flat[0] + flat[1], [*setting.host[0], *setting.host[1]], *index, page]),
        "direct lf->pf": ("transfer_kv_all_layer_direct_lf_pf", [flat[0] + flat[1], pages, *index, page]),
        "direct pf->lf": (
            "transfer_kv_per_layer_direct_pf_lf",
            [pages, [flat[0][3], flat[1][3]], *index, 3, page],
        ),
    }
    for what, (name, args) in calls.items():
        share = n if "pf->lf" in what else 1
        found: dict[str, float] = {}
        for peer, module in peers.items():
            work = partial(getattr(module, name), *args)
            found[f"{peer} GB/s"] = moved / share / gpu_seconds(work, options.rounds) / 1e9
            found[f"{peer} host ns per descriptor"] = host_seconds(work, 20) * 1e9 / (count / share)
        note(what=what, **found)


def swaps(options: Any, note: Callable[..., None]) -> None:
    """10,000 blocks by `swap_blocks_batch`, beside the driver's batch call alone."""
    from kvraw.engines.copy_engine import Descriptors, enqueue

    blocks, largest = 10_000, 64 << 10
    device = torch.empty(blocks * largest, dtype=torch.uint8, device="cuda")
    host = pinned(blocks * largest)
    order = [torch.randperm(blocks), torch.randperm(blocks)]
    for kib in (4, 8, 16, 28, 64):
        size = kib << 10
        sizes = torch.full((blocks,), size)
        ends = {"D2H": (device, host), "H2D": (host, device)}
        for direction, (src, dst) in ends.items():
            at, to = src.data_ptr() + order[0] * size, dst.data_ptr() + order[1] * size
            bare = Descriptors(*(v.numpy().view("uint64") for v in (to, at, sizes)))
            handle = torch.cuda.current_stream().cuda_stream
            rounds = max(2, options.rounds // 2)
            note(
                what=f"swap_blocks_batch {direction}",
                KiB=kib,
                kvraw=blocks * size / gpu_seconds(lambda: vllm.swap_blocks_batch(at, to, sizes), rounds) / 1e9,
                bare=blocks * size / gpu_seconds(lambda: enqueue(bare, handle), rounds) / 1e9,
            )


if __name__ == "__main__":
    main()
