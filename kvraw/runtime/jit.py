"""Compilation by numba: at first use, and kept on disk where there is a place for it. Imported on first use only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from kvraw.runtime import fork
from kvraw.runtime.jit_cache import KernelCache

__all__ = ["COMPILED", "jit", "primitive"]

COMPILED = not numba.config.DISABLE_JIT
fork.wait_for(global_compiler_lock._lock)  # kernels are compiled at their first calls


def primitive(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate an intrinsic; `plain` does the same where kernels are not compiled."""
    return intrinsic if COMPILED else lambda _: plain


def jit(function: Callable[..., Any], *, nogil: bool = True, error_model: str = "python") -> Any:
    """Compile a function at the top of a module; under NUMBA_DISABLE_JIT it runs as it is.

    Parameters
    ----------
    function : callable
        What to compile.
    nogil : bool
        Whether it gives the GIL away.
    error_model : str
        "numpy" where a division by zero is not to raise.
    """
    if not COMPILED:

        @functools.wraps(function)
        def quiet(*args: Any) -> Any:
            with np.errstate(all="ignore"):
                return function(*args)

        return quiet
    compiled = numba.njit(nogil=nogil, error_model=error_model)(function)
    compiled._cache = KernelCache(function, (nogil, error_model))  # what `cache=True` does, with numba's own
    return compiled
