"""`kvraw top` asks a server what it holds and does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvraw.cli.main import main
from kvraw.multiprocess import CacheServer
from tests.helpers.serving import HostCache, key, worker

IDS = [5, 1, 20, 9]


def test_it_says_what_the_server_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    with CacheServer(1 << 20, endpoint, disk=tmp_path / "disk", disk_bytes=1 << 20).start():
        assert main(["top", "--endpoint", endpoint, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["hit_rate"] is None
        with worker(HostCache(1).cache, endpoint) as w:
            w.store(key(1, 2), IDS)
            assert w.retrieve(key(1, 2), IDS) == 16
            assert w.retrieve(key(2, 2), IDS) == 0
            assert w.context.prefetch(key(1, 2)) == 16
            assert main(["top", "--endpoint", endpoint, "--json", "--count", "2", "--interval", "0.01"]) == 0
            report = json.loads(capsys.readouterr().out)
            assert (report["ok"], report["hit_rate"], report["workers"]) == (True, 0.5, 1)
            assert (report["counts"]["locked"] >= 2, report["counts"]["evicted"]) == (True, 0)
            assert 0 < report["pool_share"] < 1
            assert report["per_second"]["hits"] == 0
            assert main(["top", "--endpoint", endpoint]) == 0
            text = capsys.readouterr().out
            for part in ("hit rate", "50.0%", "1 live", "evictions", "locks", "disk", "2 chunks"):
                assert part in text
            pytest.importorskip("rich")
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
            assert main(["top", "--endpoint", endpoint, "--count", "2", "--interval", "0.01"]) == 0
            assert "50.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--timeout", "0.1"], 1, "did not answer"),
        (["--curve-key", "x"], 1, "go together"),
        (["--interval", "0"], 2, "must be a number above 0"),
    ],
)
def test_what_it_cannot_do(
    tmp_path: Path, argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--endpoint", f"ipc://{tmp_path}/none.sock", *argv]) == code
    assert says in capsys.readouterr().err
