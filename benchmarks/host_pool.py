"""Host memory, pinned and ready, beside torch's: `python -m benchmarks.host_pool [--json FILE] [--gib 8] [--rounds 4]`.

Without a GPU it times what is left: populating. Rounds alternate the order, and every allocation is given back before
the next. The first round on a fresh virtual machine also pays for memory that the machine gets at first touch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import kvraw
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver, driver_or_none
from kvraw.runtime.host import libc
from kvraw.runtime.host.populate import PIECE, populate_threads

DEVICE = 0
GIB = 1 << 30


def timed(make: Callable[[], Any], release: Callable[[Any], None]) -> tuple[float, Any]:
    begin = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - begin
    info = made.info() if isinstance(made, kvraw.HostBuffer) else None
    release(made)
    return seconds, info


def close(buffer: kvraw.HostBuffer) -> None:
    buffer.close()


def torch_alternative(nbytes: int) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    empty = torch._C._host_emptyCache
    holder: list[Any] = []

    def make() -> Any:
        holder.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        return None

    def release(_: Any) -> None:
        holder.clear()
        empty()

    return make, release


def against_torch(nbytes: int, rounds: int, device: int | None) -> dict[str, Any]:
    ways: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "kvraw": (lambda: kvraw.HostPool(nbytes, device=device, options=kvraw.HostOptions(populate=True)), close)
    }
    other = torch_alternative(nbytes) if device is not None else None
    if other is not None:
        ways["torch"] = other
    if device is not None:
        ways["driver"] = (
            lambda: kvraw.HostPool(nbytes, device=device, options=kvraw.HostOptions(kind="pinned")),
            close,
        )
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    splits = []
    for k in range(rounds):
        for name in names if k % 2 == 0 else names[::-1]:
            seconds, info = timed(*ways[name])
            times[name].append(seconds)
            if name == "kvraw":
                splits.append({key: info[key] for key in ("populate_seconds", "register_seconds", "huge_page_bytes")})
    print(f"{nbytes / GIB:g} GiB ready, seconds per round:")
    for name in names:
        print(f"  {name:8s} " + " ".join(f"{t:6.3f}" for t in times[name]))
    for k, split in enumerate(splits):
        print(f"  round {k}: {split}")
    out: dict[str, Any] = {"seconds": times, "splits": splits}
    if "torch" in times:
        out["ratio"] = [a / b for a, b in zip(times["torch"], times["kvraw"], strict=True)]
        print("  torch / kvraw: " + " ".join(f"{r:.2f}" for r in out["ratio"]))
    return out


def knobs(nbytes: int, device: int | None) -> list[dict[str, Any]]:
    rows = []
    cores = populate_threads()
    for threads in sorted({1, 2, 4, 8, cores}):
        for step in (GIB // 4, GIB, 2 * GIB, nbytes):
            if threads not in (cores, 8) and step != 2 * GIB:
                continue
            options = kvraw.HostOptions(populate=True, threads=threads, step_bytes=step)
            seconds, info = timed(lambda o=options: kvraw.HostPool(nbytes, device=device, options=o), close)
            row = {"threads": threads, "step MiB": step >> 20, "seconds": seconds}
            row |= {key: info[key] for key in ("populate_seconds", "register_seconds")}
            rows.append(row)
            print(
                f"  {threads:2d} threads, {step >> 20:5d} MiB per registration: {seconds:.3f} s "
                f"(waiting for pages {row['populate_seconds']:.3f}, registering {row['register_seconds']:.3f})"
            )
    return rows


def apart(nbytes: int, device: int | None) -> dict[str, Any]:
    """Populating, then registering, each alone and with several threads: the two limits."""
    out: dict[str, Any] = {}

    def every(work: Callable[[int], object], step: int, threads: int) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as workers:
            list(workers.map(work, range(0, nbytes, step)))
        return time.perf_counter() - begin

    for threads in sorted({1, 4, populate_threads()}):
        for huge in (True, False) if threads == populate_threads() else (True,):
            address = libc.map_anonymous(nbytes, align=2 << 20)
            if huge:
                libc.advise(address, nbytes, libc.HUGEPAGE)
            try:
                populate = every(lambda at: libc.advise(address + at, PIECE, libc.POPULATE_WRITE), PIECE, threads)
                row = {"populate": populate}
                text = f"  {threads:2d} threads, huge pages {huge}: populate {populate:.3f} s"
                if device is not None:

                    def register(at: int, step: int = GIB // 2) -> None:
                        with DeviceScope(DEVICE):
                            driver().host_register(address + at, step)

                    row["register"] = every(register, GIB // 2, threads)
                    begin = time.perf_counter()
                    with DeviceScope(DEVICE):
                        for at in range(0, nbytes, GIB // 2):
                            driver().host_unregister(address + at)
                    row["unregister"] = time.perf_counter() - begin
                    text += f", register {row['register']:.3f} s, unregister {row['unregister']:.3f} s"
                print(text)
                out[f"{threads} threads, huge {huge}"] = row
            finally:
                libc.unmap(address, nbytes)
    return out


def growing(nbytes: int, device: int | None) -> dict[str, float]:
    options = kvraw.HostOptions(populate=True, grow=True, first_bytes=256 << 20)
    begin = time.perf_counter()
    with kvraw.HostPool(nbytes, device=device, options=options) as pool:
        (chunk,) = pool.chunks(1, 256 << 20)
        first = time.perf_counter() - begin
        pool.wait_ready()
        whole = time.perf_counter() - begin
        assert chunk.numpy()[-1] == 0
        info = pool.info()
    print(f"{nbytes / GIB:g} GiB growing: first 256 MiB after {first:.3f} s, all after {whole:.2f} s; {info}")
    return {"first": first, "whole": whole}


def link(device: int) -> dict[str, dict[str, float]]:
    """GB/s of one copy by the copy engine, each way, from memory of every kind."""
    size, out = 512 << 20, {}
    d = driver()
    around = np.zeros(size + 4096, np.uint8)
    inside = int(around.ctypes.data) + -int(around.ctypes.data) % 4096
    kinds: dict[str, Callable[[], kvraw.HostBuffer]] = {
        kind: lambda k=kind: kvraw.HostBuffer(size, device=device, options=kvraw.HostOptions(kind=k, strict=True))
        for kind in ("anonymous", "huge-2MiB", "huge-1GiB", "shared", "pinned")
    }
    kinds["bound to a node"] = lambda: kvraw.HostBuffer(
        size, device=device, options=kvraw.HostOptions(node="device", strict=True)
    )
    kinds["registered in place"] = lambda: kvraw.HostBuffer.from_pointer(inside, size, device=device, owner=around)
    with DeviceScope(device), kvraw.Stream(device) as stream, kvraw.DeviceBuffer(size, device) as memory:
        for kind, make in kinds.items():
            try:
                buffer = make()
            except MemoryError as error:
                print(f"  {kind:20s} not here: {error}")
                continue
            with buffer:
                row = {}
                ways = {"D2H": (buffer.address, memory.address), "H2D": (memory.address, buffer.address)}
                for way, (dst, src) in ways.items():
                    times = []
                    start, end = d.event_create(timing=True), d.event_create(timing=True)
                    for _ in range(6):
                        d.event_record(start, stream.handle)
                        d.memcpy_async(dst, src, size, stream.handle)
                        d.event_record(end, stream.handle)
                        d.event_synchronize(end)
                        times.append(d.event_milliseconds(start, end) / 1e3)
                    row[way] = size / statistics.median(times[1:]) / 1e9
                out[kind] = row
                print(f"  {kind:20s} D2H {row['D2H']:.1f}  H2D {row['H2D']:.1f} GB/s")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--grow-gib", type=float, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    device = DEVICE if driver_or_none() is not None else None
    nbytes = int(options.gib * GIB)
    if device is None:
        print("no GPU: memory is populated, not pinned")
    else:
        with DeviceScope(device):
            pass  # the context is there before anything is timed
        print(f"{driver().device_name(device)}, driver {driver().version()}, {populate_threads()} threads populate")
    report: dict[str, Any] = {"torch": against_torch(nbytes, options.rounds, device)}
    print("knobs:")
    report["knobs"] = knobs(nbytes, device)
    print("apart:")
    report["apart"] = apart(nbytes, device)
    report["growing"] = growing(int(options.grow_gib * GIB), device)
    if device is not None:
        print("link:")
        report["link"] = link(device)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
