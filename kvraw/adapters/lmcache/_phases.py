"""How long the parts of planned transfers took on their stream: told once they are over, by polling."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvraw.adapters.deferred_errors import Sink
from kvraw.adapters.lmcache._recorders import Recorder
from kvraw.copying.device_state import DeviceState
from kvraw.runtime import fork
from kvraw.runtime.completion import Operation

__all__ = ["KERNEL", "STAGING", "Phase", "pop_completed_phase_timings"]

KERNEL, STAGING = 0, 1
_recorder = Recorder()
fork.in_child(_recorder.forget)


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
            _recorder.record_here(state.device, operation.stream, (self._span,), anew=not self._end)


def pop_completed_phase_timings() -> list[tuple[int, int, int, float, int, str, float, float]]:
    """Parts of plans that are over since the last call, of those that were asked to be timed.

    Returns
    -------
    list of tuples
        Phase (0 kernels, 1 staging copies), direction (0 to the device, 1 to the host), device, milliseconds, bytes
        that the step stages, session, and begin and end in seconds since the epoch.
    """
    out = []
    for record in _recorder.drain():
        span: _Span = record.value[0]
        span.times.append(record.at)
        if len(span.times) == 2:
            begin, end = span.times
            milliseconds = (end - begin) * 1e3
            out.append(
                (span.phase, int(span.to_host), span.device, milliseconds, span.nbytes, span.session, begin, end)
            )
    return out
