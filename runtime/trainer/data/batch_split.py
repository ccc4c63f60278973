"""Shares of a global batch: how many of its samples each rank gets, and from which batch on."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

# Changes to keep: more than there are between a saved batch and one that is loaded ahead.
MAX_CHANGES = 64

Shares = tuple[int, ...]  # samples by rank; they add up to the batch


def even_shares(num_samples: int, num_ranks: int) -> Shares:
    """Divide a batch as evenly as possible, larger shares first."""
    size, larger = divmod(num_samples, num_ranks)
    return (size + 1,) * larger + (size,) * (num_ranks - larger)


def fitting_shares(
    num_samples: int, sample_seconds: Sequence[float], max_samples: Sequence[float] | None = None
) -> Shares:
    """Divide a batch so that the last rank ends as early as possible; every rank gets a sample.

    Each sample goes to the rank that would end first with it. That is optimal if a rank's time is
    its samples times its seconds per sample.

    Args:
        num_samples: Samples of the batch.
        sample_seconds: Seconds per sample of each rank.
        max_samples: Largest share of each rank; by default there are no limits.

    Raises:
        ValueError: The batch has fewer samples than ranks, or exceeds their limits.
    """
    num_ranks = len(sample_seconds)
    limits = [float("inf")] * num_ranks if max_samples is None else max_samples
    if num_samples < num_ranks or sum(limits) < num_samples or min(limits) < 1:
        raise ValueError(
            f"{num_samples} samples cannot be divided over {num_ranks} ranks with at least one "
            f"sample each and at most {list(limits)}"
        )
    shares = [1] * num_ranks
    ends = [(2 * seconds, rank) for rank, seconds in enumerate(sample_seconds) if limits[rank] >= 2]
    heapq.heapify(ends)
    for _ in range(num_samples - num_ranks):
        _, rank = ends[0]
        shares[rank] += 1
        if shares[rank] + 1 <= limits[rank]:
            heapq.heapreplace(ends, ((shares[rank] + 1) * sample_seconds[rank], rank))
        else:
            heapq.heappop(ends)
    return tuple(shares)


def busy_seconds(shares: Sequence[int], sample_seconds: Sequence[float]) -> float:
    """Return the time of the slowest rank."""
    return max(share * each for share, each in zip(shares, sample_seconds, strict=True))


def gain(now: Sequence[int], other: Sequence[int], sample_seconds: Sequence[float]) -> float:
    """Return the speedup of other shares minus 1; 0.25 is 1.25 times as fast."""
    return busy_seconds(now, sample_seconds) / busy_seconds(other, sample_seconds) - 1


def resized(shares: Sequence[int], num_samples: int) -> Shares:
    """Return shares of another number of samples in the same proportion, at least 1 per rank.

    Raises:
        ValueError: There are fewer samples than ranks.
    """
    if sum(shares) == num_samples:
        return tuple(shares)
    return fitting_shares(num_samples, [1 / share for share in shares])


class ShareSource(Protocol):
    """Shares of each batch."""

    def shares_at(self, index: int) -> Sequence[int]:
        """Return the samples of each rank in a batch."""


class ShareSchedule:
    """Shares by batch index, equal on all ranks.

    Attributes:
        next_index: First batch whose shares this rank has not read yet.
    """

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        """Start with even shares of batches of `num_samples` over all ranks."""
        self.num_samples, self.num_ranks = num_samples, num_ranks
        self.next_index = 0
        self._changes: list[tuple[int, Shares]] = [(0, even_shares(num_samples, num_ranks))]

    @property
    def latest(self) -> Shares:
        """The shares of the last change, even if it is not in effect yet."""
        return self._changes[-1][1]

    def shares_at(self, index: int) -> Shares:
        """Return the shares of a batch; they cannot change any more."""
        self.next_index = max(self.next_index, index + 1)
        position = bisect_right(self._changes, index, key=itemgetter(0))
        return self._changes[max(position - 1, 0)][1]

    def change(self, from_index: int, shares: Shares) -> None:
        """Use other shares from a batch on.

        Raises:
            ValueError: Its shares were read already, or these shares do not fit the batch.
        """
        if from_index < self.next_index:
            raise ValueError(
                f"the shares of batch {from_index} are in use; shares can change from batch "
                f"{self.next_index} on"
            )
        self._check(shares)
        while len(self._changes) > 1 and self._changes[-1][0] >= from_index:
            self._changes.pop()
        self._changes.append((from_index, tuple(shares)))
        del self._changes[:-MAX_CHANGES]

    def state_dict(self) -> dict[str, Any]:
        """Return the changes, to be loaded with the position of the data."""
        return {"changes": [[index, list(shares)] for index, shares in self._changes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load saved changes; those of another number of ranks or another batch size are ignored.

        Returns:
            Whether the changes were loaded.
        """
        changes = [(int(index), tuple(map(int, shares))) for index, shares in state["changes"]]
        try:
            for _, shares in changes:
                self._check(shares)
        except ValueError:
            return False
        self._changes = changes
        return True

    def _check(self, shares: Shares) -> None:
        fits = len(shares) == self.num_ranks and sum(shares) == self.num_samples
        if not fits or min(shares) < 1:
            raise ValueError(
                f"{list(shares)} are no shares of {self.num_samples} samples for {self.num_ranks} "
                "ranks: there must be one per rank, at least 1, and they must add up"
            )
