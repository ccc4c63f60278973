"""Defines the memory sample that the training thread takes at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from .categories import EngineBytes
from .forecast.peak_readings import PeakPoint, Shape
from .memory_reader import Reading, Readings


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedSample:
    """The memory of one step by phase and category.

    Attributes:
        phase_peaks: Peak bytes by device and phase.
        held_before: Bytes held by the engine, by device and category. The larger value of two
            moments: the end of the first backward pass and the start of the optimizer step.
        held_after: Bytes held by the engine after the optimizer step.
        heap_free_bytes: Freed memory that the C library's heap kept after the optimizer step.
    """

    phase_peaks: Mapping[str, Mapping[str, float]]
    held_before: EngineBytes
    held_after: EngineBytes
    heap_free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemorySample:
    """The readings of all devices at the end of a step.

    Attributes:
        readings: Bytes by device and state. Peaks cover the time since the previous sample or the
            last change of memory use, without generation.
        generation_peaks: The peaks of generation since the previous sample, by device and state.
            Empty if nothing was generated.
        shapes: Distinct micro-batch shapes in the same time.
        earlier_peaks: The peaks of the steps before the last change of memory use, which no sample
            covers, by device and state. Empty if memory use has not changed.
        trained_only: Whether neither an evaluation nor a checkpoint ran in the same time.
        detail: Phases and categories, if the step was sampled in detail.
    """

    readings: Readings
    shapes: tuple[Shape, ...]
    generation_peaks: Readings = field(default_factory=dict)
    earlier_peaks: Readings = field(default_factory=dict)
    trained_only: bool = True
    detail: DetailedSample | None = None

    def readings_with_earlier_peaks(self) -> Readings:
        """Return the readings with the peaks of all steps since the previous sample."""
        if not self.earlier_peaks:
            return self.readings
        return {
            device: {
                state: max(value, self.earlier_peaks.get(device, {}).get(state, value))
                for state, value in states.items()
            }
            for device, states in self.readings.items()
        }

    def peak_bytes_since_change(self) -> Reading:
        """Return the peaks of allocated memory since its use has changed, by device, if it has."""
        return {
            device: self.readings[device]["peak_allocated"]
            for device, states in self.earlier_peaks.items()
            if "peak_allocated" in states and "peak_allocated" in self.readings.get(device, {})
        }

    def points(self, step: int) -> Mapping[str, PeakPoint]:
        """Return the readings as input of the forecasts, by device."""
        shapes = largest_shapes(self.shapes)
        return {
            device: _point(step, states, shapes)
            for device, states in self.readings.items()
            if "allocated" in states
        }


def largest_shapes(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return the shapes that no other shape equals or exceeds in both samples and length."""
    if len(shapes) < 2:
        return shapes
    ordered = sorted(shapes, key=lambda shape: (shape.samples, shape.length), reverse=True)
    kept: list[Shape] = []
    for shape in ordered:
        if not kept or shape.length > kept[-1].length:
            kept.append(shape)
    return tuple(kept)


def fragmented_bytes(states: Reading) -> float:
    """Return the reserved bytes in pieces too small for the requests of a step, at its peak.

    Between steps, most free pieces of segments are what activations leave, and the next step uses
    them again. At most the bytes that were reserved and free at the peak are lost.

    Args:
        states: Bytes by state, with peaks that cover the step.
    """
    free_at_peak = states.get("peak_reserved", inf) - states.get("peak_allocated", 0.0)
    return max(0.0, min(states.get("unusable", 0.0), free_at_peak))


def _point(step: int, states: Reading, shapes: tuple[Shape, ...]) -> PeakPoint:
    peak = states.get("peak_allocated", states["allocated"])
    return PeakPoint(
        step=step,
        peak_bytes=peak,
        between_steps_bytes=states["allocated"],
        limit_bytes=states.get("limit", inf),
        reserved_bytes=states.get("peak_reserved", peak),
        fragmented_bytes=fragmented_bytes(states),
        retries=states.get("alloc_retries", 0.0),
        shapes=shapes,
    )
