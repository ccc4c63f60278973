"""Defines the data exported by OTLP: traces of steps, log lines, and metric families.

Times are Unix nanoseconds, ids the integers that OpenTelemetry writes in hexadecimal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..catalog.spec import MetricSpec
from ..recorder import Distribution

AttributeValue = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named interval of a step."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An observation of a histogram that belongs to a trace."""

    spec: MetricSpec
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One rank's part of the trace of a step: a root and its children.

    The children's ids follow `span_id`, that of the root. `parent_id` is another rank's root.
    """

    trace_id: int
    span_id: int
    parent_id: int | None
    root: Span
    children: Sequence[Span]
    examples: Sequence[Example] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A log line of zerowatch. `level` is logging's; ids are 0 if the line has no trace."""

    unix_ns: int
    level: int
    text: str
    attributes: Mapping[str, AttributeValue]
    trace_id: int = 0
    span_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One series of a family: its attributes and its value."""

    attributes: Mapping[str, AttributeValue]
    value: float | Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric in OTLP's terms, with UCUM units. `bounds` are the bounds of a histogram."""

    name: str
    kind: Literal["counter", "updowncounter", "gauge", "histogram"]
    unit: str
    help: str
    points: Sequence[Point]
    bounds: Sequence[float] = ()
