"""The README's examples run, in order, in one namespace; its commands and variables are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

from kvraw import config

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_examples_run() -> None:
    namespace: dict[str, object] = {"print": lambda *a: None}
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_every_variable_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(KVRAW_\w+)` \| (.*?) \|$", README, re.M))
    assert sorted(rows) == sorted(v.name for v in config.VARIABLES)
    assert f"default {config.MAX_BATCH.default}" in rows["KVRAW_MAX_BATCH"]
    for engine in config.ENGINES:
        assert f"`{engine}`" in rows["KVRAW_ENGINE"]
        assert engine in config.ENGINE.help.split(": ")[1].split(", ")


def test_the_test_command_is_what_ci_runs() -> None:
    script = (Path(__file__).parents[2] / ".ci" / "run").read_text()
    assert "python -m pytest" in README
    assert 'python" -m pytest' in script
