"""Puts the operations here in the place of LMCache's compiled module."""

from __future__ import annotations

from typing import Any

from kvraw.adapters.stand_in import stand_in

__all__ = ["install"]


def install() -> None:
    """Make LMCache use kvraw in this process: its ``c_ops`` and ``cuda_ops`` become the operations here.

    Call it before the engine starts, best before LMCache is imported: it imports nothing itself, and takes effect when
    either module is imported, whether LMCache has it or not. Names that kvraw does not have stay LMCache's own.
    Idempotent.
    """
    stand_in("lmcache", ("c_ops", "cuda_ops"), _names)


def _names() -> dict[str, Any]:
    from kvraw.adapters import lmcache as ours

    return {name: getattr(ours, name) for name in ours.__all__ if name != "install"}
