"""What was made of tensors before, found again by the tensors themselves: cheaper than looking at all they say."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvraw.memo import Memo
from kvraw.runtime.context import at_reset

__all__ = ["cached_by_tensors"]

T = TypeVar("T")

# By identities and key: the state of the tensors then, weak references whose end takes the entry along, the value.
_known: Memo[tuple[object, ...], tuple[object, list[weakref.ref[Any]], Any]] = Memo(256)
at_reset(_known.clear)


def _forget(key: tuple[object, ...], _: object) -> None:
    _known.pop(key, None)


def _keep(key: tuple[object, ...], state: object, tensors: list[Any], value: object) -> None:
    gone = partial(_forget, key)
    _known.keep(key, (state, [weakref.ref(t, gone) for t in tensors], value))


def cached_by_tensors(given: Any, key: tuple[object, ...], make: Callable[[], T]) -> T:
    """What `make` made of an argument and a key before, or makes now.

    Parameters
    ----------
    given : object
        A tensor of addresses on a device, which counts as unchanged while torch counts no change; or tensors (one, a
        list, a list of lists), which do while they lie where they lay. Nothing is remembered of a table for which torch
        keeps no count, nor of anything else, which is cheap to read.
    key : tuple
        What else `make` looks at.
    make : callable
        Called where nothing is remembered.
    """
    state: object
    if isinstance(given, (list, tuple)):
        if not given or isinstance(given[0], (int, np.integer)):
            return make()
        flat = list(given) if not isinstance(given[0], (list, tuple)) else [t for entry in given for t in entry]
        full: tuple[object, ...] = (*map(id, flat), len(given), key)
        try:
            # Strides and counts tell shapes: to ask for the shape of each of many tensors takes as long as both.
            state = [t.data_ptr() for t in flat], [t.numel() for t in flat], [t.stride() for t in flat], flat[0].shape
        except (
            AttributeError,
            IndexError,
            RuntimeError,
            NotImplementedError,
        ):  # no tensors, or none with memory: `make` says so
            return make()
    elif hasattr(given, "data_ptr"):
        shape = given.shape
        if len(shape) != 1:
            state = given.data_ptr(), shape, given.stride()
        elif given.device.type == "cpu":
            return make()
        else:
            try:
                state = given.data_ptr(), shape, given.stride(), given._version
            except RuntimeError:  # made in torch's inference mode: nothing tells when it is changed
                return make()
        full, flat = (id(given), key), [given]
    else:
        return make()
    found = _known.get(full)
    if found is not None and found[0] == state:
        value: T = found[2]
        return value
    value = make()
    _keep(full, state, flat, value)
    return value
