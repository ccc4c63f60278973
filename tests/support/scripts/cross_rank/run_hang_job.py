"""Runs the job that hangs, for tests and benches of its reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.forked_ranks import RunningRanks, running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS


class Job:
    """A monitored job of two ranks, in its own folder."""

    def __init__(self, folder: Path, ranks: RunningRanks) -> None:
        self.folder, self.ranks = folder, ranks
        self.run = folder / "runs" / "hanging"

    def report(self, rank: int) -> Path:
        return self.run / f"hang-rank-{rank}-1.txt"

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not reached():
            late = time.monotonic() > deadline or None not in self.ranks.codes()
            assert not late, f"{what}: no.\n{self.ranks.output()[-3000:]}"
            time.sleep(0.05)

    def wait_for_steps(self, number: int) -> None:
        """Wait until rank 1 has logged so many steps."""
        log = self.run / "rank-1.jsonl"
        self.wait_until(
            lambda: log.exists() and len(log.read_text().splitlines()) >= number, f"{number} steps"
        )

    def wait_for_report(self, rank: int) -> None:
        """Wait for a complete report: the log names it once it is written."""
        self.wait_until(
            lambda: str(self.report(rank)) in self.ranks.output(), f"a report of rank {rank}"
        )

    def signal_rank(self, rank: int, number: int) -> None:
        os.kill(self.ranks.pids[rank], number)


@contextmanager
def running(folder: Path, script: str = "hang_job.py", **variables: str) -> Iterator[Job]:
    folder.mkdir()
    settings = {"ZEROWATCH_RUN_ID": "hanging", "RANKS_FOLDER": str(folder)}
    command = ("-m", "zerowatch", SCRIPTS / "cross_rank" / script)
    with running_ranks(2, *command, cwd=folder, variables=settings | variables) as ranks:
        yield Job(folder, ranks)
