"""The linter, the formatter and the type checker, as configured in pyproject.toml."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    ["ruff check --quiet", "ruff format --check --quiet --diff", "mypy --no-error-summary"],
    ids=["lint", "format", "types"],
)
def test_tool(command: str) -> None:
    tool, *options = command.split()
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed (kvraw[test] has it)")
    done = subprocess.run([sys.executable, "-m", tool, *options], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
