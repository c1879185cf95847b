"""A worker's connection to the cache server: requests and their replies, and signs of life in between."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from kvraw.errors import ClosedError, ForkError, KvrawError
from kvraw.multiprocess import messages as m
from kvraw.multiprocess.endpoints import Keys, default_endpoint
from kvraw.runtime import fork
from kvraw.runtime.closeable import Closing

__all__ = ["CacheClient", "ServerError", "ServerTimeoutError"]

_log = logging.getLogger("kvraw")


class ServerError(KvrawError, RuntimeError):
    """The server refused a request.

    Attributes
    ----------
    code : str
        Why, one of `kvraw.multiprocess.messages.CODES`.
    """

    def __init__(self, code: str, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(f"the cache server refused: {text} ({code})")

    def __reduce__(self) -> tuple[type[ServerError], tuple[str, str]]:
        return type(self), (self.code, self.text)


class ServerTimeoutError(KvrawError, TimeoutError):
    """The server did not answer in time; whether the request was carried out is not known."""


class CacheClient(Closing):
    """Asks a cache server. Threads may share it: their requests go one after another.

    Parameters
    ----------
    endpoint : str, optional
        The server's; default: that of a server that was given none.
    name : str
        For the server's log.
    timeout : float
        Seconds to wait for a reply.
    keys : Keys, optional
        CURVE keys, where the server has some.

    Attributes
    ----------
    timeout : float
        Seconds to wait for a reply.
    """

    def __init__(
        self, endpoint: str | None = None, *, name: str = "", timeout: float = 5.0, keys: Keys | None = None
    ) -> None:
        self.endpoint, self.timeout = default_endpoint() if endpoint is None else endpoint, timeout
        self.name = name or f"{os.uname().nodename}:{os.getpid()}"
        self._lock = fork.lock()
        self._epoch = fork.epoch()
        self._numbers = itertools.count(1)
        self._closed = False
        self._registration: m.Register | None = None
        self._silence = threading.Event()  # set: no more signs of life
        self._beat: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._socket = self._context.socket(zmq.DEALER)
        try:
            # Nobody else can go on under this name, and the server knows it again after a connection was lost.
            socket.setsockopt(zmq.ROUTING_ID, b"kv" + secrets.token_bytes(16))
            socket.setsockopt(zmq.LINGER, 0)
            # Not zmq.IMMEDIATE: with it a reply that arrives with the end of its connection is dropped unread. What
            # waits for a server that is to come is refused by it, for it does not know this client.
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if keys is not None:
                public, secret = keys.pair()
                socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server())
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise KvrawError(f"endpoint {self.endpoint!r}: {error}") from error
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def number(self) -> int:
        """A number for a request whose ticket may have to be ended although its reply was lost."""
        return next(self._numbers)

    def register(self, chunk_bytes: int, shared: bool) -> m.Registered:
        """Begin, and give signs of life from here on.

        Parameters
        ----------
        chunk_bytes : int
            Bytes of all chunks.
        shared : bool
            This side copies into and out of the pool by itself.

        Returns
        -------
        Registered
            Pool and limits.

        Raises
        ------
        ServerError, ServerTimeoutError
            The server refused, or is not there.
        """
        request = m.Register(name=self.name[:256], chunk_bytes=chunk_bytes, shared=shared)
        reply: m.Registered = self.request(request)
        self._registration = request
        if self._beat is None:
            self._beat = threading.Thread(
                target=self._live, args=(reply.heartbeat,), name="kvraw-heartbeat", daemon=True
            )
            self._beat.start()
        return reply

    def _live(self, seconds: float) -> None:
        last = time.monotonic()
        while not self._silence.wait(seconds):
            try:
                self.request(m.Heartbeat())
            except ClosedError:
                return
            except KvrawError as error:
                if time.monotonic() - last > 60.0:
                    last = time.monotonic()
                    _log.warning("the cache server at %s: %s", self.endpoint, error)

    def request(self, message: m.Request, payload: Sequence[Any] = ()) -> Any:
        """Ask, and wait for the reply.

        Parameters
        ----------
        message : Request
            What is asked. A number of 0 is replaced.
        payload : sequence
            Frames behind it.

        Returns
        -------
        Reply
            Of the kind that belongs to the request.

        Raises
        ------
        ServerError
            The server refused.
        ServerTimeoutError
            It did not answer in time, or is not there.
        ClosedError, ForkError
            The client is closed, or a parent process's.
        """
        found: list[Any] = []
        self.exchange([(message, payload)], lambda reply, frames: found.append(reply))
        return found[0]

    def exchange(
        self,
        parts: Iterable[tuple[m.Request, Sequence[Any]]],
        take: Callable[[Any, Sequence[Any]], None],
        window: int = 1,
    ) -> None:
        """Ask several things in a row, with `window` of them under way at a time.

        Parameters
        ----------
        parts : iterable
            Requests with their frames.
        take : callable
            Receives each reply and the frames behind it, in order.
        window : int
            Requests that are under way at once.

        Raises
        ------
        ServerError
            The server refused one; what follows it may have been carried out.
        ServerTimeoutError
            It did not answer in time, or is not there.
        ClosedError, ForkError
            The client is closed, or a parent process's.
        """
        if fork.epoch() != self._epoch:
            raise ForkError("the client is a parent process's; a child makes one of its own")
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            waiting: deque[int] = deque()
            for message, payload in parts:
                if not message.id:
                    message.id = next(self._numbers)
                self._send([m.encode(message), *payload])
                waiting.append(message.id)
                if len(waiting) >= window:
                    take(*self._receive(waiting.popleft()))
            while waiting:
                take(*self._receive(waiting.popleft()))

    def _send(self, frames: list[Any]) -> None:
        copy = len(frames) == 1
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
            return
        except zmq.Again:
            pass  # much is under way, or waits for a server
        if not self._socket.poll(int(self.timeout * 1000), zmq.POLLOUT):
            raise ServerTimeoutError(f"the cache server at {self.endpoint} took nothing for {self.timeout} s")
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again:
            raise ServerTimeoutError(f"the cache server at {self.endpoint} takes nothing") from None

    def _receive(self, number: int) -> tuple[Any, list[Any]]:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(max(1, int(left * 1000)), zmq.POLLIN):
                raise ServerTimeoutError(f"the cache server at {self.endpoint} did not answer within {self.timeout} s")
            frames: list[Any] = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                reply = m.decode_reply(frames[0].buffer)
            except m.MessageError as error:
                raise ServerError(error.code, f"its reply cannot be read: {error}") from error
            if reply.id not in (number, 0):
                continue  # of a request whose time was over
            if type(reply) is m.Error:
                raise ServerError(reply.code, reply.text)
            return reply, [frame.buffer for frame in frames[1:]]

    def forget(self, ticket: int) -> None:
        """End a ticket that nobody waits for any more, as far as the server can be asked. Never raises.

        Parameters
        ----------
        ticket : int
            Its number.
        """
        try:
            self.request(m.Abort(ticket=ticket))
        except KvrawError as error:
            _log.debug("ticket %d was not ended: %s", ticket, error)

    def close(self) -> None:
        """Take leave of the server, as far as it can be asked within a second. Idempotent."""
        if self._closed or fork.epoch() != self._epoch:
            return
        self._silence.set()
        with self._lock:
            if self._closed:
                return
            self.timeout = min(self.timeout, 1.0)
            if self._registration is not None:
                try:
                    self.request(m.Unregister())
                except KvrawError as error:
                    _log.debug("did not take leave of %s: %s", self.endpoint, error)
            self._closed = True
            self._context.destroy(linger=0)
        if self._beat is not None and self._beat is not threading.current_thread():
            self._beat.join(5)
