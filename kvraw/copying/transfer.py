"""The future of all work that is enqueued."""

from __future__ import annotations

import time
from typing import Any

from kvraw.checks import NotPicklable
from kvraw.copying.planner import Choice
from kvraw.runtime.completion import Completion
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.stream import stream_handle

__all__ = ["Transfer"]


class Transfer(NotPicklable):
    """Work that was enqueued (GPU) or is done (CPU); what all calls return that enqueue something.

    Attributes
    ----------
    engine : str
        The engine that carries a copy out; "none" where there is nothing to do.
    plan : TransferPlan or None
        The plan whose call it is.

    Examples
    --------
    >>> layers = [np.zeros((2, 8, 16, 4, 64), np.float16)]
    >>> cache = kvraw.PagedCache.from_tensors(layers, axes="PBTHD")
    >>> chunk = np.zeros(cache.chunk_bytes(tokens=32), np.uint8)
    >>> transfer = kvraw.store(cache, [chunk], [3, 1])  # a Transfer
    >>> transfer.wait(timeout=10)
    >>> transfer.done(), transfer.engine
    (True, 'cpu')
    """

    __slots__ = ("_choice", "_completions", "_device", "engine", "plan")

    def __init__(
        self,
        completions: tuple[Completion, ...] = (),
        engine: str = "none",
        device: int | None = None,
        plan: Any = None,
        choice: Choice | None = None,
    ) -> None:
        self._completions, self.engine, self._device = completions, engine, device
        self.plan, self._choice = plan, choice

    @property
    def completion(self) -> Completion | None:
        """The last of its operations; None where it is done."""
        return self._completions[-1] if self._completions else None

    def _of(self, layer: int | None) -> tuple[Completion, ...]:
        return self._completions if layer is None or not self._completions else (self._completions[layer],)

    def done(self, layer: int | None = None) -> bool:
        """Ask whether it is over; never waits.

        Parameters
        ----------
        layer : int, optional
            Of a load by layers: ask for this layer, and those before it.

        Returns
        -------
        bool
            Whether it is.
        """
        return all(one.done() for one in self._of(layer))

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until it is over, with the GIL released.

        Of a transfer that was captured into a graph, this reports what replays met since the last call, and waits for
        nothing: synchronise the stream that replays first. What it uses is kept as long as the process runs.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; default: for ever.

        Raises
        ------
        BoundsError, LayoutError
            The kernel met an index out of bounds (indices that lie on the device), or other data that it could not
            work with; such entries were left out.
        TransferTimeoutError
            It is not over after `timeout` seconds; it goes on, and can be waited for again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for one in self._completions:
            one.wait(None if end is None else max(0.0, end - time.monotonic()))
        for one in self._completions:
            if one.error is not None:
                raise one.error

    def wait_on(self, stream: Any, layer: int | None = None) -> None:
        """Make a stream of the same device wait until it is over.

        Parameters
        ----------
        stream : object
            The stream; ignored without a GPU.
        layer : int, optional
            Of a load by layers: wait for this layer, and those before it.
        """
        if self._completions and self._device is not None:
            with DeviceScope(self._device):
                handle = stream_handle(stream)
                for one in self._of(layer):
                    one.wait_on(handle)

    def explain(self) -> str:
        """Say what carries it out and why.

        Returns
        -------
        str
            A few lines.
        """
        return f"engine {self.engine}" if self.plan is None else self.plan.describe(self._choice)

    def __and__(self, other: Transfer) -> Transfer:
        return Transfer(self._completions + other._completions, self.engine, self._device)
