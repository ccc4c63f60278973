"""What the next window is cut into, and whether it is guarded. Pure; the same on all ranks.

Only what a rank measured is its own: from that it suggests a size, and all agree on the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .fit import MemoryMeasurements, smaller_size
from .guard_schedule import GuardSchedule
from .sizing import MicroBatchLimits, bucket_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShares:
    """What all ranks know of a window.

    Attributes:
        samples: Of each rank.
        wanted: By rank, the samples of a micro-batch that are asked for.
        length: The longest of all ranks.
    """

    samples: Sequence[int]
    wanted: Sequence[int]
    length: int

    def largest(self, micro_batches: int) -> list[int]:
        """Return the samples of each rank's largest micro-batch."""
        return [-(-samples // micro_batches) for samples in self.samples]


class MicroBatchPlanner:
    """How large micro-batches are by length of batch, and when the guard is armed.

    Attributes:
        sizing, arming: As they stand.
    """

    def __init__(self) -> None:
        self.sizing = MicroBatchLimits()
        self.arming = GuardSchedule()
        self._wanted = 0

    def begin(self, share: BatchShares, *, asked: bool) -> bool:
        """Whether a window about to begin is guarded; `asked` if any rank asks for it."""
        wants_more, self._wanted = max(share.wanted) > self._wanted, max(share.wanted)
        # Lengths of one bucket differ in memory: where a size ever ran out, another may.
        asked = asked or any(each <= bucket_of(share.length) for each in self.sizing.failing)
        self.arming = self.arming.before(longest=share.length, asked=asked or wants_more)
        return self.arming.is_armed

    def micro_batches(self, share: BatchShares) -> int:
        """Return into how many micro-batches every rank cuts its share."""
        bound = self.sizing.bound(share.length)
        pairs = zip(share.samples, share.wanted, strict=True)
        return max(-(-samples // min(wanted, bound)) for samples, wanted in pairs)

    def on_success(self, share: BatchShares, micro_batches: int) -> None:
        """Learn that a window fitted on all ranks."""
        before = self.sizing.bound(share.length)
        self.sizing = self.sizing.after_clean(share.length, max(share.largest(micro_batches)))
        self.arming = self.arming.after_clean(longest=share.length)
        if self.sizing.bound(share.length) > before:
            self.arming = self.arming.after_change()

    def ran_out(self, share: BatchShares, failing: int, suggested: int) -> None:
        """Learn that a size ran out on some rank, and what was suggested instead."""
        self.sizing = self.sizing.after_out_of_memory(share.length, failing, suggested)
        self.arming = self.arming.after_change()

    def forget(self) -> None:
        """Take it that what did not fit may fit now, and that what fitted may not."""
        self.sizing = self.sizing.forgotten()
        self.arming = self.arming.after_change()


def suggest_size(share: BatchShares, failing: int, measured: MemoryMeasurements) -> int | None:
    """Return what a rank that ran out would try next; None if that was a single sample."""
    bucket = bucket_of(share.length)
    alike = [peak for peak in measured.peaks if bucket_of(peak.length) == bucket]
    return smaller_size(failing, alike, measured.limit_bytes)
