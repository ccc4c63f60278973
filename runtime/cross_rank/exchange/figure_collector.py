"""Collects the figures of all ranks on rank 0, from the reports that the ranks send anyway.

If there are more than 64 ranks, the first rank of each block of 64 collects its block and adds the
figures to its own report. Rank 0 then reads a report of each block, not of each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..rank_figures import Figures
from .coordinator import BLOCK_SIZE
from .rank_messages import RankReport


class FigureCollector:
    """Holds the last figures of the ranks whose reports this rank reads.

    Args:
        rank: This rank.
        world_size: Number of ranks of the job.
        patience_seconds: Time without a report after which a rank is left out.
        now: A monotonic clock, in seconds.

    Attributes:
        children: The other ranks whose reports this rank reads.
    """

    def __init__(
        self, rank: int, world_size: int, patience_seconds: float, now: Callable[[], float]
    ) -> None:
        self.children: tuple[int, ...] = ()
        if rank % BLOCK_SIZE == 0:
            self.children = tuple(range(rank + 1, min(rank + BLOCK_SIZE, world_size)))
        if rank == 0:
            self.children += tuple(range(BLOCK_SIZE, world_size, BLOCK_SIZE))
        self._patience_seconds = patience_seconds
        self._now = now
        # By the rank that reported: the time of its last report, and the figures in it.
        self._reported: dict[int, tuple[float, Mapping[int, Figures]]] = {}

    def add(self, child: int, report: RankReport) -> None:
        """Replace the figures that a child has reported before. Ignore other ranks' reports."""
        if child in self.children and report.figures:
            self._reported[child] = (self._now(), report.figures)

    def known(self) -> dict[int, Figures]:
        """Return the figures by rank, without ranks that have not reported for a while."""
        since = self._now() - self._patience_seconds
        self._reported = {
            child: (at, figures) for child, (at, figures) in self._reported.items() if at >= since
        }
        return {
            rank: each for _, figures in self._reported.values() for rank, each in figures.items()
        }
