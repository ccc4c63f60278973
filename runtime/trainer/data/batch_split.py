"""Splits a global batch over the ranks: how many of its samples each rank trains on.

The split may change from one batch to the next, so that ranks of unequal speed finish together.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

# Number of changes to keep. Between the batch of a checkpoint and a batch that is loaded ahead,
# there are always fewer changes.
MAX_CHANGES = 64

BatchSplit = tuple[int, ...]  # samples of each rank's local batch; they add up to the batch


def even_split(num_samples: int, num_ranks: int) -> BatchSplit:
    """Return the most even split of a batch, larger local batches first."""
    size, larger = divmod(num_samples, num_ranks)
    return (size + 1,) * larger + (size,) * (num_ranks - larger)


def fastest_split(
    num_samples: int, sample_seconds: Sequence[float], max_samples: Sequence[float] | None = None
) -> BatchSplit:
    """Return the split with which the last rank finishes earliest; every rank gets a sample.

    Each sample is given to the rank that would finish first with this sample added. This is optimal
    if a rank's time is its number of samples times its seconds per sample.

    Args:
        num_samples: Samples of the batch.
        sample_seconds: Seconds per sample of each rank.
        max_samples: Largest local batch of each rank; by default there are no limits.

    Raises:
        ValueError: The batch has fewer samples than there are ranks, or more than `max_samples`
            allows.
    """
    num_ranks = len(sample_seconds)
    limits = [float("inf")] * num_ranks if max_samples is None else max_samples
    if num_samples < num_ranks or sum(limits) < num_samples or min(limits) < 1:
        raise ValueError(
            f"{num_samples} samples cannot be divided over {num_ranks} ranks with at least one "
            f"sample each and at most {list(limits)}"
        )
    split = [1] * num_ranks
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(sample_seconds) if limits[rank] >= 2]
    heapq.heapify(ends)
    for _ in range(num_samples - num_ranks):
        _, rank = ends[0]
        split[rank] += 1
        if split[rank] + 1 <= limits[rank]:
            heapq.heapreplace(ends, ((split[rank] + 1) * sample_seconds[rank], rank))
        else:
            heapq.heappop(ends)
    return tuple(split)


def busy_seconds(split: Sequence[int], sample_seconds: Sequence[float]) -> float:
    """Return the time that the slowest rank takes for a split."""
    return max(samples * each for samples, each in zip(split, sample_seconds, strict=True))


def gain(now: Sequence[int], other: Sequence[int], sample_seconds: Sequence[float]) -> float:
    """Return the speedup of another split minus 1; 0.25 is 1.25 times as fast."""
    return busy_seconds(now, sample_seconds) / busy_seconds(other, sample_seconds) - 1


def resized_split(split: Sequence[int], num_samples: int) -> BatchSplit:
    """Return a split of `num_samples` in the proportions of `split`, at least 1 sample per rank.

    Raises:
        ValueError: There are fewer samples than ranks.
    """
    if sum(split) == num_samples:
        return tuple(split)
    return fastest_split(num_samples, [1 / samples for samples in split])


class SplitSource(Protocol):
    """Supplies the split of each batch."""

    def split_at(self, index: int) -> Sequence[int]:
        """Return the split of a batch: the samples of each rank."""


class SplitSchedule:
    """Records the split of each batch by the batch's index, the same on all ranks.

    Attributes:
        next_index: First batch whose split this rank has not read yet.
    """

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        """Start with an even split of batches of `num_samples` over all ranks."""
        self.num_samples, self.num_ranks = num_samples, num_ranks
        self.next_index = 0
        self._changes: list[tuple[int, BatchSplit]] = [(0, even_split(num_samples, num_ranks))]

    @property
    def latest(self) -> BatchSplit:
        """Split of the last change, even if it is not in effect yet."""
        return self._changes[-1][1]

    @property
    def latest_index(self) -> int:
        """Index of the first batch with the split of the last change."""
        return self._changes[-1][0]

    def split_at(self, index: int) -> BatchSplit:
        """Return the split of a batch, which cannot be changed after this call."""
        self.next_index = max(self.next_index, index + 1)
        position = bisect_right(self._changes, index, key=itemgetter(0))
        return self._changes[max(position - 1, 0)][1]

    def change(self, from_index: int, split: BatchSplit) -> None:
        """Use another split from a batch on.

        Raises:
            ValueError: The split of that batch was read already, or the new split does not fit the
                batch.
        """
        if from_index < self.next_index:
            raise ValueError(
                f"the shares of batch {from_index} are in use; shares can change from batch "
                f"{self.next_index} on"
            )
        self._check(split)
        while len(self._changes) > 1 and self._changes[-1][0] >= from_index:
            self._changes.pop()
        self._changes.append((from_index, tuple(split)))
        del self._changes[:-MAX_CHANGES]

    def state_dict(self) -> dict[str, Any]:
        """Return the changes of the split, to be saved with the position of the data."""
        return {"changes": [[index, list(split)] for index, split in self._changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load saved changes, unless the number of ranks or the batch size differs.

        Returns:
            Whether the changes were loaded.
        """
        changes = [(int(index), tuple(map(int, split))) for index, split in state["changes"]]
        try:
            for _, split in changes:
                self._check(split)
        except ValueError:
            return False
        self._changes = changes
        return True

    def _check(self, split: BatchSplit) -> None:
        fits = len(split) == self.num_ranks and sum(split) == self.num_samples
        if not fits or min(split) < 1:
            raise ValueError(
                f"{list(split)} are no shares of {self.num_samples} samples for {self.num_ranks} "
                "ranks: there must be one per rank, at least 1, and they must add up"
            )
