"""The suite catches seeded faults: each mutation makes at least one of a handful of its checks fail."""

from __future__ import annotations

import ctypes
import functools
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvraw.copying import kernel as kernel_module
from kvraw.copying import kernel_args as ka
from kvraw.copying.device_state import DeviceState
from kvraw.copying.status_words import StatusPages
from kvraw.ptx import loader
from kvraw.runtime import driver as driver_module
from kvraw.runtime.completion import Completion
from kvraw.runtime.host.pool import HostPool
from kvraw.runtime.memory import PinnedBuffer
from tests.conformance.test_conformance import CASES, CHOSEN, check
from tests.device import test_transfers
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.backends import on_device
from tests.helpers.classes import VIEWS
from tests.helpers.world import World

Patch = pytest.MonkeyPatch

# One case of each width, of tables and of pages, with ids on the host and on the device, and the tests of what a case
# cannot show. Any of them may be the one that catches a fault.
# They are among those that run by default.
_KERNEL = [case for case in CASES if case in CHOSEN["kernel"]]
_BY_WIDTH = {(VIEWS["kernel"](c)[2], c.direction): c for c in _KERNEL if c.ids and c.nb == 5}
SAMPLE = [*_BY_WIDTH.values(), *[c for c in _KERNEL if c.nb in (7, 9)][:6]]


def cases(ids_on_device: bool) -> None:
    for case in SAMPLE:
        check(case, functools.partial(on_device, device=0, ids_on_device=ids_on_device))


def in_world(test: Callable[..., None], *args: object) -> Callable[[], None]:
    def run() -> None:
        world = World(0)
        test(world, *args)
        world.close()

    return run


CHECKS: list[Callable[[], None]] = [
    functools.partial(cases, False),
    functools.partial(cases, True),
    in_world(test_transfers.test_a_bad_id_on_the_device_is_left_out_and_reported, "store", 40, "int32"),
    in_world(test_transfers.test_a_bad_id_on_the_device_is_left_out_and_reported, "load", -1, "int64"),
    functools.partial(test_transfers.test_many_ids_and_many_chunks, 0, 3000),
    functools.partial(test_transfers.test_large_calls_in_a_row, 0),
    functools.partial(test_transfers.test_many_layers_spill_their_table, 0),
    in_world(test_transfers.test_a_pool_waits_for_what_uses_it),
]


def failures() -> int:
    """How many of the checks fail."""
    count = 0
    for at, one in enumerate(CHECKS):
        fake = FakeDriver(seed=at)
        before = driver_module.install(fake)  # type: ignore[arg-type]
        try:
            one()
            count += bool(fake.violations)
        except (Exception, pytest.fail.Exception):
            count += 1
        finally:
            driver_module.install(before)
        if count:
            break
    return count


@pytest.fixture(autouse=True)
def fresh_kernels() -> None:
    kernel_module.copy_kernel.cache_clear()


def ptx(pattern: str, replacement: str, nth: int = 0) -> Callable[[Patch], None]:
    """Change the n-th match of a pattern in every artifact."""

    def mutate(patch: Patch) -> None:
        real = loader.read_ptx

        def changed(name: str) -> bytes:
            text = real(name).decode()
            places = list(re.finditer(pattern, text))
            assert len(places) > nth, pattern
            place = places[nth]
            return (text[: place.start()] + place.expand(replacement) + text[place.end() :]).encode()

        patch.setattr(kernel_module, "read_ptx", changed)

    return mutate


def offset(name: str, by: int, at: int | None = None) -> Callable[[Patch], None]:
    """Shift where a field of the argument block is written."""

    def mutate(patch: Patch) -> None:
        value = getattr(ka, name)
        patch.setattr(ka, name, value + by if at is None else [v + by * (k == at) for k, v in enumerate(value)])

    return mutate


def no_wait(patch: Patch) -> None:
    def wait(self: Completion) -> None:
        if self._event is not None:
            self._finish()

    patch.setattr(Completion, "wait", wait)


def upload_given_back_early(patch: Patch) -> None:
    patch.setattr(DeviceState, "take_upload", functools.cache(DeviceState.take_upload))
    patch.setattr(DeviceState, "give_upload", lambda self, upload: None)


def status_not_cleared(patch: Patch) -> None:
    real = StatusPages.take

    def take(self: StatusPages, *args: Any, **more: Any) -> int:
        address = real(self, *args, **more)
        (ticket,) = [t for t in self._slots if t.address == address]
        ticket._words[ticket._at] = 3
        return address

    patch.setattr(StatusPages, "take", take)


def host_address_for_device(patch: Patch) -> None:
    real = PinnedBuffer.__init__

    def init(self: PinnedBuffer, nbytes: int, device: int) -> None:
        real(self, nbytes, device)
        self.device_address = self.address

    patch.setattr(PinnedBuffer, "__init__", init)


def upload_not_sent(patch: Patch) -> None:
    from kvraw.copying.device_state import Upload

    patch.setattr(Upload, "send", lambda self, count, stream: None)


def segment_lost(patch: Patch) -> None:
    real = FakeDriver.launch

    def launch(self: FakeDriver, kernel: int, ctas: int, threads: int, stream: int, params: int) -> None:
        where = ctypes.c_uint64.from_address(params).value
        ctypes.c_uint64.from_address(where + ka.SEGMENTS * 8).value -= 1
        real(self, kernel, ctas, threads, stream, params)

    patch.setattr(FakeDriver, "launch", launch)


def divider_rounds_down(patch: Patch) -> None:
    def divider(d: int) -> tuple[int, int]:
        shift = (d - 1).bit_length()
        return (1 << 63 + shift) // d, shift

    patch.setattr(ka, "divider", divider)


def pool_forgets_its_users(patch: Patch) -> None:
    patch.setattr(HostPool, "mark_used", lambda self, completion: None)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "argument block: segments one word late": offset("SEGMENTS", 1),
    "argument block: first item one word early": offset("FIRST_ITEM", -1),
    "argument block: status one word early": offset("STATUS", -1),
    "argument block: inline words one late": offset("WORDS_AT", 1),
    "argument block: destination index one late": offset("INDEX", 1, 1),
    "argument block: source index one early": offset("INDEX", -1, 0),
    "argument block: flags of the source": offset("FLAGS", 1, 0),
    "PTX: a shift by one more": ptx(r"(shl\\.b64 \\t%rd\\d+, %rd\\d+, )1;".replace("\\\\", "\\"), r"\g<1>2;"),
    "PTX: 32 lanes become 16": ptx(r"(and\.b32\s+\t?%r\d+, %r\d+, )31;", r"\g<1>15;"),
    "PTX: the high product's low half": ptx(r"mul\.hi\.u64", "mul.lo.s64"),
    "PTX: an address of the next field": ptx(r"(ld\.param\.u64\s+%rd\d+, \[%rd\d+\+)40\]", r"\g<1>48]"),
    "PTX: less becomes less or equal": ptx(r"setp\.ge\.u64", "setp.gt.u64", nth=1),
    "PTX: the bounds check is gone": ptx(r"(and\.b32\s+\t?%r\d+, %r\d+, )32;", r"\g<1>0;"),
    "PTX: a skipped item is not": ptx(r"(and\.b32\s+\t?%r\d+, %r\d+, )16;", r"\g<1>0;"),
    "a wait that does not wait": no_wait,
    "an upload used again while it is under way": upload_given_back_early,
    "an upload that is not sent": upload_not_sent,
    "a status word that is not cleared": status_not_cleared,
    "the host's address of pinned memory given to a kernel": host_address_for_device,
    "a segment fewer": segment_lost,
    "division that rounds its multiplier down": divider_rounds_down,
    "a pool closed under a transfer": pool_forgets_its_users,
}


def test_nothing_fails_unmutated() -> None:
    assert failures() == 0


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    try:
        assert failures() > 0
    finally:
        monkeypatch.undo()
        kernel_module.copy_kernel.cache_clear()
        gc.collect()  # what the fault left behind goes here, where finalizers may complain
