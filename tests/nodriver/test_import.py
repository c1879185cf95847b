"""What importing kvraw costs, and what it leaves alone. Each test looks at a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvraw

ROOT = Path(kvraw.__file__).parents[1]
HEAVY = ("torch", "numba", "llvmlite", "cuda", "zmq", "msgspec", "prometheus_client")
BUDGET_US = 50_000

LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
EVERY_NAME = "import kvraw; [getattr(kvraw, name) for name in kvraw.__all__]; from kvraw import *"


def run(
    code: str, *options: str, cwd: Path | None = None, without: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in without} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *options, "-c", code]
    return subprocess.run(command, env=env, cwd=cwd, check=True, capture_output=True, text=True, timeout=120)


def import_times(code: str) -> dict[str, int]:
    """Cumulative microseconds of every import."""
    lines = (line.split("|") for line in run(code, "-X", "importtime").stderr.splitlines() if line.count("|") == 2)
    return {name.strip(): int(total) for _, total, name in lines if total.strip().isdigit()}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvraw", (*HEAVY, "numpy")),
        ("import kvraw.transfer", HEAVY),
        ("import kvraw.codec, kvraw.rope", HEAVY),
        ("import kvraw.adapters.sglang, kvraw.adapters.vllm", HEAVY),
        (EVERY_NAME, HEAVY),
    ],
    ids=["kvraw", "transfer", "codec and rope", "adapters", "every name"],
)
def test_heavy_modules_stay_out(code: str, absent: tuple[str, ...]) -> None:
    loaded = set(run(f"{code}\n{LOADED}").stdout.split())
    assert "kvraw" in loaded
    assert loaded.isdisjoint(absent)


def test_import_time() -> None:
    def beyond_numpy() -> int:
        times = import_times("import kvraw")
        return times["kvraw"] - times.get("numpy", 0)

    # Other work on the machine only ever adds: one run within the budget shows that the imports fit it.
    assert any(beyond_numpy() < BUDGET_US for _ in range(20))


def test_public_names() -> None:
    assert dir(kvraw) == sorted(kvraw.__all__)
    assert len(set(kvraw.__all__)) == len(kvraw.__all__)
    for name in kvraw.__all__:
        assert getattr(kvraw, name) is not None
    assert kvraw.PagedCache.__module__ == "kvraw.cache"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'kvraw' has no attribute 'paged_cache'"):
        kvraw.paged_cache  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'paged_cache'"):
        from kvraw import paged_cache  # type: ignore[attr-defined]  # noqa: F401


def test_import_without_home_in_a_read_only_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    run(EVERY_NAME, cwd=tmp_path, without=("HOME",))
    assert list(tmp_path.iterdir()) == []
