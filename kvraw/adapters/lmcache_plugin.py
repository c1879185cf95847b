"""What LMCache's ``lmcache.device_plugins`` finds: a device of CUDA whose operations and pinning are kvraw's.

LMCache loads it while it is being imported. That alone puts kvraw in the place of ``lmcache.cuda_ops`` and of the CPU
devices' operations, whichever device LMCache takes then. The device itself is for those who name it:
``LMCACHE_DEVICE_BACKEND=kvraw``. It is not available otherwise, since two devices of one type are an error there.
"""

from __future__ import annotations

import os

from lmcache.logging import init_logger
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

from kvraw.adapters.engines import ENGINES, serve

__all__ = ["KvrawDeviceSpec"]

init_logger(ENGINES["lmcache"].logger)  # LMCache's loggers have a handler each
_SERVED = serve("lmcache")
_NAMED = "LMCACHE_DEVICE_BACKEND"


class KvrawDeviceSpec(CudaDeviceSpec):  # type: ignore[misc]
    """LMCache's CUDA device by the name of kvraw: its operations are those of ``lmcache.cuda_ops``, which are kvraw's.

    Tensors and events go to other processes as LMCache's own do, whose wire names LMCache's classes alone.
    """

    @property
    def backend_name(self) -> str:
        """The name of the entry point, and of the choice."""
        return "kvraw"

    def is_available(self) -> bool:
        """Whether it was named, kvraw serves LMCache, and there is a GPU."""
        named = os.environ.get(_NAMED, "").strip().lower() == self.backend_name
        return named and _SERVED and bool(super().is_available())
