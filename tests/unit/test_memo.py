"""Memos: bounded, and the newest entries stay."""

from __future__ import annotations

from kvraw.memo import Memo


def test_the_older_half_goes() -> None:
    memo: Memo[int, str] = Memo(4)
    for k in range(5):
        assert memo.keep(k, str(k)) == str(k)
    assert dict(memo) == {2: "2", 3: "3", 4: "4"}
    assert memo.get(0) is None


def test_of_one_entry() -> None:
    memo: Memo[int, int] = Memo(1)
    for k in range(3):
        memo.keep(k, k)
        assert dict(memo) == {k: k}


def test_another_value_of_an_entry_takes_no_room() -> None:
    memo: Memo[int, str] = Memo(4)
    for k in range(4):
        memo.keep(k, "old")
    memo.keep(2, "new")
    assert dict(memo) == {0: "old", 1: "old", 2: "new", 3: "old"}
