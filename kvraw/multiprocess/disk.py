"""Chunks on disk, below the pool: append-only segments with checksums, which the next server finds again.

A record is a page of header and the chunk, both in multiples of 4096 bytes, so that the pool's chunks go to the disk
and come back without a copy in between (``O_DIRECT`` where the file system has it), by threads that release the GIL.
A header tells of a record that was cut off, the chunk's checksum of one that was damaged: both are a miss. Where there
are too many bytes the oldest segment goes as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvraw.errors import BoundsError, KvrawError
from kvraw.multiprocess.messages import HASH_BYTES

__all__ = ["DiskTier"]

_log = logging.getLogger("kvraw")
PAGE = 4096
_HEADER = struct.Struct(f"<8s{HASH_BYTES}sQII")  # magic, key, bytes, checksum of the chunk, checksum of what is ahead
_MAGIC = b"kvrawsg1"


class _Segment:
    """An open file; it is closed once nobody reads it."""

    def __init__(self, path: Path, create: bool) -> None:
        self.path, self.end, self.keys = path, 0, set[bytes]()
        self.gone = False
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            self.file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            self.file = os.open(path, flags & ~os.O_EXCL, 0o600)  # a file system without it may have made it
        weakref.finalize(self, os.close, self.file)


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
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """Bytes of all segments."""
        return sum(one.end for one in self._segments)

    def _recover(self) -> None:
        """Find what is there again: each segment up to its first record that is none."""
        for path in sorted(self.folder.glob("segment-*.kvraw")):
            try:
                segment = _Segment(path, create=False)
                size = os.fstat(segment.file).st_size
                while segment.end + PAGE <= size:
                    os.preadv(segment.file, [self._header], segment.end)
                    magic, key, nbytes, checksum, own = _HEADER.unpack_from(self._header)
                    good = magic == _MAGIC and own == zlib.crc32(self._header[: _HEADER.size - 4])
                    if not good or segment.end + PAGE + nbytes > size:
                        break
                    self._index[key] = _Place(segment, segment.end + PAGE, nbytes, checksum)
                    segment.keys.add(key)
                    segment.end += PAGE + _padded(nbytes)
            except OSError as error:
                _log.warning("disk segment %s is left out: %s", path, error)
                continue
            self._segments.append(segment)
        self._make_room(0)

    def _make_room(self, nbytes: int) -> None:
        while self._segments and self.used + nbytes > self.nbytes:
            gone = self._segments.pop(0)
            gone.gone = True
            for key in list(gone.keys):  # the writer may add to them
                place = self._index.get(key)
                if place is not None and place.segment is gone:
                    del self._index[key]
            with contextlib.suppress(OSError):
                gone.path.unlink()

    def holds(self, key: bytes, nbytes: int) -> bool:
        """Whether a chunk of that size is there."""
        place = self._index.get(key)
        return place is not None and place.nbytes == nbytes

    def forget(self, key: bytes) -> None:
        """Count a chunk as not there: it turned out to be damaged."""
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
        size = PAGE + len(data)
        if key in self._index or size > self._each:
            return None
        self._make_room(size)
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.end + size > self._each:
            number = 1 + max((int(one.path.stem.split("-")[1]) for one in self._segments), default=-1)
            segment = _Segment(self.folder / f"segment-{number:09}.kvraw", create=True)
            self._segments.append(segment)
        offset, segment.end = segment.end, segment.end + size
        return self._writer.submit(self._write, segment, offset, key, data, nbytes)

    def _write(self, segment: _Segment, offset: int, key: bytes, data: Any, nbytes: int) -> None:
        checksum = zlib.crc32(data[:nbytes])
        ahead = _HEADER.pack(_MAGIC, key, nbytes, checksum, 0)[:-4]
        self._header[: _HEADER.size] = ahead + struct.pack("<I", zlib.crc32(ahead))
        # The chunk first: a header without it would end what a restart finds of the segment.
        try:
            for part, at in ((data, offset + PAGE), (self._header, offset)):
                if os.pwritev(segment.file, [part], at) != len(part):
                    raise OSError(f"{segment.path} takes no more")
        except OSError:
            segment.end = max(segment.end, self._each)  # behind a gap nothing would be found again
            raise
        if segment.gone:
            return
        segment.keys.add(key)
        self._index[key] = _Place(segment, offset + PAGE, nbytes, checksum)

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
        return self._reader.submit(self._read, self._index[key], into)

    @staticmethod
    def _read(place: _Place, into: Any) -> bool:
        if os.preadv(place.segment.file, [into], place.offset) < place.nbytes:
            return False
        return zlib.crc32(into[: place.nbytes]) == place.checksum

    def close(self) -> None:
        """Wait for what is under way, and let go of the folder. Idempotent."""
        self._writer.shutdown()
        self._reader.shutdown()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            for one in self._segments:
                with contextlib.suppress(OSError):
                    os.fsync(one.file)
            self._segments.clear()
            self._index.clear()
            os.close(lock)
