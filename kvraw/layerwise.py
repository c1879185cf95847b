"""Loads that go layer by layer: what is waited for, and one layer of a side."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from kvraw.copying.addresses import AddressTable
from kvraw.copying.plan import Side
from kvraw.prepared import Copy

__all__ = ["LayerwiseLoad", "one_layer"]


class LayerwiseLoad:
    """A load of all layers in order, with an event behind each: a layer can be used while the next still moves.

    What `HostKVPool.load_layers` returns.

    Examples
    --------
    >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16) for _ in range(2)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> host = kvraw.HostKVPool.like(cache, tokens=64, layout="layer_first")
    >>> loading = host.load_layers(cache, host.alloc(16), np.arange(16))  # a LayerwiseLoad
    >>> loading.wait()
    >>> loading.done(layer=0)
    True
    """

    __slots__ = ("_copies",)

    def __init__(self, copies: list[Copy]) -> None:
        self._copies = copies

    def wait_on(self, layer: int, stream: Any) -> None:
        """Make a stream of the same device wait for a layer, and those before it.

        Parameters
        ----------
        layer : int
            Which layer.
        stream : object
            The stream; ignored without a GPU.
        """
        self._copies[layer].wait_on(stream)

    def done(self, layer: int = -1) -> bool:
        """Ask whether a layer, and those before it, is there. Never waits.

        Parameters
        ----------
        layer : int
            Which layer; default: the last one.

        Returns
        -------
        bool
            Whether it is.
        """
        return self._copies[layer].done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host for all layers.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default: for ever.

        Raises
        ------
        BoundsError
            A kernel met a bad slot.
        TransferTimeoutError
            They are not there after `timeout` seconds; the load goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for copy in self._copies:
            copy.wait(None if end is None else max(0.0, end - time.monotonic()))


def one_layer(side: Side, bases: AddressTable, layer: int, planes: int) -> tuple[Side, AddressTable]:
    """One layer of a side: the side, which is the same for all layers, and that layer's bases."""
    entries = np.arange(planes if side.table_plane else 1) * side.table_plane + layer * side.table_layer
    one = replace(side, layer=0, table_layer=0, table_plane=int(side.table_plane != 0), entries=len(entries))
    shift = np.uint64(layer * side.layer)
    return one, AddressTable(bases.host[entries] + shift, bases.seen[entries] + shift, bases.link)
