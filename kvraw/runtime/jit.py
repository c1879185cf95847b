"""How numba compiles here: lazily, and kept on disk where a disk can be had. Imported on first use only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba.core.caching import FunctionCache

__all__ = ["jit", "unsaved"]

_log = logging.getLogger("kvraw")
unsaved: list[OSError] = []  # why compiled functions could not be kept


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Compiled functions on disk; a disk that is full, or broken, costs time and not the call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._constants = tuple(_constants(function))

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # By itself numba looks at the function's own file: constants from others would stay as they were compiled.
        return super()._index_key(sig, codegen), self._constants

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (OSError, EOFError):
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            if not unsaved:
                _log.warning("compiled functions cannot be kept in %s: %s", self.cache_path, error)
            unsaved.append(error.with_traceback(None))


def _constants(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    """The integers that a function, and those that it calls, find in their modules."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, int):
            yield name, value
        elif (inner := getattr(value, "py_func", None)) is not None:
            yield from _constants(inner)


def jit(function: Callable[..., Any], *, nogil: bool = True) -> Any:
    """Compile on first use; cached on disk where the package or the home directory can hold a cache."""
    compiled = numba.njit(nogil=nogil, error_model="numpy")(function)
    try:
        compiled._cache = _Cache(function)  # what `cache=True` does, with numba's own
    except (AttributeError, RuntimeError, OSError):
        # Numba is disabled, or "no locator available": read-only package and no usable home directory.
        return compiled
    return compiled
