"""Ranks that serve metrics on ports of their own, without training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from live_runs import RUN_ID, LiveRun

from zerowatch.metrics.catalog import communication, memory, training


class ServedRank(LiveRun):
    """A rank of a run. Rank 0 lists all ranks, of which some may serve nothing.

    Attributes:
        listed: The addresses of all ranks.
    """

    def __init__(self, rank: int = 0, folder: Path | None = None, **settings: object) -> None:
        self.listed: list[str] = []
        super().__init__(folder, **settings)
        self.rank = rank

    def targets(self) -> list[dict[str, object]]:
        """The listed ranks, on one node each."""
        return [
            {
                "targets": [address],
                "labels": {"run": RUN_ID, "node": f"node-{rank}", "rank": str(rank)},
            }
            for rank, address in enumerate(self.listed)
        ]

    @property
    def targets_url(self) -> str:
        """The address of the targets."""
        return f"http://{self.address}/targets"


@contextmanager
def two_ranks(*, second_answers: bool = True, **settings: object) -> Iterator[list[ServedRank]]:
    """Two ranks after 20 steps. Rank 1 is slow in backward, and may have died."""
    ranks = [ServedRank(rank, **settings) for rank in range(2)]
    ranks[0].listed = [rank.address for rank in ranks]
    try:
        for rank in ranks:
            rank.add_steps(20)
            rank.recorder.add(communication.COMM_WAIT_SECONDS, 1.0, "dp")
            rank.recorder.set(training.MFU, 0.25)
        ranks[1].recorder.set(communication.STRAGGLER_SCORE, 0.21, "backward")
        ranks[0].recorder.set(communication.STRAGGLER_SCORE, -0.01, "backward")
        ranks[1].recorder.set(memory.OOM_RISK, 0.4, "cpu")
        if not second_answers:
            ranks[1].close()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
