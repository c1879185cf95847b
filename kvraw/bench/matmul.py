"""A bf16 matrix product that runs beside transfers, and what they cost it. Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Matmul", "require_torch"]


def require_torch(device: int | None, what: str = "the matmul") -> Any:
    """The module torch, which `what` needs.

    Raises
    ------
    ValueError
        There is no GPU, torch cannot be imported, or it sees no GPU.
    """
    if device is None:
        raise ValueError(f"{what} needs a GPU")
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"{what} needs torch, which cannot be imported: {error}") from None
    if not torch.cuda.is_available():
        raise ValueError(f"{what} needs a torch that sees the GPU")
    return torch


class Matmul:
    """Products of random square matrices, one after another on a stream of their own."""

    def __init__(self, device: int, size: int = 8192) -> None:
        torch = self._torch = require_torch(device)
        place = torch.device("cuda", device)
        self._a, self._b = (torch.randn(size, size, device=place, dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._stream = torch.cuda.Stream(place)
        self.flops = 2 * size**3
        self._one = 0.0
        torch.cuda.synchronize(place)
        self.seconds(0.2)  # clocks and the library settle
        self._one = self.seconds(0.2)

    def seconds(self, total: float, beside: Callable[[], object] | None = None) -> float:
        """Time of one product, over products for about `total` seconds, `beside` called again and again meanwhile."""
        torch = self._torch
        count = max(4, min(900, int(total / self._one))) if self._one else 32  # a stream holds about a thousand
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            torch.mm(self._a, self._b, out=self._out)
            start.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
        while not end.query():
            if beside is None:
                time.sleep(1e-3)
            else:
                beside()
        return float(start.elapsed_time(end)) / 1e3 / count
