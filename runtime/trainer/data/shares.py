"""How many of a batch's samples each rank gets. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Shares = tuple[int, ...]  # samples by rank; they add up to the batch


def even_shares(num_samples: int, num_ranks: int) -> Shares:
    """Share out as evenly as can be, larger shares first."""
    size, larger = divmod(num_samples, num_ranks)
    return (size + 1,) * larger + (size,) * (num_ranks - larger)


def fitting_shares(
    num_samples: int, sample_seconds: Sequence[float], most: Sequence[float] | None = None
) -> Shares:
    """Share out so that the last rank ends as early as can be; every rank gets a sample.

    Sample by sample to the rank that would end first with it, which is optimal where a rank's time
    is its samples times its seconds per sample.

    Args:
        num_samples: Of the batch.
        sample_seconds: Seconds per sample of each rank.
        most: Samples that each rank can take at most; by default no rank has a limit.

    Raises:
        ValueError: The batch has fewer samples than ranks, or does not fit into their limits.
    """
    num_ranks = len(sample_seconds)
    limits = [float("inf")] * num_ranks if most is None else most
    if num_samples < num_ranks or sum(limits) < num_samples or min(limits) < 1:
        raise ValueError(
            f"{num_samples} samples cannot be shared out to {num_ranks} ranks that take one sample "
            f"at least and {list(limits)} at most"
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
    """Return how long the rank works that works longest."""
    return max(share * each for share, each in zip(shares, sample_seconds, strict=True))


def gain(now: Sequence[int], other: Sequence[int], sample_seconds: Sequence[float]) -> float:
    """Return by how much faster other shares are; 0.25 is 1.25 times as fast."""
    return busy_seconds(now, sample_seconds) / busy_seconds(other, sample_seconds) - 1


def resized(shares: Sequence[int], num_samples: int) -> Shares:
    """Return shares of another number of samples in the same proportion; each rank gets one.

    Raises:
        ValueError: There are fewer samples than ranks.
    """
    if sum(shares) == num_samples:
        return tuple(shares)
    return fitting_shares(num_samples, [1 / share for share in shares])
