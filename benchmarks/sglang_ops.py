"""The adapters' operations on a GPU: `python -m benchmarks.sglang_ops [--json FILE] [--beside MODULE]`.

`--beside` names an importable module with the same operations, measured in the same run; needs torch. GB/s count bytes
once and are medians of event times; host time is the median over calls with an idle stream and new indices. One line
per case, then a table per target. `--mib 64 --rounds 3` takes about a minute.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from kvraw.adapters import sglang, vllm

MIB = 1 << 20
QUOTAS: dict[str, dict[str, int]] = {"2": {"block_quota": 2}, "16": {"block_quota": 16}, "default": {}}
SWAP_KIB = (4, 8, 16, 28, 64, 128)
Note = Callable[..., None]


def gpu_seconds(work: Callable[[], object], rounds: int, calls: int = 1) -> float:
    """Median device time of one call; the stream has one call more to do ahead of the first."""
    times = []
    for k in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        if k >= 2:
            times.append(start.elapsed_time(end) / 1e3 / calls)
    return float(statistics.median(times))


def host_seconds(work: Callable[[], object], rounds: int = 100) -> float:
    """Median time of a call on the host, with an idle stream."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return float(statistics.median(times[len(times) // 10 :]))


def table(layers: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in layers], dtype=torch.uint64, device="cuda")


def pinned(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True)
class Op:
    """One operation: how it is called with indices, and what a call moves."""

    name: str
    way: str
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    moved: int
    calls: int = 1

    def call(self, module: Any, index: tuple[Any, Any], **options: int) -> Callable[[], object] | None:
        """The call, ready to be made; None where the module has no such operation."""
        function = getattr(module, self.name, None)
        return None if function is None else partial(function, *self.before, *index, *self.after, **options)


class Setting:
    """Pools of rows of one size, on the device and pinned; tables, and random tokens of whole pages."""

    def __init__(self, row: int, total: int, layers: int = 32, page: int = 16) -> None:
        self.row, self.layers, self.page, self.heads = row, layers, page, max(1, row // 256)
        count = max(total // (row * layers * 2) // page, 1) * page
        self.count, self.tokens, self.moved = count, count * 2, count * row * layers * 2
        self.device = [torch.zeros(layers, self.tokens, row, dtype=torch.uint8, device="cuda") for _ in "kv"]
        self.host = [pinned(layers, self.tokens, row) for _ in "kv"]
        self.tables = [table(list(t)) for t in self.device], [table(list(t)) for t in self.host]
        rng = torch.Generator().manual_seed(0)
        self.index = [self._tokens(rng), self._tokens(rng)]
        self.ids = self.index[0].cuda(), self.index[1].cuda()
        self.others = [(self._tokens(rng).cuda(), self._tokens(rng).cuda()) for _ in range(4)]

    def _tokens(self, rng: torch.Generator) -> torch.Tensor:
        starts = torch.randperm(self.tokens // self.page, generator=rng)[: self.count // self.page] * self.page
        return (starts[:, None] + torch.arange(self.page)).flatten()

    def operations(self) -> list[Op]:
        """Every kernel operation, each in the direction that it is used in."""
        s, n, d = self.row, self.layers, self.row * self.layers
        (dk, dv), (hk, hv), (tdk, tdv), (thk, thv) = self.device, self.host, *self.tables
        fk, fv = hk.view(-1), hv.view(-1)
        ph, whole, part = (self.page, self.heads), self.moved, self.moved // n
        return [
            Op("transfer_kv_all_layer", "D2H", (tdk, thk, tdv, thv), (s, n), whole),
            Op("transfer_kv_all_layer", "H2D", (thk, tdk, thv, tdv), (s, n), whole),
            Op("transfer_kv_all_layer_lf_pf", "D2H", (tdk, fk, tdv, fv), (s, d, n), whole),
            Op("transfer_kv_all_layer_lf_ph", "D2H", (tdk, fk, tdv, fv), (s, d, n, *ph), whole),
            Op("transfer_kv_per_layer", "H2D", (hk[3], dk[3], hv[3], dv[3]), (s,), part, n),
            Op("transfer_kv_per_layer_pf_lf", "H2D", (fk, dk[3], fv, dv[3]), (3, s, d), part, n),
            Op("transfer_kv_per_layer_ph_lf", "H2D", (fk, dk[3], fv, dv[3]), (3, s, d, *ph), part, n),
            Op("transfer_kv_all_layer_mla", "D2H", (tdk, thk), (s, n), whole // 2),
            Op("transfer_kv_all_layer_mla", "H2D", (thk, tdk), (s, n), whole // 2),
            Op("transfer_kv_all_layer_mla_lf_pf", "D2H", (tdk, fk), (s, d, n), whole // 2),
            Op("transfer_kv_per_layer_mla", "H2D", (hk[3], dk[3]), (s,), part // 2, n),
            Op("transfer_kv_per_layer_mla_pf_lf", "H2D", (fk, dk[3]), (3, s, d), part // 2, n),
        ]

    def direct(self, page: int = 64) -> list[tuple[Op, int]]:
        """The copy engine's operations on whole pages, with the descriptors of a call."""
        n, s = self.layers, self.row
        flat, host = [*self.device[0], *self.device[1]], [*self.host[0], *self.host[1]]
        pages = [t.view(-1)[: self.tokens // page * page * n * s].view(-1, n, page, s) for t in self.host]
        one = [self.device[0][3], self.device[1][3]]
        many = self.tokens // page // 2
        each = many * page * s * 2
        return [
            (Op("transfer_kv_direct", "D2H", (flat, host), (page,), each * n), many * n * 2),
            (Op("transfer_kv_direct", "H2D", (host, flat), (page,), each * n), many * n * 2),
            (Op("transfer_kv_all_layer_direct_lf_pf", "D2H", (flat, pages), (page,), each * n), many * n * 2),
            (Op("transfer_kv_per_layer_direct_pf_lf", "H2D", (pages, one), (3, page), each, n), many * 2),
        ]

    def pages(self, page: int = 64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Indices of whole pages on the host, others each time."""
        rng, made = torch.Generator().manual_seed(1), []
        for _ in range(4):
            starts = [torch.randperm(self.tokens // page, generator=rng)[: self.tokens // page // 2] for _ in "ab"]
            made.append(tuple((s[:, None] * page + torch.arange(page)).flatten() for s in starts))
        return cycle(made)


def kernels(peers: dict[str, Any], options: argparse.Namespace, note: Note) -> None:
    """The kernel operations: rates over row sizes and thread blocks, then time on the host."""
    for row in options.rows:
        setting = Setting(row, options.mib * MIB)
        for op in setting.operations():
            for quota, chosen in QUOTAS.items():
                found = {}
                for peer, module in peers.items():
                    work = op.call(module, setting.ids, **chosen)
                    if work is not None:
                        found[peer] = op.moved / gpu_seconds(work, options.rounds, op.calls) / 1e9
                note("GB/s", op=op.name, way=op.way, row=row, quota=quota, **found)
        del setting
    setting = Setting(1152, 4 * MIB)
    for op in setting.operations():
        found = {}
        for peer, module in peers.items():
            calls = [op.call(module, index, block_quota=2) for index in setting.others]
            if None not in calls:
                found[peer] = host_seconds(partial(_next, cycle(calls))) * 1e6
        note("host us", op=op.name, way=op.way, **found)


def _next(calls: Iterator[Callable[[], object] | None]) -> None:
    call = next(calls)
    assert call is not None
    call()


def direct(peers: dict[str, Any], options: argparse.Namespace, note: Note) -> None:
    """The copy engine's operations: rates, and time on the host per call and per descriptor."""
    setting = Setting(1024, options.mib * MIB, page=64)
    indices = setting.pages()
    for op, descriptors in setting.direct():
        rate, host, each = {}, {}, {}
        for peer, module in peers.items():
            if not hasattr(module, op.name):
                continue

            def work(op: Op = op, module: Any = module) -> None:
                call = op.call(module, next(indices))
                assert call is not None
                call()

            rate[peer] = op.moved / gpu_seconds(work, options.rounds, op.calls) / 1e9
            host[peer] = host_seconds(work, 30) * 1e6
            each[peer] = host[peer] * 1e3 / descriptors
        note("GB/s", op=op.name, way=op.way, row=1024, quota="direct", **rate)
        note("host us", op=op.name, way=op.way, **host)
        note("host ns per descriptor", op=op.name, way=op.way, **each)


def swaps(ceilings: dict[str, float], options: argparse.Namespace, note: Note) -> None:
    """10,000 blocks by `swap_blocks_batch`, beside the driver's batch call alone and one large copy."""
    from kvraw.copying.copy_engine import Descriptors, enqueue

    blocks, largest = 10_000, max(SWAP_KIB) << 10
    device, host = torch.empty(blocks * largest, dtype=torch.uint8, device="cuda"), pinned(blocks * largest)
    order, handle = [torch.randperm(blocks), torch.randperm(blocks)], torch.cuda.current_stream().cuda_stream
    for kib in SWAP_KIB:
        size = kib << 10
        sizes = torch.full((blocks,), size)
        for way, (src, dst) in {"D2H": (device, host), "H2D": (host, device)}.items():
            at, to = src.data_ptr() + order[0] * size, dst.data_ptr() + order[1] * size
            bare = Descriptors(*(v.numpy().view("uint64") for v in (to, at, sizes)))
            mine, alone = partial(vllm.swap_blocks_batch, at, to, sizes), partial(enqueue, bare, handle)
            found = {
                n: blocks * size / gpu_seconds(f, options.rounds) / 1e9 for n, f in (("kvraw", mine), ("bare", alone))
            }
            note("swap GB/s", way=way, KiB=kib, **found, ceiling=ceilings[way])
            note(
                "swap host us", way=way, KiB=kib, kvraw=host_seconds(mine, 10) * 1e6, bare=host_seconds(alone, 10) * 1e6
            )


def summary(results: list[dict[str, Any]]) -> None:
    """A short table per target."""
    by = defaultdict(list)
    for r in results:
        by[r["what"]].append(r)
    for quota in (*QUOTAS, "direct"):
        mine = [r for r in by["GB/s"] if r["quota"] == quota and "kvraw" in r and "beside" in r]
        if mine:
            print(f"\nkvraw / beside in GB/s, {'copy engine' if quota == 'direct' else f'quota {quota}'}")
        rows = sorted({r["row"] for r in mine})
        for op, way in dict.fromkeys((r["op"], r["way"]) for r in mine):
            ratios = {r["row"]: r["kvraw"] / r["beside"] for r in mine if (r["op"], r["way"]) == (op, way)}
            line(f"{op} {way}", *(f"{row}: {ratios[row]:.2f}" for row in rows))
        for way in ("D2H", "H2D"):
            ratios_of = [r["kvraw"] / r["beside"] for r in mine if r["way"] == way]
            if ratios_of:
                line(f"worst and median, {way}", f"{min(ratios_of):.2f}", f"{statistics.median(ratios_of):.2f}")
    for what in ("host us", "host ns per descriptor"):
        print(f"\n{what}")
        for r in by[what]:
            line(f"{r['op']} {r['way']}", *(f"{p} {r[p]:.1f}" for p in ("kvraw", "beside") if p in r))
    print(
        "\nswap_blocks_batch, 10,000 blocks: of one large copy, of the driver's batch call; on the host, of that call"
    )
    for r, h in zip(by["swap GB/s"], by["swap host us"], strict=True):
        ratios_of = [r["kvraw"] / r["ceiling"], r["kvraw"] / r["bare"], h["kvraw"] / h["bare"]]
        line(f"{r['KiB']} KiB {r['way']}", *(f"{x:.2f}" for x in ratios_of))


def line(first: str, *rest: str) -> None:
    print(f"  {first:42s}", "  ".join(f"{x:>12s}" for x in rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--beside")
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 512, 576, 1152, 2048, 8192])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU, and a torch that is built for it")
    peers: dict[str, Any] = {"kvraw": sglang}
    if options.beside:
        peers["beside"] = importlib.import_module(options.beside)
    results: list[dict[str, Any]] = []

    def note(what: str, **values: Any) -> None:
        results.append({"what": what, **values})
        print(
            what, *(f"{k} {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in values.items()), sep="  ", flush=True
        )

    began, ceilings = time.perf_counter(), {}
    big, host = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"), pinned(256 * MIB)
    for way, a, b in (("D2H", host, big), ("H2D", big, host)):
        ceilings[way] = 256 * MIB / gpu_seconds(partial(a.copy_, b, non_blocking=True), options.rounds) / 1e9
        note("ceiling", way=way, rate=ceilings[way])
    with torch.cuda.stream(torch.cuda.Stream()):
        kernels(peers, options, note)
        direct(peers, options, note)
        swaps(ceilings, options, note)
    torch.cuda.synchronize()
    summary(results)
    print(f"\n{time.perf_counter() - began:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
