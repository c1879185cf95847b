"""Where a server listens, and who may speak to it there.

A Unix socket that its owner alone can open, or loopback, needs no keys. Everything else does: CURVE, with the server's
key and those of its clients from files.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
import zmq.utils.z85

from kvraw import config
from kvraw.errors import KvrawError

__all__ = ["EndpointError", "Keys", "Listening", "default_endpoint", "require_endpoint"]

_LONGEST = 100  # bytes of a socket's path; the kernel takes 107


class EndpointError(KvrawError, ValueError):
    """An endpoint or keys that a server must not, or cannot, use."""


class Keys(NamedTuple):
    """Files with CURVE keys, as ``zmq.auth.create_certificates`` writes them.

    Attributes
    ----------
    own : path
        The secret key of this side; nobody but its owner may read it.
    others : path
        Of a client: the server's public key. Of a server: a directory with the public keys of its clients.
    """

    own: str | Path
    others: str | Path

    def pair(self) -> tuple[bytes, bytes]:
        """Public and secret key of this side.

        Raises
        ------
        EndpointError
            The file cannot be read, holds no secret key, or others may read it.
        """
        try:
            mode = os.stat(self.own).st_mode
        except OSError as error:
            raise EndpointError(f"keys: {error}") from error
        if mode & 0o077:
            raise EndpointError(
                f"keys: {self.own} has mode {stat.S_IMODE(mode):#o}, must be for its owner alone (0600)"
            )
        public, secret = _load(self.own)
        if secret is None:
            raise EndpointError(f"keys: {self.own} holds no secret key")
        return public, secret

    def server(self) -> bytes:
        """The server's public key.

        Raises
        ------
        EndpointError
            The file cannot be read.
        """
        return _load(self.others)[0]

    def clients(self) -> set[bytes]:
        """Public keys of the clients.

        Raises
        ------
        EndpointError
            There are none.
        """
        found = {_load(path)[0] for path in sorted(Path(self.others).glob("*.key"))}
        if not found:
            raise EndpointError(f"keys: {self.others} holds no public key (*.key) of a client")
        return found


def _load(path: str | Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise EndpointError(f"keys: {path}: {error}") from error


def default_endpoint() -> str:
    """A Unix socket in a folder of the user's own."""
    return f"ipc://{config.user_runtime()}/serve.sock"


def require_endpoint(endpoint: str, keys: Keys | None) -> str | None:
    """Path of a Unix socket, None for TCP.

    Raises
    ------
    EndpointError
        It is neither, or needs keys and there are none.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not os.path.isabs(path) or len(os.fsencode(path)) > _LONGEST or "\0" in path:
            raise EndpointError(
                f"endpoint is {endpoint!r}, must be ipc:// and an absolute path of at most {_LONGEST} bytes"
            )
        return path
    found = re.fullmatch(r"tcp://(\[[0-9a-fA-F:]+\]|[^:\[\]/;]+):(\d{1,5}|\*)", endpoint)
    if found is None:
        raise EndpointError(f"endpoint is {endpoint!r}, must be ipc:///path or tcp://address:port")
    host = found[1].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False  # a name may mean anything, and another thing tomorrow
    if not loopback and keys is None:
        raise EndpointError(
            f"endpoint is {endpoint!r}, which is no loopback address (127.0.0.1, [::1]) and needs CURVE keys: keys="
        )
    return None


class Listening:
    """A ROUTER socket that is bound, safely; `close` gives back the socket and its path."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: Keys | None, most: int) -> None:
        path = require_endpoint(endpoint, keys)
        self._lock: int | None = None
        self._path: str | None = None
        self._zap: zmq.Socket[bytes] | None = None
        self._allowed: set[bytes] = set()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        try:
            self._set(most)
            if keys is not None:
                self._secure(context, keys)
            if path is not None:
                self._claim(path)
            try:
                self.socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise EndpointError(f"endpoint {endpoint!r} cannot be bound: {error}") from error
            if path is not None:
                os.chmod(path, 0o600)
            self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self.close()
            raise

    def _set(self, most: int) -> None:
        s = self.socket
        s.setsockopt(zmq.LINGER, 1000)
        s.setsockopt(zmq.MAXMSGSIZE, most)  # a larger frame ends its connection
        s.setsockopt(zmq.RCVHWM, 64)
        s.setsockopt(zmq.SNDHWM, 4096)  # replies that a client may leave unread; what is more is dropped and counted
        s.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that a reply that cannot go is counted
        s.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that connects anew keeps its identity
        s.setsockopt(zmq.IPV6, 1)

    def _secure(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        public, secret = keys.pair()
        self._allowed = keys.clients()
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        s = self.socket
        s.setsockopt(zmq.CURVE_SERVER, 1)
        s.setsockopt(zmq.CURVE_PUBLICKEY, public)
        s.setsockopt(zmq.CURVE_SECRETKEY, secret)
        s.setsockopt_string(zmq.ZAP_DOMAIN, "kvraw")

    def _claim(self, path: str) -> None:
        """Be the only server of a path: binding would take it from another one."""
        folder = os.path.dirname(path)
        with contextlib.suppress(FileExistsError):
            os.makedirs(folder, mode=0o700)
        status = os.stat(folder)
        if status.st_uid not in (os.geteuid(), 0) or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
            raise EndpointError(f"the folder {folder} is another user's, or others may write to it")
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(f"{path}.lock", flags, 0o600)
        except OSError as error:
            raise EndpointError(f"endpoint ipc://{path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise EndpointError(f"endpoint ipc://{path} is another server's that lives") from None
        self._lock = lock
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise EndpointError(f"endpoint ipc://{path}: there is something that is no socket")
            os.unlink(path)  # of a server that is dead
        self._path = path

    @property
    def zap(self) -> zmq.Socket[bytes] | None:
        """Where libzmq asks about keys; None without them."""
        return self._zap

    def answer_zap(self) -> None:
        """Let in a client whose key is known, and nobody else."""
        assert self._zap is not None
        # Version, request, domain, address, identity, mechanism, credentials.
        frames = self._zap.recv_multipart()
        known = len(frames) == 7 and frames[5] == b"CURVE" and zmq.utils.z85.encode(frames[6]) in self._allowed
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._zap.send_multipart([b"1.0", frames[1], *status, b"", b""])

    def close(self) -> None:
        """Close the sockets, and remove the path. Idempotent."""
        self.socket.close()
        if self._zap is not None:
            self._zap.close()
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
        lock, self._lock = self._lock, None
        if lock is not None:
            # The lock's file stays: another server may wait for it, and would lock a file without a name.
            os.close(lock)
