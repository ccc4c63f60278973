"""Figures that a report says in several places, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..forecast.series import PeakPoint, Shape
from .evidence import Evidence

MAX_SHAPES = 3


def use_bytes(evidence: Evidence, told: str, read: str) -> float | None:
    """Return what the error itself tells, else what was read as it passed."""
    found = evidence.out_of_memory.told_bytes.get(told)
    return (evidence.readings or {}).get(read) if found is None else found


def in_use_bytes(evidence: Evidence) -> float | None:
    """Return what was in use as the request failed, comparable with the limit.

    An error's text tells it of the very moment. A reading comes when much is free again; but a peak
    above all before it is this step's. On CUDA the limit is one of what is reserved.
    """
    told = evidence.out_of_memory.told_bytes
    if "allocated" in told:
        return told["allocated"] + told.get("reserved_unallocated", 0.0)
    state = "allocated" if evidence.device == "cpu" else "reserved"
    readings = evidence.readings or {}
    now, peak = readings.get(state), readings.get(f"peak_{state}", 0.0)
    if now is None or evidence.device != "cpu" or not evidence.peaks:
        return now
    highest = max(point.peak_bytes for point in evidence.peaks)
    return max(now, peak) if peak > highest else now


def free_bytes(evidence: Evidence) -> float | None:
    """Return what was left under the limit, or what the device says that was free if less."""
    told, use = evidence.out_of_memory.told_bytes.get("free"), in_use_bytes(evidence)
    rooms = [] if told is None else [told]
    if use is not None and evidence.limit and math.isfinite(evidence.limit.num_bytes):
        rooms.append(max(0.0, evidence.limit.num_bytes - use))
    return min(rooms) if rooms else None


def step_under_way(evidence: Evidence) -> str:
    """Name the step and the micro-batch in which memory ran out."""
    number = f", micro-batch {evidence.micro_batch}" if evidence.micro_batch else ""
    return f"step {evidence.step + 1}{number}"


def percent(part: float, whole: float) -> str:
    """Write a share."""
    if not whole or not math.isfinite(whole):
        return "-"
    return f"{100 * part / whole:.0f} %"


def shape_words(shape: Shape) -> str:
    """Write a micro-batch's size."""
    return f"{shape.samples} x {shape.length}"


def shapes_words(shapes: Sequence[Shape]) -> str:
    """Write the largest of several."""
    largest = sorted(shapes, key=lambda each: -each.samples * each.length)[:MAX_SHAPES]
    more = f" and {len(shapes) - MAX_SHAPES} more" if len(shapes) > MAX_SHAPES else ""
    return ", ".join(map(shape_words, largest)) + more or "-"


def largest_tokens(peaks: Sequence[PeakPoint]) -> int | None:
    """Return the tokens of the largest micro-batch of some steps; None where none is known."""
    shapes = (shape for point in peaks for shape in point.shapes)
    return max((shape.samples * shape.length for shape in shapes), default=None)
