"""Decides which steps are traced, computes the ids, and creates the spans of a trace.

A step of one rank has at most 20 spans, for the step itself, its phases and its collectives. All
ranks compute the same ids and sample the same steps without communication.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS
from ...metrics.exporters.telemetry_data import AttributeValue, Span, SpanEvent
from ..collectives.groups import CollectiveCall
from ..common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVAL,
    FORWARD,
    GENERATE,
    OPTIMIZER,
    OTHER,
    PhaseInterval,
)
from ..common.step_errors import StepError

# A step is slow if it takes more than SLOW_RATIO times the median of the last steps.
SLOW_RATIO = 2.0
# Number of last steps whose median is computed.
REMEMBERED_STEPS = 101
# Number of steps that must have ended before a step can count as slow.
LEAST_STEPS = 10
# A token bucket limits the traces of slow steps. It allows SLOW_AT_ONCE traces at once, then one
# trace every SECONDS_PER_SLOW seconds.
SLOW_AT_ONCE = 20
SECONDS_PER_SLOW = 5.0

# Maximum number of spans below the root span.
MAX_CHILDREN = 19
# Maximum number of phase spans. If a step has more, such as one with many micro-batches, each phase
# becomes one span. The rest of MAX_CHILDREN is enough for one span of each operation.
MAX_PHASE_SPANS = 8
# Gaps shorter than this between two intervals of a phase do not end its span. The script runs a few
# lines of its own in such a gap.
GAP_NS = 100_000

_NAMES = {
    DATA: "data.wait",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    EVAL: "eval",
    GENERATE: "generate",
    CHECKPOINT: "checkpoint",
}


@dataclass(slots=True)
class _SpanBuilder:
    """A span under construction, in Unix time. `busy_ns` is the length of the span without gaps."""

    name: str
    start_ns: int
    end_ns: int
    busy_ns: int
    pieces: int = 1
    attributes: dict[str, AttributeValue] = field(default_factory=dict)

    def join(self, other: _SpanBuilder) -> None:
        self.start_ns = min(self.start_ns, other.start_ns)
        self.end_ns = max(self.end_ns, other.end_ns)
        self.busy_ns += other.busy_ns
        self.pieces += other.pieces

    def span(self) -> Span:
        attributes = self.attributes
        if self.pieces > 1:
            attributes["zerowatch.pieces"] = self.pieces
            attributes["zerowatch.busy_seconds"] = self.busy_ns / 1e9
        return Span(
            name=self.name,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            attributes=attributes,
        )


def child_spans(
    intervals: Iterable[PhaseInterval],
    calls: Sequence[CollectiveCall],
    offset_ns: int,
    device_offset_ns: int,
) -> list[Span]:
    """Return the spans of a step, in the order in which they begin.

    Args:
        intervals: The intervals of the phases, in order of time.
        calls: The step's settled collectives.
        offset_ns: Added to the times of the intervals to get Unix times.
        device_offset_ns: Added to times that were read from device events to get Unix times.
    """
    phases = _phase_spans(intervals, offset_ns)
    offsets = offset_ns, device_offset_ns
    comms = _comm_spans([call for call in calls if call.timed], MAX_CHILDREN - len(phases), offsets)
    spans = [builder.span() for builder in (*phases, *comms)]
    return sorted(spans, key=lambda span: span.start_ns)


def _phase_spans(intervals: Iterable[PhaseInterval], offset_ns: int) -> list[_SpanBuilder]:
    """Return one span per run of intervals of one phase. If there are too many, one per phase."""
    spans: list[_SpanBuilder] = []
    for phase, start_ns, end_ns in intervals:
        if phase == OTHER or end_ns <= start_ns:
            continue
        start, end = start_ns + offset_ns, end_ns + offset_ns
        span = _SpanBuilder(_NAMES[phase], start, end, end - start)
        last = spans[-1] if spans else None
        if last is not None and last.name == span.name and start - last.end_ns < GAP_NS:
            last.join(span)
        else:
            spans.append(span)
    return spans if len(spans) <= MAX_PHASE_SPANS else _by_name(spans)


def _comm_spans(
    calls: Sequence[CollectiveCall], limit: int, offsets: tuple[int, int]
) -> list[_SpanBuilder]:
    """Return a span for each of the longest calls, and one span per operation for other calls."""
    if len(calls) <= limit:
        return [_comm_span(call, offsets) for call in calls]
    operations = len({call.op for call in calls})
    longest = heapq.nlargest(max(0, limit - operations), calls, key=_length)
    chosen = set(map(id, longest))
    rest = [_comm_span(call, offsets) for call in calls if id(call) not in chosen]
    return [*(_comm_span(call, offsets) for call in longest), *_by_name(rest)]


def _comm_span(call: CollectiveCall, offsets: tuple[int, int]) -> _SpanBuilder:
    offset_ns = offsets[call.start_event is not None]
    attributes: dict[str, AttributeValue] = {
        "zerowatch.op": OPS[call.op],
        "zerowatch.group": call.group.role,
        "zerowatch.payload_bytes": call.payload_bytes,
        "zerowatch.exposed_seconds": call.exposed_ns / 1e9,
    }
    return _SpanBuilder(
        f"comm {OPS[call.op]}",
        call.start_ns + offset_ns,
        call.end_ns + offset_ns,
        _length(call),
        attributes=attributes,
    )


def _length(call: CollectiveCall) -> int:
    return call.end_ns - call.start_ns


def _by_name(spans: Iterable[_SpanBuilder]) -> list[_SpanBuilder]:
    joined: dict[str, _SpanBuilder] = {}
    for span in spans:
        known = joined.get(span.name)
        if known is None:
            joined[span.name] = span
        else:
            known.join(span)
            known.attributes = _sums(known.attributes, span.attributes)
    return list(joined.values())


def _sums(
    one: Mapping[str, AttributeValue], other: Mapping[str, AttributeValue]
) -> dict[str, AttributeValue]:
    """Add up the numbers of two calls of one operation. Leave out strings that differ."""
    sums: dict[str, AttributeValue] = {}
    for name in [name for name in one if name in other]:
        left, right = one[name], other[name]
        if isinstance(left, str) or isinstance(right, str):
            if left == right:
                sums[name] = left
        else:
            sums[name] = left + right
    return sums


def trace_id_of(run_id: str, step: int) -> int:
    """Return the id of a step's trace. All ranks get the same id."""
    return _hash(f"{run_id}/{step}", 16)


def span_id_of(run_id: str, step: int, rank: int, *, attempt: str) -> int:
    """Return the id of a rank's root span in the trace of a step.

    Args:
        run_id: The id of the run.
        step: The number of the step.
        rank: The global rank that the span belongs to.
        attempt: Distinguishes steps of a run that have the same number, such as after a restart,
            which the launcher need not have counted.
    """
    return _hash(f"{run_id}/{step}/{rank}/{attempt}", 8)


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Whether a trace is sampled. All ranks agree, because the id picks a share of all traces.

    OpenTelemetry's own sampler `traceidratio` makes the same choice.
    """
    return trace_id % 2**64 < round(ratio * 2**64)


def exception_events(errors: Iterable[StepError]) -> list[SpanEvent]:
    """Return an event `exception` for each error, as OpenTelemetry's conventions define it."""
    found: dict[tuple[str, str], SpanEvent] = {}  # an error that ends the run is seen twice
    for error in errors:
        attributes = {
            "exception.type": error.type_name,
            "exception.message": error.message,
            "zerowatch.error": error.kind,
        }
        event = SpanEvent(name="exception", unix_ns=error.unix_ns, attributes=attributes)
        found[error.type_name, error.message] = event
    return list(found.values())


def _hash(text: str, num_bytes: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "big") or 1  # 0 is not a valid id


class SlowSteps:
    """Finds steps that are slow compared with the last steps, and limits their traces."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last: deque[float] = deque()
        self._sorted: list[float] = []
        self._allowed = float(SLOW_AT_ONCE)
        self._counted_at = now()

    def is_slow(self, seconds: float) -> bool:
        """Whether a step was slow compared with earlier steps. Adds the step to the median."""
        known = len(self._sorted)
        slow = known >= LEAST_STEPS and seconds > SLOW_RATIO * self._sorted[known // 2]
        self._last.append(seconds)
        insort(self._sorted, seconds)
        if len(self._last) > REMEMBERED_STEPS:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
        return slow

    def may_trace(self) -> bool:
        """Whether one more slow step may be traced. If so, counts the trace."""
        now = self._now()
        earned = (now - self._counted_at) / SECONDS_PER_SLOW
        self._allowed = min(SLOW_AT_ONCE, self._allowed + earned)
        self._counted_at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True
