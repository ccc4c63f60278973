"""Formatting of values in out-of-memory reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..forecast.series import Shape

MAX_SHAPES = 3


def format_percent(part: float, whole: float) -> str:
    """Format a ratio in percent; "-" without a finite whole."""
    if not whole or not math.isfinite(whole):
        return "-"
    return f"{100 * part / whole:.0f} %"


def format_shape(shape: Shape) -> str:
    """Format the size of a micro-batch."""
    return f"{shape.samples} x {shape.length}"


def format_shapes(shapes: Sequence[Shape]) -> str:
    """Format the largest of several micro-batches."""
    largest = sorted(shapes, key=lambda each: -each.samples * each.length)[:MAX_SHAPES]
    more = f" and {len(shapes) - MAX_SHAPES} more" if len(shapes) > MAX_SHAPES else ""
    return ", ".join(map(format_shape, largest)) + more or "-"
