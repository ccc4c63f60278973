"""Who sums which part of a bucket, and by which way the sums reach those who need them; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .formats import BLOCK

# Values of a shard that go in one message between processors: of int8 256 KB. Two of them under way
# keep a link of 200 Mbit/s full; of one at a time gloo sends first one way, then the other, and a
# third of the link to half of it stays empty (measured).
PIECE_VALUES = 1024 * BLOCK

Span = tuple[int, int]
"""Where a rank's values start, and how many there are."""


def even_sizes(num_values: int, num_ranks: int) -> list[int]:
    """Share values out evenly, in whole blocks; the last ranks may get less or nothing."""
    share = -(-num_values // (num_ranks * BLOCK)) * BLOCK
    left = [max(0, num_values - rank * share) for rank in range(num_ranks)]
    return [min(share, rest) for rest in left]


def direct_is_cheaper(sizes: Sequence[int]) -> bool:
    """Whether each rank's values should go straight to it, rather than in two even shots.

    Straight, a rank receives its part from all others: cheap where parts are alike, dear where one
    rank has most of the bucket. In two shots each rank sends its share of the values twice.

    Args:
        sizes: How many of the values each rank needs the sum of.
    """
    total, num_ranks = sum(sizes), len(sizes)
    straight = max(max((num_ranks - 1) * size, total - size) for size in sizes)
    return straight <= 2 * (num_ranks - 1) * total / num_ranks


def chunks(sizes: Sequence[int], most: int | None) -> Iterator[list[Span]]:
    """Yield the spans of all ranks, cut alike, that go in one message.

    Args:
        sizes: How many values each rank has; they lie one rank's after the other's.
        most: Values of a rank in a piece; None for all at once.
    """
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    largest = max(sizes)
    step = most or max(largest, 1)
    for begin in range(0, largest, step):
        yield [
            (start + min(begin, size), max(0, min(step, size - begin)))
            for start, size in zip(starts, sizes, strict=True)
        ]
