"""Standing in for LMCache's module, in a process of its own with a package of that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = """
import sys, types
module = types.ModuleType("lmcache.c_ops")
module.multi_layer_kv_transfer = "theirs"
module.encode_of_theirs = "theirs"
sys.modules["lmcache.c_ops"] = c_ops = module
"""
CHECK = """
import lmcache
import lmcache.c_ops
from lmcache.c_ops import multi_layer_kv_transfer, encode_of_theirs, TransferDirection
assert lmcache.c_ops is sys.modules["lmcache.c_ops"]
assert multi_layer_kv_transfer is ours.multi_layer_kv_transfer
assert TransferDirection is ours.TransferDirection
assert encode_of_theirs == "theirs"
assert not any(type(f).__module__.startswith("kvraw") for f in sys.meta_path)
"""


@pytest.mark.parametrize("first", ["ours.install(); ours.install()\nassert 'lmcache' not in sys.modules",
                                   "import lmcache; ours.install()"])  # fmt: skip
def test_install(tmp_path: Path, first: str) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text(PACKAGE)
    code = f"import sys\nimport kvraw.adapters.lmcache as ours\nassert 'torch' not in sys.modules\n{first}\n{CHECK}"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
