"""The worker's side of LMCache's multiprocess mode, where the worker copies itself, on kvraw's copies and memory.

`install` puts these in the place of LMCache's own, in a process that runs a worker: gather, scatter, the reading of an
engine's tensors, and the context through the server's shared memory. Messages and bytes stay as LMCache's: its server
cannot tell the difference. What kvraw cannot read, and other engines than vLLM, stay with LMCache's own functions.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvraw.adapters.lmcache import _utilities as ours
from kvraw.adapters.lmcache._types import is_mla
from kvraw.adapters.tensors import torch_cuda
from kvraw.errors import BoundsError, ClosedError, KvrawError, LayoutError
from kvraw.runtime import fork
from kvraw.runtime.host.buffer import HostBuffer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "compute_kv_layout",
    "gather_paged_kv_to_cpu",
    "install",
    "installed",
    "scatter_cpu_to_paged_kv",
    "uninstall",
]

_log = logging.getLogger("kvraw")
_PACKAGE = "lmcache.v1.multiprocess.transfer_context"
_FUNCTIONS = ("compute_kv_layout", "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv")
_MODULES = ("base", "shm", "worker_transfer", "async_engine_driven")
# What was there before, by module and name; empty: nothing is installed.
_before: dict[tuple[str, str], Any] = {}
_lock = fork.lock()


def _theirs(name: str, args: tuple[Any, ...], engine_type: Any, why: object) -> Any:
    """Call LMCache's own function, also while kvraw's is in its place."""
    _log.debug("%s is left to LMCache: %s", name, why)
    own = _before.get((f"{_PACKAGE}.base", name)) or getattr(import_module(f"{_PACKAGE}.base"), name)
    return own(*args) if engine_type is None else own(*args, engine_type=engine_type)


def _serve(name: str, call: Callable[..., Any], args: tuple[Any, ...], engine_type: Any) -> Any:
    """Call kvraw's function; LMCache's own for other engines and what kvraw cannot read. Nothing has moved then."""
    if engine_type is not None and str(getattr(engine_type, "name", engine_type)).upper() != "VLLM":
        return _theirs(name, args, engine_type, engine_type)
    if any(isinstance(one, (list, tuple)) for one in args[0].values()):
        return _theirs(name, args, engine_type, "K and V of a layer are a pair, whose axes only LMCache's rules tell")
    try:
        return call(*args)
    except (TypeError, LayoutError) as error:
        return _theirs(name, args, engine_type, error)


def _layout(kv_caches: dict[str, Tensor], layout_hints: Mapping[str, Any] | None) -> tuple[Any, ...]:
    block_size, layers, hidden, dtype, number = ours.compute_kv_layout(kv_caches, layout_hints)
    planes = 1 if is_mla(number) else ours.planes_of(kv_caches, layout_hints)
    native = sys.modules.get("lmcache.lmcache_native")
    return block_size, layers, hidden, dtype, number if native is None else native.EngineKVFormat(int(number)), planes


def compute_kv_layout(
    kv_caches: dict[str, Tensor], layout_hints: Mapping[str, Any] | None = None, engine_type: Any = None
) -> tuple[int, int, int, str, Any, int]:
    """Read an engine's tensors.

    Parameters
    ----------
    kv_caches
        Tensors by layer.
    layout_hints
        What the engine says about them.
    engine_type
        LMCache's name of the engine; default: vLLM.

    Returns
    -------
    tuple
        Block size, layers, elements of a token's row, name of the type, LMCache's format, and planes of a chunk.

    Raises
    ------
    ValueError
        There are no tensors, or they fit no format.
    """
    args = (kv_caches, layout_hints)
    result: tuple[int, int, int, str, Any, int] = _serve("compute_kv_layout", _layout, args, engine_type)
    return result


def gather_paged_kv_to_cpu(
    kv_caches: dict[str, Tensor],
    block_ids: list[int],
    blocks_per_chunk: int,
    layout_hints: Mapping[str, Any] | None = None,
    engine_kv_format: Any | None = None,
    out: list[Tensor] | None = None,
    chunk_indices: list[int] | None = None,
    engine_type: Any = None,
) -> list[Tensor]:
    """Gather blocks into one host tensor per chunk; see `kvraw.adapters.lmcache.gather_paged_kv_to_cpu`.

    Parameters
    ----------
    engine_type
        LMCache's name of the engine; default: vLLM.
    """
    args = (kv_caches, block_ids, blocks_per_chunk, layout_hints, engine_kv_format, out, chunk_indices)
    result: list[Tensor] = _serve("gather_paged_kv_to_cpu", ours.gather_paged_kv_to_cpu, args, engine_type)
    return result


def scatter_cpu_to_paged_kv(
    kv_caches: dict[str, Tensor],
    block_ids: list[int],
    chunks: Sequence[Tensor],
    blocks_per_chunk: int,
    skip_first_n_tokens: int = 0,
    layout_hints: Mapping[str, Any] | None = None,
    engine_kv_format: Any | None = None,
    engine_type: Any = None,
) -> None:
    """Scatter host tensors back into the paged tensors; see `kvraw.adapters.lmcache.scatter_cpu_to_paged_kv`.

    Parameters
    ----------
    engine_type
        LMCache's name of the engine; default: vLLM.
    """
    args = (kv_caches, block_ids, chunks, blocks_per_chunk, skip_first_n_tokens, layout_hints, engine_kv_format)
    _serve("scatter_cpu_to_paged_kv", ours.scatter_cpu_to_paged_kv, args, engine_type)


class SharedPool:
    """A server's pool as this process sees it: mapped, and registered with the driver, once for all contexts.

    Parameters
    ----------
    name : str
        The segment's name, with or without a slash.
    nbytes : int
        What the server says of its size.

    Raises
    ------
    FileNotFoundError, HostMemoryError, PermissionError, BoundsError
        This process cannot have it.
    """

    _held: dict[tuple[str, int, int], tuple[HostBuffer, int]] = {}  # noqa: RUF012  (of the process)
    _lock = fork.lock()

    def __init__(self, name: str, nbytes: int) -> None:
        self.name, self.nbytes, self._gone = name.lstrip("/"), nbytes, False
        with self._lock:
            self._key = self._identity()
            buffer, uses = self._held.get(self._key, (None, 0))
            if buffer is None:
                # Whose it is, is the server's affair: it may be another user's, as for LMCache's own worker.
                buffer = HostBuffer.attach(self.name, pin=False, any_user=True)
            if buffer.nbytes < nbytes or self._identity() != self._key:
                if not uses:
                    buffer.close()
                raise BoundsError(f"shared memory {name!r} has {buffer.nbytes} bytes, the server says {nbytes}")
            self._held[self._key] = buffer, uses + 1
        self.buffer = buffer

    def _identity(self) -> tuple[str, int, int]:
        """The segment itself: a server that was started anew may give another one the same name."""
        facts = os.stat(f"/dev/shm/{self.name}")
        return self.name, facts.st_dev, facts.st_ino

    def pin(self) -> bool:
        """Register it with the driver where a GPU is in use in this process; whether it is."""
        cuda = torch_cuda()
        if cuda is None:
            return False
        try:
            self.buffer.pin(cuda.current_device())
        except (KvrawError, OSError) as error:
            _log.warning("the pool %s is not pinned, copies go through other memory: %s", self.name, error)
        return self.buffer.pinned

    def bytes_of(self, offset: int, length: int) -> Any:
        """The bytes of a slot.

        Raises
        ------
        BoundsError
            It does not lie in the pool.
        ClosedError
            The pool was given back.
        """
        if self._gone:
            raise ClosedError("Shared memory buffer not initialized")
        if offset < 0 or length <= 0 or offset + length > self.nbytes:
            raise BoundsError(f"slot of {length} bytes at {offset} must lie in the pool of {self.nbytes} bytes")
        return self.buffer.view(self.buffer.address + offset, length)

    def close(self) -> None:
        """Give it back. Idempotent; the memory goes with the last array of it."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
            buffer, uses = self._held.get(self._key, (None, 0))
            if buffer is self.buffer and uses > 1:
                self._held[self._key] = buffer, uses - 1
                return
            if buffer is self.buffer:
                del self._held[self._key]
        self.buffer.close()


fork.in_child(SharedPool._held.clear)


def _shared_context(base: Any) -> Any:
    """LMCache's context through shared memory, on a `SharedPool`."""

    class EngineDrivenContextShm(base):  # type: ignore[misc]
        """LMCache's context through its server's shared memory, which is mapped and pinned once per process."""

        def __init__(self, metadata: Any, req_client: Any, mq_timeout: float, shm_name: str, pool_size: int) -> None:
            base.__mro__[1].__init__(self, metadata, req_client, mq_timeout)
            if not shm_name or pool_size <= 0:
                raise ValueError("shm_name must be non-empty and pool_size must be > 0")
            self._shm_name, self._pool_size = shm_name, pool_size
            self._shm = SharedPool(shm_name, pool_size)
            try:
                self._pinned = self._shm.pin()
            except BaseException:
                self._shm.close()
                raise

        def _make_tensor_view(self, offset: int, length: int, shape: Sequence[int], dtype_str: str) -> Any:
            import torch

            dtype = getattr(torch, dtype_str, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"Invalid torch dtype string: {dtype_str}")
            count = length // dtype.itemsize
            return torch.frombuffer(self._shm.bytes_of(offset, length), dtype=dtype, count=count).view(list(shape))

        def close(self) -> None:
            """Give the pool back. Idempotent; the memory goes with the last tensor of it."""
            self._shm.close()

    EngineDrivenContextShm.__qualname__ = "EngineDrivenContextShm"
    return EngineDrivenContextShm


def install() -> None:
    """Put kvraw's in the place of LMCache's own, for this process and contexts made from now on. Idempotent.

    Raises
    ------
    ImportError
        LMCache is not there, or has no such contexts.
    """
    with _lock:
        if _before:
            return
        package = import_module(_PACKAGE)
        modules = [package, *(import_module(f"{_PACKAGE}.{name}") for name in _MODULES)]
        theirs = import_module(f"{_PACKAGE}.shm").EngineDrivenContextShm
        new = {name: globals()[name] for name in _FUNCTIONS} | {"EngineDrivenContextShm": _shared_context(theirs)}
        for module in modules:
            for name, value in new.items():
                if name in vars(module):
                    _before[module.__name__, name] = vars(module)[name]
                    setattr(module, name, value)


def uninstall() -> None:
    """Put LMCache's own back; contexts that were created stay what they are. Idempotent."""
    with _lock:
        while _before:
            (module, name), value = _before.popitem()
            setattr(import_module(module), name, value)


def installed() -> bool:
    """Whether kvraw's are in the place of LMCache's own.

    Returns
    -------
    bool
        After `install`, until `uninstall`.
    """
    return bool(_before)
