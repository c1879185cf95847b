"""Objects of the cache by key: where each lies in the pool, who holds it, and what goes when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvraw.errors import HostMemoryError
from kvraw.runtime.host.pool import HostChunk, HostPool

__all__ = ["ObjectTable", "StoredObject"]


class StoredObject:
    """A chunk under its key. It may be read where it is `ready`, and is not evicted while it has `locks`."""

    __slots__ = ("chunk", "key", "locks", "ready")

    def __init__(self, key: bytes, chunk: HostChunk) -> None:
        self.key, self.chunk = key, chunk
        self.locks, self.ready = 0, False


class ObjectTable:
    """What the pool holds, the least recently used first.

    One thread at a time may call it.

    Attributes
    ----------
    evicted : int
        Objects that had to go.
    nbytes : int
        Bytes of the objects that are there, or being written.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._ready: OrderedDict[bytes, StoredObject] = OrderedDict()
        self._writing: dict[bytes, StoredObject] = {}
        self.evicted = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def writing(self) -> int:
        """Objects that are being written."""
        return len(self._writing)

    def locked(self) -> int:
        """Objects that are there and locked; another thread may ask."""
        return sum(1 for one in list(self._ready.values()) if one.locks)

    def find(self, key: bytes, nbytes: int) -> StoredObject | None:
        """The object of a key, where it is ready and of this size."""
        found = self._ready.get(key)
        return found if found is not None and found.chunk.nbytes == nbytes else None

    def known(self, key: bytes) -> bool:
        """Whether an object of that key is there, or being written."""
        return key in self._ready or key in self._writing

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count as used now; what comes last among them goes first, for a prompt is of no use without its beginning."""
        for key in reversed(keys):
            if key in self._ready:
                self._ready.move_to_end(key)

    def reserve(self, key: bytes, nbytes: int) -> StoredObject | None:
        """Room for a new object, which nobody sees before `publish`; None where all that is left is locked."""
        while True:
            try:
                (chunk,) = self.pool.chunks(1, nbytes)
            except HostMemoryError:
                if not self._evict_one():
                    return None
            else:
                break
        made = self._writing[key] = StoredObject(key, chunk)
        self.nbytes += nbytes
        return made

    def publish(self, objects: Iterable[StoredObject]) -> None:
        """Their bytes are there. What an earlier version of a key would be cannot be: it was reserved once."""
        made = list(objects)
        for one in made:
            del self._writing[one.key]
            one.ready = True
            self._ready[one.key] = one
        self.touch([one.key for one in made])

    def withdraw(self, one: StoredObject) -> None:
        """Let others write the key; the memory stays taken, for somebody may still be writing to it."""
        if self._writing.get(one.key) is one:
            del self._writing[one.key]

    def drop(self, one: StoredObject) -> None:
        """Give the memory of an object back."""
        self.withdraw(one)
        if self._ready.get(one.key) is one:
            del self._ready[one.key]
        one.ready = False
        self.nbytes -= one.chunk.nbytes
        self.pool.free([one.chunk])

    def _evict_one(self) -> bool:
        for one in self._ready.values():
            if not one.locks:
                self.drop(one)
                self.evicted += 1
                return True
        return False

    def clear(self) -> int:
        """Drop all that nobody has locked; how many."""
        gone = [one for one in self._ready.values() if not one.locks]
        for one in gone:
            self.drop(one)
        return len(gone)
