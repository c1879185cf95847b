"""Chunks on disk, below the pool: append-only segments with checksums, which the next server finds again.

A record is a page of header and the chunk, both in multiples of 4096 bytes, so that the pool's chunks go to the disk
and come back without a copy in between (``O_DIRECT`` where the file system has it), by threads that release the GIL.
A header tells of a record that was cut off, the chunk's checksum of one that was damaged: both are a miss. Where there
are too many bytes the oldest segment goes as a whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvraw.errors import BoundsError, KvrawError
from kvraw.multiprocess.messages import HASH_BYTES
from kvraw.runtime import fork

__all__ = ["DiskTier"]

_log = logging.getLogger("kvraw")
PAGE = 4096
# Magic, version, key, bytes, checksum of the chunk, checksum of what is ahead.
_HEADER = struct.Struct(f"<7sB{HASH_BYTES}sQII")
_MAGIC, _VERSION = b"kvrawsg", ord("1")
_NAME = re.compile(r"segment-(\d{1,15})\.kvraw")
_LONGEST_PAUSE = 60.0


class _Segment:
    """An open file; it is closed once nobody reads it."""

    def __init__(self, path: Path, create: bool) -> None:
        self.path, self.end, self.keys = path, 0, set[bytes]()
        self.whole = False  # nothing may be added
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            self.file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.file = os.open(path, flags & ~os.O_EXCL, 0o600)  # a file system without it may have made it
        self._finalizer = weakref.finalize(self, os.close, self.file)

    def read(self, into: Any, offset: int) -> int:
        """Bytes that there were."""
        return self._all(os.preadv, into, offset)

    def write(self, data: Any, offset: int) -> None:
        if self._all(os.pwritev, data, offset) != len(data):
            raise OSError(errno.EIO, f"{self.path} takes no more")

    def _all(self, move: Callable[[int, list[Any], int], int], data: Any, offset: int) -> int:
        done, data = 0, memoryview(data)
        while done < len(data):
            try:
                count = move(self.file, [data[done:]], offset + done)
            except OSError as error:
                flags = fcntl.fcntl(self.file, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # It wants a larger alignment, or begins behind a part that was no multiple of it.
                fcntl.fcntl(self.file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                continue
            if count <= 0:
                break
            done += count
        return done


class _Place(NamedTuple):
    segment: _Segment
    offset: int  # of the chunk
    nbytes: int
    checksum: int


def _padded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class DiskTier:
    """Chunks under a directory. One thread at a time may call it; its own threads read and write.

    Parameters
    ----------
    folder : path
        Where; made where it is not there. No other server may use it.
    nbytes : int
        Most bytes of all segments.
    segment_bytes : int, optional
        Bytes after which a new segment is begun; default: an eighth of `nbytes`, at most 1 GiB.

    Attributes
    ----------
    pause : float
        Seconds for which nothing is written after the disk refused something; twice as long each time.

    Raises
    ------
    KvrawError
        The folder cannot be used, or another server uses it.
    BoundsError
        `nbytes` is too small.
    """

    def __init__(self, folder: str | Path, nbytes: int, segment_bytes: int | None = None) -> None:
        self.folder, self.nbytes = Path(folder), nbytes
        self._each = min(nbytes // 8, 1 << 30) if segment_bytes is None else segment_bytes
        if not 2 * PAGE <= self._each <= nbytes:
            raise BoundsError(f"nbytes is {nbytes}, segments of {self._each}: must be at least {2 * PAGE} and in order")
        self._index: dict[bytes, _Place] = {}
        self._segments: list[_Segment] = []
        self._changes = fork.lock()  # of the two above, between the writer and callers
        self._next = 0  # number of the next segment
        self.pause, self._failures, self._paused = 1.0, 0, 0.0
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written")
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise KvrawError(f"disk folder {self.folder}: {error}") from error
        self._header = mmap.mmap(-1, PAGE)  # aligned, as O_DIRECT wants it
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise KvrawError(f"disk folder {self.folder} is another server's that lives") from None
            self._recover()
        except BaseException:
            os.close(self._lock)
            raise
        self._writer = ThreadPoolExecutor(1, "kvraw-disk-write")
        self._reader = ThreadPoolExecutor(2, "kvraw-disk-read")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used(self) -> int:
        """Bytes of all segments; another thread may ask."""
        return sum(one.end for one in list(self._segments))

    def _recover(self) -> None:
        """Find what is there again: each segment up to its first record that is none, where it is cut."""
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        for number, path in sorted(found):
            self._next = max(self._next, number + 1)
            try:
                segment = _Segment(path, create=False)
                status = os.fstat(segment.file)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "no regular file")
            except OSError as error:
                _log.warning("disk segment %s is left out: %s", path, error)
                continue
            self._segments.append(segment)
            size = status.st_size
            try:
                if self._scan(segment, size):
                    segment.end, segment.whole = size, True  # another version's: goes when room is needed
                elif segment.end < size:
                    _log.warning("disk segment %s is cut at %d of %d bytes", path, segment.end, size)
                    os.ftruncate(segment.file, segment.end)
            except OSError as error:
                _log.warning("disk segment %s is read up to %d of %d bytes: %s", path, segment.end, size, error)
                segment.end, segment.whole = size, True
        self._make_room(0)

    def _scan(self, segment: _Segment, size: int) -> bool:
        """Take up a segment's records; True where one is of another version."""
        while segment.end + PAGE <= size and segment.read(self._header, segment.end) == PAGE:
            magic, version, key, nbytes, checksum, own = _HEADER.unpack_from(self._header)
            if magic != _MAGIC:
                break
            good = own == zlib.crc32(self._header[: _HEADER.size - 4])
            if version != _VERSION:  # whose headers may be others; one that is damaged begins no segment
                return segment.end == 0 or good
            if not good or segment.end + PAGE + _padded(nbytes) > size:
                break
            self._index[key] = _Place(segment, segment.end + PAGE, nbytes, checksum)
            segment.keys.add(key)
            segment.end += PAGE + _padded(nbytes)
        return False

    def _make_room(self, nbytes: int) -> None:
        while self._segments and self.used + nbytes > self.nbytes:
            self._remove(self._segments[0])

    def _remove(self, segment: _Segment) -> None:
        with self._changes:
            self._segments.remove(segment)
            for key in segment.keys:
                place = self._index.get(key)
                if place is not None and place.segment is segment:
                    del self._index[key]
        with contextlib.suppress(OSError):
            segment.path.unlink()

    def holds(self, key: bytes, nbytes: int) -> bool:
        """Whether a chunk of that size is there."""
        place = self._index.get(key)
        return place is not None and place.nbytes == nbytes

    def forget(self, key: bytes) -> None:
        """Count a chunk as not there: it turned out to be damaged."""
        with self._changes:
            self._index.pop(key, None)

    def write(self, key: bytes, data: Any, nbytes: int) -> Future[None] | None:
        """Begin to write a chunk, which must stay as it is until then; None where it is there, or is too large.

        Parameters
        ----------
        key : bytes
            Its key.
        data : memoryview
            Its bytes, and what follows them up to a multiple of 4096; at an address that is one.
        nbytes : int
            Its bytes.

        Returns
        -------
        Future or None
            To ask; an OSError where it was not written.
        """
        if key in self._index or PAGE + len(data) > self._each:
            return None
        return self._writer.submit(self._write, key, data, nbytes)

    # in the writer's thread

    def _write(self, key: bytes, data: Any, nbytes: int) -> None:
        if self._failures and time.monotonic() < self._paused:
            raise OSError(errno.EAGAIN, "the disk refused something a moment ago")
        try:
            self._append(key, data, nbytes)
        except OSError as error:
            pause = min(self.pause * 2**self._failures, _LONGEST_PAUSE)
            self._failures = min(self._failures + 1, 16)
            self._paused = time.monotonic() + pause
            _log.warning("nothing is written to disk for %.0f s: %s", pause, error)
            raise
        self._failures = 0

    def _append(self, key: bytes, data: Any, nbytes: int) -> None:
        size = PAGE + len(data)
        self._make_room(size)
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.whole or segment.end + size > self._each:
            segment = _Segment(self.folder / f"segment-{self._next:09}.kvraw", create=True)
            self._next += 1
            self._segments.append(segment)
        offset, checksum = segment.end, zlib.crc32(data[:nbytes])
        ahead = _HEADER.pack(_MAGIC, _VERSION, key, nbytes, checksum, 0)[:-4]
        self._header[: _HEADER.size] = ahead + struct.pack("<I", zlib.crc32(ahead))
        try:
            segment.write(data, offset + PAGE)  # ahead of the header: one without its chunk would end the segment
            segment.write(self._header, offset)
        except OSError:
            try:
                os.ftruncate(segment.file, offset)  # what follows would not be found again behind a part of a record
            except OSError:
                segment.whole = True
            if not offset:
                self._remove(segment)
            raise
        with self._changes:
            segment.end += size
            segment.keys.add(key)
            self._index[key] = _Place(segment, offset + PAGE, nbytes, checksum)

    # reading

    def read(self, key: bytes, into: Any) -> Future[bool]:
        """Begin to read a chunk; the result says whether it is right.

        Parameters
        ----------
        key : bytes
            Its key; `holds` said that it is there.
        into : memoryview
            Where to, as of `write`.

        Returns
        -------
        Future of bool
            To ask.
        """
        return self._reader.submit(self._read, self._index.get(key), into)

    @staticmethod
    def _read(place: _Place | None, into: Any) -> bool:
        if place is None or place.segment.read(into, place.offset) < place.nbytes:
            return False
        return zlib.crc32(into[: place.nbytes]) == place.checksum

    def close(self) -> None:
        """Wait for what is under way, drop what is not begun, and let go of the folder. Idempotent."""
        self._writer.shutdown(cancel_futures=True)
        self._reader.shutdown()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            for one in self._segments:
                with contextlib.suppress(OSError):
                    os.fsync(one.file)
            self._segments.clear()
            self._index.clear()
            os.close(lock)
