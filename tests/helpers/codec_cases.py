"""Symbols for the coder's tests, and arrays with guards around them, on the host or on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import kvraw

GUARD = 64


@dataclass(frozen=True)
class CodecCase:
    """Symbols [layers, tokens, channels] below an alphabet; `foreign`: coded with another chunk's distribution."""

    name: str
    symbols: np.ndarray
    alphabet: int
    foreign: bool = False


def _cases() -> list[CodecCase]:
    rng = np.random.default_rng(8)
    draw = lambda shape, n: rng.integers(0, n, shape).astype(np.uint8)  # noqa: E731
    bell = lambda shape, n: np.clip(np.rint(rng.normal(n / 2, n / 9, shape)), 0, n - 1).astype(np.uint8)  # noqa: E731
    return [
        CodecCase("random", draw((2, 40, 70), 32), 32),
        CodecCase("bell", bell((2, 64, 33), 32), 32),
        CodecCase("bell of 15", bell((3, 50, 5), 15), 15),
        CodecCase("constant", np.full((1, 90, 3), 7, np.uint8), 32),
        CodecCase("constant top", np.full((1, 70, 2), 31, np.uint8), 32),
        CodecCase("constant middle", np.full((1, 200, 2), 15, np.uint8), 33),
        CodecCase("one symbol", np.zeros((2, 20, 3), np.uint8), 1),
        CodecCase("two symbols", draw((2, 30, 40), 2), 2),
        CodecCase("three symbols, rarely two", (rng.random((1, 120, 9)) < 0.02).astype(np.uint8) * 2, 3),
        CodecCase("alphabet of 33", draw((1, 30, 40), 33), 33),
        CodecCase("alphabet of 47", draw((1, 30, 5), 47), 47),
        CodecCase("alphabet of 64", draw((1, 25, 6), 64), 64),
        CodecCase("alphabet of 65", draw((1, 25, 6), 65), 65),
        CodecCase("alphabet of 200", draw((2, 30, 6), 200), 200),
        CodecCase("maximal alphabet", draw((1, 60, 35), 256), 256),
        CodecCase("one token", draw((3, 1, 65), 32), 32),
        CodecCase("two tokens", draw((1, 2, 31), 32), 32),
        CodecCase("no tokens", np.zeros((2, 0, 5), np.uint8), 16),
        CodecCase("one channel", bell((5, 77, 1), 32), 32),
        CodecCase("foreign distribution", draw((2, 40, 20), 32), 32, foreign=True),
        CodecCase("foreign, rare symbols only", np.full((1, 60, 4), 9, np.uint8), 32, foreign=True),
        CodecCase("foreign, rare symbols in long streams", np.full((1, 300, 3), 9, np.uint8), 32, foreign=True),
        CodecCase("foreign, maximal alphabet", draw((1, 50, 4), 256), 256, foreign=True),
    ]


CASES = _cases()


def foreign_cdf(case: CodecCase) -> np.ndarray:
    """Distributions in which most symbols have the least share, the first or the last almost all."""
    layers, _, channels = case.symbols.shape
    n = case.alphabet
    low, high = np.arange(n + 1), np.concatenate([np.arange(n + 1)[:1], 65535 - n + np.arange(1, n + 1)])
    rows = np.stack([low, high])[np.arange(layers * channels) % 2]
    return rows.reshape(layers, channels, n + 1).astype(np.uint16)


class HostArray:
    """An array in host memory with guard bytes on both sides."""

    def __init__(self, values: np.ndarray, device: Any = None, shift: int = 0) -> None:
        self.before = GUARD + shift * max(values.itemsize, 1)
        self.raw = np.full(self.before + values.nbytes + GUARD, 0xA5, np.uint8)
        self.array = self.raw[self.before : self.before + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    @property
    def tensor(self) -> Any:
        return self.array

    def fetch(self) -> np.ndarray:
        """What it holds; its guards must be as they were."""
        assert (self.raw[: self.before] == 0xA5).all()
        assert (self.raw[len(self.raw) - GUARD :] == 0xA5).all()
        return self.array.copy()


class DeviceArray:
    """An array in device memory, as a foreign library would hand it over, with guard bytes on both sides."""

    def __init__(self, values: np.ndarray, device: Any, shift: int = 0) -> None:
        self.device, self.stream = device.device, device.stream
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        self.host = HostArray(values, shift=shift)
        self.memory = kvraw.DeviceBuffer(self.host.raw.nbytes, self.device)
        device.copy(self.memory.address, int(self.host.raw.ctypes.data), self.host.raw.nbytes)
        self._world = device

    @property
    def address(self) -> int:
        return self.memory.address + self.host.before

    @property
    def tensor(self) -> Any:
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        data = (self.address, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3}

    def fetch(self) -> np.ndarray:
        self._world.copy(int(self.host.raw.ctypes.data), self.memory.address, self.host.raw.nbytes)
        return self.host.fetch()


class Place:
    """Where a test's arrays lie: a device (its `device` an int), or host memory (None)."""

    def __init__(self, device: int | None) -> None:
        self.device = device
        self.stream = None if device is None else kvraw.Stream(device)

    def put(self, values: np.ndarray, shift: int = 0) -> Any:
        return HostArray(values, shift=shift) if self.device is None else DeviceArray(values, self, shift)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        from kvraw.runtime.context import DeviceScope
        from kvraw.runtime.driver import driver

        assert self.device is not None
        assert self.stream is not None
        with DeviceScope(self.device):
            driver().memcpy_async(dst, src, nbytes, self.stream.handle)
        self.stream.synchronize()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
