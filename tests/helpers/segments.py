"""Shared memory in a folder of its own, for another run of the tests sweeps too; and processes that own some."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvraw.runtime.host import shm

SHM = Path(f"/dev/shm/kvraw-tests-{os.getpid()}-{secrets.token_hex(4)}")


START = f"""
import os, signal, sys, threading, time
import kvraw
from kvraw.runtime.host import shm
from kvraw.runtime.host.mapping import HostOptions
shm.FOLDER = {str(SHM)!r}
"""
START += """
def own(name=None, nbytes=1 << 20):
    return kvraw.HostPool(nbytes, options=HostOptions(kind="shared", name=name))
def say(text):
    print(text, flush=True)
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    SHM.mkdir()
    monkeypatch.setattr(shm, "FOLDER", str(SHM))
    yield
    left = sorted(path.name for path in SHM.iterdir())
    shutil.rmtree(SHM)
    assert not left


def names() -> list[str]:
    return sorted(os.listdir(SHM))


class Child:
    """A Python process that runs code and talks by lines."""

    def __init__(self, code: str, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + code, *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self, number: int | None = None) -> tuple[int, str]:
        """Its exit code and what it complained about."""
        if number is not None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def left_by(*chosen: str) -> None:
    """What an owner that is killed leaves: segments of these names, or one without."""
    owner = Child(
        "kept = [own(*a) for a in (zip(sys.argv[1:]) if sys.argv[1:] else [()])]; say('made'); input()", *chosen
    )
    assert owner.line() == "made"
    assert set(chosen) <= set(names())
    owner.end(signal.SIGKILL)
