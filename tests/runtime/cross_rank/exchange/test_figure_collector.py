"""Tests of which ranks' reports a rank reads for their figures, and of figures that are too old."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.clock import FakeClock

from zerowatch.runtime.cross_rank.exchange.figure_collector import FigureCollector
from zerowatch.runtime.cross_rank.exchange.rank_messages import RankReport
from zerowatch.runtime.cross_rank.rank_figures import NUM_FIGURES


def report(*ranks: int) -> RankReport:
    """A report with figures of these ranks, each the number of its rank."""
    figures = {rank: np.full(NUM_FIGURES, rank, np.float32) for rank in ranks}
    return RankReport(calls={}, figures=figures)


@pytest.mark.parametrize(
    ("rank", "world_size", "children"),
    [
        (0, 1, []),
        (0, 3, [1, 2]),
        (2, 3, []),
        (0, 64, [*range(1, 64)]),
        (0, 200, [*range(1, 64), 64, 128, 192]),
        (64, 200, [*range(65, 128)]),
        (192, 200, [*range(193, 200)]),
        (199, 200, []),
        (64, 65, []),
    ],
)
def test_the_first_rank_of_a_block_reads_its_block_and_rank_zero_the_blocks(
    rank: int, world_size: int, children: list[int]
) -> None:
    collector = FigureCollector(rank, world_size, 20.0, FakeClock())

    assert list(collector.children) == children


def test_the_last_figures_of_each_child_are_known() -> None:
    collector = FigureCollector(0, 200, 20.0, FakeClock())

    collector.add(1, report(1, 5))
    collector.add(1, report(1))  # the earlier figures are replaced
    collector.add(64, report(64, 65))
    collector.add(64, RankReport(calls={}))  # a report without figures changes nothing
    collector.add(65, report(65, 66))  # rank 64 reads this rank

    assert {rank: each[0] for rank, each in collector.known().items()} == {1: 1, 64: 64, 65: 65}


def test_figures_are_forgotten_once_their_rank_was_silent_for_longer_than_the_patience() -> None:
    clock = FakeClock()
    collector = FigureCollector(0, 3, 20.0, clock)
    collector.add(1, report(1))
    clock.seconds += 5
    collector.add(2, report(2))

    known = []
    for seconds in (15, 1, 4, 1):
        clock.seconds += seconds
        known.append(list(collector.known()))

    assert known == [[1, 2], [2], [2], []]
