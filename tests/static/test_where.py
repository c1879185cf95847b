"""The table of tests/README.md: each file of the package has a row, and what rows name is there."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "kvraw"
TEXT = (TESTS / "README.md").read_text()


def rows() -> list[tuple[list[str], list[str]]]:
    """Patterns of files, and of their tests."""
    table = TEXT.split("| in `kvraw/` | in `tests/` |\n|---|---|\n")[1]
    cells = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return [(re.findall("`(.*?)`", files), re.findall("`(.*?)`", tests)) for files, tests in cells]


def test_each_file_has_a_row() -> None:
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    patterns = [pattern for files_of, _ in rows() for pattern in files_of]
    assert len(patterns) > 30
    assert not [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)]
    assert not [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)]


def test_what_rows_name_is_there() -> None:
    named = {pattern for _, tests in rows() for pattern in tests} | set(re.findall(r"`(\w+/test_\w+\.py)`", TEXT))
    assert not [pattern for pattern in named if not list(TESTS.glob(pattern))]
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(re.findall(r"^\| `([a-z]+)` \| ", TEXT, re.MULTILINE))


def test_variables_are_those_that_tests_read() -> None:
    read = {
        name for path in TESTS.rglob("*.py") for name in re.findall(r'"(KVRAW_(?:TEST|REQUIRE)_\w+)"', path.read_text())
    }
    assert read <= set(re.findall(r"KVRAW_(?:TEST|REQUIRE)_\w+", TEXT))
