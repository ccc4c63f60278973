"""Runs the job that hangs, for tests and benches of its reports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TWO_RANKS, ZEROWATCH, environment

PATIENCE_SECONDS = TIMEOUT_SECONDS


class Job:
    """A monitored job of two ranks, in its own folder."""

    def __init__(self, folder: Path, script: str, **variables: str) -> None:
        folder.mkdir()
        self.run = folder / "runs" / "hanging"
        self.folder = folder
        self._output = (folder / "output").open("w+")
        settings = {
            "ZEROWATCH_RUN_ID": "hanging",
            "RANKS_FOLDER": str(folder),
        }
        self.process = subprocess.Popen(
            [ZEROWATCH, "run", *TWO_RANKS, str(SCRIPTS / "cross_rank" / script)],
            cwd=folder,
            env=environment(**settings | variables),
            stdout=self._output,
            stderr=self._output,
        )

    def report(self, rank: int) -> Path:
        return self.run / f"hang-rank-{rank}-1.txt"

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            late = time.monotonic() > deadline or self.process.poll() is not None
            assert not late, f"{what}: no.\n{(self.folder / 'output').read_text()[-3000:]}"
            time.sleep(0.05)

    def wait_for_steps(self, number: int) -> None:
        """Wait until rank 1 has logged so many steps."""
        log = self.run / "rank-1.jsonl"
        self.wait_until(
            lambda: log.exists() and len(log.read_text().splitlines()) >= number, f"{number} steps"
        )

    def wait_for_report(self, rank: int) -> None:
        """Wait for a complete report: the log names it once it is written."""
        log = self.folder / "output"
        self.wait_until(
            lambda: str(self.report(rank)) in log.read_text(), f"a report of rank {rank}"
        )

    def signal_rank(self, rank: int, number: int) -> None:
        os.kill(int((self.folder / f"rank-{rank}.pid").read_text()), number)

    def close(self) -> None:
        for rank in (0, 1):  # the launcher puts each rank into a session of its own
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                self.signal_rank(rank, signal.SIGKILL)
        self.process.terminate()  # it ends ranks that have written no process id yet
        self.process.wait(PATIENCE_SECONDS)
        self._output.close()


@contextmanager
def running(folder: Path, script: str = "hang_job.py", **variables: str) -> Iterator[Job]:
    job = Job(folder, script, **variables)
    try:
        yield job
    finally:
        job.close()
