"""The two offload examples, and proof that they would notice a page that was lost."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the examples need torch, which is not installed")

import kvraw  # noqa: E402
from examples import cpu_offload, hicache_loop  # noqa: E402


def test_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert hicache_loop.main(["--device", "cpu"]) == 0
    assert cpu_offload.main(["--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.count("every layer saw the same keys and values") == 4
    assert "every block is the same" in out


@pytest.mark.gpu
def test_gpu(gpu: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is a GPU, but torch is built without CUDA")
    assert hicache_loop.main(["--device", "cuda"]) == 0
    assert cpu_offload.main(["--device", "cuda"]) == 0


def test_a_backup_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvraw.HostKVPool, "backup", lambda *args, **options: None)
    assert hicache_loop.main(["--device", "cpu"]) == 1


def test_a_block_in_the_place_of_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = cpu_offload.CpuOffloadHandler.submit

    def misplaced(self: object, job: int, direction: str, gpu_blocks: list[int], cpu_blocks: list[int]) -> None:
        submit(self, job, direction, gpu_blocks, cpu_blocks[::-1] if direction == "load" else cpu_blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_offload.CpuOffloadHandler, "submit", misplaced)
    assert cpu_offload.main(["--device", "cpu"]) == 1
