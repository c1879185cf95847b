"""A table of what was worked out before, that forgets."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Memo"]

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """What was made for a key; once there are `most` entries, the older half of them goes.

    It is read as any dictionary is, without a lock; threads that make the same entry at once each make it.

    Parameters
    ----------
    most : int
        Entries.
    """

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: K, value: V) -> V:
        """Keep a value, and return it."""
        if len(self) >= self.most and key not in self:
            for old in list(self)[: max(self.most // 2, 1)]:
                self.pop(old, None)
        self[key] = value
        return value
