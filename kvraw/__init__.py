"""kvraw moves KV-cache blocks between paged GPU memory and host memory, with nothing to compile.

Names are loaded on first use: importing kvraw loads no torch, numba or cuda module.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from kvraw.runtime.fork import undivided

if TYPE_CHECKING:
    from kvraw.batch import memcpy_batch as memcpy_batch
    from kvraw.cache import PagedCache as PagedCache
    from kvraw.copying.plan import CopyPlan as CopyPlan
    from kvraw.copying.plan import Side as Side
    from kvraw.copying.transfer import Transfer as Transfer
    from kvraw.copying.warm import warm_up as warm_up
    from kvraw.errors import ArtifactError as ArtifactError
    from kvraw.errors import BoundsError as BoundsError
    from kvraw.errors import ClosedError as ClosedError
    from kvraw.errors import DriverError as DriverError
    from kvraw.errors import DriverNotFoundError as DriverNotFoundError
    from kvraw.errors import ForkError as ForkError
    from kvraw.errors import HostMemoryError as HostMemoryError
    from kvraw.errors import KvrawError as KvrawError
    from kvraw.errors import LayoutError as LayoutError
    from kvraw.errors import PlacementError as PlacementError
    from kvraw.errors import TransferTimeoutError as TransferTimeoutError
    from kvraw.errors import UnsupportedDriverError as UnsupportedDriverError
    from kvraw.host_kv_pool import HostKVPool as HostKVPool
    from kvraw.layouts.geometry import Geometry as Geometry
    from kvraw.prepared import DeviceTable as DeviceTable
    from kvraw.prepared import PreparedCopy as PreparedCopy
    from kvraw.prepared import Reached as Reached
    from kvraw.runtime.host.buffer import HostBuffer as HostBuffer
    from kvraw.runtime.host.mapping import HostOptions as HostOptions
    from kvraw.runtime.host.pool import HostChunk as HostChunk
    from kvraw.runtime.host.pool import HostPool as HostPool
    from kvraw.runtime.host.registration import Registration as Registration
    from kvraw.runtime.host.shm import sweep_shared_memory as sweep_shared_memory
    from kvraw.runtime.memory import DeviceBuffer as DeviceBuffer
    from kvraw.runtime.stream import Stream as Stream
    from kvraw.transfer import load as load
    from kvraw.transfer import load_slots as load_slots
    from kvraw.transfer import store as store
    from kvraw.transfer import store_slots as store_slots
    from kvraw.transfer_plan import TransferPlan as TransferPlan

__version__ = "0.1.0"

_ERRORS = (
    "ArtifactError BoundsError ClosedError DriverError DriverNotFoundError ForkError HostMemoryError KvrawError "
    "LayoutError PlacementError TransferTimeoutError UnsupportedDriverError"
)
_HOMES = {
    "kvraw.batch": "memcpy_batch",
    "kvraw.cache": "PagedCache",
    "kvraw.copying.transfer": "Transfer",
    "kvraw.copying.warm": "warm_up",
    "kvraw.errors": _ERRORS,
    "kvraw.host_kv_pool": "HostKVPool",
    "kvraw.layouts.geometry": "Geometry",
    "kvraw.copying.plan": "CopyPlan Side",
    "kvraw.prepared": "DeviceTable PreparedCopy Reached",
    "kvraw.runtime.host.buffer": "HostBuffer",
    "kvraw.runtime.host.mapping": "HostOptions",
    "kvraw.runtime.memory": "DeviceBuffer",
    "kvraw.runtime.host.pool": "HostChunk HostPool",
    "kvraw.runtime.host.registration": "Registration",
    "kvraw.runtime.host.shm": "sweep_shared_memory",
    "kvraw.runtime.stream": "Stream",
    "kvraw.transfer": "load load_slots store store_slots",
    "kvraw.transfer_plan": "TransferPlan",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, "__version__"])

logging.getLogger("kvraw").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvraw' has no attribute {name!r}")
    with undivided():
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
