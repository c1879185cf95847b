"""Environments of their own for the engines' published packages, and what runs in them.

They lie under ``KVRAW_TEST_ENGINES`` (default: ``~/.cache/kvraw-engines``) and are kept; kvraw itself is installed anew
in each session, as a package, so that plugin managers find its entry points.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
COMMON = (TORCH, "numpy", "numba", "cuda-python>=12.8,<14", "setuptools", "wheel", "pytest", "pytest-asyncio")

SUITE = (
    "-m",
    "pytest",
    "-q",
    "-o",
    "log_cli=false",
    "-p",
    "no:cacheprovider",
    "-rfE",
    "--continue-on-collection-errors",
)


def outcome(text: str) -> tuple[int, set[str]]:
    """How many tests passed, by the output of `SUITE`, and which failed."""
    counts = re.findall(r"(\d+) passed", text)
    lines = (line.split(" - ")[0] for line in text.splitlines() if line.startswith(("FAILED tests", "ERROR tests")))
    return int(counts[-1]) if counts else 0, set(lines)


# Counts calls of an adapter's operations, in whatever process; no part of how kvraw gets into an engine's path.
COUNTER = """
import functools, os, types
from kvraw.adapters.stand_in import amend
def counted(name, call):
    @functools.wraps(call)
    def wrapper(*args, **options):
        os.write(FILE, (name + "\\n").encode())
        return call(*args, **options)
    return wrapper
def count(module):
    for name in module.__all__:
        held = getattr(module, name)
        if isinstance(held, types.FunctionType) and name != "install":
            setattr(module, name, counted(module.__name__ + "." + name, held))
if os.environ.get("KVRAW_COUNTED"):
    FILE = os.open(os.environ["KVRAW_COUNTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for name in ("lmcache", "sglang", "vllm"):
        amend("kvraw.adapters." + name, count)
"""


@dataclass(frozen=True)
class Packages:
    """What an environment holds: the engine without its needs, and those of its needs that these tests come to."""

    engine: str
    version: str
    needs: tuple[str, ...]


class Environment:
    """A virtual environment with an engine and kvraw."""

    def __init__(self, packages: Packages) -> None:
        home = os.environ.get("KVRAW_TEST_ENGINES") or os.path.expanduser("~/.cache/kvraw-engines")
        self.packages = packages
        self.folder = Path(home) / f"{packages.engine}-{packages.version}"
        self.python = self.folder / "venv/bin/python"
        self.calls = self.folder / "calls.txt"
        self._make()

    def pip(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run pip there; skips where a package cannot be had."""
        command = [str(self.python), "-m", "pip", "-q", "--disable-pip-version-check", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        if done.returncode:
            pytest.skip(f"pip {' '.join(args)}: {done.stderr.strip().splitlines()[-1:]}")
        return done

    def _make(self) -> None:
        ready = self.folder / "ready"
        wanted = "\n".join((*COMMON, *self.packages.needs))
        if not ready.exists() or ready.read_text() != wanted:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            subprocess.run([sys.executable, "-m", "venv", str(self.folder / "venv")], check=True)
            self.pip("install", *COMMON)
            self.pip("install", *self.packages.needs)
            self.pip("install", "--no-deps", f"{self.packages.engine}=={self.packages.version}")
            ready.write_text(wanted)
        tree = self.folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(ROOT / "kvraw", tree / "kvraw", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        self.pip("install", "--no-deps", "--no-build-isolation", "--force-reinstall", str(tree))
        shutil.rmtree(tree)
        (self.folder / "counting").mkdir(exist_ok=True)
        (self.folder / "counting/sitecustomize.py").write_text(COUNTER)

    def environ(self, **more: str) -> dict[str, str]:
        """Variables of a process there, whose calls are counted."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVRAW_", "PYTEST_"))}
        path = os.pathsep.join((str(self.folder / "counting"), *filter(None, [more.pop("PYTHONPATH", "")])))
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        own = {"KVRAW_COUNTED": str(self.calls), "PYTHONPATH": path, "HOME": str(home), "OMP_NUM_THREADS": "2"}
        return kept | own | {"LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1"} | more

    def run(self, *args: str, timeout: float = 600, cwd: Path | None = None, **environ: str) -> str:
        """Run Python there; what it printed. Fails where it does, with the end of its output."""
        done = self.tried(*args, timeout=timeout, cwd=cwd, **environ)
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def tried(
        self, *args: str, timeout: float = 600, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python there."""
        self.calls.write_text("")  # emptied, not removed: a server that runs goes on writing to it
        command, place = [str(self.python), *args], cwd or self.folder
        return subprocess.run(
            command, cwd=place, env=self.environ(**environ), timeout=timeout, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @property
    def counted(self) -> Counter[str]:
        """Operations of kvraw that were called since the last `run` began, in any process."""
        return Counter(self.calls.read_text().split() if self.calls.exists() else ())

    @cached_property
    def sources(self) -> Path:
        """The engine's source package, which holds its tests; skips where there is none."""
        found = next(self.folder.glob("sources/*/tests"), None)
        if found is None:
            kept, built = self.folder / "sdist", self.folder / "built"
            built.mkdir(exist_ok=True)
            what = f"{self.packages.engine}=={self.packages.version}"
            args = ["download", what, "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean"]
            command = [str(self.python), "-m", "pip", "-q", *args, "-d", str(kept)]
            # Its metadata may fail to be made without a compiler; the archive is there by then.
            subprocess.run(command, capture_output=True, timeout=600, env={**os.environ, "TMPDIR": str(built)})
            (self.folder / "sources").mkdir(exist_ok=True)
            for archive in [*kept.glob("*.tar.gz"), *built.glob("*/*.tar.gz")][:1]:
                shutil.unpack_archive(archive, self.folder / "sources")
            for unpacked in [*built.glob("*/*/tests")][:1]:
                if not list(self.folder.glob("sources/*/tests")):
                    shutil.move(unpacked.parent, self.folder / "sources")
            shutil.rmtree(built, ignore_errors=True)
            found = next(self.folder.glob("sources/*/tests"), None)
        if found is None:
            pytest.skip(f"{self.packages.engine}'s source package, with its tests, cannot be had")
        return found.parent
