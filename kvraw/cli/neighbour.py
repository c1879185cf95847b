"""What plans of a measurement are made for: `KVRAW_NEIGHBOUR`, set while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvraw import config

__all__ = ["neighbour"]


@contextmanager
def neighbour(asked: str | None, default: str) -> Iterator[str]:
    """Set the variable to what was asked for, else, where it is not set, to a default; gives its value."""
    name = config.NEIGHBOUR.name
    before = os.environ.get(name)
    os.environ[name] = asked or before or default
    try:
        yield config.NEIGHBOUR.get()
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
