"""Defines the data that is exported by OTLP: traces of steps, log lines, and metric families.

Times are Unix nanoseconds. Ids are integers, which OpenTelemetry writes in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..catalog.spec import MetricSpec
from ..recorder import Distribution

AttributeValue = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """A moment within a span, such as an exception."""

    name: str
    unix_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval of a step. `error` describes what failed; None if nothing did."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An observation of a histogram that belongs to a trace."""

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One rank's part of the trace of a step: a root span and its children.

    Attributes:
        trace_id: The id of the trace, the same on all ranks.
        span_id: The id of the root span. The ids of the children follow it.
        parent_id: The id of another span of the trace, above the root span.
        root: The root span.
        children: The spans below it.
        examples: Observations of histograms that belong to the trace.
        linked: The trace id and span id of another step, to compare this one with.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    root: Span
    children: Sequence[Span]
    examples: Sequence[Example] = ()
    linked: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A log line of zerowatch. `level` is a level of `logging`. Ids are 0 without a trace."""

    logger: str
    unix_ns: int
    level: int
    text: str
    attributes: Mapping[str, AttributeValue]
    trace_id: int = 0
    span_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One series of a family: its attributes and its value.

    `start_ns` is the start of the interval that an increase covers. None means the start of the
    monitoring.
    """

    attributes: Mapping[str, AttributeValue]
    value: float | Distribution
    start_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric in the terms of OTLP, with UCUM units. `bounds` are the bounds of a histogram."""

    name: str
    kind: Literal["counter", "updowncounter", "gauge", "histogram"]
    unit: str
    help: str
    points: Sequence[Point]
    bounds: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """What a receiver rejected of an export that it accepted otherwise.

    Attributes:
        num_items: Number of rejected items.
        items: What these are, such as "spans".
        message: The reason that the receiver gave.
    """

    num_items: int
    items: str
    message: str
