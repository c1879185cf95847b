"""The example of two processes with a cache server."""

from __future__ import annotations

import pytest

from examples import cache_server


def test_the_second_process_computes_the_rest_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cache_server.main([]) == 0
    out = capsys.readouterr().out
    assert "loaded 256 tokens, computed 44, stored 0 chunks" in out
    assert out.endswith("\nthe same tokens\n")
