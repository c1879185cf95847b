"""Checks that every level makes of what it is given."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import NoReturn, SupportsIndex, cast

import numpy as np

__all__ = ["NotPicklable", "integer"]


class NotPicklable:
    """Base of what stands for memory of this process: a copy, or another process, would go on with its addresses."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stands for memory of this process: it cannot be copied or pickled")


def integer(name: str, value: object) -> int:
    """A count or a size as a plain int: others may have a width that products overflow, or fractions.

    Raises
    ------
    TypeError
        It is no integer, or a bool.
    """
    if type(value) is int:
        return value
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            return operator.index(cast(SupportsIndex, value))
    raise TypeError(f"{name} is {value!r}, must be an integer")
