"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

__all__ = ["require_writable"]


def require_writable(path: Path) -> None:
    """Find out ahead of measuring that a file cannot be written.

    Raises
    ------
    OSError
        It cannot.
    """
    there = path.exists()
    path.open("a").close()
    if not there:
        path.unlink()
