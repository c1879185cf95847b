"""Standing in for modules of LMCache and SGLang, in processes of their own with small packages of those names."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
LMCACHE = "import kvraw.adapters.lmcache as ours; ours.install()"
SGLANG = "import kvraw.adapters.sglang as ours; ours.install()"


def run(tmp_path: Path, files: dict[str, str], code: str) -> None:
    """Run code in a new process that finds these files."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import importlib, sys\nsys.path.remove('')\n{code}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


COMPILED = """
def multi_layer_kv_transfer(): return "theirs"
def encode_of_theirs(): return "theirs"
__all__ = ["multi_layer_kv_transfer"]
"""
# As a module without anything of its own that forwards what it is asked for.
FORWARDS = """
class Ops:
    def multi_layer_kv_transfer(self): return "theirs"
    def encode_of_theirs(self): return "theirs"
ops, asked = Ops(), []
def __getattr__(name):
    asked.append(name)
    return getattr(ops, name)
"""
ITSELF = f"import sys, types\nother = types.ModuleType('other')\nexec('''{COMPILED}''', vars(other))\n"
ITSELF += "sys.modules[__name__] = other"
LAZY = "def native():\n    import lmcache.cuda_ops as native\n    return native\n"
CHECK = """
native = lmcache.native()
from lmcache import cuda_ops
from lmcache.cuda_ops import multi_layer_kv_transfer, TransferDirection
assert native is cuda_ops is lmcache.cuda_ops is sys.modules["lmcache.cuda_ops"]
assert multi_layer_kv_transfer is native.multi_layer_kv_transfer is ours.multi_layer_kv_transfer
assert TransferDirection is ours.TransferDirection and native.H2D is ours.H2D
assert not hasattr(native, "install") and not hasattr(native, "no_such_name")
assert importlib.util.find_spec("lmcache.cuda_ops") is not None
"""
THEIRS = "assert native.encode_of_theirs() == 'theirs' and {'encode_of_theirs', 'is_mla'} <= set(dir(native))\n"
AGAIN = f"assert importlib.reload(native) is native\n{CHECK}"
BEFORE = f"{LMCACHE}\nassert 'lmcache' not in sys.modules\nimport lmcache\n"


@pytest.mark.parametrize("package", [LAZY, f"{LAZY}import lmcache.cuda_ops", f"{LAZY}from lmcache import cuda_ops"])
@pytest.mark.parametrize("module", [COMPILED, FORWARDS, ITSELF], ids=["names", "forwards", "replaces itself"])
def test_a_module_that_is_there(tmp_path: Path, package: str, module: str) -> None:
    """Imported by the package or later, it has all that the adapter has, and its own names beside."""
    files = {"lmcache/__init__.py": package, "lmcache/cuda_ops.py": module}
    eager = "assert 'lmcache.cuda_ops' in sys.modules\n" if package != LAZY else ""
    asked = "assert not {'multi_layer_kv_transfer', 'H2D'} & set(native.asked)\n" if module is FORWARDS else ""
    theirs = THEIRS.replace("'encode_of_theirs', ", "") if module is FORWARDS else THEIRS
    run(tmp_path, files, f"{BEFORE}{eager}{CHECK}{theirs}{asked}{AGAIN}")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {f"lmcache/cuda_ops{SUFFIX}": "not a shared object"},
        {"lmcache/cuda_ops.py": "raise OSError('libcudart.so: cannot open shared object file')"},
        {"lmcache/cuda_ops.py": "import no_such_module"},
    ],
    ids=["absent", "broken", "OSError", "ImportError"],
)
def test_a_module_that_is_not_there(tmp_path: Path, files: dict[str, str]) -> None:
    run(tmp_path, {"lmcache/__init__.py": LAZY, **files}, f"{BEFORE}{CHECK}{AGAIN}")


def test_an_error_of_another_kind_is_told(tmp_path: Path) -> None:
    files = {"lmcache/__init__.py": LAZY, "lmcache/cuda_ops.py": "1 / 0"}
    code = "try:\n    lmcache.native()\nexcept ZeroDivisionError: sys.exit()\nsys.exit('nothing was raised')"
    run(tmp_path, files, BEFORE + code)


FALLBACK = COMPILED + "def helper_of_theirs(): return 'theirs'\n"
MERGED = """
import sys, types
from lmcache import python_ops_fallback
try:
    import lmcache.c_ops as native
except ImportError:
    native = None
c_ops = types.ModuleType("lmcache.c_ops")
for source in (python_ops_fallback, native):
    for name in dir(source):
        if not name.startswith("_"):
            setattr(c_ops, name, getattr(source, name))
sys.modules["lmcache.c_ops"] = c_ops
"""
ALIAS = "import sys\nfrom lmcache import python_ops_fallback\nsys.modules['lmcache.c_ops'] = python_ops_fallback\n"
CHECK_C = """
import lmcache.c_ops
from lmcache import c_ops, python_ops_fallback as fallback
assert hasattr(lmcache, "c_ops") and c_ops is lmcache.c_ops is sys.modules["lmcache.c_ops"]
assert c_ops is not fallback and fallback.multi_layer_kv_transfer() == "theirs"
assert c_ops.multi_layer_kv_transfer is ours.multi_layer_kv_transfer and c_ops.D2H is ours.D2H
assert c_ops.helper_of_theirs() == "theirs"
importlib.reload(c_ops)
assert c_ops.multi_layer_kv_transfer is ours.multi_layer_kv_transfer and c_ops.helper_of_theirs() == "theirs"
"""


@pytest.mark.parametrize("first", [BEFORE, f"import lmcache\n{LMCACHE}\n{LMCACHE}\n"], ids=["before", "after"])
@pytest.mark.parametrize("package", [MERGED, ALIAS], ids=["merged", "alias"])
def test_a_module_that_the_package_makes(tmp_path: Path, package: str, first: str) -> None:
    files = {"lmcache/__init__.py": package, "lmcache/python_ops_fallback.py": FALLBACK}
    run(tmp_path, files, first + CHECK_C)


@pytest.mark.parametrize("first", [BEFORE, f"import lmcache\n{LMCACHE}\n"], ids=["before", "after"])
def test_a_module_that_nobody_has(tmp_path: Path, first: str) -> None:
    """The later one is stood in for all the same; the earlier one, which later versions do not have, is not made."""
    code = """
assert lmcache.cuda_ops is sys.modules['lmcache.cuda_ops'] and lmcache.cuda_ops.is_mla is ours.is_mla
assert not hasattr(lmcache, "c_ops") and importlib.util.find_spec("lmcache.c_ops") is None
try: import lmcache.c_ops
except ModuleNotFoundError as error: assert error.name == "lmcache.c_ops", error
else: sys.exit("it was imported")
"""
    run(tmp_path, {"lmcache/__init__.py": ""}, first + code)


CPU = """
class DeviceOps:
    def alloc_pinned_ptr(self, size, device_id=0): return "theirs"
    def multi_layer_kv_transfer(self, *args, **kwargs): return "theirs"
    def encode_of_theirs(self): return "theirs"
    TransferDirection = int
class CpuDeviceOps(DeviceOps):
    def tensor_from_ptr(self): return "theirs"
"""
HOME = "lmcache.v1.platform.devices.cpu"
PARTS = HOME.split(".")
DEVICES = {"/".join([*PARTS[:n], "__init__.py"]): "" for n in range(2, len(PARTS) + 1)} | {
    "lmcache/__init__.py": f"from {HOME}.device_ops import CpuDeviceOps\ndevice_ops = CpuDeviceOps()",
    f"{HOME.replace('.', '/')}/device_ops.py": CPU,
}


@pytest.mark.parametrize("first", [BEFORE, f"import lmcache\n{LMCACHE}\n{LMCACHE}\n"], ids=["before", "after"])
def test_the_devices_of_a_machine_without_a_gpu(tmp_path: Path, first: str) -> None:
    """Operations that a device's class has become those here; its types, what only it has, and the classes stay."""
    code = f"""
from {HOME}.device_ops import CpuDeviceOps, DeviceOps
found = lmcache.device_ops
assert found.alloc_pinned_ptr is ours.alloc_pinned_ptr is CpuDeviceOps().alloc_pinned_ptr
assert CpuDeviceOps.alloc_pinned_ptr is DeviceOps.alloc_pinned_ptr
assert found.multi_layer_kv_transfer is ours.multi_layer_kv_transfer
assert found.encode_of_theirs() == found.tensor_from_ptr() == DeviceOps().alloc_pinned_ptr(1) == "theirs"
assert found.TransferDirection is int and not hasattr(found, "execute_cb_retrieve_plan_flat")
importlib.reload(sys.modules["{HOME}.device_ops"])
assert sys.modules["{HOME}.device_ops"].CpuDeviceOps().alloc_pinned_ptr is ours.alloc_pinned_ptr
"""
    run(tmp_path, DEVICES, first + code)


def test_a_module_that_was_imported_before(tmp_path: Path) -> None:
    files = {"lmcache/__init__.py": f"{LAZY}import lmcache.cuda_ops", "lmcache/cuda_ops.py": COMPILED}
    run(tmp_path, files, f"import lmcache\nbefore = lmcache.cuda_ops\n{LMCACHE}\n{CHECK}{THEIRS}"
        "assert before.multi_layer_kv_transfer() == 'theirs'")  # fmt: skip


def test_the_package_itself(tmp_path: Path) -> None:
    """It keeps its loader, its data and its other modules; a second import of one that failed is looked after too."""
    files = {
        "lmcache/__init__.py": f"import sys\nif not hasattr(sys, 'second'): raise ImportError\n{LAZY}",
        "lmcache/other.py": "value = 7",
        "lmcache/data.txt": "text",
    }
    code = f"""
{LMCACHE}
assert importlib.util.find_spec("lmcache").loader.get_filename("lmcache").endswith("__init__.py")
try: import lmcache
except ImportError: sys.second = True
import lmcache, pkgutil
from lmcache.other import value
assert value == 7 and pkgutil.get_data("lmcache", "data.txt") == b"text"
assert type(lmcache.__loader__).__module__ == type(lmcache.__spec__.loader).__module__ != "kvraw.adapters.stand_in"
{CHECK}
importlib.reload(lmcache)
{CHECK}
"""
    run(tmp_path, files, code)
    run(tmp_path / "none", {}, f"{LMCACHE}\nassert importlib.util.find_spec('lmcache') is None")


KERNELS = {
    "sgl_kernel/__init__.py": "from sgl_kernel.kvcacheio import transfer_kv_direct, is_hip, of_theirs\n"
    "def rmsnorm(): return 'theirs'\ndef transfer_kv_all_layer(): return 'the root\\'s own'",
    "sgl_kernel/kvcacheio.py": "def transfer_kv_direct(): return 'theirs'\ndef is_hip(): return 'theirs'\n"
    "def of_theirs(): return 'theirs'",
}


@pytest.mark.parametrize(
    "first", [f"{SGLANG}\nassert 'sgl_kernel' not in sys.modules\n", f"import sgl_kernel\n{SGLANG}\n"],
    ids=["before", "after"],
)  # fmt: skip
def test_sglang(tmp_path: Path, first: str) -> None:
    code = """
import sgl_kernel
from sgl_kernel import is_hip, kvcacheio, of_theirs, rmsnorm, transfer_kv_direct
from sgl_kernel.kvcacheio import transfer_kv_per_layer
assert kvcacheio is sgl_kernel.kvcacheio is sys.modules["sgl_kernel.kvcacheio"]
assert transfer_kv_direct is kvcacheio.transfer_kv_direct is ours.transfer_kv_direct
assert transfer_kv_per_layer is ours.transfer_kv_per_layer and is_hip is ours.is_hip
assert rmsnorm() == of_theirs() == kvcacheio.of_theirs() == "theirs"
assert sgl_kernel.transfer_kv_all_layer() == "the root's own" and not hasattr(kvcacheio, "install")
"""
    run(tmp_path, KERNELS, first + code)


def test_sglang_without_its_kernels(tmp_path: Path) -> None:
    code = """
try: import sgl_kernel.kvcacheio
except ImportError as error: assert "{}" in str(error), error
else: sys.exit("it was imported")
"""
    run(tmp_path, {}, f"{SGLANG}\n{code.format('No module named ' + repr('sgl_kernel'))}")
    broken = {"sgl_kernel/__init__.py": "raise ImportError('built for another torch')"}
    run(tmp_path, broken, f"{SGLANG}\n{code.format('built for another torch')}")
