"""The codec and key re-rotation, on a GPU or on the CPU: `python -m benchmarks.codec [--cpu] [--write FILE]`.

kvraw is called by LMCache's names. Where LMCache can be imported, its own functions run beside, in turns, all on the
default stream, where LMCache launches whatever the current stream is. GPU times are medians of events around single
calls, caches warm; host times medians of what a call takes to return when the stream is idle. Rates are symbols per
second; for keys, bytes read and written.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvraw.adapters.lmcache as names
from kvraw import codec
from kvraw.copying import cpu
from kvraw.rope import rerotate_keys

LAYERS, TOKENS, CHANNELS, BINS = 32, 256, 1024, 32
SYMBOLS = LAYERS * TOKENS * CHANNELS
SLOT = 256
Work = dict[str, Callable[[], Any]]


def native() -> Any:
    """LMCache's compiled functions, or its fallback's on the CPU; None where there are none."""
    try:
        import lmcache.c_ops as ops
    except Exception:
        return None
    return ops


def fallback() -> Any:
    try:
        import lmcache.python_ops_fallback as ops
    except Exception:
        return None
    return ops


def gpu_times(work: Work, rounds: int) -> dict[str, float]:
    """Seconds of each, by events."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for k in range(rounds + 3):
        for name, call in work.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)  # the call is enqueued before the first event is reached
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if k >= 3:
                times[name].append(start.elapsed_time(end) / 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def host_times(work: Work, rounds: int, synchronize: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Seconds until each returns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for k in range(rounds + 2):
        for name, call in work.items():
            synchronize()
            begin = time.perf_counter()
            call()
            if k >= 2:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t) for name, t in times.items()}


def coder(device: str, ops: Any, stream: Any) -> Work:
    """cdf, encode and decode, by who does it."""
    rng = np.random.default_rng(0)
    bell = np.clip(np.rint(rng.normal(BINS / 2, BINS / 10, (LAYERS, TOKENS, CHANNELS))), 0, BINS - 1)
    symbols = torch.from_numpy(bell.astype(np.int8)).to(device)
    cdf = torch.zeros(LAYERS, CHANNELS, BINS + 1, dtype=torch.int16, device=device)
    out = torch.zeros(LAYERS, CHANNELS, SLOT, dtype=torch.uint8, device=device)
    lengths = torch.zeros(LAYERS, CHANNELS, dtype=torch.int32, device=device)
    back = torch.zeros(LAYERS, TOKENS, CHANNELS, dtype=torch.uint8, device=device)
    codec.write_cdf(symbols, cdf, stream=stream).wait()
    codec.encode_into(cdf, symbols, out, lengths, stream=stream).wait()
    codec.decode_into(cdf, out, lengths, back, stream=stream).wait()
    assert torch.equal(back, symbols.to(torch.uint8))
    packed = out[torch.arange(SLOT, device=device) < lengths[:, :, None]]
    ends = lengths.flatten().cumsum(0).reshape(lengths.shape)
    work: Work = {
        "cdf, kvraw": lambda: names.calculate_cdf(symbols, BINS),
        "encode, kvraw": lambda: names.encode_fast_new(cdf, symbols, out, lengths),
        "decode, kvraw": lambda: names.decode_fast_new(cdf, out, lengths, back),
        "decode packed, kvraw": lambda: names.decode_fast_prefsum(cdf, packed, ends, back),
    }
    if ops is not None:
        out2, lengths2, back2 = torch.zeros_like(out), torch.zeros_like(lengths), torch.zeros_like(back)
        ops.encode_fast_new(cdf, symbols, out2, lengths2)
        ops.decode_fast_new(cdf, out2, lengths2, back2)
        packed_back = torch.zeros_like(back)
        ops.decode_fast_prefsum(cdf, packed, ends, packed_back)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(ops.calculate_cdf(symbols, BINS), cdf), "distributions differ"
        assert torch.equal(lengths2, lengths), "lengths differ"
        inside = torch.arange(SLOT, device=device) < lengths[:, :, None]
        assert torch.equal(out2[inside], packed), "streams differ"
        assert torch.equal(back2, back), "symbols differ"
        assert torch.equal(packed_back, back), "symbols differ"
        work |= {
            "cdf, LMCache": lambda: ops.calculate_cdf(symbols, BINS),
            "encode, LMCache": lambda: ops.encode_fast_new(cdf, symbols, out2, lengths2),
            "decode, LMCache": lambda: ops.decode_fast_new(cdf, out2, lengths2, back2),
            "decode packed, LMCache": lambda: ops.decode_fast_prefsum(cdf, packed, ends, packed_back),
        }
    return work


def units(key: torch.Tensor, neox: bool) -> torch.Tensor:
    """The unit in the last place of the larger element of each key's pair.

    Products that are fused with sums move a pair by at most four of them: see tests/unit/test_rope.py.
    """
    x, y = key.chunk(2, -1) if neox else (key[..., ::2], key[..., 1::2])
    larger = torch.maximum(x.abs(), y.abs())
    unit = torch.nextafter(larger, torch.full_like(larger, torch.inf)) - larger
    return torch.cat([unit, unit], -1) if neox else unit.repeat_interleave(2, -1)


def rope(device: str, ops: Any, stream: Any, tokens: int, dtype: torch.dtype, neox: bool) -> tuple[Work, int]:
    """Both ways over the same keys, and the bytes that a call reads and writes."""
    heads, size, positions = 8, 128, 8192
    key = torch.randn(tokens, heads, size, device=device).to(dtype)
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(size // 2) / (size // 2))
    cache = torch.cat([angle.cos(), angle.sin()], 1).to(dtype).to(device)
    old = torch.arange(tokens, device=device) % positions
    new = (old + 100) % positions
    rotate = lambda k: rerotate_keys(k, old, new, cache, neox=neox, stream=stream)  # noqa: E731
    work: Work = {"keys, kvraw": lambda: names.rotary_embedding_k_fused(old, new, key, size, cache, neox)}
    if ops is not None:
        mine, theirs = key.clone(), key.clone()
        rotate(mine).wait()
        ops.rotary_embedding_k_fused(old, new, theirs, size, cache, neox)
        if device == "cuda":
            torch.cuda.synchronize()
        if dtype == torch.float32:
            apart, most = (mine - theirs).abs(), units(key, neox)
            print(f"fp32 keys: {(apart > 0).float().mean():.4f} differ, by at most {float((apart / most).max())} units")
            assert bool((apart <= 4 * most).all()), "keys differ"
        else:
            assert torch.equal(mine, theirs), "keys differ"
        work["keys, LMCache"] = lambda: ops.rotary_embedding_k_fused(old, new, theirs, size, cache, neox)
    if device == "cuda":
        to = torch.empty_like(key)
        work["copy, torch"] = lambda: to.copy_(key)
    return work, 2 * key.nbytes


def chunks(device: str, stream: Any) -> list[str]:
    """Whole chunks: time, size and error."""
    rows = []
    chunk = torch.randn(2, LAYERS, TOKENS, CHANNELS, device=device).to(torch.bfloat16)
    for bins in (32, 16):
        compressed = codec.compress(chunk, bins, stream=stream)
        back = torch.zeros_like(chunk)
        codec.decompress(compressed, back, stream=stream).wait()
        work: Work = {
            "compress": lambda b=bins: codec.compress(chunk, b, stream=stream),  # type: ignore[misc]
            "decompress": lambda c=compressed, o=back: codec.decompress(c, o, stream=stream).wait(),  # type: ignore[misc]
        }
        times = host_times(work, 5)
        error = (back.float() - chunk.float()).square().mean().sqrt() / chunk.float().square().mean().sqrt()
        size = f"{compressed.nbytes / 2**20:.1f} MiB ({compressed.ratio:.2f}x)"
        rates = [f"{chunk.nbytes / times[name] / 1e9:.2f}" for name in work]
        rows.append(f"| {bins} | {chunk.nbytes / 2**20:.0f} MiB | {size} | {float(error):.3f} | {' | '.join(rates)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the CPU, which it is anyway where torch sees no GPU")
    parser.add_argument("--write")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    options.cpu = options.cpu or not torch.cuda.is_available()
    device = "cpu" if options.cpu else "cuda"
    ops = fallback() if options.cpu else native()
    stream = None if options.cpu else torch.cuda.default_stream()
    if options.cpu:
        torch.set_num_threads(cpu.threads())
        machine = f"{platform.machine()}, {cpu.threads()} threads"
    else:
        from kvraw.runtime.driver import driver

        machine = f"{torch.cuda.get_device_name()}, driver {driver().version()}"
    beside = "LMCache's functions beside" if ops is not None else "without LMCache"
    command = f"`python -m benchmarks.codec{' --cpu' if options.cpu else ''}`"
    lines = [
        f"{machine}; {command}, {beside}. {LAYERS} layers x {TOKENS} tokens x {CHANNELS} channels, {BINS} symbols.",
        "",
    ]
    rounds = options.rounds or (5 if options.cpu else 30)
    with torch.no_grad():
        work = coder(device, ops, stream)
        gpu = {} if options.cpu else gpu_times(work, rounds)
        host = host_times(work, rounds, (lambda: None) if options.cpu else torch.cuda.synchronize)
        lines += ["| | G symbols/s | us | host us |", "|---|---|---|---|"]
        for name in sorted(work):
            seconds = gpu.get(name, host[name])
            lines.append(f"| {name} | {SYMBOLS / seconds / 1e9:.3f} | {seconds * 1e6:.1f} | {host[name] * 1e6:.1f} |")
        lines += ["", "| keys, 8 heads of 128 | GB/s | us | host us |", "|---|---|---|---|"]
        for tokens in (4096,) if options.cpu else (8192, 262144):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for neox in (True, False):
                    work, nbytes = rope(device, ops, stream, tokens, dtype, neox)
                    gpu = {} if options.cpu else gpu_times(work, rounds)
                    host = host_times(work, rounds, (lambda: None) if options.cpu else torch.cuda.synchronize)
                    for name in work:
                        seconds = gpu.get(name, host[name])
                        kind = f"{tokens} tokens, {str(dtype)[6:]}, {'neox' if neox else 'interleaved'}: {name}"
                        lines.append(
                            f"| {kind} | {nbytes / seconds / 1e9:.2f} | {seconds * 1e6:.1f} | {host[name] * 1e6:.1f} |"
                        )
        lines += [
            "",
            "| bins | chunk, normal deviates in bf16 | compressed | RMS error | compress GB/s | decompress GB/s |",
        ]
        lines += ["|---|---|---|---|---|---|", *chunks(device, stream)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        with open(options.write, "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
