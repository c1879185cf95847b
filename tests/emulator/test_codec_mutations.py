"""Seeded faults in the codec's and the rotation's kernels and in what launches them: each is caught by a named test."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvraw.adapters import deferred_errors
from kvraw.adapters.lmcache import _codec
from kvraw.codec import coder, gpu, quantize
from kvraw.copying import launch
from kvraw.copying.status_words import StatusSlot
from kvraw.ptx import build
from kvraw.rope import rotate
from kvraw.runtime import driver as driver_module
from tests.adapters import test_lmcache_codec_calls as calls
from tests.device import test_codec, test_codec_pack, test_quantize, test_rope
from tests.emulator.fake_driver import FakeDriver
from tests.helpers.codec_cases import CASES, Place
from tests.helpers.torch_like import TorchLike

Patch = pytest.MonkeyPatch
Test = Callable[[Place], None]
KERNELS = (gpu.stream_kernel, gpu.pack_kernel, quantize._gpu_kernel, rotate._kernel)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change to a kernel's source, and the test that must fail of it."""

    source: str
    old: str
    new: str
    test: Test


def streams(case: str, shift: int = 0) -> Test:
    (found,) = [c for c in CASES if c.name == case]
    return functools.partial(test_codec.test_streams, found, shift)


def distribution(case: str) -> Test:
    (found,) = [c for c in CASES if c.name == case]
    return functools.partial(test_codec.test_cdf, found)


def round_trip(case: str) -> Test:
    (found,) = [c for c in CASES if c.name == case]
    return functools.partial(test_codec.test_native_round_trip, found)


def keys(shape: int, neox: bool, dtype: str) -> Test:
    return functools.partial(test_rope.test_keys, test_rope.SHAPES[shape], neox, dtype)


def bad_sums(at: int) -> Test:
    return functools.partial(test_codec_pack.test_sums_that_do_not_fit, *test_codec_pack.BAD[at])


damaged = functools.partial(functools.partial, test_codec.test_damaged_streams_stay_inside_their_buffers)
outside = functools.partial(functools.partial, test_rope.test_a_position_outside_the_cache)

FAULTS = {
    "encode: no barrier behind the cleared words": Fault(
        "codec_encode.cu",
        "faulty[threadIdx.x] = 0;\n    __syncthreads();",
        "faulty[threadIdx.x] = 0;",
        test_codec.test_a_distribution_that_does_not_rise_is_refused,
    ),
    "encode: no barrier behind the tables": Fault(
        "codec_encode.cu", "__syncthreads();\n    if (stream >=", "if (stream >=", streams("two tokens")
    ),
    "decode: no barrier behind the cleared words": Fault(
        "codec_decode.cu",
        "faulty[threadIdx.x] = 0;\n    __syncthreads();",
        "faulty[threadIdx.x] = 0;",
        test_codec.test_a_distribution_that_does_not_rise_is_refused,
    ),
    "decode: no barrier behind the tables": Fault(
        "codec_decode.cu", "__syncthreads();\n    if (stream >=", "if (stream >=", streams("two tokens")
    ),
    "cdf: no barrier behind the counts": Fault("codec_cdf.cu", "__syncthreads();", "", distribution("two tokens")),
    "quantize: no barrier behind the maxima": Fault(
        "quantize.cu",
        "__syncthreads();",
        "",
        functools.partial(test_quantize.test_quantization, (3, 7, 100), 32, "float32"),
    ),
    "quantize: a barrier before the maxima": Fault(
        "quantize.cu",
        "    if ((threadIdx.x & 31) == 0)\n        largest[threadIdx.x >> 5] = bits;\n    __syncthreads();",
        "    __syncthreads();\n    if ((threadIdx.x & 31) == 0)\n        largest[threadIdx.x >> 5] = bits;",
        functools.partial(test_quantize.test_quantization, (3, 7, 100), 32, "float32"),
    ),
    "any: a load that is not coherent": Fault("arith.h", '"ld.global."', '"ld.global.nc."', streams("two tokens")),
    "encode: waiting bits are forgotten": Fault(
        "codec_encode.cu", "pending += straddles", "pending = straddles", test_codec.test_bits_that_wait_without_end
    ),
    "encode: one waiting bit fewer at the end": Fault(
        "codec_encode.cu", "low >> 30 & 1, pending + 1", "low >> 30 & 1, pending", streams("bell")
    ),
    "encode: a carry is lost": Fault(
        "codec_encode.cu", "(((1u << pending) - 1) << (same - 1))", "0", streams("random")
    ),
    "encode: words are written past the slot": Fault(
        "codec_encode.cu",
        "if (at + 4 <= room)",
        "if (at <= room)",
        test_codec.test_an_output_that_is_too_small_names_the_channel_and_the_need,
    ),
    "encode: bytes in the order of words": Fault(
        "codec_encode.cu", "__byte_perm(word, 0, 0x0123)", "word", streams("random")
    ),
    "encode: the last symbol's end is read": Fault(
        "codec_args.h", "b + 1 < a.alphabet ?", "b < a.alphabet ?", streams("random")
    ),
    "encode and decode: a distribution that stands still passes": Fault(
        "codec_decode.cu",
        "high[k] <= low[k]",
        "high[k] < low[k]",
        test_codec.test_a_distribution_that_does_not_rise_is_refused,
    ),
    "decode: damage leads outside the alphabet": Fault(
        "codec_decode.cu", "distance = min(distance, range);", "", damaged(5)
    ),
    "decode: a byte behind the stream is read": Fault("codec_decode.cu", "p < end ?", "p <= end ?", damaged(1)),
    "decode: prefix sums may leave the data": Fault(
        "codec_decode.cu",
        "|| end > (i64)a.bytes_size",
        "",
        functools.partial(test_codec.test_prefix_sums_outside_the_data_are_reported, [5, 9, 21]),
    ),
    "decode: lengths may leave the slot": Fault(
        "codec_decode.cu",
        "|| end > start + (i64)a.row",
        "",
        functools.partial(test_codec.test_a_length_outside_the_slot_is_reported, 65),
    ),
    "decode: the ring runs dry": Fault(
        "codec_decode.cu", "#define TARGET 20", "#define TARGET 12", streams("foreign, rare symbols in long streams")
    ),
    "decode: the fourth symbol of a group": Fault("codec_decode.cu", "if (s3 < limit)", "if (0)", streams("random")),
    "cdf: symbols up to b, not below": Fault(
        "codec_cdf.cu",
        "(0xFFFF - a.alphabet) * sum",
        "(0xFFFF - a.alphabet) * (sum + count)",
        distribution("bell of 15"),
    ),
    "cdf: a negative symbol counts as the highest": Fault(
        "codec_cdf.cu",
        "(a.flags & SIGNED) && s > 127 ? 0 : top",
        "top",
        functools.partial(test_codec.test_a_symbol_outside_the_alphabet_is_reported_or_clamped, test_codec.np.int8),
    ),
    "pack: the first 32 bytes of each stream": Fault(
        "codec_pack.cu", "k < (u32)(end - start)", "k < 32 && k < (u32)(end - start)", round_trip("maximal alphabet")
    ),
    "pack: warps behind the last stream": Fault(
        "codec_pack.cu",
        "    if (stream >= a.streams)\n        return;\n",
        "",
        test_codec_pack.test_warps_behind_the_last_stream,
    ),
    "pack: sums may be negative": Fault("codec_pack.cu", "start < 0 || ", "", bad_sums(0)),
    "pack: sums may fall": Fault(
        "codec_pack.cu",
        "end < start || (u64)end > a.packed_size || (u64)(end - start) > a.row",
        "(u64)end > a.packed_size || (i64)(end - start) > (i64)a.row",
        bad_sums(1),
    ),
    "pack: sums may leave the output": Fault("codec_pack.cu", "(u64)end > a.packed_size || ", "", bad_sums(2)),
    "pack: a stream may be longer than its slot": Fault(
        "codec_pack.cu", " || (u64)(end - start) > a.row", "", bad_sums(3)
    ),
    "rope: old and new in the other direction": Fault(
        "rope.cu", "sub(mul(u, nc[k]), mul(v, ns[k]))", "add(mul(u, nc[k]), mul(v, ns[k]))", keys(0, True, "float16")
    ),
    "rope: a product loses the sign of a zero": Fault(
        "rope.cu",
        "#define MINUS_ZERO 0x80008000",
        "#define MINUS_ZERO 0",
        functools.partial(test_rope.test_any_bits, 64, True, "float16"),
    ),
    "rope: products of fp32 are fused": Fault(
        "rope.cu",
        "__fmul_rn(__uint_as_float(a), __uint_as_float(b))",
        "__fmaf_rn(__uint_as_float(a), __uint_as_float(b), 1e-9f)",
        keys(0, True, "float32"),
    ),
    "rope: the last position is one too many": Fault(
        "rope.cu", "(u64)after >= a.limit)) {", "(u64)after > a.limit)) {", outside(50, 1, True)
    ),
    "rope: heads that are not there": Fault(
        "rope.cu", "min(a.heads - group * HEADS, HEADS)", "HEADS", keys(1, True, "float32")
    ),
    "rope: angles of neighbours as those of halves": Fault(
        "rope.cu", "load_v2(row + (half + step) / 2)", "load_v2(row + step / 2 + 8)", keys(0, False, "float16")
    ),
    "rope: neighbours are not put back together": Fault(
        "rope.cu", "0x5410);\n        p[2 * k + 1]", "0x7632);\n        p[2 * k + 1]", keys(0, False, "float16")
    ),
    "rope: new positions as wide as old ones": Fault(
        "rope.cu", "a.flags & NEW_I32", "a.flags & OLD_I32", test_rope.test_positions_of_two_widths
    ),
    "quantize: towards zero": Fault(
        "quantize.cu",
        "__float2int_rn(at)",
        "(int)at",
        functools.partial(test_quantize.test_quantization, (3, 7, 100), 32, "float16"),
    ),
}


def caught(test: Callable[[FakeDriver], None]) -> bool:
    """Whether a test fails, or misuses the fake driver."""
    fake = FakeDriver()
    before = driver_module.install(fake)  # type: ignore[arg-type]
    try:
        test(fake)
    except (Exception, pytest.fail.Exception):
        return True
    finally:
        driver_module.install(before)
    return bool(fake.violations)


def on_device(test: Test, fake: FakeDriver) -> None:
    place = Place(0)
    test(place)
    place.close()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Kernels and launches are kept for good: those of a fault are forgotten, and so are the ones before."""

    def forget() -> None:
        for kernel in KERNELS:
            kernel.cache_clear()
        for launches in (coder._launches, rotate._launches, _codec._launches):
            launches._made.clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_in_a_kernel_is_caught(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    fault = FAULTS[name]
    for path in (*build.HERE.glob("*.cu"), *build.HERE.glob("*.h")):
        shutil.copy(path, tmp_path)
    text = (tmp_path / fault.source).read_text()
    assert text.count(fault.old) >= 1, fault.old
    (tmp_path / fault.source).write_text(text.replace(fault.old, fault.new, 1))
    try:
        build._nvrtc()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    by_name = {artifact.name: artifact for artifact in build.ARTIFACTS}
    monkeypatch.setattr(build, "HERE", tmp_path)
    for module in (gpu, quantize, rotate):
        monkeypatch.setattr(module, "read_ptx", lambda file: build.compile_ptx(by_name[file]).encode())
    assert caught(functools.partial(on_device, fault.test))


def addresses_of_the_first_call(patch: Patch) -> None:
    real, block = launch.Launch.start, {}

    def start(self: launch.Launch, stream: int, tensors: tuple[Any, ...], captured: bool) -> object:
        return real(self, stream, block.setdefault(self, tensors), captured)

    patch.setattr(launch.Launch, "start", start)


def status_not_cleared(patch: Patch) -> None:
    def read(self: StatusSlot) -> Exception | None:
        where, value = self._words[self._at], self._words[self._at + 1]
        error = self.describer.describe_fault(where, value, self.origin) if where else None
        if error is not None and self.on_error is not None:
            self.on_error(error)
        return error

    def give_back(self: StatusSlot) -> None:
        self.completion = self.on_error = None
        self._free.append(self)

    patch.setattr(StatusSlot, "read", read)
    patch.setattr(StatusSlot, "give_back", give_back)


def alignment_left_out(patch: Patch) -> None:
    patch.setattr(_codec, "launch_key", lambda options, *tensors: launch.key_of(options, *tensors))


def tensors_let_go(patch: Patch) -> None:
    real = launch.Launch.start

    class Address(NamedTuple):
        address: int

        def data_ptr(self) -> int:
            return self.address

    def start(self: launch.Launch, stream: int, tensors: tuple[Any, ...], captured: bool) -> object:
        return real(self, stream, tuple(Address(t.data_ptr()) for t in tensors), captured)

    patch.setattr(launch.Launch, "start", start)


def captures_unseen(patch: Patch) -> None:
    class Every:
        def __contains__(self, stream: int) -> bool:
            return True

    patch.setattr(deferred_errors, "LEGACY", Every())  # streams that are never captured


HOST_FAULTS: dict[str, tuple[Callable[[Patch], None], Callable[..., None]]] = {
    "a launch stays with the addresses of its first call": (
        addresses_of_the_first_call,
        calls.test_other_addresses_take_the_launch_that_was_made,
    ),
    "a status word that is not cleared": (
        status_not_cleared,
        calls.test_what_a_kernel_found_is_raised_once_by_the_next_call,
    ),
    "the alignment is no part of the key": (
        alignment_left_out,
        calls.test_keys_of_another_alignment_take_another_kernel,
    ),
    "tensors are not kept": (tensors_let_go, calls.test_tensors_are_kept_until_their_kernel_is_over),
    "a capture is not seen": (
        captures_unseen,
        calls.test_a_capture_asks_for_no_event_and_reports_what_its_replays_met,
    ),
}


@pytest.mark.parametrize("name", HOST_FAULTS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_on_the_host_is_caught(name: str, monkeypatch: Patch) -> None:
    mutate, test = HOST_FAULTS[name]
    mutate(monkeypatch)

    def run(fake: FakeDriver) -> None:
        world = TorchLike(0).install(monkeypatch)
        test(*(world, fake)[: test.__code__.co_argcount])

    assert caught(run)
