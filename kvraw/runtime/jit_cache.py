"""Compiled functions on disk: a file each, which only this user may have written, and which is whole or absent.

What is kept are pickles of machine code, so whoever may write them runs code here: the directory and each file must
belong to this user, to root or to the owner of the package, and nobody else may write to them. Both are looked at
through their descriptors, so it does not matter who may write to the directories above. Imported on first use only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pickle
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from kvraw import config

__all__ = ["KernelCache", "kept_in", "unsaved"]

_log = logging.getLogger("kvraw")
unsaved: list[OSError] = []  # why compiled kernels could not be kept

_MAGIC = b"KVRJ1\n"
_DIGEST = hashlib.sha256().digest_size
_ABANDONED = 3600.0  # seconds after which a file under way belongs to a process that was ended


class _DistrustedError(PermissionError):
    """A directory or file that somebody else could have written."""


@functools.cache
def _trusted() -> set[int]:
    """Users that may run code here: this one, root, and whose package this is."""
    with contextlib.suppress(OSError):
        return {os.geteuid(), 0, os.stat(__file__).st_uid}
    return {os.geteuid(), 0}


def _require_own(info: os.stat_result, path: object) -> None:
    if info.st_uid not in _trusted():
        raise _DistrustedError(f"{path} belongs to user {info.st_uid}, must belong to user {os.geteuid()}")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _DistrustedError(f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, others must not write to it")


def _places() -> Iterator[tuple[Path, int]]:
    """Directories to keep kernels in, and the mode to make each with; the best first."""
    mine = f"kvraw-{os.geteuid()}"
    if numba.config.CACHE_DIR:
        yield Path(numba.config.CACHE_DIR).absolute() / mine, 0o700
    # As readable as the package is: kernels that root compiled into an image serve all of its users.
    yield Path(__file__).parent / "__pycache__" / "kernels", 0o755
    if (home := config.user_cache()) is not None:
        yield home / mine, 0o700


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _require_own(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def _write(directory: int, name: str, data: bytes, mode: int) -> None:
    """Put a whole file in place, or nothing."""
    temporary = f"{name}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode & 0o644, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _sweep(directory: int) -> None:
    """Remove files that processes began and did not finish."""
    for name in os.listdir(directory):
        if name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime < time.time() - _ABANDONED:
                    os.unlink(name, dir_fd=directory)


def _read(directory: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise _DistrustedError(f"{name} is no regular file")
        _require_own(info, name)
        return file.read()


@functools.cache
def _place() -> tuple[Path, int] | None:
    """The directory in which this process keeps kernels: the first that can be written to."""
    for path, mode in _places():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode)
            with _opened(path) as directory:
                _sweep(directory)
                probe = f"{secrets.token_hex(8)}.tmp"
                os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory))
                os.unlink(probe, dir_fd=directory)
        except _DistrustedError as error:
            _log.warning("compiled kernels are neither read from nor kept in %s: %s", path, error)
        except OSError:
            continue
        else:
            return path, mode
    return None


def _readable() -> Iterator[tuple[Path, int]]:
    """The places to look at: that which is written to, and better ones that can only be read."""
    for place in _places():
        yield place
        if place == _place():
            return


def kept_in() -> str | None:
    """The directory that compiled kernels are kept in; None where there is no place for them."""
    found = _place()
    return None if found is None else str(found[0])


def _stamp(module: ModuleType) -> bytes | None:
    """Digest of all source text that a module's kernels come from; None where there is no text."""
    modules = {module.__name__: module}
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str) and name.startswith("kvraw.") and name in sys.modules:
            modules[name] = sys.modules[name]
    digest = hashlib.sha256()
    for name in sorted(modules):
        try:
            text = inspect.getsource(modules[name])
        except OSError:
            return None
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.digest()


def _constants(function: Callable[..., Any]) -> Iterator[tuple[str, int]]:
    """The integers that a function, and those that it calls, find in their modules."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, int):
            yield name, value
        elif (inner := getattr(value, "py_func", None)) is not None and inner is not function:
            yield from _constants(inner)


class KernelCache:
    """The compiled forms of one function; what numba's dispatcher asks of a cache.

    Parameters
    ----------
    function : callable
        A function at the top of a module.
    options : tuple
        What else the compiled form depends on.
    """

    def __init__(self, function: Callable[..., Any], options: tuple[object, ...] = ()) -> None:
        self._function = function
        self._options = options
        self._source = inspect.getfile(function)

    @functools.cached_property
    def _stamp(self) -> bytes | None:
        # Asked for at the first call, when the module is complete.
        return _stamp(sys.modules[self._function.__module__])

    @property
    def cache_path(self) -> str | None:
        """The directory of compiled forms."""
        return kept_in()

    def _name(self, sig: Any, codegen: Any) -> str:
        function = self._function
        versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.implementation.cache_tag)
        options = [getattr(numba.config, name, None) for name in ("OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")]
        # Constants by their values too: they may depend on the machine, or come through several modules.
        parts = (sig, codegen.magic_tuple(), versions, options, self._options, tuple(_constants(function)))
        key = repr((self._source, function.__qualname__, *parts))
        module = function.__module__.replace("kvraw.", "").replace(".cpu_kernels", "")
        short = hashlib.sha256(key.encode()).hexdigest()[:24]
        return f"{module}.{function.__name__.strip('_').removesuffix('_source')}-{short}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """A compiled form; None where it is not there, damaged, of other sources, or not to be trusted."""
        target_context.refresh()
        name = self._name(sig, target_context.codegen())
        for path, _ in _readable():
            try:
                with _opened(path) as directory:
                    data = memoryview(_read(directory, name))
                head = _MAGIC + (self._stamp or b"")
                body = data[len(head) + _DIGEST :]
                if data[: len(head)] != head or data[len(head) :][:_DIGEST] != hashlib.sha256(body).digest():
                    continue
                return CompileResult._rebuild(target_context, *pickle.loads(body))
            except OSError:
                continue
            except Exception as error:  # whatever another numba makes of it
                _log.debug("a compiled kernel does not load: %s: %r", path / name, error)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled form; a disk that is full, or broken, costs time and not the call."""
        found = _place()
        if found is None or self._stamp is None or data.library.has_dynamic_globals:
            return
        path, mode = found
        body = dumps(data._reduce())
        try:
            with _opened(path) as directory:
                whole = _MAGIC + self._stamp + hashlib.sha256(body).digest() + body
                _write(directory, self._name(sig, data.codegen), whole, mode)
        except OSError as error:
            if not unsaved:
                _log.warning("compiled kernels cannot be kept in %s: %s", path, error)
            unsaved.append(error.with_traceback(None))

    def enable(self) -> None:
        """Numba's; always on."""

    def disable(self) -> None:
        """Numba's; always on."""

    def flush(self) -> None:
        """Numba's; a compiled form that is out of date counts as absent."""
