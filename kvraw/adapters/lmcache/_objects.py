"""Memory objects: the side of a copy that they are, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvraw.cache import require_host
from kvraw.copying.addresses import AddressTable, resolve
from kvraw.copying.plan import Side
from kvraw.runtime.context import DeviceScope

if TYPE_CHECKING:
    from kvraw.layouts.parts import Part

__all__ = ["object_side", "reach"]


def object_side(part: Part, layers: int, tokens: int, step: int | None = None) -> Side:
    """The side of a row of objects, one base each, whose item i is block i of the row, or `step` tokens."""
    step = part.layout.geometry.block_size if step is None else step
    return Side(
        outer=0,
        inner=step * part.row,
        page=tokens // step,
        layer=tokens * part.row,
        plane=layers * tokens * part.row,
        token=part.row,
        head=part.head_bytes,
        table_outer=1,
        entries=0,
    )


def reach(objects: Sequence[int], nbytes: int, device: int | None) -> AddressTable:
    """Look objects up: what the device calls them, and where registrations end inside them."""
    host = np.array(objects, np.uint64)
    if device is None:
        require_host("objects", host, 1)
        return AddressTable(host, host, False)
    with DeviceScope(device):
        found = resolve(host, nbytes)
        found.require(device, "objects")
    return found
