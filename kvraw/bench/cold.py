"""Cold start: from the first call of a fresh process to its first block moved, the driver's compile cache off.

Run as a module, it is that process: ``python -m kvraw.bench.cold DEVICE ENGINE`` (device -1: host memory).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["cold_start"]

_TIMEOUT = 120


def cold_start(device: int | None, engine: str) -> dict[str, Any]:
    """Milliseconds of the import, the context, the first call, the second, and the first in the other direction."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "kvraw.bench.cold", str(-1 if device is None else device), engine]
    environ = os.environ | {"CUDA_CACHE_DISABLE": "1", "PYTHONPATH": path}
    row: dict[str, Any] = {"engine": engine, "error": None}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT)
        if done.returncode == 0:
            row |= json.loads(done.stdout)
            return row
        row["error"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        row["error"] = str(error)
    return row


def _measure(device: int | None, engine: str) -> dict[str, float]:
    at = [time.perf_counter()]

    def lap() -> float:
        at.append(time.perf_counter())
        return (at[-1] - at[-2]) * 1e3

    from dataclasses import replace

    import kvraw
    from kvraw.bench.shapes import BLOCKS
    from kvraw.bench.workload import Engine, Workload

    out = {"import_milliseconds": lap()}
    if device is not None:
        kvraw.DeviceBuffer(1, device).close()
    out["context_milliseconds"] = lap()
    shape = replace(BLOCKS, chunk_tokens=BLOCKS.geometry.block_size)
    with Workload(shape, shape.chunk_bytes, device) as work:
        lap()
        for name, direction in (("first", "store"), ("second", "store"), ("other_way", "load")):
            work.plan(direction, Engine(engine))(work.chunks, work.ids, stream=work.stream).wait()  # type: ignore[arg-type]
            out[f"{name}_milliseconds"] = lap()
    return out


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(int(sys.argv[1]) if int(sys.argv[1]) >= 0 else None, sys.argv[2])))
