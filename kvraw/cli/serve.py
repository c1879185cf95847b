"""The cache server as a process: until SIGTERM or SIGINT, which let open transfers end first."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import Any

from kvraw.errors import KvrawError

__all__ = ["run"]


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Serve; the server's counts at its end."""
    try:
        from kvraw.multiprocess import CacheServer, Keys, Limits
    except ImportError as error:
        raise KvrawError(str(error)) from error
    if (options.curve_key is None) != (options.curve_clients is None):
        raise KvrawError("--curve-key and --curve-clients go together")
    server = CacheServer(
        options.mib << 20,
        options.endpoint,
        keys=None if options.curve_key is None else Keys(options.curve_key, options.curve_clients),
        limits=Limits(options.write_limit, options.read_limit, options.liveness, options.drain),
        metrics=options.metrics,
        message_bytes=options.message_mib << 20,
        name=options.name,
        disk=options.disk,
        disk_bytes=options.disk_mib << 20,
    )
    with server:

        def stop(number: int, frame: FrameType | None) -> None:
            server.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            where = f"{server.endpoint}, pool {server.pool_name} of {options.mib} MiB"
            print(f"kvraw serve: listening at {where}", file=sys.stderr, flush=True)
            if server.metrics_port is not None:
                print(f"kvraw serve: metrics at port {server.metrics_port}", file=sys.stderr, flush=True)
            server.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        counts = server.service.stats()
    rows = [(name, f"{value:.0f}") for name, value in counts.items()]
    return {"ok": True, "endpoint": server.endpoint, **counts}, rows
