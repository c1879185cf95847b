"""What a cache server holds and does, asked of it by a message: once, or again and again on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvraw.errors import KvrawError

__all__ = ["run"]

Rows = list[tuple[str, str]]
_RATES = ("hits", "misses", "stored", "stored_bytes", "evicted", "disk_written", "disk_loaded")


def run(options: argparse.Namespace) -> tuple[dict[str, Any], Rows]:
    """Look as often as is asked, and return the last look."""
    try:
        from kvraw.multiprocess import CacheClient, Keys
        from kvraw.multiprocess.messages import Stats
    except ImportError as error:
        raise KvrawError(str(error)) from error
    if (options.curve_key is None) != (options.curve_server is None):
        raise KvrawError("--curve-key and --curve-server go together")
    keys = None if options.curve_key is None else Keys(options.curve_key, options.curve_server)
    live = None if options.json else _live()
    count = (0 if live is not None else 1) if options.count is None else options.count
    report: dict[str, Any] | None = None
    with CacheClient(options.endpoint, timeout=options.timeout, keys=keys) as client:
        try:
            if live is not None:
                live.start()
            looks = 0
            while True:
                report = _report(client.endpoint, client.request(Stats()).values, report)
                looks += 1
                if live is not None:
                    live.update(_table(rows(report)), refresh=True)
                if looks == count:
                    break
                time.sleep(options.interval)
        except KeyboardInterrupt:
            if report is None:
                raise KvrawError("interrupted ahead of the first answer") from None
        finally:
            if live is not None:
                live.stop()
    del report["at"]
    return report, rows(report)


def _report(endpoint: str, values: dict[str, float], before: dict[str, Any] | None) -> dict[str, Any]:
    """A look: shares of what was counted, and what came about since the look before, by the second."""
    now = time.monotonic()
    asked = values["hits"] + values["misses"]
    rates: dict[str, float] = {}
    if before is not None:
        # A server that was restarted counts from 0 again.
        past, passed = before["counts"], max(now - before["at"], 1e-9)
        rates = {n: max(values[n] - past.get(n, 0.0), 0.0) / passed for n in _RATES if n in values}
    return {
        "ok": True,
        "endpoint": endpoint,
        "hit_rate": values["hits"] / asked if asked else None,
        "pool_share": values["object_bytes"] / values["pool_bytes"],
        "workers": int(values["clients"]),
        "per_second": rates,
        "counts": values,
        "at": now,
    }


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def rows(report: dict[str, Any]) -> Rows:
    """Rows of the text form.

    Parameters
    ----------
    report : dict
        A look.

    Returns
    -------
    list of tuple
        Names and texts.
    """
    c, rates = report["counts"], report["per_second"]

    def counted(name: str, text: str) -> str:
        return f"{c[name]:,.0f} {text}" + (f" ({rates[name]:,.1f}/s)" if name in rates else "")

    share = "none was asked for" if report["hit_rate"] is None else f"{report['hit_rate']:.1%}"
    speed = f" ({_mib(rates['stored_bytes'])}/s)" if rates else ""
    found = [
        ("server", report["endpoint"]),
        ("hit rate", f"{share}: {counted('hits', 'hits')}, {counted('misses', 'misses')}"),
        ("pool", f"{_mib(c['object_bytes'])} of {_mib(c['pool_bytes'])} ({report['pool_share']:.1%})"),
        ("chunks", f"{c['objects']:,.0f}, {c['writing']:,.0f} being written"),
        ("stored", f"{counted('stored', 'chunks')}, {_mib(c['stored_bytes'])}{speed}"),
        ("locks", f"{c['locked']:,.0f} chunks, {c['tickets']:,.0f} tickets, {c['expired']:,.0f} expired"),
        ("evictions", f"{counted('evicted', 'chunks')}, {c['refused']:,.0f} refused"),
        ("workers", f"{report['workers']} live, {c['dead']:,.0f} fell silent"),
        ("errors", f"{c['errors']:,.0f} requests"),
    ]
    if "disk_objects" in c:
        written, loaded = counted("disk_written", "written"), counted("disk_loaded", "loaded")
        lost = f"{c['disk_waiting']:,.0f} waiting, {c['disk_skipped']:,.0f} skipped, {c['disk_damaged']:,.0f} damaged"
        found.append(("disk", f"{c['disk_objects']:,.0f} chunks, {_mib(c['disk_bytes'])}: {written}, {loaded}, {lost}"))
    return found


def _live() -> Any:
    """A part of a terminal that is drawn anew, where rich is installed and there is one."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.live import Live
    except ImportError:
        return None
    return Live(auto_refresh=False, transient=True)


def _table(found: Rows) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", box=None, show_header=False, pad_edge=False)
    for name, text in found:
        table.add_row(Text(name, style="bold"), Text(text))
    return table
