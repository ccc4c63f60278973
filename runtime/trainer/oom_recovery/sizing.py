"""How large micro-batches may be: less after an error, and more again without repeating it. Pure.

All ranks go through the same states: sizes and lengths are agreed between them beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

GROW_AFTER = 20  # clean windows of a length at its bound, before a larger one is tried
UNBOUND = 2**62

ByBucket = Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """What is known of the sizes that fit, in samples of a micro-batch, by length of batch.

    A length stands for all of its bucket, up to the next power of two. What failed at one length is
    taken to fail at all longer ones, what fitted to fit at all shorter ones.

    Attributes:
        bounds: By bucket, the size to keep to.
        failing: By bucket, the smallest size that ran out of memory.
        proven: By bucket, the largest size that came to its end.
        clean: By bucket, windows in a row that came to their end at the bound.
    """

    bounds: ByBucket = field(default_factory=dict)
    failing: ByBucket = field(default_factory=dict)
    proven: ByBucket = field(default_factory=dict)
    clean: ByBucket = field(default_factory=dict)

    def bound(self, length: int) -> int:
        """Return the samples that a micro-batch of this length may hold; UNBOUND if unknown."""
        return min(_up_to(self.bounds, bucket_of(length)), default=UNBOUND)

    def after_out_of_memory(self, length: int, failing: int, suggested: int) -> MicroBatchLimits:
        """Return what is known after a size ran out.

        The bound is the suggested size, or a larger one that fitted before.
        """
        bucket = bucket_of(length)
        proven = {
            each: min(size, failing - 1) if each >= bucket else size
            for each, size in self.proven.items()
        }
        fitted = [size for each, size in proven.items() if bucket <= each]
        return MicroBatchLimits(
            bounds={**self.bounds, bucket: max(1, suggested, *fitted)},
            failing={**self.failing, bucket: min(failing, self.failing.get(bucket, failing))},
            proven=proven,
            clean={**self.clean, bucket: 0},
        )

    def after_clean(self, length: int, ran: int) -> MicroBatchLimits:
        """Return what is known after a window came to its end: now and then a larger bound.

        Args:
            length: The longest of all ranks.
            ran: Samples of the largest micro-batch of all ranks.
        """
        bucket, bound = bucket_of(length), self.bound(length)
        known = replace(self, proven={**self.proven, bucket: max(ran, self.proven.get(bucket, 0))})
        if ran < bound:  # it was not the bound that kept it small
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

    def forgotten(self) -> MicroBatchLimits:
        """Return what is known after a change that matters to memory: the bounds, to grow from."""
        return MicroBatchLimits(bounds=self.bounds)

    def _larger(self, length: int) -> int:
        """Return half the way up to what failed, or twice the bound where nothing did."""
        bound, failed = self.bound(length), _up_to(self.failing, bucket_of(length))
        return (bound + min(failed)) // 2 if failed else 2 * bound


def bucket_of(length: int) -> int:
    """Return the bucket of a length: lengths up to the same power of two share one."""
    return max(0, length - 1).bit_length()


def _up_to(values: ByBucket, bucket: int) -> list[int]:
    return [value for each, value in values.items() if each <= bucket]
