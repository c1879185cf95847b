"""A line on a terminal that says what is being measured: with rich where it is installed, nothing otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A function to be called ahead of each step, with its name."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        except ImportError:
            pass
        else:
            columns = (SpinnerColumn(), TextColumn("{task.completed:.0f}"), TextColumn("{task.description}"))
            options = {"console": Console(stderr=True), "transient": True}
            # What is printed meanwhile stands above the line on a terminal, and goes where it is to go otherwise.
            with Progress(*columns, TimeElapsedColumn(), redirect_stdout=sys.stdout.isatty(), **options) as bar:
                task = bar.add_task(title, total=None)
                yield lambda text: bar.update(task, advance=1, description=f"{title}: {text}")
            return
    yield lambda text: None
