"""Runs the command line without a GPU, without variables, and in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvraw import config

ROOT = Path(__file__).parents[2]


def clear_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in config.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def no_driver(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let the commands find that there is no driver, for this reason."""

    def raising() -> None:
        raise error

    monkeypatch.setattr("kvraw.cli.doctor.driver", raising)
    monkeypatch.setattr("kvraw.cli.demo.driver", raising)


def python(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with HOME unset and warnings as errors."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("KVRAW_") and k != "HOME"}
    command = [sys.executable, "-W", "error", *args]
    return subprocess.run(command, cwd=cwd, env=base | {"PYTHONPATH": str(ROOT)} | env, capture_output=True, text=True)
