"""The cache server: a socket, a pool in shared memory, and one thread that answers.

One thread answers all requests in the order in which they come, so each client's are in order, and nothing is locked.
What it does for one is short, but for copies of clients by message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

import zmq

from kvraw.errors import BoundsError, ClosedError
from kvraw.multiprocess.disk import DiskTier
from kvraw.multiprocess.endpoints import Keys, Listening, default_endpoint, require_endpoint
from kvraw.multiprocess.metrics import Exporter
from kvraw.multiprocess.service import Service
from kvraw.multiprocess.tickets import Limits
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing
from kvraw.runtime.host.mapping import HostOptions
from kvraw.runtime.host.pool import HostPool

__all__ = ["CacheServer"]

_log = logging.getLogger("kvraw")
_MOST_FRAMES = (1 << 16) + 2
_ROUND = 64  # messages between two looks at the clock


class CacheServer(Closing):
    """Holds chunks in shared memory for workers of this machine, and by message for others.

    Parameters
    ----------
    nbytes : int
        Bytes of the pool.
    endpoint : str, optional
        ``ipc:///path`` or ``tcp://address:port``; default: a Unix socket in a folder of the user's own.
    keys : Keys, optional
        CURVE keys; needed where the endpoint is neither a Unix socket nor loopback.
    limits : Limits, optional
        Time limits.
    metrics : str, optional
        "host:port" at which Prometheus finds the counts.
    message_bytes : int
        Most bytes of a frame, so of a chunk by message; a connection that sends more is closed.
    name : str, optional
        Of the segment in /dev/shm; default: one that nobody else has.
    populate : bool
        Have all pages there at the start.
    disk : path, optional
        A directory that keeps chunks beyond the pool, and beyond the server's end.
    disk_bytes : int
        Most bytes there.

    Attributes
    ----------
    endpoint : str
        Where it listens.
    pool : HostPool
        The memory.
    pool_name : str
        Its name in /dev/shm.
    service : Service
        What answers.

    Raises
    ------
    EndpointError
        The endpoint is none, is another server's, or needs keys.
    HostMemoryError
        The pool is not to be had.
    BoundsError
        A size or a limit is out of bounds.
    """

    def __init__(
        self,
        nbytes: int,
        endpoint: str | None = None,
        *,
        keys: Keys | None = None,
        limits: Limits | None = None,
        metrics: str | None = None,
        message_bytes: int = 256 << 20,
        name: str | None = None,
        populate: bool = True,
        disk: str | Path | None = None,
        disk_bytes: int = 16 << 30,
    ) -> None:
        endpoint = default_endpoint() if endpoint is None else endpoint
        require_endpoint(endpoint, keys)
        if nbytes < 2 * HostPool.ALIGNMENT or message_bytes <= 0:
            raise BoundsError(
                f"nbytes is {nbytes}, message_bytes {message_bytes}: must be at least {2 * HostPool.ALIGNMENT} and 1"
            )
        self._closed = False
        self._thread: Thread | None = None
        self._stopping: float | None = None  # when the drain is over
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._listening: Listening | None = None
        self._exporter: Exporter | None = None
        self._disk: DiskTier | None = None
        self._pid = os.getpid()
        self.pool: HostPool | None = None
        self.pool_name: str | None = None
        try:
            self._listening = Listening(self._context, endpoint, keys, message_bytes)
            self.endpoint = self._listening.endpoint
            self.pool = HostPool(nbytes, pin=False, options=HostOptions(kind="shared", name=name, populate=populate))
            self.pool_name = self.pool.name
            if disk is not None:
                self._disk = DiskTier(disk, disk_bytes)
            self.service = Service(self.pool, limits, self._disk)
            if metrics is not None:
                self._exporter = Exporter(self.service, metrics)
        except BaseException:
            self._give_back()
            raise

    @property
    def metrics_port(self) -> int | None:
        """Port of the metrics."""
        return None if self._exporter is None else self._exporter.port

    def start(self) -> CacheServer:
        """Answer in a thread of its own, until `close`.

        Returns
        -------
        CacheServer
            This.

        Raises
        ------
        ClosedError
            It was closed, or started before.
        """
        if self._closed or self._thread is not None:
            raise ClosedError("the server was closed, or started before")
        self._thread = Thread(target=self.run, name="kvraw-serve", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take nothing new, wait for open tickets within `Limits.drain`, then end `run`. Signal handlers may call it.

        A second call waits for nothing.
        """
        with contextlib.suppress(OSError):  # full, or closed: it ends anyway
            os.write(self._wake_write, b"s")

    def run(self) -> None:
        """Answer until `stop`."""
        assert self._listening is not None
        socket, zap = self._listening.socket, self._listening.zap
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if zap is not None:
            poller.register(zap, zmq.POLLIN)
        pause = 0.0
        while True:
            events = dict(poller.poll(int(pause * 1000)))
            if self._wake_read in events:
                self._woken()
            if zap is not None and zap in events:
                self._listening.answer_zap()
            if socket in events:
                self._answer_some(socket)
            pause = self.service.tick()
            if self._stopping is not None:
                if not self.service.open_copies() or time.monotonic() >= self._stopping:
                    return self.service.finish(self._stopping)
                pause = min(pause, 0.05)

    def _woken(self) -> None:
        try:
            asked = len(os.read(self._wake_read, 64))
        except BlockingIOError:
            return
        now = time.monotonic()
        self.service.draining = True
        self._stopping = now if self._stopping is not None or asked > 1 else now + self.service.limits.drain

    def _answer_some(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_ROUND):
            try:
                frames: list[Any] = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            if len(frames) > _MOST_FRAMES:
                frames = frames[:1]  # answered as what it is
            reply = self.service.handle(identity, [frame.buffer for frame in frames[1:]])
            try:
                if len(reply) == 1:
                    socket.send_multipart([identity, reply[0]], zmq.NOBLOCK)
                else:
                    # From where they lie.
                    sent = socket.send_multipart([identity, *reply], zmq.NOBLOCK, copy=False, track=True)
                    assert sent is not None
                    self.service.hold(sent)
            except zmq.ZMQError:  # gone, or it takes nothing; its tickets end by their limits
                self.service.counts["dropped_replies"] += 1

    def close(self) -> None:
        """Stop, and give the pool and the endpoint back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:  # a forked child: all of it is the parent's
            return
        thread = self._thread
        if thread is not None:
            self.stop()
            thread.join(self.service.limits.drain + 5)
            if thread.is_alive():
                _log.error("the server's thread does not end")
        self._give_back()

    def _give_back(self) -> None:
        self._closed = True
        if self._exporter is not None:
            self._exporter.close()
        if self._listening is not None:
            self._listening.close()
        self._context.destroy(linger=1000)
        if self._disk is not None:
            self._disk.close()
        if self.pool is not None:
            self.pool.close()
        with fork.undivided():
            for end in (self._wake_read, self._wake_write):
                os.close(end)
