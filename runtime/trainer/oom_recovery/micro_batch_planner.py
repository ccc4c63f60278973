"""Decides the sizes of micro-batches after out-of-memory errors, and when to guard collectives.

The module consists of plain data and pure functions, except `PeakHistory`, which records this
rank's memory peaks. The ranks exchange sizes and lengths first, so their plans are equal. Only the
memory measurements differ between ranks. Each rank computes a size from its own measurements, and
all ranks use the smallest size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field

from ....metrics.step_record import StepRecord
from ....metrics.thresholds import MEMORY_HEADROOM_LOW
from ..window.window_agreement import LocalBatches

SAFETY_RATIO = 0.95  # part of the memory limit to plan with, since predictions are not exact
GROW_AFTER = 20  # successful windows at the bound before a larger size is tried
UNBOUND = 2**62  # samples; stands for no bound
CLEAN_WINDOWS = 3  # successful windows before the guard is disarmed
MAX_PEAKS = 200  # steps whose peaks are kept

ByBucket = Mapping[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0, le=UNBOUND)]]
SizeByBucket = Mapping[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1, le=UNBOUND)]]


class MicroBatchPlanner:
    """Decides the number of micro-batches of each window, and whether its collectives are guarded.

    Attributes:
        limits: Sizes known to fit or to fail, by length.
        guard_schedule: When the guard is armed.
        configuration: Number of the configuration in use, apart from the size of micro-batches. A
            change in memory use makes a new number. A change back may restore the number.
    """

    def __init__(self) -> None:
        self.limits = MicroBatchLimits()
        self.guard_schedule = GuardSchedule()
        self.configuration = self._last_configuration = 0
        self._largest_requested = 0

    def begin_window(self, local_batches: LocalBatches, *, guard_requested: bool) -> bool:
        """Return whether to guard the window; `guard_requested` is whether any rank asks for it."""
        wants_more, self._largest_requested = (
            max(local_batches.micro_batch_samples) > self._largest_requested,
            max(local_batches.micro_batch_samples),
        )
        # Lengths of one bucket need different memory. If a size failed before in a bucket, a
        # smaller size may fail at a longer length of that bucket.
        failed_before = any(
            each <= length_bucket(local_batches.length) for each in self.limits.failing
        )
        self.guard_schedule = self.guard_schedule.next_window(
            longest=local_batches.length, requested=guard_requested or failed_before or wants_more
        )
        return self.guard_schedule.is_armed

    def micro_batches(self, local_batches: LocalBatches) -> int:
        """Return the number of micro-batches into which every rank splits its local batch."""
        bound = self.limits.bound(local_batches.length)
        pairs = zip(local_batches.samples, local_batches.micro_batch_samples, strict=True)
        return max(-(-samples // min(wanted, bound)) for samples, wanted in pairs)

    def on_success(self, local_batches: LocalBatches, micro_batches: int) -> None:
        """Record a window that fitted in memory on all ranks."""
        before = self.limits.bound(local_batches.length)
        self.limits = self.limits.after_success(
            local_batches.length, max(local_batches.largest(micro_batches))
        )
        self.guard_schedule = self.guard_schedule.after_success(longest=local_batches.length)
        if self.limits.bound(local_batches.length) > before:
            self.guard_schedule = self.guard_schedule.after_change()

    def on_out_of_memory(self, local_batches: LocalBatches, failing: int, next_size: int) -> None:
        """Record a size that ran out of memory on some rank, and the size to try instead."""
        self.limits = self.limits.after_out_of_memory(local_batches.length, failing, next_size)
        self.guard_schedule = self.guard_schedule.after_change()

    def invalidate(self) -> None:
        """Forget which sizes fit or fail, but keep the bounds, after a change in memory use."""
        self._last_configuration += 1
        self.configuration = self._last_configuration
        self.limits = self.limits.invalidated()
        self.guard_schedule = self.guard_schedule.after_change()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """Sizes of micro-batches that fit or fail, in samples, by sequence length.

    Lengths up to the same power of two share a bucket. A size that failed at one length is assumed
    to fail at all longer lengths. A size that fitted is assumed to fit at all shorter lengths.

    Attributes:
        bounds: Maximum size to use, by bucket.
        failing: Smallest size that ran out of memory, by bucket.
        proven: Largest size that succeeded, by bucket. A size of 0 counts as none.
        clean: Consecutive successful windows at the bound, by bucket.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bounds: SizeByBucket = field(default_factory=dict)
    failing: SizeByBucket = field(default_factory=dict)
    proven: ByBucket = field(default_factory=dict)
    clean: ByBucket = field(default_factory=dict)

    def bound(self, length: int) -> int:
        """Return the maximum samples of a micro-batch of this length; UNBOUND if none is known."""
        return min(_up_to(self.bounds, length_bucket(length)), default=UNBOUND)

    def after_out_of_memory(self, length: int, failing: int, next_size: int) -> MicroBatchLimits:
        """Return the limits after a size ran out of memory.

        The new bound is the next size to try, or a larger size that fitted before.
        """
        bucket = length_bucket(length)
        lowered = {
            each: min(size, failing - 1) if each >= bucket else size
            for each, size in self.proven.items()
        }
        proven = {each: size for each, size in lowered.items() if size > 0}
        fitted = [size for each, size in proven.items() if bucket <= each]
        return MicroBatchLimits(
            bounds={**self.bounds, bucket: max(1, next_size, *fitted)},
            failing={**self.failing, bucket: min(failing, self.failing.get(bucket, failing))},
            proven=proven,
            clean={**self.clean, bucket: 0},
        )

    def after_success(self, length: int, largest: int) -> MicroBatchLimits:
        """Return the limits after a window succeeded.

        The bound grows after `GROW_AFTER` such windows.

        Args:
            length: The longest sequence of all ranks.
            largest: Samples of the largest micro-batch of all ranks.
        """
        bucket, bound = length_bucket(length), self.bound(length)
        proven = max(largest, self.proven.get(bucket, 0))
        known = replace(self, proven={**self.proven, bucket: proven})
        if largest < bound:  # a small batch does not show whether the bound fits
            return known
        count = min(GROW_AFTER, self.clean.get(bucket, 0) + 1)
        larger = self._larger(length) if count == GROW_AFTER else bound
        if larger <= bound:
            return replace(known, clean={**self.clean, bucket: count})
        bounds = {
            each: max(larger, held) if each <= bucket else held
            for each, held in self.bounds.items()
        }
        return replace(known, bounds=bounds, clean={**self.clean, bucket: 0})

    def invalidated(self) -> MicroBatchLimits:
        """Return the limits after a change in memory use. Only the bounds are kept."""
        return MicroBatchLimits(bounds=self.bounds)

    def _larger(self, length: int) -> int:
        """Return the next larger bound to try.

        This is the middle between the bound and the smallest failing size, or twice the bound if no
        size failed.
        """
        bound, failed = self.bound(length), _up_to(self.failing, length_bucket(length))
        return (bound + min(failed)) // 2 if failed else 2 * bound


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSchedule:
    """Decides in which windows the ranks vote before each collective.

    The ranks vote while an out-of-memory error is likely. A new schedule is armed, because no size
    is known to fit yet.

    Attributes:
        windows_left: Successful windows until the guard is disarmed; 0 while it is disarmed.
        longest: Longest sequence in any successful window; 0 before the first successful window.
    """

    windows_left: int = CLEAN_WINDOWS
    longest: int = 0

    @property
    def is_armed(self) -> bool:
        """Whether to vote before each collective of the window."""
        return self.windows_left > 0

    def next_window(self, *, longest: int, requested: bool) -> GuardSchedule:
        """Return the schedule for a window that is about to begin.

        Args:
            longest: Length of the window's longest sequence over all ranks.
            requested: Whether any rank requests the guard.
        """
        if requested or longest > self.longest:
            return replace(self, windows_left=CLEAN_WINDOWS)
        return self

    def after_success(self, *, longest: int) -> GuardSchedule:
        """Return the schedule after a window in which no rank ran out of memory."""
        return GuardSchedule(
            windows_left=max(0, self.windows_left - 1), longest=max(self.longest, longest)
        )

    def after_change(self) -> GuardSchedule:
        """Return the schedule after a change of memory use, such as a new micro-batch size."""
        return replace(self, windows_left=CLEAN_WINDOWS)


def needs_guard(*, headroom_bytes: float | None, limit_bytes: float | None) -> bool:
    """Return whether a rank requests the guard because its own memory is low.

    Args:
        headroom_bytes: Memory limit minus the predicted next peak; None while unknown.
        limit_bytes: Limit of the process, or of torch on the device; None without a limit.
    """
    if headroom_bytes is None or not limit_bytes:
        return False
    return headroom_bytes < MEMORY_HEADROOM_LOW * limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSample:
    """Peak memory of one step.

    Attributes:
        samples: Samples of the step's largest micro-batch.
        length: Sequence length of that micro-batch.
        peak_bytes: Highest memory use in the step.
        configuration: Number of the planner's configuration in the step.
    """

    samples: int
    length: int
    peak_bytes: float
    configuration: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasurements:
    """Memory peaks of a rank's last steps, and its memory limit; None means no limit."""

    peaks: Sequence[PeakSample]
    limit_bytes: float | None


class PeakHistory:
    """Records the memory peaks of the last steps on the watch thread; empty without monitoring.

    Args:
        watch: The watch on the engine.
        device: The training device, such as "cuda:0".
    """

    def __init__(self, watch: Any, device: str) -> None:
        self._watch, self._device = watch, device
        self._peaks: deque[PeakSample] = deque(maxlen=MAX_PEAKS)
        self._limit_bytes: float | None = None
        self._last_step = self._configuration = 0
        # The configurations of recent windows, each with the step of its first window.
        self._configurations: deque[tuple[int, int]] = deque([(0, 0)], maxlen=MAX_PEAKS)
        self._lock = threading.Lock()
        watch.subscribe_internal(self._record)

    @property
    def is_low(self) -> bool:
        """Whether the last peak came near the limit."""
        if not self._peaks or self._limit_bytes is None:
            return False
        headroom = self._limit_bytes - self._peaks[-1].peak_bytes
        return needs_guard(headroom_bytes=headroom, limit_bytes=self._limit_bytes)

    def on_window_start(self, *, step: int, configuration: int) -> None:
        """Record the configuration that the window of a step uses, before its peak is recorded.

        Peaks are recorded later than their steps.
        """
        if configuration != self._configuration or step <= self._last_step:
            with self._lock:
                if step < self._last_step:  # a checkpoint was loaded
                    self._configurations.clear()
                self._configurations.append((step, configuration))
        self._last_step, self._configuration = step, configuration

    def measured(self) -> MemoryMeasurements:
        """Return the peaks of the last steps, and the limit as it is now."""
        limit_bytes = self._watch.memory_limit_bytes(self._device)
        if limit_bytes is None:
            limit_bytes = self._limit_bytes
        with self._lock:
            return MemoryMeasurements(peaks=tuple(self._peaks), limit_bytes=limit_bytes)

    def _record(self, record: StepRecord) -> None:
        states = record.memory_bytes.get(self._device, {})
        peak_bytes = record.peak_bytes_since_change.get(self._device, states.get("peak_allocated"))
        if peak_bytes is None or not record.micro_batch_shapes:
            return
        self._limit_bytes = states.get("limit", self._limit_bytes)
        samples, length = max(record.micro_batch_shapes, key=lambda shape: shape[0] * shape[1])
        with self._lock:
            configuration = next(
                (each for first, each in reversed(self._configurations) if first <= record.step),
                self._configurations[0][1],
            )
            self._peaks.append(
                PeakSample(
                    samples=samples,
                    length=length,
                    peak_bytes=peak_bytes,
                    configuration=configuration,
                )
            )


def size_after_oom(
    local_batches: LocalBatches, failing: int, measured: MemoryMeasurements
) -> int | None:
    """Return the size to try after this rank ran out of memory; None if one sample failed."""
    bucket = length_bucket(local_batches.length)
    alike = [peak for peak in measured.peaks if length_bucket(peak.length) == bucket]
    return smaller_size(failing, alike, measured.limit_bytes)


def smaller_size(
    failing: int, peaks: Sequence[PeakSample], limit_bytes: float | None
) -> int | None:
    """Return the size to try after a size ran out of memory; None if one sample failed.

    If peaks of at least two sizes are known, a line through the peaks predicts the memory of each
    size, and the result is the largest size that fits. Otherwise the result is half the failing
    size, rounded up. The result is always below the failing size.
    """
    if failing <= 1:
        return None
    fitting = None if limit_bytes is None else largest_fitting(peaks, limit_bytes)
    if fitting is None or fitting >= failing:  # this failure contradicts the line
        return -(-failing // 2)
    return max(1, fitting)


def largest_fitting(peaks: Sequence[PeakSample], limit_bytes: float) -> int | None:
    """Return the largest size whose predicted peak is under the limit.

    The predicted peak is a + b * size. This is the least squares line through the measured peaks,
    lifted so that no measured peak is above the line. The result is 0 if not even one sample is
    expected to fit, and None if no line can be computed.
    """
    if len({peak.samples for peak in peaks}) < 2:
        return None
    sizes = np.array([peak.samples for peak in peaks], dtype=float)
    bytes_needed = np.array([peak.peak_bytes for peak in peaks], dtype=float)
    slope, intercept = np.polyfit(sizes, bytes_needed, 1)
    if slope <= 0:
        return None
    intercept += max(0.0, float((bytes_needed - (intercept + slope * sizes)).max()))
    return max(0, int((SAFETY_RATIO * limit_bytes - intercept) // slope))


def length_bucket(length: int) -> int:
    """Return the bucket of a length: lengths up to the same power of two share one."""
    return max(0, length - 1).bit_length()


def _up_to(values: ByBucket, bucket: int) -> list[int]:
    return [value for each, value in values.items() if each <= bucket]
