"""A job on two hosts that trains and serves metrics while a test causes faults."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.two_hosts import Host, place_of
from scripts.launching import SCRIPTS, environment


@dataclass(frozen=True)
class WatchedRun:
    """The processes of a job, by rank, and the folder with its fault files."""

    name: str
    folder: Path
    ranks: Sequence[subprocess.Popen[bytes]]

    def has_begun(self) -> bool:
        """Whether all ranks train; raises an error with the log of a rank that ended early."""
        ended = [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]
        if ended:
            raise RuntimeError("\n".join(self.log(rank) for rank in ended))
        return all((self.folder / f"rank-{rank}.pid").exists() for rank in range(len(self.ranks)))

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def begin(self, fault: str) -> None:
        (self.folder / fault).touch()

    def cease(self, fault: str) -> None:
        (self.folder / fault).unlink()


@contextmanager
def watched_run(
    hosts: Sequence[Host], folder: Path, name: str, *, ports: tuple[int, int]
) -> Iterator[WatchedRun]:
    """Start scripts/monitor/faults_job.py as one rank on each host, and end it in any case.

    Args:
        hosts: The hosts, which this machine reaches.
        folder: A folder that does not exist yet.
        name: The run's name.
        ports: On which each rank serves, and where the ranks meet.
    """
    folder.mkdir()
    serves, meets = ports
    variables = environment(
        ZEROWATCH_RUN_ID=name,
        ZEROWATCH_SERVE_HOST="0.0.0.0",
        ZEROWATCH_SERVE_PORT=str(serves),
        ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS="1",
        ZEROWATCH_RUN_LOG_FOLDER=str(folder / "runs"),
        # Otherwise the C library keeps freed memory, and RSS does not shrink.
        MALLOC_MMAP_THRESHOLD_="131072",
    )
    with ExitStack() as undo:
        ranks = []
        for rank, host in enumerate(hosts):
            advertised = {"ZEROWATCH_SERVE_ADVERTISE_HOST": str(host.management_address)}
            log = undo.enter_context((folder / f"rank-{rank}.log").open("wb"))
            process = subprocess.Popen(
                host.command(sys.executable, SCRIPTS / "monitor" / "faults_job.py", folder),
                env=variables | place_of(rank, hosts, meets) | advertised,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            ranks.append(process)
        yield WatchedRun(name=name, folder=folder, ranks=ranks)


def targets_url(hosts: Sequence[Host], serves: int) -> str:
    """Return the address of /targets of the run whose ranks serve on this port."""
    return f"http://{hosts[0].management_address}:{serves}/targets"
