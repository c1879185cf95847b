"""Events, completions and timed parts of plans, in stream order: LMCache's names for the runtime's recorders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvraw.adapters.deferred_errors import Sink
from kvraw.adapters.lmcache._place import this_device
from kvraw.copying.device_state import DeviceState
from kvraw.runtime import fork
from kvraw.runtime.completion import Operation
from kvraw.runtime.stream_records import DEFAULT_STREAMS, Recorder

__all__ = [
    "KERNEL",
    "STAGING",
    "Phase",
    "drain_recorded_completions",
    "drain_recorded_events",
    "pop_completed_phase_timings",
    "record_completion_on_stream",
    "record_event_on_stream",
]

KERNEL, STAGING = 0, 1
_events, _completions, _phases = Recorder(), Recorder(), Recorder()
for _one in (_events, _completions, _phases):
    fork.in_child(_one.forget)
_Texts = Mapping[str, str]
_Numbers = Mapping[str, int]


def _record(recorder: Recorder, stream: int, value: tuple[Any, ...]) -> None:
    recorder.record(stream, value, this_device() if stream in DEFAULT_STREAMS else 0)


def record_event_on_stream(
    cuda_stream_ptr: int, event_type_name: str, session_id: str, str_metadata: _Texts, int_metadata: _Numbers
) -> None:
    """Note an event when a stream gets to this point; `drain_recorded_events` returns it with that time."""
    _record(_events, int(cuda_stream_ptr), (event_type_name, session_id, dict(str_metadata), dict(int_metadata)))


def drain_recorded_events() -> list[tuple[str, str, float, dict[str, str], dict[str, int]]]:
    """Events that streams got to since the last call: name, session, seconds since the epoch, and both mappings."""
    return [(*r.value[:2], r.at, *r.value[2:]) for r in _events.drain()]


def record_completion_on_stream(cuda_stream_ptr: int, kind: str, payload: bytes | str) -> None:
    """Note a completion when a stream gets to this point."""
    data = payload.encode() if isinstance(payload, str) else bytes(payload)
    _record(_completions, int(cuda_stream_ptr), (kind, data))


def drain_recorded_completions() -> list[tuple[str, bytes]]:
    """Completions that streams got to since the last call: kind and payload."""
    return [(r.value[0], r.value[1]) for r in _completions.drain()]


@dataclass(slots=True)
class _Span:
    """One part: what it is, and when the stream began and ended it."""

    phase: int
    to_host: bool
    device: int
    nbytes: int
    session: str
    times: list[float] = field(default_factory=list)


class Phase:
    """Takes the place of a copy among those of a plan: enqueued, it notes the beginning of a part, or its end."""

    __slots__ = ("_end", "_span")

    def __init__(self, span: _Span, end: bool) -> None:
        self._span, self._end = span, end

    @classmethod
    def around(
        cls, work: list[object], phase: int, to_host: bool, device: int, nbytes: int, session: str
    ) -> list[object]:
        """The work of a part between its two ends; nothing where there is none."""
        if not work:
            return work
        span = _Span(phase, to_host, device, nbytes, session)
        return [cls(span, False), *work, cls(span, True)]

    def enqueue(self, state: DeviceState, operation: Operation, capturing: bool, on_error: Sink) -> None:
        """Note the point that the operation's stream is at; replays of a capture are not timed."""
        if not capturing:
            # One clock for both ends: two measurements of it differ by more than a short part takes.
            _phases.record_here(state.device, operation.stream, (self._span,), anew=not self._end)


def pop_completed_phase_timings() -> list[tuple[int, int, int, float, int, str, float, float]]:
    """Parts of plans that are over since the last call, of those that were asked to be timed.

    Returns
    -------
    list of tuples
        Phase (0 kernels, 1 staging copies), direction (0 to the device, 1 to the host), device, milliseconds, bytes
        that the step stages, session, and begin and end in seconds since the epoch.
    """
    out = []
    for record in _phases.drain():
        span: _Span = record.value[0]
        span.times.append(record.at)
        if len(span.times) == 2:
            begin, end = span.times
            milliseconds = (end - begin) * 1e3
            out.append(
                (span.phase, int(span.to_host), span.device, milliseconds, span.nbytes, span.session, begin, end)
            )
    return out
