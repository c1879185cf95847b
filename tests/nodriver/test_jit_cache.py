"""Compiled CPU kernels on disk: what is damaged counts as absent, and what others could have written is not read."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvraw.runtime import jit_cache
from kvraw.runtime.jit import jit
from tests.helpers.profile import examples

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


def _triple_source(values: Any) -> Any:
    return values[0] * 3


VALUES = np.array([14])
HEAD = len(jit_cache._MAGIC) + 32  # and the digest behind it


def call() -> tuple[int, int]:
    """The kernel's value, as in a new process, and how many compiled forms were read."""
    kernel = jit(_triple_source)
    return int(kernel(VALUES)), sum(kernel.stats.cache_hits.values())


def fresh() -> None:
    jit_cache._place.cache_clear()
    jit_cache.unsaved.clear()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory that NUMBA_CACHE_DIR names; no other place is there."""
    places = jit_cache._places
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(jit_cache, "_places", lambda: iter([next(places())]))
    fresh()
    yield tmp_path / "base"
    fresh()


def kept(base: Path) -> Path:
    (path,) = base.rglob("*.nbc")
    return path


FACTOR = 3


def _inner_source(value: Any) -> Any:
    return value * FACTOR


_inner = jit(_inner_source)


def _outer_source(values: Any) -> Any:
    return _inner(values[0])


def test_other_values_of_constants_are_other_kernels(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same; what a constant is may depend on the machine."""
    assert jit(_outer_source)(VALUES) == 42
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 4)
    monkeypatch.setattr(sys.modules[__name__], "_inner", jit(_inner_source))
    kernel = jit(_outer_source)
    assert kernel(VALUES) == 56
    assert not sum(kernel.stats.cache_hits.values())


def test_other_options_are_other_kernels(base: Path) -> None:
    for options in ({}, {"nogil": False}, {"error_model": "numpy"}):
        kernel = jit(_triple_source, **options)
        assert kernel(VALUES) == 42
        assert not sum(kernel.stats.cache_hits.values())


def test_what_was_kept_is_read(base: Path) -> None:
    assert call() == (42, 0)
    assert call() == (42, 1)
    directory = kept(base).parent
    assert directory == base / f"kvraw-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert kept(base).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in directory.iterdir()] == [kept(base).name]
    assert jit_cache.kept_in() == str(directory)


@pytest.mark.parametrize("mask", [0, 0o002])
def test_whatever_the_umask_is(base: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        assert call() == (42, 0)
    finally:
        os.umask(before)
    assert call() == (42, 1)
    assert kept(base).parent.stat().st_mode & 0o777 == 0o700


def test_the_places_where_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for home, cache in ((tmp_path, None), (None, tmp_path)):
        for name, value in (("HOME", home), ("XDG_CACHE_HOME", cache)):
            monkeypatch.setenv(name, str(value)) if value else monkeypatch.delenv(name, raising=False)
        package, user = jit_cache._places()
        assert package == (Path(jit_cache.__file__).parent / "__pycache__" / "kernels", 0o755)
        assert user == (tmp_path / ("" if cache else ".cache") / f"kvraw-{os.geteuid()}", 0o700)
    monkeypatch.setenv("HOME", "not/absolute")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert len(list(jit_cache._places())) == 1


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "text": lambda data: b"hello world\n",
    "noise": lambda data: np.random.default_rng(1).bytes(len(data)),
    "a pickle": lambda data: data[HEAD + 32 :],
    "other sources": lambda data: data[:8] + bytes([data[8] ^ 1]) + data[9:],
    "sound, but no kernel": lambda data: data[:HEAD] + hashlib.sha256(pickle.dumps(1)).digest() + pickle.dumps(1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_counts_as_absent_and_is_replaced(base: Path, damage: Callable[[bytes], bytes]) -> None:
    call()
    path = kept(base)
    path.write_bytes(damage(path.read_bytes()))
    assert call() == (42, 0)
    assert call() == (42, 1)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_altered_bit_is_loaded(base: Path, data: st.DataObject) -> None:
    if not base.exists():
        call()
    path = kept(base)
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(altered)
    kernel = jit(_triple_source)
    assert kernel._cache.load_overload(*signature(kernel)) is None
    path.write_bytes(whole)
    assert kernel._cache.load_overload(*signature(kernel)) is not None


def signature(kernel: Any) -> tuple[Any, Any]:
    return (numba.typeof(VALUES),), kernel.targetctx


RAN: list[int] = []


def intrude() -> None:
    RAN.append(1)


class Intruder:
    """Runs code of its own where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return intrude, ()


def poison(path: Path) -> None:
    body = pickle.dumps(Intruder())
    path.write_bytes(path.read_bytes()[:HEAD] + hashlib.sha256(body).digest() + body)


def test_the_poison_works_where_it_is_trusted(base: Path) -> None:
    """Else the tests below would show nothing."""
    call()
    poison(kept(base))
    RAN.clear()
    call()
    assert RAN == [1]


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_what_others_may_write_is_not_read(base: Path, what: str, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    call()
    path = kept(base)
    poison(path)
    RAN.clear()
    (path.parent if what == "directory" else path).chmod(mode)
    fresh()
    assert call() == (42, 0)
    assert RAN == []
    if what == "directory":
        assert f"{path.parent} has mode {mode:04o}, others must not write to it" in caplog.text
        assert jit_cache.kept_in() is None
    else:
        assert call() == (42, 1)  # replaced by one of our own


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_others_own_is_not_read(base: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    call()
    path = kept(base)
    poison(path)
    RAN.clear()
    os.chown(path.parent if what == "directory" else path, 12345, -1)
    fresh()
    assert call() == (42, 0)
    assert RAN == []
    assert (f"{path.parent} belongs to user 12345, must belong to user 0" in caplog.text) == (what == "directory")


@pytest.mark.parametrize("what", ["directory", "file"])
def test_links_are_not_followed(base: Path, tmp_path: Path, what: str) -> None:
    call()
    path = kept(base)
    poison(path)
    RAN.clear()
    linked = path.parent if what == "directory" else path
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    fresh()
    assert call() == (42, 0)
    assert RAN == []


def test_what_is_no_file(base: Path) -> None:
    call()
    path = kept(base)
    path.unlink()
    os.mkfifo(path)  # to open it would wait for a writer
    assert call() == (42, 0)
    assert call() == (42, 1)
    path.unlink()
    path.mkdir()
    assert call() == (42, 0)
    assert len(jit_cache.unsaved) == 1  # a directory cannot be replaced by a file


def test_a_writer_that_fails_or_was_ended_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        assert call() == (42, 0)
    assert len(jit_cache.unsaved) == 1
    directory = base / f"kvraw-{os.geteuid()}"
    assert list(directory.iterdir()) == []
    old, new = directory / "a.nbc.1.tmp", directory / "b.nbc.2.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    fresh()
    assert call() == (42, 0)
    assert not old.exists()
    assert new.exists()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_that_fill_it_at_once(base: Path) -> None:
    children = []
    for _ in range(16):
        child = os.fork()
        if not child:
            code = 1
            try:
                code = 0 if call()[0] == 42 and not jit_cache.unsaved else 1
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 16
    assert call() == (42, 1)
    assert [path.suffix for path in (base / f"kvraw-{os.geteuid()}").iterdir()] == [".nbc"]


def test_threads_that_fill_it_at_once(base: Path) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(call()[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [42] * 8
    assert call() == (42, 1)


REAL = """
import numpy as np, kvraw
from kvraw.copying.cpu_kernels import copy_batch
a, b = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
kvraw.memcpy_batch([b.ctypes.data], [a.ctypes.data], [4096])
assert (a == b).all()
print(sum(copy_batch.stats.cache_hits.values()), copy_batch.stats.cache_path)
"""


def test_the_engines_kernels_in_processes(tmp_path: Path) -> None:
    def run() -> str:
        environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, env=environ, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    where = tmp_path / f"kvraw-{os.geteuid()}"
    assert run() == f"0 {where}"
    assert run() == f"1 {where}"
    for path in where.iterdir():
        path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))
    assert run() == f"0 {where}"
    assert run() == f"1 {where}"


ALL = """
import gc, kvraw
from kvraw.runtime import jit_cache
from kvraw.runtime.compiled import Compiled
kvraw.warm_up()
compiled = [one for one in gc.get_objects() if type(one) is Compiled]
[one.compile() for one in compiled]
assert all(one.entry is not None for one in compiled) and len(compiled) >= 2
assert not jit_cache.unsaved
"""


def test_programs_and_descriptors_are_kept_in_the_same_place(tmp_path: Path) -> None:
    script = "import kvraw.copying.copy_engine, kvraw.runtime.program" + ALL
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    written = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, timeout=120)
        assert done.returncode == 0, done.stderr
        written.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()})
    assert written[0] == written[1]
    names = {path.name.split("-")[0] for path in written[0]}
    assert {path.parent.name for path in written[0]} == {f"kvraw-{os.geteuid()}"}
    assert {"runtime.program_numba.run", "copying.descriptors_numba.enumerate", "copying.copy_items"} <= names


def test_the_sources_that_count() -> None:
    """A kernel is out of date when any module is altered that it takes something from."""
    from kvraw.codec import cpu_kernels as codec_kernels
    from kvraw.copying import descriptors_numba
    from kvraw.rope import cpu_kernels as rope_kernels
    from kvraw.runtime import program_numba

    for module, others in (
        (codec_kernels, ["codec.args"]),
        (rope_kernels, ["copying.cpu_floats"]),
        (program_numba, ["runtime.program_rows"]),
        (descriptors_numba, []),
    ):
        before = jit_cache._stamp(module)
        for name in ["runtime.jit", *others]:
            other = sys.modules[f"kvraw.{name}"]
            was = other.__file__
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jit_cache.inspect, "getsource", altered(other, jit_cache.inspect.getsource))
                assert jit_cache._stamp(module) != before, was
        assert jit_cache._stamp(module) == before


def altered(module: Any, read: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda asked: read(asked) + ("#" if asked is module else "")
