"""Checks whether a configuration is likely to fit this rank's memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....metrics.thresholds import OOM_RISK_HIGH
from ...common.format_numbers import format_bytes
from ...trainer.oom_recovery.micro_batch_planner import (
    SAFETY_RATIO,
    MemoryMeasurements,
    PeakSample,
    largest_fitting,
    length_bucket,
)
from ..policy.knob_registry import SPECS
from ..policy.policy_types import Configuration

# Share of the memory limit that a change may use. The rest is a margin, because running out of
# memory costs more than leaving out a change.
USED_RATIO = 0.92
_RECENT_PEAKS = 20


def peaks_of(
    measured: MemoryMeasurements, configuration: int, *, samples: int | None = None
) -> MemoryMeasurements:
    """Return the measurements with the peaks of one configuration only.

    A trial alternates between two configurations. The peaks of the new one contain the memory that
    the change needs, and a check would count it again.

    Args:
        measured: Memory peaks of this rank, and its limit.
        configuration: Number of the planner's configuration.
        samples: Samples of the largest micro-batch whose peaks count; None for any.
    """
    peaks = [
        each
        for each in measured.peaks
        if each.configuration == configuration and (samples is None or each.samples <= samples)
    ]
    return replace(measured, peaks=peaks)


def exceeds_free(measured: MemoryMeasurements, *, extra_bytes: int, length: int) -> str | None:
    """Return a reason if a change needs more than the highest recent peak leaves free; else None.

    Args:
        measured: Memory peaks of the configuration in use on this rank, and the rank's limit.
        extra_bytes: Bytes that the change needs.
        length: Length of the longest batch so far.
    """
    peaks = same_length_bucket(measured.peaks, length)[-_RECENT_PEAKS:]
    if measured.limit_bytes is None or not peaks or extra_bytes <= 0:
        return None
    peak = max(each.peak_bytes for each in peaks)
    free = USED_RATIO * measured.limit_bytes - peak
    if extra_bytes <= free:
        return None
    return f"{format_bytes(extra_bytes)} more needed, {format_bytes(max(0, free))} free"


def exceeds_fit(
    measured: MemoryMeasurements, *, samples: int, extra_bytes: int, length: int, bound: int
) -> str | None:
    """Return a reason if peaks show that micro-batches of this size do not fit; else None.

    Args:
        measured: Memory peaks of the configuration in use on this rank, with micro-batches of any
            size, and the rank's limit.
        samples: Samples of a micro-batch on this rank.
        extra_bytes: Bytes that the change needs apart from the micro-batch.
        length: Length of the longest batch so far.
        bound: Samples of this length that have not run out of memory.
    """
    if samples > bound:
        return f"micro-batches of more than {bound} ran out of memory before"
    if measured.limit_bytes is None:
        return None
    usable = USED_RATIO * measured.limit_bytes - extra_bytes
    fitting = largest_fitting(same_length_bucket(measured.peaks, length), usable / SAFETY_RATIO)
    if fitting is None or samples <= fitting:
        return None
    return f"micro-batches of {samples} are likely to run out of memory, {fitting} fit"


def exceeds_host(now: Configuration, target: Configuration, host_risk: float) -> str | None:
    """Return a reason if a change moves state to a host that is short of memory; else None.

    Args:
        now: The configuration in use.
        target: The configuration to change to.
        host_risk: Probability that the host runs out of memory soon.
    """
    moves = any(
        value and not now.get(name) and SPECS[name].moves_to_host for name, value in target.items()
    )
    if not moves or host_risk < OOM_RISK_HIGH:
        return None
    return f"the host itself may run out of memory, with probability {host_risk:.0%}"


def same_length_bucket(peaks: Sequence[PeakSample], length: int) -> list[PeakSample]:
    """Return the peaks of batches of similar length."""
    return [peak for peak in peaks if length_bucket(peak.length) == length_bucket(length)]
