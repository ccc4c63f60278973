"""Measurements of the GPU tests that are also tried on fakes and made-up traces, without a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# More calls than torch's pool has streams, so that each stream would get one.
NUM_CALLS = 40

_OWN = ("runtime/", "metrics/")  # the packages that run in training

Span = tuple[float, float]


def streams_that_wait(
    streams: Sequence[Any], begin: Callable[[], Any], keep_busy: Callable[[], None]
) -> int:
    """Return how many streams wait for asynchronous calls, though no work of theirs does.

    The streams must be idle before. The result contains NCCL's own stream if it is one of them.

    Args:
        streams: Streams of the script, each with `query`.
        begin: Begins a call on the current stream, and returns its handle.
        keep_busy: Queues work on the current stream that takes longer than this function.
    """
    keep_busy()
    handles = [begin() for _ in range(NUM_CALLS)]
    waiting = sum(not stream.query() for stream in streams)
    del handles
    return waiting


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of spans, in their unit."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposed(communication: Sequence[Span], compute: Sequence[Span]) -> float:
    """Return how long only communication runs, up to the last computation.

    This is the exposed time if the compute stream waits for each call before its last work.
    """
    last = max((end for _, end in compute), default=0.0)
    ended = [(begin, min(end, last)) for begin, end in communication if begin < last]
    return covered([*ended, *compute]) - covered(compute)


def added_ratio(plain: Sequence[float], monitored: Sequence[float]) -> float:
    """Return the median of paired ratios, less one."""
    pairs = zip(plain, monitored, strict=True)
    return statistics.median(after / before for before, after in pairs) - 1


def ratios_to_neighbours(
    before: Sequence[float], between: Sequence[float], after: Sequence[float]
) -> list[float]:
    """Compare each value with the mean of the one before and the one after it."""
    # The last values of a sequence may have no neighbour.
    triples = zip(before, between, after, strict=False)
    return [2 * value / (first + last) for first, value, last in triples]


def own_synchronizations(places: Iterable[str], root: str) -> list[str]:
    """Return those places "FILE:LINE" that are in zerowatch's packages or in its root's modules.

    Other folders of the checkout may hold installed packages, such as DeepSpeed.
    """
    inside = [place.removeprefix(f"{root}/") for place in places if place.startswith(f"{root}/")]
    return [place for place in inside if "/" not in place or place.startswith(_OWN)]
