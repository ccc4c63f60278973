"""Defines one step's memory reading, its micro-batch shapes, and its prediction, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """The size of one micro-batch: number of samples, and tokens per sample, padding included.

    `length` is the token count of the longest sample. If data has no tokens, it is the number of
    elements per sample.
    """

    samples: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPoint:
    """One reading at the end of a step. It covers all steps since the previous reading.

    Attributes:
        step: The step that has just ended.
        peak_bytes: Peak of the allocated bytes since the previous reading.
        between_steps_bytes: Bytes in use now, between steps.
        limit_bytes: Current upper bound of `peak_bytes`, or infinity without a limit.
        reserved_bytes: Bytes reserved for this process at its peak. On CPU, the peak itself.
        fragmented_bytes: Bytes reserved at the peak in blocks too small to serve a large request.
        retries: How often the allocator has freed its cache and retried so far.
        shapes: Distinct micro-batch shapes since the previous reading. Empty if unknown.
    """

    step: int
    peak_bytes: float
    between_steps_bytes: float
    limit_bytes: float
    reserved_bytes: float
    fragmented_bytes: float = 0.0
    retries: float = 0.0
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrediction:
    """A prediction made before a step: the peak, and the risk within the next 50 steps."""

    step: int
    predicted_bytes: float | None
    risk_ratio: float | None
