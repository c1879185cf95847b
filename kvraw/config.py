"""Environment variables, read at each use so that tests and callers can change them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable: its name, how it is parsed, its default and what it does."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    def get(self, environ: Mapping[str, str] = os.environ) -> T:
        """Value of the variable.

        Raises
        ------
        ValueError
            The text does not parse; names the variable.
        """
        text = environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {self.name}={text!r}: {error}") from None


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError("must be a positive integer")
    return value


def _size(text: str) -> int:
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1].upper(), 0)
    return _positive(text[:-1] if shift else text) << shift


def _register_bytes(text: str) -> int:
    value = int(text)
    # A registration of 512 GiB or more fails on r580; pages of 2 MiB stay whole.
    if not 2 << 20 <= value <= 256 << 30 or value % (2 << 20):
        raise ValueError(f"must be a multiple of {2 << 20} in [{2 << 20}, {256 << 30}]")
    return value


ENGINES = ("auto", "kernel", "copy", "staged", "cpu", "reference")


def _engine(text: str) -> str:
    if text not in ENGINES:
        raise ValueError(f"must be one of {', '.join(ENGINES)}")
    return text


ENGINE = Variable(
    "KVRAW_ENGINE",
    _engine,
    "auto",
    f"engine for every plan that names none, read when it is made: {', '.join(ENGINES)}",
)
CPU_THREADS = Variable("KVRAW_CPU_THREADS", _positive, 0, "threads of the CPU engine; default: usable cores, at most 8")
MAX_BATCH = Variable("KVRAW_MAX_BATCH", _positive, 8192, "descriptors per batch-memcpy call")
STAGING_SLOT = Variable("KVRAW_STAGING_SLOT", _size, 32 << 20, "bytes of one staging slot on a GPU, such as 32M")
STAGING_DEPTH = Variable("KVRAW_STAGING_DEPTH", _positive, 2, "staging slots per direction and GPU; default 2")
NEIGHBOURS = ("busy", "idle")


def _neighbour(text: str) -> str:
    if text not in NEIGHBOURS:
        raise ValueError(f"must be one of {', '.join(NEIGHBOURS)}")
    return text


NEIGHBOUR = Variable(
    "KVRAW_NEIGHBOUR",
    _neighbour,
    "busy",
    "what the GPU does beside transfers, for every plan that does not say, read when it is made: busy (default; "
    "transfers hold back) or idle (the fastest transfer)",
)
CTAS = Variable("KVRAW_CTAS", _positive, 0, "thread blocks of the kernel engine; default: 16 to or from host memory")

HOST_THREADS = Variable(
    "KVRAW_HOST_THREADS", _positive, 0, "threads that populate host memory; default: usable cores, at most 16"
)
REGISTER_BYTES = Variable(
    "KVRAW_REGISTER_BYTES", _register_bytes, 2 << 30, "bytes of host memory per registration with the driver"
)

SERVED = ("lmcache", "sglang", "vllm")


def _served(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if set(names) - set(SERVED):
        raise ValueError(f"must be names of {', '.join(SERVED)}, with commas between them")
    return names


DISABLE: Variable[tuple[str, ...]] = Variable(
    "KVRAW_DISABLE", _served, (), f"engines whose plugin managers get nothing from kvraw, of {', '.join(SERVED)}"
)

VARIABLES: tuple[Variable[str] | Variable[int] | Variable[tuple[str, ...]], ...] = (
    ENGINE,
    CPU_THREADS,
    MAX_BATCH,
    NEIGHBOUR,
    CTAS,
    STAGING_SLOT,
    STAGING_DEPTH,
    HOST_THREADS,
    REGISTER_BYTES,
    DISABLE,
)


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's directory for caches; None where there is no home."""
    path = Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return path if path.is_absolute() else None


def user_runtime(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's directory for sockets."""
    import tempfile  # here: it costs milliseconds

    home = environ.get("XDG_RUNTIME_DIR", "")
    return Path(home) / "kvraw" if os.path.isabs(home) else Path(tempfile.gettempdir()) / f"kvraw-{os.geteuid()}"
