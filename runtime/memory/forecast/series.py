"""What forecasts are made from: readings of one device's memory, in the order of the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """The size of one micro-batch: so many samples of so many tokens each, padding included.

    `length` is the tokens of the longest sample; of data without tokens, the elements per sample.
    """

    samples: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPoint:
    """One reading, at the end of a step; it covers all since the reading before.

    Attributes:
        step: The step that has just ended.
        peak_bytes: The most that was in use since the reading before (CPU: RSS; CUDA: allocated).
        floor_bytes: What is in use now, between steps.
        limit_bytes: What `peak_bytes` may reach, as known now; infinite where there is no limit.
        reserved_bytes: What is held for this process at its peak (CUDA: reserved; CPU: as peak).
        unusable_bytes: Reserved, but in pieces too small to serve a large request.
        retries: How often the allocator had to free its cache and try again, so far.
        shapes: The distinct micro-batches since the reading before; empty where unknown.
    """

    step: int
    peak_bytes: float
    floor_bytes: float
    limit_bytes: float
    reserved_bytes: float
    unusable_bytes: float = 0.0
    retries: float = 0.0
    shapes: tuple[Shape, ...] = ()
