"""What serves LMCache's multiprocess workers, on stand-ins for its modules; the real ones are in tests/engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvraw
from kvraw.adapters import lmcache_multiprocess as ours
from kvraw.errors import BoundsError, ClosedError, LayoutError

NAMES = ("compute_kv_layout", "gather_paged_kv_to_cpu", "scatter_cpu_to_paged_kv")


@pytest.fixture
def segment() -> Iterator[kvraw.HostBuffer]:
    with kvraw.HostBuffer(8192, pin=False, options=kvraw.HostOptions(kind="shared")) as buffer:
        yield buffer


@pytest.fixture
def lmcache(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    class Context:
        def __init__(self, metadata: Any, req_client: Any, mq_timeout: float) -> None:
            self.metadata = metadata

    class EngineDrivenContextShm(Context):
        pass

    package = "lmcache.v1.multiprocess.transfer_context"
    parents = [package.rsplit(".", n)[0] for n in (3, 2, 1)]
    made = {name: ModuleType(name) for name in (*parents, package)}
    made |= {f"{package}.{name}": ModuleType(f"{package}.{name}") for name in ours._MODULES}
    for name, module in made.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for name in NAMES:
        own = lambda *args, name=name, **options: (name, args, options)  # noqa: E731
        for module in ("", ".base", ".worker_transfer"):
            setattr(made[package + module], name, own)
    for module in ("", ".shm"):
        made[package + module].EngineDrivenContextShm = EngineDrivenContextShm  # type: ignore[attr-defined]
    yield {name.removeprefix(package): module for name, module in made.items()}
    ours.uninstall()


def test_install_and_back(lmcache: dict[str, ModuleType]) -> None:
    before = {name: dict(vars(module)) for name, module in lmcache.items()}
    for _ in range(2):
        ours.install()
        ours.install()
        assert ours.installed()
        for module in ("", ".base", ".worker_transfer"):
            assert all(getattr(lmcache[module], name) is getattr(ours, name) for name in NAMES)
        assert lmcache[".shm"].EngineDrivenContextShm.__module__ == ours.__name__
        assert not any(name in vars(lmcache[".async_engine_driven"]) for name in NAMES)
        ours.uninstall()
        ours.uninstall()
        assert not ours.installed()
        assert {name: dict(vars(module)) for name, module in lmcache.items()} == before


@pytest.mark.parametrize("installed", [False, True])
def test_what_is_left_to_lmcache(
    lmcache: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    if installed:
        ours.install()
    other = SimpleNamespace(name="SGLANG")
    assert ours.compute_kv_layout({}, None, other)[:1] == ("compute_kv_layout",)
    assert ours.gather_paged_kv_to_cpu({}, [0], 1, engine_type=other)[2] == {"engine_type": other}

    def unreadable(*args: Any) -> None:
        raise LayoutError("two readings")

    def wrong(*args: Any) -> None:
        raise BoundsError("block_ids")

    monkeypatch.setattr(ours.ours, "scatter_cpu_to_paged_kv", unreadable)
    ours.scatter_cpu_to_paged_kv({}, [0], [], 1)
    monkeypatch.setattr(ours.ours, "scatter_cpu_to_paged_kv", wrong)
    with pytest.raises(BoundsError):
        ours.scatter_cpu_to_paged_kv({}, [0], [], 1)


def test_pool_is_mapped_once_and_bounded(segment: kvraw.HostBuffer) -> None:
    assert segment.name is not None
    one, two = ours.SharedPool(f"/{segment.name}", 8192), ours.SharedPool(segment.name, 8192)
    assert one.buffer is two.buffer
    assert not one.pin()
    segment.view(segment.address + 4096, 4)[:] = (1, 2, 3, 4)
    held = one.bytes_of(4096, 4)
    for offset, length in ((-1, 4), (8190, 4), (0, 0), (0, -4), (1 << 62, 1 << 62), (8192, 1)):
        with pytest.raises(BoundsError, match="slot of"):
            one.bytes_of(offset, length)
    one.close()
    one.close()
    with pytest.raises(ClosedError):
        one.bytes_of(0, 4)
    assert np.array_equal(two.bytes_of(4096, 4), (1, 2, 3, 4))
    two.close()
    assert ours.SharedPool._held == {}
    assert np.array_equal(held, (1, 2, 3, 4))  # a tensor that is left keeps the memory


def test_a_server_that_lies_or_is_not_there(segment: kvraw.HostBuffer) -> None:
    with pytest.raises(BoundsError, match="the server says 1048576"):
        ours.SharedPool(str(segment.name), 1 << 20)
    with pytest.raises(FileNotFoundError):
        ours.SharedPool("kvraw-is-not-there", 4096)
    assert ours.SharedPool._held == {}


def test_a_new_segment_of_the_same_name_is_another() -> None:
    path = f"/dev/shm/kvraw-test-same-{os.getpid()}"
    pools = []
    try:
        for value in (1, 2):
            with open(path, "wb") as file:
                file.write(bytes([value]) * 4096)
            pools.append(ours.SharedPool(os.path.basename(path), 4096))
            os.unlink(path)
        assert [int(pool.bytes_of(0, 1)[0]) for pool in pools] == [1, 2]
    finally:
        for pool in pools:
            pool.close()
    assert ours.SharedPool._held == {}


def test_pairs_of_a_layer_are_left_to_lmcache(lmcache: dict[str, ModuleType]) -> None:
    ours.install()
    pair = {"layer.0": (np.zeros((2, 8, 4, 8), np.float32), np.zeros((2, 8, 4, 8), np.float32))}
    assert ours.compute_kv_layout(pair)[:1] == ("compute_kv_layout",)  # type: ignore[arg-type]
    assert ours.gather_paged_kv_to_cpu(pair, [0], 1)[:1] == ("gather_paged_kv_to_cpu",)  # type: ignore[arg-type, comparison-overlap]
