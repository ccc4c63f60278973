"""One trial of a job in which a rank skips a collective: which rank is named, and when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TORCHRUN, TWO_RANKS, environment

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
        variables = environment(ZEROWATCH_RUN_LOG_ENABLED="false", **more)
        command = (TORCHRUN, *TWO_RANKS, SCRIPTS / "cross_rank" / "skip_job.py", rank, call, step)
        job = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        end_early = threading.Timer(60.0, job.send_signal, [signal.SIGTERM])
        end_early.start()
        try:
            self._read(job, patience_seconds)
        finally:
            end_early.cancel()
            _end(job)

    def _read(self, job: subprocess.Popen[str], patience_seconds: float) -> None:
        skipped_at = 0.0
        give_up: threading.Timer | None = None
        for line in job.stderr or ():
            if (skips := SKIPS.search(line)) and not skipped_at:
                skipped_at = float(skips[1])
                give_up = threading.Timer(patience_seconds, job.send_signal, [signal.SIGTERM])
                give_up.start()
            elif found := NAMED.search(line):
                self.named, self.line = int(found[1]), found[0]
                self.seconds = time.time() - skipped_at
                break
        if give_up is not None:
            give_up.cancel()


def _end(job: subprocess.Popen[str]) -> None:
    """End the launcher, which ends its ranks, and the ranks if it does not."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    job.send_signal(signal.SIGTERM)
    for rank in ranks:  # they hang, so that nothing is lost
        try:
            os.kill(int(rank), signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.communicate(timeout=TIMEOUT_SECONDS)
