"""Key re-rotation on the CPU beside torch's operations, and clear errors for what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

import kvraw
from kvraw.rope import rerotate_keys


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("rotary", "size"), [(128, 128), (64, 80), (6, 7)])
def test_beside_torch(rotary: int, size: int, neox: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kind, half = getattr(torch, dtype), rotary // 2
    torch.manual_seed(0)
    key = (torch.randn(70, 5, size) * 3).to(kind)
    angle = torch.arange(200)[:, None] / 10000 ** (torch.arange(half) / half)
    cache = torch.cat([angle.cos(), angle.sin()], 1).to(kind)
    old, new = torch.randint(0, 200, (70,)), torch.randint(0, 200, (70,), dtype=torch.int32)
    want = key.clone()
    x, y = (want[..., :half], want[..., half:rotary]) if neox else (want[..., 0:rotary:2], want[..., 1:rotary:2])
    oc, os = cache[old][:, None].chunk(2, -1)
    nc, ns = cache[new][:, None].chunk(2, -1)
    u, v = x * oc + y * os, y * oc - x * os
    first, second = u * nc - v * ns, v * nc + u * ns
    x.copy_(first)
    y.copy_(second)
    rerotate_keys(key, old, new, cache, neox=neox).wait()
    assert torch.equal(key, want)


F32 = np.ndarray


def fused(a: F32, b: F32, c: F32, d: F32, other: bool) -> F32:
    """``a * b + c * d`` in fp32 with one of the products not rounded, as compilers make it where they may."""
    kept, rounded = (c * d.astype(np.float64), a * b) if other else (a * b.astype(np.float64), c * d)
    out: F32 = (kept + rounded).astype(np.float32)  # fp64 holds the product, and more than twice the sum's digits
    return out


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("back", [False, True], ids=["one rotation", "two rotations"])
def test_fp32_beside_fused_products(back: bool, other: bool) -> None:
    """A product that is not rounded moves the sum of a rotation by one unit in the last place, of the larger product.

    Or of the sum where that is larger. Under cancellation the sum itself may be far smaller than that unit. Two
    rotations make four, of the largest product that a pair meets.
    """
    rng = np.random.default_rng(5)
    key = rng.standard_normal((4000, 4, 64)).astype(np.float32)
    angle = rng.uniform(0, 2 * np.pi, (4001, 32))
    angle[0] = 0
    cache = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    old = rng.integers(0, 4001, 4000) if back else np.zeros(4000, np.int64)
    new = rng.integers(0, 4001, 4000)
    found = key.copy()
    rerotate_keys(found, old, new, cache)
    x, y = key[..., :32], key[..., 32:]
    (oc, os), (nc, ns) = (np.split(cache[p][:, None], 2, axis=2) for p in (old, new))
    u, v = fused(x, oc, y, os, other), fused(y, oc, -x, os, other)
    want = np.concatenate([fused(u, nc, -v, ns, other), fused(v, nc, u, ns, other)], 2)
    products = [np.abs(p) for p in (x * oc, y * os, y * oc, x * os, u * nc, v * ns, v * nc, u * ns)]
    if back:
        unit = np.spacing(np.maximum.reduce(products))
        bound = 4 * np.concatenate([unit, unit], 2)
    else:
        larger = np.concatenate([np.maximum(*products[4:6]), np.maximum(*products[6:])], 2)
        bound = np.spacing(np.maximum(larger, np.abs(want)))
    apart = np.abs(found - want)
    assert (apart <= bound).all()
    assert 0.1 < (apart > 0).mean() < 0.5


def test_there_and_back() -> None:
    rng = np.random.default_rng(0)
    key = rng.standard_normal((300, 4, 64)).astype(np.float32)
    angle = np.arange(500)[:, None] / 10000 ** (np.arange(32) / 32)
    cache = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    old, new = rng.integers(0, 500, 300), rng.integers(0, 500, 300)
    moved = key.copy()
    rerotate_keys(moved, old, new, cache)
    assert np.abs(moved - key).max() > 0.5
    rerotate_keys(moved, new, old, cache)
    np.testing.assert_allclose(moved, key, atol=2e-6)


KEY, CACHE, POSITIONS = np.zeros((4, 2, 16), np.float32), np.zeros((10, 16), np.float32), np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "said"),
    [
        ((KEY, POSITIONS[:3], POSITIONS, CACHE), {}, kvraw.BoundsError, "old_positions has 3 positions, key has 4"),
        (
            (KEY, POSITIONS, POSITIONS + 10, CACHE),
            {},
            kvraw.BoundsError,
            r"new_positions\[0\] is 10, must be in \[0, 10\)",
        ),
        ((KEY, POSITIONS, POSITIONS.astype(float), CACHE), {}, TypeError, "new_positions holds float64"),
        ((KEY, POSITIONS, POSITIONS, CACHE.astype(np.float16)), {}, TypeError, "must hold float32 as key does"),
        (
            (KEY.astype(np.uint16), POSITIONS, POSITIONS, CACHE),
            {},
            TypeError,
            "key holds uint16 of 2 bytes; pass dtype=",
        ),
        ((KEY, POSITIONS, POSITIONS, CACHE[:, :15]), {}, kvraw.LayoutError, "cos_sin_cache has shape"),
        ((KEY, POSITIONS, POSITIONS, CACHE[0]), {}, kvraw.LayoutError, "cos_sin_cache has shape"),
        (
            (KEY[..., :8], POSITIONS, POSITIONS, CACHE),
            {},
            kvraw.LayoutError,
            "16 rotary dimensions, key has heads of 8",
        ),
        ((KEY[..., ::2], POSITIONS, POSITIONS, CACHE), {}, kvraw.LayoutError, "must be dense"),
        ((KEY[::-1], POSITIONS, POSITIONS, CACHE), {}, kvraw.LayoutError, "non-negative"),
        ((KEY[0, 0], POSITIONS, POSITIONS, CACHE), {}, kvraw.LayoutError, "key has 1 axes"),
        ((KEY.reshape(4, 32), POSITIONS, POSITIONS, CACHE), {}, kvraw.LayoutError, "pass head_size"),
        (
            (KEY.reshape(4, 32), POSITIONS, POSITIONS, CACHE),
            {"head_size": 24},
            kvraw.LayoutError,
            "multiple of head_stride",
        ),
        ((KEY, POSITIONS, POSITIONS, CACHE), {"head_size": 8}, kvraw.LayoutError, "heads of 16 elements"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: tuple[object, ...], options: dict[str, int], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rerotate_keys(*arguments, **options)  # type: ignore[arg-type]
    assert not KEY.any()


def test_read_only_keys_are_refused() -> None:
    key, table = np.ones((3, 2, 4), np.float32), np.ones((9, 4), np.float32)
    key.flags.writeable = table.flags.writeable = False
    with pytest.raises(kvraw.PlacementError, match="key is read-only memory"):
        rerotate_keys(key, np.arange(3), np.arange(3) + 1, table)
    assert (key == 1).all()
    rerotate_keys(key.copy(), np.arange(3), np.arange(3) + 1, table)


@pytest.mark.parametrize("strides", [(0, 16), (32, 0)])
def test_keys_that_lie_on_one_another_are_refused(strides: tuple[int, int]) -> None:
    memory, table = np.ones((3, 2, 4), np.float32), np.ones((9, 4), np.float32)
    key = np.lib.stride_tricks.as_strided(memory, (3, 2, 4), (*strides, 4))
    with pytest.raises(kvraw.LayoutError, match=r"key has strides .* none may be 0"):
        rerotate_keys(key, np.arange(3), np.arange(3) + 1, table)
    assert (memory == 1).all()


def test_a_dtype_is_told_by_name() -> None:
    key, table = np.ones((3, 2, 4), np.float16), np.ones((9, 4), np.float16)
    with pytest.raises(TypeError, match=r"dtype is <class 'numpy\.float16'>, must be one of"):
        rerotate_keys(key, np.arange(3), np.arange(3), table, dtype=np.float16)  # type: ignore[arg-type]
