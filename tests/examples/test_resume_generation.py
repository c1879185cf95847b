"""The resume-generation example, and proof that it would notice a lost or a misplaced block."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the example needs torch, which is not installed")
pytest.importorskip("transformers", reason="the example needs transformers, which is not installed")

import kvraw  # noqa: E402
from examples import resume_generation as example  # noqa: E402


def test_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "tokens and logits are equal" in out
    assert "engine cpu" in out


@pytest.mark.gpu
def test_gpu(gpu: int, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is a GPU, but torch is built without CUDA")
    assert example.main(["--device", f"cuda:{gpu}"]) == 0
    out = capsys.readouterr().out
    assert "tokens and logits are equal" in out
    assert "engine kernel: the cheapest by the model" in out


def test_the_context_decides_the_tokens() -> None:
    tokens, logits = example.resume("cpu").expected
    assert len(tokens.unique()) > len(tokens) // 2
    assert logits.isfinite().all()


def test_a_load_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kvraw, "load", lambda *args, **options: None)
    outcome = example.resume("cpu")
    assert not outcome.same
    assert outcome.resumed[1].isnan().all()
    assert example.main(["--device", "cpu"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_a_block_in_the_place_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks that change places would not do: attention does not mind the order of rotated keys.
    store = kvraw.store

    def misplaced(cache: object, chunks: object, ids: list[int], **options: object) -> kvraw.Transfer:
        return store(cache, chunks, [ids[0], ids[0], *ids[2:]], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kvraw, "store", misplaced)
    outcome = example.resume("cpu")
    assert outcome.resumed[1].isfinite().all()
    assert not torch.equal(outcome.expected[0], outcome.resumed[0])
