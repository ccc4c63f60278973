"""Whether a configuration is likely to fit this rank's memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ....metrics.thresholds import OOM_RISK_HIGH
from ...common.units import format_bytes
from ...trainer.oom_recovery.sizing import (
    SAFETY_RATIO,
    MemoryMeasurements,
    PeakSample,
    largest_fitting,
    length_bucket,
)
from ..policy.types import Configuration

# Of the limit: a change that is wrong about its need costs more than one that is not made.
USED_RATIO = 0.92
_RECENT = 20
ON_HOST = ("optimizer_sleep", "offload_optimizer", "offload_param")


def exceeds_free(measured: MemoryMeasurements, *, extra_bytes: int, length: int) -> str | None:
    """Say so if a change needs more than is free beside the highest of the last peaks.

    Args:
        measured: This rank's peaks, and its limit.
        extra_bytes: What the change needs; 0 or less is always there.
        length: Of the longest batch so far.
    """
    peaks = same_length_bucket(measured.peaks, length)[-_RECENT:]
    if measured.limit_bytes is None or not peaks or extra_bytes <= 0:
        return None
    peak = max(each.peak_bytes for each in peaks)
    free = USED_RATIO * measured.limit_bytes - peak
    if extra_bytes <= free:
        return None
    return f"it needs {format_bytes(extra_bytes)} more, and {format_bytes(max(0, free))} are free"


def exceeds_fit(
    measured: MemoryMeasurements, *, samples: int, extra_bytes: int, length: int, bound: int
) -> str | None:
    """Say so if micro-batches of that size would not fit, as peaks of two sizes or more tell.

    Args:
        measured: This rank's peaks, and its limit.
        samples: Of a micro-batch on this rank.
        extra_bytes: What else of the change needs memory.
        length: Of the longest batch so far.
        bound: What a micro-batch of this length may hold, as errors have shown.
    """
    if samples > bound:
        return f"micro-batches of more than {bound} ran out of memory before"
    if measured.limit_bytes is None:
        return None
    usable = USED_RATIO * measured.limit_bytes - extra_bytes
    fitting = largest_fitting(same_length_bucket(measured.peaks, length), usable / SAFETY_RATIO)
    if fitting is None or samples <= fitting:
        return None
    return f"micro-batches of {samples} are likely to run out of memory, {fitting} would fit"


def exceeds_host(now: Configuration, target: Configuration, host_risk: float) -> str | None:
    """Say so if a change would move to the host what that has no memory for.

    Args:
        now: What is in use.
        target: What would be.
        host_risk: That the host's memory runs out, as it is.
    """
    moves = any(target.get(knob) and not now.get(knob) for knob in ON_HOST)
    if not moves or host_risk < OOM_RISK_HIGH:
        return None
    return f"the host is short of memory itself, at a risk of {host_risk:.0%}"


def same_length_bucket(peaks: Sequence[PeakSample], length: int) -> list[PeakSample]:
    """Return the peaks of batches about as long."""
    return [peak for peak in peaks if length_bucket(peak.length) == length_bucket(length)]
