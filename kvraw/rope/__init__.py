"""Rotary position embedding of keys, taken back and applied anew, on a GPU (PTX) or on the CPU (numba)."""

from kvraw.rope.rotate import rerotate_keys

__all__ = ["rerotate_keys"]
