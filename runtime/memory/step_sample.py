"""What the training thread read of memory at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .categories import Held
from .forecast.series import PeakPoint, Shape
from .memory_reader import Reading, Readings


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedSample:
    """A step looked at closely.

    Attributes:
        phase_peaks: By device and phase, the most that was in use, in bytes.
        held_before: By device and category, the most that the engine held at two moments: as the
            first backward pass ended, and as its optimizer's step began.
        held_after: What it held once that had ended.
        heap_free_bytes: What the C library kept then of the memory that was freed.
    """

    phase_peaks: Mapping[str, Mapping[str, float]]
    held_before: Held
    held_after: Held
    heap_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemorySample:
    """All devices at the end of a step; peaks and `shapes` are those since the reading before.

    `trained_only` says that there was neither evaluation nor a checkpoint meanwhile.
    """

    readings: Readings
    shapes: tuple[Shape, ...]
    trained_only: bool = True
    look: DetailedSample | None = None

    def points(self, step: int) -> Mapping[str, PeakPoint]:
        """Return, by device, what forecasts are made from."""
        shapes = largest_shapes(self.shapes)
        return {
            device: _point(step, states, shapes)
            for device, states in self.readings.items()
            if "allocated" in states
        }


def largest_shapes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Leave out each micro-batch that another one is at least as large as, in both ways."""
    if len(shapes) < 2:
        return shapes
    ordered = sorted(shapes, key=lambda shape: (shape.samples, shape.length), reverse=True)
    kept: list[Shape] = []
    for shape in ordered:
        if not kept or shape.length > kept[-1].length:
            kept.append(shape)
    return tuple(kept)


def _point(step: int, states: Reading, shapes: tuple[Shape, ...]) -> PeakPoint:
    peak = states.get("peak_allocated", states["allocated"])
    return PeakPoint(
        step=step,
        peak_bytes=peak,
        floor_bytes=states["allocated"],
        limit_bytes=states.get("limit", float("inf")),
        reserved_bytes=states.get("peak_reserved", peak),
        unusable_bytes=states.get("unusable", 0.0),
        retries=states.get("alloc_retries", 0.0),
        shapes=shapes,
    )
