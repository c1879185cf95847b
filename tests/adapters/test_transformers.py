"""A transformers cache in host memory and back."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import kvraw
from kvraw.transformers import offload

torch = pytest.importorskip("torch", reason="transformers' caches are torch's tensors")
transformers = pytest.importorskip("transformers", reason="needs transformers")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def make(kind: str, model: Any) -> Any:
    if kind == "dynamic":
        return transformers.DynamicCache()
    return transformers.StaticCache(config=model.config, max_cache_len=64)


def tensors_of(cache: Any) -> dict[tuple[int, str], Any]:
    return {
        (at, name): value
        for at, layer in enumerate(cache.layers)
        for name, value in vars(layer).items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_goes_on(model: Any, kind: str, device: str) -> None:
    """The same logits as without an interruption, though the memory was somebody else's in between."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    model = model.to(device)
    tokens = torch.randint(128, (2, 20), device=device)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        whole, cut = make(kind, model), make(kind, model)
        want = [model(t, use_cache=True, **{name: whole}).logits for t in (tokens[:, :15], tokens[:, 15:])]
        model(tokens[:, :15], use_cache=True, **{name: cut})
        before = {key: (t.clone(), t.data_ptr()) for key, t in tensors_of(cut).items()}
        saved = offload(cut)
        assert saved.nbytes == sum(t.numel() * t.element_size() for t, _ in before.values())
        for tensor in tensors_of(cut).values():
            assert (tensor.numel() > 0) is (kind == "static")
            tensor.zero_()
        torch.full((1 << 20,), 7.0, device=device)
        saved.restore()
        for key, tensor in tensors_of(cut).items():
            assert torch.equal(tensor, before[key][0])
            assert kind != "static" or tensor.data_ptr() == before[key][1]
        got = model(tokens[:, 15:], use_cache=True, **{name: cut}).logits
    assert torch.equal(got, want[1])
    assert saved.closed
    with pytest.raises(kvraw.ClosedError, match="given back"):
        saved.restore()


def test_restored_more_than_once(model: Any) -> None:
    cache = make("dynamic", model)
    keys = torch.randn(1, 2, 9, 16).transpose(1, 2).contiguous().transpose(1, 2)  # with gaps
    cache.update(keys, keys * 2, 0)
    with offload(cache) as saved:
        for _ in range(2):
            saved.restore(keep=True).wait()
            assert torch.equal(cache.layers[0].keys, keys)
            cache.layers[0].values.zero_()
    assert saved.closed


def test_what_is_no_cache(model: Any) -> None:
    with pytest.raises(TypeError, match="cache is a int, must be a cache of transformers"):
        offload(7)
    offload(SimpleNamespace(layers=[])).restore()
    cache = make("static", model)
    cache.update(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), 0)
    saved = offload(cache)
    cache.layers[0].keys = torch.zeros(1, 2, 8, 16)
    with pytest.raises(kvraw.LayoutError, match=r"keys of a static layer has shape \(1, 2, 8, 16\), must have"):
        saved.restore()
