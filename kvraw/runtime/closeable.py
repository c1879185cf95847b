"""Base of what has an address, a size and a finalizer."""

from __future__ import annotations

import weakref
from types import TracebackType

from kvraw.errors import ClosedError

__all__ = ["Owner"]


class Owner:
    """Owns an address range until `close`, which is idempotent and also runs when it is collected."""

    address: int
    nbytes: int
    _finalizer: weakref.finalize  # type: ignore[type-arg]

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Give it back. Idempotent."""
        self._finalizer()

    def context_lost(self) -> None:
        """It ended with its device's context."""
        self._finalizer.detach()

    def require_open(self) -> None:
        """Raise `ClosedError` where it was closed.

        Raises
        ------
        ClosedError
            It was.
        """
        if self.closed:
            raise ClosedError(f"the {type(self).__name__} at {self.address:#x} is closed")

    def __enter__(self) -> Owner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
