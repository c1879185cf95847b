"""The server's counts for Prometheus, read when they are asked for: requests cost nothing more."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvraw.errors import BoundsError, KvrawError
from kvraw.multiprocess.service import Service

__all__ = ["Exporter"]

_COUNTERS = {
    "hits": "chunks that were asked for and there",
    "misses": "chunks that were asked for and not there",
    "stored": "chunks that were stored",
    "stored_bytes": "bytes that were stored",
    "evicted": "chunks that went for others",
    "refused": "chunks for which there was no room",
    "expired": "tickets that were over their time limit",
    "dead": "clients that fell silent",
    "errors": "requests that were answered by an error",
    "dropped_replies": "replies that no client was there to take",
    "disk_written": "chunks that were written to disk",
    "disk_loaded": "chunks that were read from disk",
    "disk_skipped": "chunks that were not written to disk, for it was too slow or full",
    "disk_damaged": "chunks on disk that were damaged",
}
_GAUGES = {
    "objects": "chunks that are there",
    "writing": "chunks that are being written",
    "object_bytes": "bytes of the chunks that are there or being written",
    "pool_bytes": "bytes of the pool",
    "locked": "chunks that cannot be evicted",
    "tickets": "stores, retrieves and lookups that are open",
    "clients": "clients that are registered",
    "disk_waiting": "chunks that are yet to be written to disk",
    "disk_objects": "chunks on disk",
    "disk_bytes": "bytes of the segments on disk",
}


class _Reader(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        values = self._service.stats()
        for name, text in _COUNTERS.items():
            if name in values:  # some only where there is a disk
                yield CounterMetricFamily(f"kvraw_serve_{name}", text, value=values[name])
        for name, text in _GAUGES.items():
            if name in values:
                yield GaugeMetricFamily(f"kvraw_serve_{name}", text, value=values[name])
        requests = CounterMetricFamily(
            "kvraw_serve_requests", "requests by operation and outcome", labels=("operation", "outcome")
        )
        for (operation, outcome), count in list(self._service.requests.items()):
            requests.add_metric((operation, outcome), count)
        yield requests


class Exporter:
    """Serves a service's counts over HTTP.

    Parameters
    ----------
    service : Service
        Whose.
    address : str
        "host:port"; port 0: any that is free.

    Attributes
    ----------
    port : int
        The port.
    registry : CollectorRegistry
        The counts; no other process's or library's.
    """

    def __init__(self, service: Service, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise BoundsError(f"metrics is {address!r}, must be host:port")
        self.registry = CollectorRegistry()
        self.registry.register(_Reader(service))
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), self.registry)
        except OSError as error:
            raise KvrawError(f"metrics cannot be served at {address}: {error}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        thread: Thread = self._thread
        thread.join(5)
