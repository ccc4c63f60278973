"""One trial of a job in which a rank skips a collective: which rank is named, and when."""

from __future__ import annotations

import re
import time
from pathlib import Path

from scripts.forked_ranks import RunningRanks, running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS

SKIPS = re.compile(r"skipping at (\d+\.\d{3})")
NAMED = re.compile(r"rank (\d+) diverged from the common sequence of collectives .*")


class Trial:
    """Runs the job until a rank is named, or `patience_seconds` after the collective was skipped.

    Attributes:
        named: The rank named first; None if none was.
        line: The log line.
        seconds: From the skipped collective to that line.
    """

    def __init__(
        self, folder: Path, rank: int, call: int, step: int, patience_seconds: float, **more: str
    ) -> None:
        self.named: int | None = None
        self.line = ""
        self.seconds = float("inf")
        command = (SCRIPTS / "cross_rank" / "skip_job.py", rank, call, step)
        variables = {"ZEROWATCH_RUN_LOG_ENABLED": "false", **more}
        with running_ranks(2, *command, cwd=folder, variables=variables) as ranks:
            self._read(ranks, patience_seconds)

    def _read(self, ranks: RunningRanks, patience_seconds: float) -> None:
        skipped_at, give_up_at = 0.0, time.time() + TIMEOUT_SECONDS
        while True:
            is_running, printed = None in ranks.codes(), ranks.output()
            if not skipped_at and (skips := SKIPS.search(printed)):
                skipped_at = float(skips[1])
                give_up_at = skipped_at + patience_seconds
            if found := NAMED.search(printed):
                self.named, self.line = int(found[1]), found[0]
                self.seconds = time.time() - skipped_at
            if found or not is_running or time.time() > give_up_at:
                return
            time.sleep(0.02)
