"""Defines one step's memory reading, its micro-batch shapes, and its prediction, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """The size of one micro-batch: number of samples, and tokens per sample, padding included.

    `length` is the token count of the longest sample; for data without tokens, elements per sample.
    """

    samples: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPoint:
    """One reading at the end of a step; it covers all steps since the previous reading.

    Attributes:
        step: The step that has just ended.
        peak_bytes: Peak since the previous reading (CPU: RSS; CUDA: allocated).
        between_steps_bytes: Bytes in use now, between steps.
        limit_bytes: Upper bound of `peak_bytes`, as known now; infinite without a limit.
        reserved_bytes: Bytes reserved for this process at its peak (CUDA: reserved; CPU: the peak).
        fragmented_bytes: Bytes reserved in blocks too small to serve a large request.
        retries: Total times the allocator freed its cache and retried.
        shapes: Distinct micro-batches since the previous reading; empty if unknown.
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
    """The prediction made before a step: its peak, and the risk within the next 50 steps."""

    step: int
    predicted_bytes: float | None
    risk_ratio: float | None
