"""README.md and docs/: the examples run, commands, variables and figures are the real ones, links lead somewhere."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvraw import config
from kvraw.cli.main import _parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
MAPS = [*DOCS, *sorted((ROOT / "benchmarks").glob("*.md")), *sorted((ROOT / "tests").glob("*.md"))]
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *MAPS]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> list[str]:
    """Python examples; those in ``py`` need another project, or are fragments, and are not run."""
    return re.findall(r"```python\n(.*?)```", text, re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p.read_text())], ids=named)
def test_the_examples_run(page: Path) -> None:
    """In order, in one namespace for each page."""
    namespace: dict[str, object] = {"print": lambda *a: None}
    for block in blocks(page.read_text()):
        exec(compile(block, named(page), "exec"), namespace)


def test_there_are_examples() -> None:
    counts = {page.name: len(blocks(page.read_text())) for page in PAGES}
    assert counts["README.md"] == 1
    assert sum(counts.values()) >= 15


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 120


def test_every_document_is_named_in_the_readme() -> None:
    assert [named(page) for page in DOCS if f"({named(page)})" not in README] == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [t for t in targets if "://" not in t and not (page.parent / t).exists()] == []


def test_every_variable_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(KVRAW_\w+)` \| (.*?) \|$", (ROOT / "docs/environment.md").read_text(), re.M))
    assert sorted(rows) == sorted(v.name for v in config.VARIABLES)
    assert f"default {config.MAX_BATCH.default}" in rows["KVRAW_MAX_BATCH"]
    for engine in config.ENGINES:
        assert f"`{engine}`" in rows["KVRAW_ENGINE"]
        assert engine in config.ENGINE.help.split(": ")[1].split(", ")


def test_every_command_and_option_is_described() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert sorted(commands.choices) == sorted(re.findall(r"^## `kvraw (\w+)`$", text, re.M))
    options = {
        option
        for parser in commands.choices.values()
        for action in parser._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }
    assert sorted(options - set(re.findall(r"--\w[\w-]*", text))) == []
    assert sorted(set(re.findall(r"--\w[\w-]*", text)) - options - {"--help"}) == []


def test_figures_are_those_that_were_measured() -> None:
    """Whatever a table on performance says stands in benchmarks/, where commands and machines are."""
    measured = "\n".join(page.read_text() for page in (ROOT / "benchmarks").glob("*.md"))
    known = set(re.findall(r"\d+\.\d+", measured))
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs/performance.md").read_text(), re.M)
    figures = {figure for row in rows for figure in re.findall(r"\d+\.\d+", row)}
    assert len(figures) > 50
    assert sorted(figures - known) == []


def test_the_test_command_is_what_ci_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "python -m pytest" in README
    assert 'python" -m pytest' in script


@pytest.mark.parametrize("page", EVERY_PAGE, ids=named)
def test_files_that_are_named_are_there(page: Path) -> None:
    """Paths such as `kvraw/copying/plan.py`: in a map that is out of date nobody finds the way."""
    paths = re.findall(r"`((?:kvraw|tests|docs|benchmarks|examples|\.ci)/[\w./]*)`", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_map_shows_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    hidden = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    rooms = [f"kvraw/{p.name}{'/' * p.is_dir()}" for p in (ROOT / "kvraw").iterdir() if p.name not in hidden]
    assert sorted(room for room in rooms if f"`{room}`" not in text) == []
