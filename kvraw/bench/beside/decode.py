"""A decode loop: the matrix products of a model's layers as one CUDA graph, replayed step after step.

A thread of its own replays it several steps ahead of the GPU, so that it does not depend on when Python gets to it, and
events time each step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from kvraw.bench.matmul import require_torch

__all__ = ["DECODERS", "DecodeLoop", "Decoder", "Steps", "percentile"]

AHEAD = 8  # steps that are enqueued before the first of them is done
SETTLE = 4  # first steps, that are not counted: transfers begin meanwhile
LEAST, MOST = 30, 4000  # steps of a measurement


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a model's weights, on one rank.

    Attributes
    ----------
    layers, hidden, queries, keys, feed_forward : int
        Layers; columns of the hidden state, of all queries, of keys (and values), and between the two feed-forward
        products.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    feed_forward: int

    def products(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a layer's weights, in the order of their use."""
        return (
            (self.hidden, self.queries + 2 * self.keys),
            (self.queries, self.hidden),
            (self.hidden, 2 * self.feed_forward),
            (self.feed_forward, self.hidden),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all layers' weights in bf16: what a step reads."""
        return 2 * self.layers * sum(a * b for a, b in self.products())


# Dense models of `kvraw.cli.models`, numbers from their config.json.
DECODERS = MappingProxyType(
    {
        "llama-3.1-8b": Decoder(32, 4096, 32 * 128, 8 * 128, 14336),
        "llama-3.1-70b": Decoder(80, 8192, 64 * 128 // 4, 8 * 128 // 4, 28672 // 4),
        "qwen3-32b": Decoder(64, 5120, 64 * 128, 8 * 128, 25600),
    }
)


def percentile(values: list[float], percent: float) -> float:
    """The least value that so many percent of all do not exceed."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


@dataclass(frozen=True, slots=True)
class Steps:
    """Times of steps, in milliseconds.

    Attributes
    ----------
    times : list of float
        Of each step that counts.
    starved : int
        Steps left out, ahead of which the GPU had nothing more to do: the host was late.
    """

    times: list[float]
    starved: int = 0

    @property
    def p50(self) -> float:
        """The median."""
        return float(np.median(self.times))

    @property
    def p99(self) -> float:
        """99 % of the steps took no longer."""
        return percentile(self.times, 99)


class DecodeLoop:
    """The graph, on a stream of its own.

    Parameters
    ----------
    device : int
        The GPU.
    decoder : Decoder
        Whose weights.
    batch : int
        Rows of the hidden state.
    """

    def __init__(self, device: int, decoder: Decoder, batch: int) -> None:
        torch = self._torch = require_torch(device, "the decode loop")
        self._place = torch.device("cuda", device)
        kind = {"device": self._place, "dtype": torch.bfloat16}
        with torch.no_grad(), torch.cuda.device(self._place):
            self._weights = [
                [torch.empty(size, **kind).normal_(0, 0.1 * size[0] ** -0.5) for size in decoder.products()]
                for _ in range(decoder.layers)
            ]
            self._hidden = torch.randn(batch, decoder.hidden, **kind)
            self.stream = torch.cuda.Stream(self._place)
            self.stream.wait_stream(torch.cuda.current_stream(self._place))
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._step(decoder)
            self.stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self.stream):
                self._out = self._step(decoder)
        self._events: list[Any] = []
        self.step_seconds = 0.004
        self.steps(0.2)  # clocks settle
        self.step_seconds = self.steps(0.2).p50 / 1e3

    def _step(self, decoder: Decoder) -> Any:
        torch, h = self._torch, self._hidden.clone()
        for attention, out, up, down in self._weights:
            h.addmm_((h @ attention)[:, : decoder.queries], out)
            h.addmm_(torch.nn.functional.silu((h @ up)[:, : decoder.feed_forward]), down)
        return h

    def steps(
        self,
        seconds: float,
        beside: Callable[[Callable[[], bool]], None] | None = None,
        step: float | None = None,
    ) -> Steps:
        """Replay steps for about `seconds`.

        Parameters
        ----------
        seconds : float
            How long; never less than some steps.
        beside : callable, optional
            Called meanwhile, with a function that says whether the steps still go on.
        step : float, optional
            Milliseconds that a step is expected to take; default: as long as alone.
        """
        expected = self.step_seconds if step is None else step / 1e3
        count = SETTLE + max(LEAST, min(MOST, int(seconds / expected)))
        while len(self._events) <= count:
            self._events.append(self._torch.cuda.Event(enable_timing=True))
        starved: set[int] = set()
        enqueued, failed = threading.Event(), []

        def replay() -> None:
            try:
                self._replay(count, starved)
            except BaseException as error:
                failed.append(error)
            finally:
                enqueued.set()

        thread = threading.Thread(target=replay, name="kvraw-decode", daemon=True)
        thread.start()
        last = self._events[count]
        try:
            if beside is not None:
                beside(lambda: not (enqueued.is_set() and (failed or last.query())))
        finally:
            thread.join()
        if failed:
            raise failed[0]
        last.synchronize()
        kept = [k for k in range(SETTLE, count) if k not in starved]
        times = [float(self._events[k].elapsed_time(self._events[k + 1])) for k in kept]
        if not times:
            raise RuntimeError("the host was late for every step of the decode loop: nothing was measured")
        return Steps(times, len(starved - set(range(SETTLE))))

    def _replay(self, count: int, starved: set[int]) -> None:
        events, torch = self._events, self._torch
        with torch.cuda.device(self._place), torch.cuda.stream(self.stream):
            events[0].record(self.stream)
            for k in range(count):
                while k >= AHEAD and not events[k - AHEAD + 1].query():
                    time.sleep(self.step_seconds / 8)
                self._graph.replay()
                if k and events[k].query():  # the step before is over: this one may have come late
                    starved.add(k)
                events[k + 1].record(self.stream)
