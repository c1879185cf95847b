"""Standing in for modules of another project's package, whoever imports them and whenever."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

__all__ = ["amend", "put", "rebind", "stand_in"]

_log = logging.getLogger("kvraw")

Names = Callable[[], dict[str, Any]]
_NONE = object()


def stand_in(package: str, modules: tuple[str, ...], names: Names, *, there: tuple[str, ...] = ()) -> None:
    """Serve `modules` of a package with these names in the place of its own; the others stay as they are there.

    Those of `there` are served only where the package has them, or makes them; the rest in any case.

    Nothing is imported for it. A module that is there already is replaced where imports look for it; who has taken
    names or functions from it keeps them, but for the package itself. Idempotent.
    """
    finder = _Finder(package, tuple(f"{package}.{name}" for name in modules), names, there)
    if not any(isinstance(f, _Finder) and f.modules == finder.modules for f in sys.meta_path):
        sys.meta_path.insert(0, finder)
    if package in sys.modules:
        finder.replace(sys.modules[package])


def amend(module: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module whenever it is loaded, and now where it is already. Nothing is imported for it. Idempotent."""
    if not any(isinstance(f, _Amender) and f.module == module for f in sys.meta_path):
        sys.meta_path.insert(0, _Amender(module, change))
    if module in sys.modules:
        change(sys.modules[module])


def put(module: str, names: Names) -> None:
    """Put these names in the place of those that a module has, whenever it is loaded; those it has not are left out.

    Where it is loaded already, the other modules of its package that took a function from it get the new one. Nothing
    is imported for it. Idempotent.
    """
    amend(module, lambda loaded: _put(loaded, names()))


def _put(module: ModuleType, names: dict[str, Any]) -> None:
    package = module.__name__.partition(".")[0]
    for name, value in names.items():
        theirs = vars(module).get(name, value)
        if theirs is not value:
            setattr(module, name, value)
            rebind(theirs, value, package)


def rebind(theirs: Any, ours: Any, package: str) -> None:
    """Give a package's modules that are loaded one function where they took another, under whatever name."""
    for name, module in list(sys.modules.items()) if callable(theirs) and theirs is not ours else ():
        if name.startswith(f"{package}.") and isinstance(module, ModuleType):
            for taken in [key for key, held in list(vars(module).items()) if held is theirs]:
                setattr(module, taken, ours)


class _StandIn(ModuleType):
    """A module with another behind it, which is asked for what this one has not."""

    _theirs: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._theirs is not None:
            return getattr(self._theirs, name)
        raise AttributeError(f"module {self.__name__!r}, which kvraw stands in for, has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *(dir(self._theirs) if self._theirs is not None else ())} - {"_theirs"})


class _Behind(MetaPathFinder):
    """Finds what would be found without it."""

    def _find_theirs(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None

    def _look_after(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        if spec is not None and spec.loader is not None:
            spec.loader = _PackageLoader(spec.loader, self.replace)
        return spec

    def replace(self, module: ModuleType) -> None:
        """What is done once the module is loaded."""
        raise NotImplementedError


class _Amender(_Behind):
    """Finds a module, to change it once it is loaded."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self.module, self._change = module, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return self._look_after(self._find_theirs(fullname, path, target)) if fullname == self.module else None

    def replace(self, module: ModuleType) -> None:
        self._change(module)


class _Finder(_Behind):
    """Finds a package, to look after it once it is loaded, and the modules of it that are stood in for."""

    def __init__(self, package: str, modules: tuple[str, ...], names: Names, there: tuple[str, ...]) -> None:
        self.modules, self._package, self._names = modules, package, names
        self._there = tuple(f"{package}.{name}" for name in there)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._package:
            return self._look_after(self._find_theirs(fullname, path, target))
        if fullname not in self.modules:
            return None
        theirs = self._find_theirs(fullname, path, target)
        if theirs is None and fullname in self._there and fullname not in sys.modules:
            return None
        return self._spec(fullname, theirs)

    def _spec(self, name: str, theirs: Any) -> ModuleSpec:
        return ModuleSpec(name, _Loader(self._names, theirs), origin=getattr(theirs, "origin", None))

    def replace(self, package: ModuleType) -> None:
        """Put the modules in the place of those that the package has loaded, or made, and of those it has not."""
        for name in self.modules:
            attribute = name.rpartition(".")[2]
            theirs = sys.modules.get(name, vars(package).get(attribute))
            if theirs is None and (
                name in self._there or self._find_theirs(name, getattr(package, "__path__", None), None) is not None
            ):
                continue  # it is loaded when it is asked for, or not there
            if not isinstance(theirs, _StandIn):
                loader = _Loader(self._names, theirs)
                module = module_from_spec(ModuleSpec(name, loader))
                loader.exec_module(module)
                taken = {k: vars(module)[k] for k, v in _public(theirs).items() if vars(package).get(k, _NONE) is v}
                vars(package).update(taken)
            if name in sys.modules:
                setattr(package, attribute, sys.modules[name])


class _PackageLoader(Loader):
    """Loads a package as its own loader does, which is put back for whoever asks for it later."""

    def __init__(self, loader: Loader, replace: Callable[[ModuleType], None]) -> None:
        self._loader, self._replace = loader, replace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._replace(module)


class _Loader(Loader):
    """Loads kvraw's names, and behind them what was there: a module, or what one is found by."""

    def __init__(self, names: Names, theirs: Any) -> None:
        self._names, self._theirs = names, theirs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = self._names()
        vars(module).update(names)  # before theirs is loaded: it may import what imports this module
        theirs = _load(self._theirs, module) if isinstance(self._theirs, ModuleSpec) else self._theirs
        vars(module).update(_public(theirs) | names)
        # Some compiled modules that are loaded again do not come anew: they put their names into the present one.
        if theirs is not None and theirs is not module:
            module._theirs = theirs  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def _public(module: Any) -> dict[str, Any]:
    return {k: v for k, v in getattr(module, "__dict__", {}).items() if not k.startswith("__")}


def _load(spec: ModuleSpec, module: ModuleType) -> Any:
    """Load a module beside the one that stands in for it; None where it does not load."""
    try:
        theirs = module_from_spec(spec)
        if spec.loader is not None:
            spec.loader.exec_module(theirs)
    except (ImportError, OSError) as error:
        _log.info("%s does not load, kvraw stands in for it alone: %s", spec.name, error)
        return None
    placed = sys.modules.get(spec.name, module)  # a module may put another in its own place
    return theirs if placed is module else placed
