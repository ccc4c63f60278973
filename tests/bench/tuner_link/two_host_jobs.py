"""Runs a job of the tuner's benches on two hosts, and reads rank 0's reports while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.rank_processes import BENCH
from bench.tuner_link.link_figures import REPORT
from lab.two_hosts import Host, missing, place_of, throttle, two_hosts
from scripts.launching import DEEPSPEED, environment

__all__ = ["DEEPSPEED", "Host", "environment", "missing", "throttle", "two_hosts"]

Report = dict[str, Any]


@dataclass(frozen=True)
class JobResult:
    """The reports of rank 0, and the decisions of its tuner."""

    reports: Sequence[Report]
    decisions: Sequence[Report]


@dataclass(frozen=True)
class Job:
    """A job that runs: one rank on each host.

    Attributes:
        hosts: Where; their link may be throttled meanwhile.
        folder: Folder of its output: `out-<rank>`, and its run logs under `runs`.
    """

    hosts: Sequence[Host]
    folder: Path
    ranks: Sequence[subprocess.Popen[bytes]]

    def reports(self) -> list[Report]:
        """Return the lines of JSON that rank 0 has written so far, in order."""
        lines = (self.folder / "out-0").read_text(errors="replace").split("\n")[:-1]
        return [json.loads(line.removeprefix(REPORT)) for line in lines if line.startswith(REPORT)]

    def check(self) -> None:
        """Raise RuntimeError if a rank is gone."""
        if any(rank.poll() is not None for rank in self.ranks):
            self.wait(0)

    def wait(self, seconds: float) -> JobResult:
        """Wait for the end of the job.

        Raises:
            RuntimeError: A rank did not say that it had ended, or it took too long.
        """
        deadline = time.monotonic() + seconds
        while any(rank.poll() is None for rank in self.ranks):
            if time.monotonic() > deadline or any(rank.poll() for rank in self.ranks):
                break
            time.sleep(0.2)
        reports = self.reports()
        # Not by exit codes: torch 2.13's gloo now and then aborts as the interpreter ends.
        if not reports or not reports[-1].get("ended"):
            tails = [(self.folder / f"out-{n}").read_text(errors="replace")[-3000:] for n in (0, 1)]
            raise RuntimeError("the job on the link did not end:\n" + "\n".join(tails))
        return JobResult(reports=reports[:-1], decisions=self.decisions())

    def decisions(self) -> list[Report]:
        """Return the decisions of the tuner so far."""
        return [
            json.loads(line)
            for file in self.folder.glob("runs/*/decisions.jsonl")
            for line in file.read_text().split("\n")[:-1]
        ]


@contextmanager
def job(hosts: Sequence[Host], script: str, asked: Mapping[str, Any]) -> Iterator[Job]:
    """Start a script on both hosts, and end it in any case.

    Args:
        hosts: The hosts.
        script: It gets the path of a file: `asked` as JSON, and in it `folder`.
        asked: Arguments of the script.
    """
    with ExitStack() as undo:
        name = undo.enter_context(tempfile.TemporaryDirectory(prefix="zerowatch-bench-"))
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps({**asked, "folder": name}))
        variables = environment(ZEROWATCH_RUN_LOG_FOLDER=str(folder / "runs"))
        del variables["GLOO_SOCKET_IFNAME"]
        ranks = []
        for rank, host in enumerate(hosts):
            output = undo.enter_context((folder / f"out-{rank}").open("wb"))
            process = subprocess.Popen(
                host.command(sys.executable, BENCH / script, folder / "asked.json"),
                cwd=name,
                env=variables | place_of(rank, hosts),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            ranks.append(process)
        yield Job(hosts=hosts, folder=folder, ranks=ranks)


def on_link(
    rate: str | None, script: str, asked: Mapping[str, Any], timeout_seconds: float
) -> JobResult:
    """Run a script on two hosts joined by a link of this bandwidth."""
    with two_hosts(rate) as hosts, job(hosts, script, asked) as running:
        return running.wait(timeout_seconds)
