"""Puts the operations here in the place of LMCache's compiled module."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__all__ = ["install"]

_PACKAGE = "lmcache"


def install() -> None:
    """Make LMCache use kvraw in this process: its ``c_ops`` and ``cuda_ops`` become the operations here.

    Call it before the engine starts, best before LMCache is imported: it imports nothing itself, and takes effect when
    LMCache comes. Names that kvraw does not have stay LMCache's own. Idempotent.
    """
    if _PACKAGE in sys.modules:
        _replace(sys.modules[_PACKAGE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _replace(package: types.ModuleType) -> None:
    from kvraw.adapters import lmcache as ours

    names = {name: getattr(ours, name) for name in ours.__all__}
    for name in ("c_ops", "cuda_ops"):
        before = sys.modules.get(f"{_PACKAGE}.{name}")
        if before is None and name != "c_ops":
            continue
        module = types.ModuleType(f"{_PACKAGE}.{name}")
        if before is not None:
            vars(module).update({k: v for k, v in vars(before).items() if not k.startswith("__")})
        vars(module).update(names)
        sys.modules[module.__name__] = module
        setattr(package, name, module)


class _Finder(MetaPathFinder):
    """Waits for LMCache's package, and lets go once it is there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as another loader does, and puts the operations in place after it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _replace(module)
