"""vLLM's published package on the CPU, with kvraw by its entry point and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engines.environments import HERE, SUITE, Environment, outcome

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

FIXTURES = """
import logging, pytest
@pytest.fixture
def default_vllm_config(): yield None
@pytest.fixture
def caplog_vllm(caplog):
    logger = logging.getLogger("vllm"); before = logger.propagate; logger.propagate = True
    with caplog.at_level(logging.INFO): yield caplog
    logger.propagate = before
"""
# Without those of its shared regions, which are not kvraw's, and whose processes wait for each other.
TESTS = (
    "test_gpu_worker.py test_swap_blocks_batch.py test_swap_blocks_triton.py test_canonical_layout.py test_capacity.py"
)
LOADED = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"


@pytest.mark.parametrize("when", ["", "late"])
def test_store_and_load(vllm: Environment, when: str) -> None:
    """By vLLM's own worker, by kvraw's offloading spec, and by what its other connector calls."""
    text = vllm.run("-O", str(HERE / "in_vllm.py"), *filter(None, [when]))
    assert "all bytes equal" in text
    assert text.count("kvraw serves vllm") == 1, text
    assert vllm.counted["kvraw.adapters.vllm.swap_blocks_batch"] == 17


def test_its_own_tests(vllm: Environment, tmp_path: Path) -> None:
    """None fails that does not fail without kvraw; most of those that copy need a GPU."""
    folder = tmp_path / "tests/v1"
    shutil.copytree(vllm.sources / "tests/v1/kv_offload/cpu", folder / "kv_offload/cpu")
    shutil.copy(vllm.sources / "tests/v1/kv_offload/conftest.py", folder / "kv_offload")
    for package in (tmp_path / "tests", folder, folder / "kv_offload"):
        (package / "__init__.py").touch()
    (tmp_path / "tests/conftest.py").write_text(FIXTURES + LOADED)
    failed = []
    for environ in ({}, {"KVRAW_DISABLE": "vllm"}):
        paths = [f"tests/v1/kv_offload/cpu/{name}" for name in TESTS.split()]
        done = vllm.tried(*SUITE, *paths, cwd=tmp_path, timeout=1500, **environ)
        passed, names = outcome(done.stdout)
        assert passed > 10, done.stdout[-4000:]
        print(f"vllm: {passed} passed, {len(names)} failed, {environ}")
        failed.append(names)
    assert failed[0] - failed[1] == set()


def test_doctor(vllm: Environment) -> None:
    text = vllm.run("-m", "kvraw", "doctor", "--engines")
    assert "tried: it called kvraw.adapters.vllm.swap_blocks_batch" in text, text
