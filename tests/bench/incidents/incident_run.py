"""One training run on two hosts of its own, in which a bench plants one incident."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.incidents.hardware_incidents import ANSWERS
from bench.monitoring_cost.slow_clients import slow_clients
from fakes.nvml_library import HEALTHY, compiled, write_answers
from lab.two_hosts import Host, cut, place_of, throttle, two_hosts
from scripts.launching import SCRIPTS, environment

from zerowatch.metrics.thresholds import WATCH_RATIO_HIGH

HOST_NAMES = ("node-0", "node-1")
MIB = 2**20
# The budget of a rank: far above what it uses, but for the incident that fills it.
HOST_LIMIT_BYTES = 4096 * MIB
DISK = "8m"
SLOW_LINK = "200mbit"
SLOW_CLIENTS = 8
# The limit of the incident that fills it: at the start, two ranks use about half of it.
FILLED_BYTES = 2048 * MIB
# Incidents that are there as soon as the ranks are.
FROM_THE_START = ("stuck-before-step-1",)
STOPPED_RANKS = {"rank-stopped": (1,), "all-ranks-stopped": (0, 1)}
# Incidents that can be taken away, and by which the training is as before.
PASSING = (*STOPPED_RANKS, "hang-in-a-collective")
# Files that must be there before the ranks start.
AT_START = {"stuck-before-step-1": ("stuck",), "skipped-steps": ("half",)}
# Incidents that are a file; the others are in `plant`.
FILES = {
    "hang-in-a-collective": "sleep",
    "divergent-collective": "skip",
    "slow-rank": "slow",
    "data-starvation": "starve",
    "loss-nan": "nan",
    "loss-spike": "spike",
    "gradient-explosion": "explode",
    "skipped-steps": "overflow",
    "leak": "keep",
    "host-memory-of-several-ranks": "fill",
    "normal-end": "end",
    "end-by-exception": "raise",
}
SERVES, MEETS = 9464, 29577


def host_of_faulty_rank(name: str) -> str:
    """Return the name of the host on which an incident is planted: that of rank 1."""
    return HOST_NAMES[0 if name == "host-memory-of-several-ranks" else 1]


@dataclass
class IncidentRun:
    """The processes of a run, by rank.

    Attributes:
        name: The incident, and the id of the run.
        folder: The files that plant incidents, and the logs.
        hidden: Addresses of ranks that discovery no longer lists.
        began: When all ranks were first seen to be ready, by the monotonic clock.
    """

    name: str
    folder: Path
    hosts: Sequence[Host]
    ranks: Sequence[subprocess.Popen[bytes]]
    hidden: set[str] = field(default_factory=set)
    began: float | None = None
    _undo: ExitStack = field(default_factory=ExitStack)

    @property
    def runs(self) -> Path:
        """The folder in which the run has its run folder."""
        return self.folder / "disk" / "runs"

    def is_ready(self) -> bool:
        """Whether all ranks have an engine."""
        ready = all((self.folder / f"rank-{rank}.pid").exists() for rank in range(len(self.ranks)))
        if ready and self.began is None:
            self.began = time.monotonic()
        return ready

    def failure(self) -> str | None:
        """Return the end of the log of a rank that has ended; None if all ranks run."""
        for rank, process in enumerate(self.ranks):
            if process.poll() is not None:
                return f"rank {rank} ended: {self.log(rank)[-2000:]}"
        return None

    def targets(self) -> list[dict[str, Any]]:
        """Return the targets that the run lists itself, without those that are hidden."""
        listed: list[dict[str, Any]] = []
        for file in self.runs.glob("*/targets.json"):
            listed += json.loads(file.read_text())
        return [target for target in listed if not self.hidden & set(target["targets"])]

    def log(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()

    def plant(self) -> float:
        """Let the incident happen; return when it did, by the monotonic clock."""
        if self.name in FROM_THE_START and self.began is not None:
            return self.began
        now = time.monotonic()
        if self.name in FILES:
            (self.folder / FILES[self.name]).touch()
        elif self.name in ANSWERS:
            write_answers(self.folder / "nvml-1.txt", {**HEALTHY, **ANSWERS[self.name]})
        elif self.name in STOPPED_RANKS:
            self._signal(signal.SIGSTOP, *STOPPED_RANKS[self.name])
        else:
            self._plant_once()
        return now

    def take_away(self) -> None:
        """End one of the incidents in `PASSING`."""
        if self.name in STOPPED_RANKS:
            self._signal(signal.SIGCONT, *STOPPED_RANKS[self.name])
        else:
            (self.folder / FILES[self.name]).unlink()

    def _plant_once(self) -> None:
        match self.name:
            case "rank-killed":
                self._kill_silently()
            case "target-vanished":
                self.hidden.add(f"{self.hosts[1].management_address}:{SERVES}")
                self._kill_silently()
            case "slow-link":
                throttle(self.hosts, SLOW_LINK)
            case "disk-full":
                subprocess.run(
                    ["dd", "if=/dev/zero", f"of={self.folder}/disk/filling", "bs=64k"],
                    capture_output=True,  # it ends as the disk is full
                )
            case "scrape-blocked-by-slow-clients":
                self._hold_connections()
            case _:
                raise ValueError(f"{self.name}: no such incident")

    def _kill_silently(self) -> None:
        """Kill rank 1 so that rank 0 goes on and waits, as with NCCL.

        gloo would raise at rank 0 as soon as the kernel closed the connections of rank 1, and the
        run would end by an exception, which is another incident.
        """
        cut(self.hosts[1])
        self._signal(signal.SIGKILL, 1)

    def _signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            process_id = int((self.folder / f"rank-{rank}.pid").read_text())
            subprocess.run(["kill", f"-{number}", str(process_id)], check=True)

    def _hold_connections(self) -> None:
        address = f"{self.hosts[1].management_address}:{SERVES}"
        self._undo.enter_context(slow_clients(address, SLOW_CLIENTS))


def gpu_variables() -> dict[str, str]:
    """Return the variables with which the processes of a rank read the scripted NVML."""
    folders = {
        "LD_LIBRARY_PATH": compiled().parent,
        "PYTHONPATH": SCRIPTS / "monitor" / "incident_gpu",
    }
    return {"INCIDENT_GPU": "true"} | {
        name: os.pathsep.join(filter(None, (str(folder), os.environ.get(name))))
        for name, folder in folders.items()
    }


@contextmanager
def incident_run(name: str, folder: Path, number: int, *, scale: float) -> Iterator[IncidentRun]:
    """Start a run on a pair of hosts of its own, and end it in any case.

    Args:
        name: The incident.
        folder: A folder that does not exist yet.
        number: From 0 to 99; runs at the same time need different ones.
        scale: By what the waits of the run are multiplied, as those of the rules are.
    """
    disk = folder / "disk"
    disk.mkdir(parents=True)
    limit_bytes = FILLED_BYTES if FILES.get(name) == "fill" else HOST_LIMIT_BYTES
    (folder / "limit").write_text(str(limit_bytes))
    for file in AT_START.get(name, ()):
        (folder / file).touch()
    variables = environment(
        ZEROWATCH_RUN_ID=name,
        ZEROWATCH_SERVE_HOST="0.0.0.0",
        ZEROWATCH_SERVE_PORT=str(SERVES),
        ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS="1",
        ZEROWATCH_HANG_TIMEOUT_SECONDS=str(30 * scale),
        ZEROWATCH_RUN_LOG_FOLDER=str(disk / "runs"),
        # Otherwise the C library keeps freed memory, and RSS does not shrink.
        MALLOC_MMAP_THRESHOLD_="131072",
        # Ranks are scraped 15 times as often as with the default, and exchange 5 times as often.
        ZEROWATCH_ALERTS_THRESHOLDS=f"watch_ratio_high={5 * WATCH_RATIO_HIGH}",
        INCIDENT_SCALE=str(scale),
        **(gpu_variables() if name in ANSWERS else {}),
        ZEROWATCH_PROCESS_SEPARATE=os.environ.get("BENCH_SEPARATE", "false"),
    )
    with ExitStack() as undo:
        hosts = undo.enter_context(two_hosts(None, managed=True, number=number))
        if name == "disk-full":
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
            subprocess.run(mount, check=True)
            undo.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        ranks = []
        for rank, host in enumerate(hosts):
            answers = folder / f"nvml-{rank}.txt"
            write_answers(answers, HEALTHY)
            own = {
                "ZEROWATCH_SERVE_ADVERTISE_HOST": str(host.management_address),
                "FAKE_NVML": str(answers),
            }
            log = undo.enter_context((folder / f"rank-{rank}.log").open("wb"))
            host_name = host_of_faulty_rank(name) if rank else HOST_NAMES[0]
            named = ("unshare", "--uts", "sh", "-c", f'hostname {host_name}; exec "$@"', "sh")
            # As on hosts of their own: what else runs on this machine is no part of the incident.
            # Without the right to it, nice(1) warns and starts the program all the same.
            alone = ("nice", "-n", "-10")
            script = SCRIPTS / "monitor" / "incident_job.py"
            process = subprocess.Popen(
                host.command(*alone, *named, sys.executable, script, folder),
                env=variables | place_of(rank, hosts, MEETS) | own,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            ranks.append(process)
        yield IncidentRun(name=name, folder=folder, hosts=hosts, ranks=ranks, _undo=undo)
