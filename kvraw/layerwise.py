"""One layer of a side, for loads that go layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvraw.copying.addresses import AddressTable
from kvraw.copying.plan import Side

__all__ = ["one_layer"]


def one_layer(side: Side, bases: AddressTable, layer: int, planes: int) -> tuple[Side, AddressTable]:
    """One layer of a side: the side, which is the same for all layers, and that layer's bases."""
    entries = np.arange(planes if side.table_plane else 1) * side.table_plane + layer * side.table_layer
    one = replace(side, layer=0, table_layer=0, table_plane=int(side.table_plane != 0), entries=len(entries))
    shift = np.uint64(layer * side.layer)
    return one, AddressTable(bases.host[entries] + shift, bases.seen[entries] + shift, bases.link)
