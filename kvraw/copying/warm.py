"""What first calls would otherwise compile, load and allocate, made ready ahead of them."""

from __future__ import annotations

from kvraw.copying import copy_engine, cpu, given, staged_program
from kvraw.copying.device_state import device_state
from kvraw.copying.kernel import copy_kernel, kernels_barred
from kvraw.runtime import program
from kvraw.runtime.context import DeviceScope
from kvraw.runtime.driver import driver

__all__ = ["warm_up"]

_WIDTHS = (16, 8, 4, 2, 1)
_EVENTS = 32  # as many transfers may be in flight before another event is made
_UPLOADS = (1024, 4096)  # words of ids and addresses that do not fit an argument block


def warm_up(device: int | None = None) -> None:
    """Get ready what first calls need: compiled functions, and for a device its kernels, staging slots and events.

    The compiled functions take about a second without a cache on disk. A kernel that is loaded while the GPU is busy
    waits for what the GPU was given; so a service calls this ahead of its first work.

    Parameters
    ----------
    device : int, optional
        The GPU to get ready; takes its staging memory (four slots of ``KVRAW_STAGING_SLOT`` bytes).

    Raises
    ------
    ImportError
        numba cannot be imported.
    DriverNotFoundError, UnsupportedDriverError, PlacementError
        There is no such device.

    Examples
    --------
    >>> kvraw.warm_up()
    """
    cpu.warm_up()
    for made in (copy_engine.COMPILED, program.COMPILED, given.COMPILED):
        made.compile()
    if device is None:
        return
    d = driver()
    with DeviceScope(device):
        state = device_state(device)
        if not kernels_barred(d, 16):
            for width in _WIDTHS:
                for paced in (False, True):
                    copy_kernel(width, paced).handle_for(d)
            for direction in ("store", "load"):
                staged_program.get_ready(state, direction)
        state.get_ready(_EVENTS, _UPLOADS)
