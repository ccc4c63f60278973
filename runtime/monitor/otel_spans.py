"""A step's spans: its phases and its collectives, twenty at most with the root. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS
from ...metrics.exporters.telemetry_data import Span, Value
from ..collectives.call import CollectiveCall
from ..common.phase_timer import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVAL,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PhaseInterval,
)

MAX_CHILDREN = 19
# With more, as of many micro-batches, each phase becomes one span. The rest has room for one of
# each operation.
MAX_PHASE_SPANS = 8
# Shorter gaps between two stretches of a phase are the script's own lines, not another stretch.
GAP_NS = 100_000

_NAMES = {
    DATA: "data.wait",
    FORWARD: "forward",
    BACKWARD: "backward",
    OPTIMIZER: "optimizer",
    EVAL: "eval",
    CHECKPOINT: "checkpoint",
}


@dataclass(slots=True)
class _Stretch:
    """One span in the making, in Unix time; `busy_ns` is less than its length where it has gaps."""

    name: str
    start_ns: int
    end_ns: int
    busy_ns: int
    pieces: int = 1
    attributes: dict[str, Value] = field(default_factory=dict)

    def join(self, other: _Stretch) -> None:
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


def children(
    intervals: Iterable[PhaseInterval],
    calls: Sequence[CollectiveCall],
    offset_ns: int,
    device_offset_ns: int,
) -> list[Span]:
    """Return the spans of a step, in the order in which they begin.

    Args:
        intervals: When each phase had the time, in order.
        calls: The step's settled collectives.
        offset_ns: What makes the intervals' times Unix times.
        device_offset_ns: The same for the times of calls that were read from CUDA events.
    """
    phases = _phases(intervals, offset_ns)
    offsets = offset_ns, device_offset_ns
    comms = _comms([call for call in calls if call.timed], MAX_CHILDREN - len(phases), offsets)
    spans = [stretch.span() for stretch in (*phases, *comms)]
    return sorted(spans, key=lambda span: span.start_ns)


def _phases(intervals: Iterable[PhaseInterval], offset_ns: int) -> list[_Stretch]:
    """Join the stretches of each phase that follow each other; if there are many, all of them."""
    stretches: list[_Stretch] = []
    for phase, start_ns, end_ns in intervals:
        if phase == OTHER or end_ns <= start_ns:
            continue
        start, end = start_ns + offset_ns, end_ns + offset_ns
        stretch = _Stretch(_NAMES[phase], start, end, end - start)
        last = stretches[-1] if stretches else None
        if last is not None and last.name == stretch.name and start - last.end_ns < GAP_NS:
            last.join(stretch)
        else:
            stretches.append(stretch)
    return stretches if len(stretches) <= MAX_PHASE_SPANS else _by_name(stretches)


def _comms(calls: Sequence[CollectiveCall], room: int, offsets: tuple[int, int]) -> list[_Stretch]:
    """Give the longest calls a span each, and what is left of each operation one together."""
    if len(calls) <= room:
        return [_comm(call, offsets) for call in calls]
    operations = len({call.op for call in calls})
    longest = heapq.nlargest(max(0, room - operations), calls, key=_length)
    chosen = set(map(id, longest))
    rest = [_comm(call, offsets) for call in calls if id(call) not in chosen]
    return [*(_comm(call, offsets) for call in longest), *_by_name(rest)]


def _comm(call: CollectiveCall, offsets: tuple[int, int]) -> _Stretch:
    offset_ns = offsets[call.start_event is not None]
    attributes: dict[str, Value] = {
        "zerowatch.op": OPS[call.op],
        "zerowatch.group": call.group.role,
        "zerowatch.payload_bytes": call.payload_bytes,
        "zerowatch.exposed_seconds": call.exposed_ns / 1e9,
    }
    return _Stretch(
        f"comm {OPS[call.op]}",
        call.start_ns + offset_ns,
        call.end_ns + offset_ns,
        _length(call),
        attributes=attributes,
    )


def _length(call: CollectiveCall) -> int:
    return call.end_ns - call.start_ns


def _by_name(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    joined: dict[str, _Stretch] = {}
    for stretch in stretches:
        known = joined.get(stretch.name)
        if known is None:
            joined[stretch.name] = stretch
        else:
            known.join(stretch)
            known.attributes = _sums(known.attributes, stretch.attributes)
    return list(joined.values())


def _sums(one: Mapping[str, Value], other: Mapping[str, Value]) -> dict[str, Value]:
    """Add up what two calls of one operation have in numbers; leave out what they differ in."""
    found: dict[str, Value] = {}
    for name in [name for name in one if name in other]:
        left, right = one[name], other[name]
        if isinstance(left, str) or isinstance(right, str):
            if left == right:
                found[name] = left
        else:
            found[name] = left + right
    return found
