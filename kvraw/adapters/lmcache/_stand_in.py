"""Puts the operations here in the place of LMCache's compiled module."""

from __future__ import annotations

import sys
import types

__all__ = ["install"]


def install() -> None:
    """Make LMCache use kvraw in this process: its ``c_ops`` and ``cuda_ops`` become the operations here.

    Call it before the engine starts. Names that kvraw does not have stay LMCache's own.
    """
    import lmcache

    from kvraw.adapters import lmcache as ours

    names = {name: getattr(ours, name) for name in ours.__all__}
    for name in ("c_ops", "cuda_ops"):
        before = sys.modules.get(f"lmcache.{name}")
        if before is None and name != "c_ops":
            continue
        module = types.ModuleType(f"lmcache.{name}")
        module.__dict__.update({k: v for k, v in vars(before or module).items() if not k.startswith("__")})
        module.__dict__.update(names)
        sys.modules[f"lmcache.{name}"] = module
        setattr(lmcache, name, module)
