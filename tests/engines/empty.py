"""Empty modules in the place of packages that are not installed: they import, and do nothing.

SGLang and vLLM import far more than their host pools and workers need, much of it for GPUs alone.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Meta(name, (_Thing,), {"__module__": cls.__module__})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and callable(args[0]) and not isinstance(args[0], _Meta):
            return args[0]  # a decorator
        if len(args) == 3 and isinstance(args[0], str):
            return type.__call__(cls, *args, **options)
        return object.__new__(cls)  # type: ignore[call-overload]

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return object

    __ror__ = __or__

    def _no(cls, other: object) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = _no


class _Thing(metaclass=_Meta):
    def __init_subclass__(cls, **options: Any) -> None: ...

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing()

    def __getitem__(self, item: object) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __and__ = __add__ = __or__

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class _Module(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Meta(name, (_Thing,), {"__module__": self.__name__})
        if name == "dumps":  # what it gives is used while modules are loaded
            made = lambda *args, **options: b""
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        found = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def install(names: str, instead: str = "") -> None:
    """Find `names` where they are not found otherwise, and those of `instead` in any case."""
    sys.meta_path.insert(0, _Finder(tuple(instead.split())))
    sys.meta_path.append(_Finder(tuple(names.split())))
