"""A cache of KV chunks for several processes: a server with a pool in shared memory, and what workers use of it.

Needs pyzmq, msgspec and prometheus_client (``pip install 'kvraw[serve]'``); nothing else of kvraw imports this.
"""

from __future__ import annotations

try:
    import msgspec as _msgspec
    import prometheus_client as _prometheus
    import zmq as _zmq
except ImportError as error:
    raise ImportError(
        f"kvraw.multiprocess needs pyzmq, msgspec and prometheus_client (pip install 'kvraw[serve]'): {error}"
    ) from error

from kvraw.multiprocess.client import CacheClient, ServerError, ServerTimeoutError
from kvraw.multiprocess.contexts import (
    EngineDrivenContext,
    MessageContext,
    SharedMemoryContext,
    Slots,
    create_engine_driven_context,
)
from kvraw.multiprocess.endpoints import EndpointError, Keys, default_endpoint
from kvraw.multiprocess.keys import CacheKey, EngineDrivenContextMetadata, MemoryLayoutDesc
from kvraw.multiprocess.paged import compute_kv_layout, gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv
from kvraw.multiprocess.server import CacheServer
from kvraw.multiprocess.tickets import Limits
from kvraw.multiprocess.worker import EngineWorker, Stored

__all__ = [
    "CacheClient",
    "CacheKey",
    "CacheServer",
    "EndpointError",
    "EngineDrivenContext",
    "EngineDrivenContextMetadata",
    "EngineWorker",
    "Keys",
    "Limits",
    "MemoryLayoutDesc",
    "MessageContext",
    "ServerError",
    "ServerTimeoutError",
    "SharedMemoryContext",
    "Slots",
    "Stored",
    "compute_kv_layout",
    "create_engine_driven_context",
    "default_endpoint",
    "gather_paged_kv_to_cpu",
    "scatter_cpu_to_paged_kv",
]
del _msgspec, _prometheus, _zmq
