"""kvraw where things are missing: a writable disk, a home, a driver, numba. Each test looks at a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvraw
from tests.static.test_wheel import build_wheel

ROOT = Path(kvraw.__file__).parents[1]
NOWHERE = "/dev/null/nowhere"  # not even root can create this

ROUND_TRIP = """
import kvraw, numpy as np

def round_trip(engine=None, block_size=4, pin=None, **options):
    rng = np.random.default_rng(7)
    layers = [rng.integers(1, 256, (2, 8, block_size, 2, 16), np.uint8) for _ in range(3)]
    before = [layer.copy() for layer in layers]
    cache, ids = kvraw.PagedCache.from_tensors(layers, format=1), [5, 0, 7]
    with kvraw.HostPool(1 << 24, pin=pin) as pool:
        chunks = pool.chunks(2, cache.chunk_bytes(2 * block_size))
        chunks[1].numpy()[:] = 0
        kvraw.store(cache, chunks, ids, engine=engine, **options)
        for chunk, part in zip(chunks, (ids[:2], ids[2:])):
            stored = chunk.numpy().reshape(2, 3, 2, block_size, 2, 16)  # plane, layer, block, token, head, element
            assert (stored[:, :, :len(part)] == np.stack([layer[:, part] for layer in before], 1)).all()
            assert not stored[:, :, len(part):].any()
        for layer in layers:
            layer[:, ids] = 0
        kvraw.load(cache, chunks, ids, engine=engine, **options)
    assert all((a == b).all() for a, b in zip(layers, before))
"""
# Read-only bits do not hold for root, unless it gives up CAP_DAC_OVERRIDE (1).
RESPECT_MODES = """
import ctypes
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 1)
assert libc.capset(header, sets) == 0
"""
KERNELS_NOT_CACHED = """
from kvraw.copying.cpu_kernels import copy_items
assert copy_items.stats.cache_path is None, copy_items.stats.cache_path
"""
NO_NUMBA = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(code: str, *, path: Path = ROOT, **variables: str | None) -> str:
    """Run code in a process of its own that imports kvraw from `path`; variables that are None are unset."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "error", **variables}
    env = {key: value for key, value in env.items() if value is not None}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    """The wheel, unpacked as an installer would, and then read-only."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield tmp_path
    for folder in folders:
        folder.chmod(0o755)


@pytest.fixture(scope="module")
def no_driver() -> None:
    from kvraw.runtime.driver import driver_or_none

    if (driver := driver_or_none()) is not None:
        pytest.skip(f"there is a CUDA driver, version {driver.version()}")


@pytest.mark.parametrize(("home", "cache"), [(None, NOWHERE), (NOWHERE, None)], ids=["HOME unset", "HOME unusable"])
def test_read_only_site_packages(installed: Path, home: str | None, cache: str | None) -> None:
    run(
        f"""{RESPECT_MODES}{ROUND_TRIP}
from pathlib import Path
package = Path(kvraw.__file__).parent
assert package == Path({str(installed / "kvraw")!r})
try:
    (package / "copying" / "probe").touch()
except PermissionError:
    pass
else:
    raise AssertionError("the package can be written to")
round_trip("cpu")
{KERNELS_NOT_CACHED}""",
        path=installed,
        HOME=home,  # where HOME is unset, the user database may still name a home
        XDG_CACHE_HOME=cache,
        NUMBA_CACHE_DIR=None,
    )
    assert not list(installed.rglob("__pycache__"))


def test_wheel_as_zip(wheel: Path) -> None:
    # Nothing can be written beside modules in an archive, not even by root.
    run(
        f"{ROUND_TRIP}\nround_trip('cpu')\n{KERNELS_NOT_CACHED}\n"
        "from kvraw.ptx.loader import manifest, read_ptx\nassert all(read_ptx(name) for name in manifest())",
        path=wheel,
        HOME=NOWHERE,
        XDG_CACHE_HOME=None,
        NUMBA_CACHE_DIR=NOWHERE,
    )


def test_kernels_are_cached_where_possible(tmp_path: Path) -> None:
    run(f"{ROUND_TRIP}\nround_trip('cpu')", NUMBA_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("*.nbc"))


NOT_COMPILED = f"""{ROUND_TRIP}
import hashlib
from kvraw import codec
from kvraw.runtime.jit import COMPILED
from kvraw.rope import rerotate_keys

kvraw.warm_up()
round_trip("cpu")
round_trip("cpu", block_size=64)
size = 9 << 20  # compiled, stores go past the caches, from several threads
a, b = np.arange(size, dtype=np.uint8), np.zeros(size, np.uint8)
kvraw.memcpy_batch(*[[x.ctypes.data, x.ctypes.data + size // 2] for x in (b, a)], [size // 2] * 2)
assert (a == b).all()
kvraw.memcpy_batch([a.ctypes.data + 1], [a.ctypes.data], [1000])  # overlaps itself
assert (a[1:1001] == b[:1000]).all() and (a[1001:] == b[1001:]).all()

digest, rng = hashlib.sha256(), np.random.default_rng(0)
for dtype in ("float32", "float16", "bfloat16"):
    values = rng.standard_normal((2, 8, 2, 16)).astype(np.float32) * 10.0 ** rng.integers(-8, 9, (2, 8, 2, 16))
    angles = rng.standard_normal((32, 16)).astype(np.float32)
    if dtype == "bfloat16":
        keys, cos_sin = ((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (values, angles))
    else:
        with np.errstate(over="ignore"):
            keys, cos_sin = values.astype(dtype), angles.astype(dtype)
    for neox in (True, False):
        rerotate_keys(keys, np.arange(8), np.arange(8) + 3, cos_sin, neox=neox, dtype=dtype)
        digest.update(keys.tobytes())
    compressed = codec.compress(cos_sin.reshape(2, 16, 16), [32, 7], dtype=dtype)
    digest.update(compressed.to_bytes())
    digest.update(codec.decompress(compressed).tobytes())
print(COMPILED, digest.hexdigest())
"""


def test_kernels_that_are_not_compiled_do_the_same() -> None:
    (yes, compiled), (no, plain) = (
        run(NOT_COMPILED, NUMBA_DISABLE_JIT=value, KVRAW_CPU_THREADS="3").split() for value in (None, "1")
    )
    assert (yes, no) == ("True", "False")
    assert compiled == plain


def test_without_numba() -> None:
    run(
        f"""{NO_NUMBA}{ROUND_TRIP}
round_trip("reference")
try:
    round_trip("cpu")
except ImportError as error:
    assert "numba" in str(error), f"does not name numba: {{error}}"
else:
    raise AssertionError("the CPU engine ran without numba")
"""
    )


def test_fork() -> None:
    # 3 MiB: split over threads, which the child does not inherit
    run(
        f"""{ROUND_TRIP}
import os, threading
round_trip("cpu", block_size=16384, pin=False)
assert any(thread.name.startswith("kvraw-cpu") for thread in threading.enumerate())
child = os.fork()
if child == 0:
    try:
        round_trip("cpu", block_size=16384, pin=False)
        os._exit(0)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
round_trip("cpu", block_size=16384, pin=False)
""",
        KVRAW_CPU_THREADS="2",
        PYTHONWARNINGS=None,  # Python 3.12 warns of every fork of a process with threads
    )


@pytest.mark.usefixtures("no_driver")
class TestWithoutDriver:
    def test_default_engine(self) -> None:
        run(f"{ROUND_TRIP}\nround_trip()")

    def test_kernel_engine(self) -> None:
        run(
            f"""{ROUND_TRIP}
try:
    round_trip("kernel", stream=0)
except kvraw.PlacementError as error:
    assert "host memory" in str(error) and "kernel" in str(error), error
else:
    raise AssertionError("the kernel engine took a cache in host memory")
"""
        )

    def test_stream(self) -> None:
        with pytest.raises(kvraw.DriverNotFoundError, match="CUDA driver"):
            kvraw.Stream(0)
        with pytest.raises(kvraw.DriverNotFoundError, match="CUDA driver"):  # the second call says the same
            kvraw.Stream(0)

    def test_pinned_pool(self) -> None:
        run(
            """
import kvraw, resource
from kvraw.runtime.driver import driver_or_none

def mapped():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

assert driver_or_none() is None  # what the attempt loads is loaded now
before = mapped()
for options in ({"pin": True}, {"device": 0}):
    try:
        kvraw.HostPool(128 << 20, **options)
    except kvraw.DriverNotFoundError as error:
        assert "CUDA driver" in str(error), error
    else:
        raise AssertionError("pinned without a driver")
assert mapped() - before < 64 << 20
"""
        )

    def test_default_pool(self) -> None:
        with kvraw.HostPool(1 << 20) as pool:
            assert pool.info()["pinned"] is pool.pinned is False
            pool.chunks(1, 1000)[0].numpy()[:] = 1
