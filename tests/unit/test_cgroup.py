"""CPU quotas of control groups, and the threads that are chosen by them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvraw.copying import cpu
from kvraw.runtime import cgroup
from kvraw.runtime.host import populate


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "a" / "b c").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/a/b c\n")
    return tmp_path


def quota(tree: Path) -> float | None:
    return cgroup.cpu_quota(str(tree), str(tree / "cgroup"))


def test_version_2(tree: Path) -> None:
    assert quota(tree) is None
    (tree / "a" / "b c" / "cpu.max").write_text("max 100000\n")
    assert quota(tree) is None
    (tree / "a" / "cpu.max").write_text("150000 100000\n")
    assert quota(tree) == 1.5
    (tree / "a" / "b c" / "cpu.max").write_text("25000 50000\n")
    assert quota(tree) == 0.5
    (tree / "cgroup").write_text("0::/../elsewhere\n")  # as in a container that sees its own group as the root
    (tree / "cpu.max").write_text("400000 100000\n")
    assert quota(tree) == 4


@pytest.mark.parametrize("directory", ["cpu", "cpu,cpuacct"])
def test_version_1(tree: Path, directory: str) -> None:
    (tree / "cgroup").write_text("5:memory:/a\n4:cpu,cpuacct:/outside\n3:cpuset:/\n1:name=systemd:/a:b\n0::/\n")
    (tree / directory).mkdir()
    (tree / directory / "cpu.cfs_period_us").write_text("100000\n")
    (tree / directory / "cpu.cfs_quota_us").write_text("-1\n")
    assert quota(tree) is None
    (tree / directory / "cpu.cfs_quota_us").write_text("250000\n")
    assert quota(tree) == 2.5
    inner = tree / directory / "outside"
    inner.mkdir()
    (inner / "cpu.cfs_quota_us").write_text("20000")
    (inner / "cpu.cfs_period_us").write_text("20000")
    assert quota(tree) == 1


@pytest.mark.parametrize("text", ["", "max", "100000", "0 100000", "100000 0", "a b", "1 2 3", "\0\xff"])
def test_what_says_nothing(tree: Path, text: str) -> None:
    (tree / "cpu.max").write_bytes(text.encode("latin-1"))
    assert quota(tree) is None
    (tree / "cgroup").write_text("nonsense\n::\n0:\n")
    assert quota(tree) is None


@pytest.mark.parametrize(("share", "threads"), [(None, 64), (0.1, 1), (1.0, 1), (1.5, 2), (5.0, 5), (100.0, 64)])
def test_threads(share: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRAW_CPU_THREADS", raising=False)
    monkeypatch.delenv("KVRAW_HOST_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroup, "_quota", lambda: share)
    assert cgroup.usable_cores() == threads
    assert cpu.threads() == min(threads, 8)
    assert populate.populate_threads() == min(threads, 16)
    monkeypatch.setenv("KVRAW_CPU_THREADS", "7")
    assert cpu.threads() == 7
