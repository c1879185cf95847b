"""Entry points: small packages with the engines' plugin managers, in processes of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvraw
from kvraw import config
from kvraw.adapters import engines, sglang, vllm_plugin
from kvraw.adapters.engines import ENGINES, Engine
from kvraw.adapters.lmcache_pinning import PinMemory
from kvraw.cli import engines as cli
from kvraw.cli.main import main
from kvraw.runtime.memory import locate
from tests.adapters.test_stand_in import ROOT, run
from tests.helpers.torch_like import TorchLike

CUDA = "lmcache/v1/platform/devices/cuda/__init__.py"
# How each engine looks for plugins, and what the tests look at afterwards.
MANAGER = """
from importlib.metadata import entry_points
def load(group):
    return [ep.load() for ep in entry_points(group=group) if ep.name == "kvraw"]
"""
FILES = {
    "torch.py": "class version: hip, cuda = None, '13.0'\nclass cuda:\n    is_available = staticmethod(lambda: True)",
    "manager.py": MANAGER,
    "lmcache/__init__.py": "",
    "lmcache/logging.py": "import logging\nasked = []\n"
    "def init_logger(name):\n    asked.append(name)\n    return logging.getLogger(name)",
    "lmcache/cuda_ops.py": "def batched_memcpy(*a): return 'theirs'\ndef of_theirs(): return 'theirs'",
    "lmcache/v1/__init__.py": "",
    "lmcache/v1/platform/__init__.py": "",
    "lmcache/v1/platform/devices/__init__.py": "",
    CUDA: "class PinMemoryBackend: pass\nclass CudaDeviceSpec:\n    device_type = backend_name = 'cuda'\n"
    "    pin_memory_backend = property(lambda self: PinMemoryBackend)\n    def is_available(self): return True",
    "sgl_kernel/__init__.py": "",
    "sgl_kernel/kvcacheio.py": "def transfer_kv_direct(): return 'theirs'",
    "sglang/__init__.py": "",
    "sglang/kernels/__init__.py": "",
    "sglang/kernels/ops/__init__.py": "",
    "sglang/kernels/ops/kvcache/__init__.py": "",
    "sglang/kernels/ops/kvcache/hicache.py": "def transfer_hicache_one_layer(): return 'theirs'\n"
    "def use_hicache_tma_kernel(): return 'theirs'\nis_hip = len",
    "sglang/taker.py": "from sglang.kernels.ops.kvcache.hicache import transfer_hicache_one_layer as jit_one_layer\n"
    "from sgl_kernel.kvcacheio import transfer_kv_direct",
    "vllm/__init__.py": "",
    "vllm/_custom_ops.py": "def swap_blocks_batch(): return 'theirs'\ndef convert_fp8(): return 'theirs'",
    "vllm/taker.py": "from vllm._custom_ops import swap_blocks_batch as taken",
}
ENTER = {
    "lmcache": "import manager; (found,) = manager.load('lmcache.device_plugins')\n"
    "from lmcache.v1.platform.devices.cuda import CudaDeviceSpec\n"
    "assert issubclass(found, CudaDeviceSpec) and found().backend_name == 'kvraw'\n",
    "sglang": "import manager; [f() for f in manager.load('sglang.srt.plugins')]\n",
    "vllm": "import manager; [f() for f in manager.load('vllm.general_plugins')]\n",
}
SERVED = {
    "lmcache": "from lmcache import cuda_ops\nassert cuda_ops.of_theirs() == 'theirs'\nf = cuda_ops.batched_memcpy\n",
    "sglang": "from sglang.kernels.ops.kvcache import hicache\nfrom sgl_kernel import kvcacheio\n"
    "assert hicache.use_hicache_tma_kernel() == 'theirs' and hicache.is_hip is len\n"
    "f = hicache.transfer_hicache_one_layer\n"
    "from sglang import taker\nassert taker.jit_one_layer is f\n"
    "assert taker.transfer_kv_direct is kvcacheio.transfer_kv_direct\n"
    "assert f.__module__.startswith('kvraw.') == kvcacheio.transfer_kv_direct.__module__.startswith('kvraw.')\n",
    "vllm": "from vllm import _custom_ops, taker\nassert _custom_ops.convert_fp8() == 'theirs'\n"
    "f = taker.taken\nassert f is _custom_ops.swap_blocks_batch\n",
}
LOG = """
import logging
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.name, record.levelname, record.getMessage()))
logging.getLogger().addHandler(Keep()); logging.getLogger().setLevel("INFO")
"""
YES = "assert f.__module__.startswith('kvraw.'), f\n"
NO = "assert not f.__module__.startswith('kvraw.'), f\n"


def metadata(versions: dict[str, str]) -> dict[str, str]:
    """The packages' metadata, kvraw's entry points among them as its project file has them."""
    text = (ROOT / "pyproject.toml").read_text()
    points = re.findall(r'\[project\.entry-points\."([^"]+)"\]\nkvraw = "([^"]+)"', text)
    files = {"kvraw-0.1.0.dist-info/entry_points.txt": "".join(f"[{g}]\nkvraw = {v}\n" for g, v in points)}
    for name, version in ({"kvraw": "0.1.0"} | versions).items():
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files[f"{name}-{version}.dist-info/METADATA"] = text
    return files


def newest(engine: Engine) -> str:
    return ".".join(map(str, engine.last)) + "+cu130"


def enter(tmp_path: Path, name: str, code: str, version: str | None = None, **files: str) -> None:
    """Have an engine look for plugins, and run code behind it."""
    versions = {name: newest(ENGINES[name]) if version is None else version}
    run(tmp_path, FILES | metadata(versions) | files, f"{LOG}{code}")


def test_the_table_is_the_metadata() -> None:
    found = metadata({})["kvraw-0.1.0.dist-info/entry_points.txt"]
    assert found == "".join(f"[{e.group}]\nkvraw = {e.entry}\n" for e in ENGINES.values())
    assert tuple(ENGINES) == config.SERVED == tuple(engines._INSTALL)


@pytest.mark.parametrize("name", ENGINES)
def test_served(tmp_path: Path, name: str) -> None:
    """Nothing is imported until the engine asks; then its names are kvraw's, and one line says so."""
    code = f"""
assert not [m for m in sys.modules if m.startswith("kvraw")]
{ENTER[name]}assert not {{"kvraw.adapters.vllm", "kvraw.adapters.sglang", "cuda.bindings"}} & (
    set(sys.modules) - {{"kvraw.adapters.{name}"}})
{SERVED[name]}{YES}{ENTER[name]}
((logger, level, text),) = lines
assert (logger, level) == ("{name}.kvraw", "INFO") and "kvraw serves {name} " in text, lines
"""
    enter(tmp_path, name, code)


def test_the_line_is_there_before_an_engine_sets_its_logging_up(tmp_path: Path) -> None:
    code = f"""import io
sys.stderr = io.StringIO()
{ENTER["sglang"]}{ENTER["sglang"]}
assert sys.stderr.getvalue().startswith("kvraw serves sglang 0.5.23+cu130: sgl_kernel.kvcacheio"), sys.stderr.getvalue()
assert sys.stderr.getvalue().count("\\n") == 1
"""
    run(tmp_path, FILES | metadata({"sglang": newest(ENGINES["sglang"])}), code)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_what_was_imported_before(tmp_path: Path, name: str) -> None:
    """Who took a function from a module that was loaded already has kvraw's too."""
    enter(tmp_path, name, f"{SERVED[name]}{ENTER[name]}{SERVED[name]}{YES}")


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("before", "version", "files", "level", "text"),
    [
        ("import os; os.environ['KVRAW_DISABLE'] = 'vllm, sglang,lmcache'", None, {}, "INFO", "KVRAW_DISABLE names it"),
        ("import os; os.environ['KVRAW_DISABLE'] = 'llama'", None, {}, "INFO", "must be names of lmcache, sglang"),
        ("", "99.0", {}, "WARNING", "version 99.0 is not one that this kvraw knows"),
        ("", "0.0.1", {}, "WARNING", "version 0.0.1 is not one"),
        ("", "dev", {}, "WARNING", "version dev is not one"),
        ("", None, {"torch.py": "class version: hip = '6.4'"}, "WARNING", "torch is built for ROCm"),
        (
            "",
            None,
            {
                "torch.py": "class version: pass\nclass accelerator:\n"
                "    @staticmethod\n    def current_accelerator(): return type('D', (), {'type': 'xpu'})"
            },
            "WARNING",
            "torch is built for xpu",
        ),
        (
            "from kvraw.adapters import engines\ndef bad(): raise OSError('no room')\n"
            "engines._INSTALL.update(dict.fromkeys(engines._INSTALL, bad))",
            None,
            {},
            "WARNING",
            "OSError: no room",
        ),
    ],
)
def test_left_alone(
    tmp_path: Path, name: str, before: str, version: str | None, files: dict[str, str], level: str, text: str
) -> None:
    """The engine starts with its own, whatever the reason, which is logged once."""
    code = f"""{before}
{ENTER[name]}{ENTER[name]}{SERVED[name]}{NO}
((logger, level, text),) = lines
assert (logger, level) == ("{name}.kvraw", "{level}") and {text!r} in text, lines
"""
    enter(tmp_path, name, code, version, **files)


def test_lmcache_without_a_gpu(tmp_path: Path) -> None:
    """Its compiled module, which it does not look at then, stays as it is."""
    torch = "class version: hip = None\nclass cuda:\n    is_available = staticmethod(lambda: False)"
    enter(tmp_path, "lmcache", f"{ENTER['lmcache']}{SERVED['lmcache']}{NO}", **{"torch.py": torch})


def test_lmcaches_device_is_there_where_it_is_named(tmp_path: Path) -> None:
    code = f"""import os
{ENTER["lmcache"]}
assert not found().is_available()
os.environ["LMCACHE_DEVICE_BACKEND"] = "Kvraw"
assert found().is_available()
assert issubclass(found().pin_memory_backend, sys.modules[CudaDeviceSpec.__module__].PinMemoryBackend)
"""
    enter(tmp_path, "lmcache", code)


@pytest.mark.parametrize(
    ("version", "known"), [("0.5.6", True), ("0.5.6+cu12", True), ("0.5.6rc1", True), ("0.5.5", False), ("0.6", False)]
)
def test_versions(version: str, known: bool) -> None:
    assert engines._is_known(ENGINES["lmcache"], version) is known
    assert [v for v in ("0.33.7", "1.33", "0.33") if engines._is_known(ENGINES["vllm"], v)] == ["0.33.7", "0.33"]


@pytest.mark.parametrize("kinds", [("device", "pinned"), ("pinned", "device")])
def test_vllms_block_copies(w: TorchLike, kinds: tuple[str, str]) -> None:
    """Blocks of all layers by one call, between caches whose blocks have unlike sizes from layer to layer."""
    kinds = kinds if w.stream is not None else ("host", "host")
    rng = np.random.default_rng(0)
    arrays = [[rng.integers(0, 256, (9, 4096 * (k + 1)), dtype=np.uint8) for k in range(3)] for _ in kinds]
    caches = [{str(k): w.put(kind, a) for k, a in enumerate(held)} for kind, held in zip(kinds, arrays, strict=True)]
    stream = SimpleNamespace(cuda_stream=0 if w.stream is None else w.stream.handle)
    params = vllm_plugin.build_params(caches[0], caches[1], stream)
    vllm_plugin.copy_blocks([8, 0, 3], [1, 2, 8], params)
    vllm_plugin.copy_blocks([], [], params)
    for a, b, tensor in zip(arrays[0], arrays[1], caches[1].values(), strict=True):
        b[[1, 2, 8]] = a[[8, 0, 3]]
        np.testing.assert_array_equal(w.take(tensor), b)
    with pytest.raises(kvraw.BoundsError, match=r"dst_block_ids\[1\] is 9, must be in \[0, 9\)"):
        vllm_plugin.copy_blocks([0, 1], [0, 9], params)
    with pytest.raises(kvraw.BoundsError, match="src_block_ids has 1 entries, dst_block_ids 2"):
        vllm_plugin.copy_blocks([0], [0, 1], params)
    with pytest.raises(kvraw.LayoutError, match="must have the same names"):
        vllm_plugin.build_params(caches[0], {}, stream)


@pytest.mark.parametrize(
    ("version", "entry", "trial", "ok", "text"),
    [
        ("", True, {}, True, "not installed; kvraw serves 0.33"),
        ("0.33.0", True, {"called": "kvraw.f", "equal": True, "error": None}, True, "tried: it called kvraw.f, all"),
        ("0.33.0", True, {"called": "vllm.f", "equal": True, "error": None}, False, "the engine called its own vllm.f"),
        ("0.33.0", True, {"called": "kvraw.f", "equal": False, "error": None}, False, "kvraw.f moved did not arrive"),
        ("0.33.0", True, {"called": None, "equal": False, "error": "E: x"}, False, "not served: the try failed: E: x"),
        ("0.33.0", False, {}, False, "does not find kvraw in vllm.general_plugins"),
        ("0.34.0", True, {}, True, "not served: version 0.34.0 is not one that this kvraw knows (0.33)"),
    ],
)
def test_doctor(
    version: str,
    entry: bool,
    trial: dict[str, object],
    ok: bool,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (engines, cli):
        monkeypatch.setattr(module, "version_of", lambda engine: version if engine.name == "vllm" else "")
    monkeypatch.setattr(cli, "_entered", lambda engine: entry)
    monkeypatch.setattr(cli, "_try", lambda name: trial)
    assert main(["doctor", "--engines"]) == (0 if ok else 1)
    assert text in capsys.readouterr().out
    main(["doctor", "--engines", "--json"])
    assert json.loads(capsys.readouterr().out)["ok"] is ok


@pytest.mark.parametrize(
    ("version", "text"), [("0.33.0", "it called kvraw.adapters.vllm.swap_blocks_batch"), ("0.32.0", "not served")]
)
def test_doctor_tries(tmp_path: Path, version: str, text: str) -> None:
    """In a process of its own, by a plugin manager, with torch as it is."""
    pytest.importorskip("torch", reason="an engine's operations take torch's tensors")
    files = {name: body for name, body in FILES.items() if name.startswith("vllm/")} | metadata({"vllm": version})
    files |= {
        "manager.py": MANAGER,
        "vllm/plugins.py": "def load_general_plugins():\n"
        "    import manager; [f() for f in manager.load('vllm.general_plugins')]",
    }
    code = f"""
import io
from contextlib import redirect_stdout
from kvraw.cli.main import main
with redirect_stdout(io.StringIO()) as out: code = main(["doctor", "--engines"])
assert code == 0 and {text!r} in out.getvalue(), out.getvalue()
"""
    run(tmp_path, files, code)


def test_pinning(device: int) -> None:
    """Pinned once for each call, and as long as one is not undone; what cannot be is an answer, and no error."""
    memory = np.zeros(3 << 20, np.uint8)
    pins, address = PinMemory(), -(-memory.ctypes.data // 4096) * 4096
    assert pins.is_pin_supported
    assert not pins.unpin_memory(address)
    assert [pins.pin_memory(address, 1 << 20, flags) for flags in (0, 2)] == [True, True]
    assert locate(address, 1 << 20).device_address
    assert not pins.pin_memory(address + 4096, 1 << 20)
    assert not pins.pin_memory(0, 4096)
    assert pins.unpin_memory(address)
    assert locate(address, 1 << 20).device_address
    assert pins.unpin_memory(address)
    assert not locate(address, 1 << 20).device_address
    assert not pins.unpin_memory(address)


def test_addresses_that_a_gpu_sees(w: TorchLike) -> None:
    if w.stream is None:
        pytest.skip("without a GPU there is none")
    rows = np.zeros((4, 64), np.uint8)
    on_device, pinned = w.put("device", rows), w.put("pinned", rows)
    assert sglang.get_device_accessible_ptr(on_device, w.device) == on_device.data_ptr()
    assert sglang.get_device_accessible_ptr(pinned, w.device) == locate(pinned.data_ptr(), 1).device_address
    with pytest.raises(kvraw.PlacementError, match="pageable host memory"):
        sglang.get_device_accessible_ptr(w.put("host", rows), w.device)
