"""Ctrl-C ends a job as a whole: Prometheus reads the end, and no rank reports another's failure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chosen_cases import tiers
from fakes.scraper import eventually, get
from scripts.forked_ranks import running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TWO_RANKS, ZEROWATCH, environment

pytestmark = pytest.mark.jobs

# A rank waits for 1.2 intervals of a scraper, if its last scrape is at most 3 intervals ago.
INTERVAL_SECONDS = 3.0
SCRIPT = SCRIPTS / "monitor" / "train_until_killed.py"
RUN = {"ZEROWATCH_RUN_ID": "stopped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that runs; `pids` are of all processes to which a terminal sends a signal."""

    pids: Callable[[], list[int]]
    output: Callable[[], str]
    wait: Callable[[], object]


@contextmanager
def forked(folder: Path) -> Iterator[Job]:
    with running_ranks(2, "-m", "zerowatch", SCRIPT, cwd=folder, variables=RUN) as ranks:
        yield Job(pids=lambda: ranks.pids, output=ranks.output, wait=ranks.join)


@contextmanager
def launched(folder: Path) -> Iterator[Job]:
    command, file = [ZEROWATCH, "run", *TWO_RANKS, str(SCRIPT)], folder / "output"
    with file.open("w+") as output:
        job = subprocess.Popen(
            command, cwd=folder, env=environment(**RUN), stdout=output, stderr=output
        )
        try:
            yield Job(
                pids=lambda: [*(rank.pid for rank in psutil.Process(job.pid).children()), job.pid],
                output=file.read_text,
                wait=lambda: job.wait(timeout=TIMEOUT_SECONDS),
            )
        finally:
            job.kill()
            job.wait()


def run_active(address: str, client: str) -> str | None:
    """Return the value that a rank exports."""
    _, _, text = get(address, **{"User-Agent": client})
    value = re.search(r"^zerowatch_run_active\{.*\} (\S+)$", text, re.MULTILINE)
    return value and value.group(1)


def poll_until(stopped: threading.Event, addresses: list[str], last: dict[str, str | None]) -> None:
    """Keep the last value of each rank."""
    while not stopped.wait(0.1):
        for address in addresses:
            with contextlib.suppress(OSError, http.client.HTTPException):
                last[address] = run_active(address, "poll")


def addresses_in(targets: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return [each["targets"][0] for each in json.loads(targets.read_text())]
    return []


@pytest.mark.parametrize("start", tiers([forked, launched], quick=[forked]))
def test_ctrl_c_ends_a_run_visibly_and_is_not_reported_as_the_failure_of_a_rank(
    tmp_path: Path, start: Callable[[Path], contextlib.AbstractContextManager[Job]]
) -> None:
    folder = tmp_path / "runs" / "stopped"
    logs, targets = [folder / f"rank-{rank}.jsonl" for rank in (0, 1)], folder / "targets.json"
    ended, last = threading.Event(), {}
    with start(tmp_path) as job:
        try:
            listed = eventually(lambda: len(addresses_in(targets)) == 2, TIMEOUT_SECONDS, pause=0.1)
            assert listed, job.output()
            addresses = addresses_in(targets)
            for address in addresses:
                run_active(address, "prometheus")
            time.sleep(INTERVAL_SECONDS)
            trains = eventually(
                lambda: all(log.exists() for log in logs), TIMEOUT_SECONDS, pause=0.1
            )
            assert trains, job.output()
            for address in addresses:
                run_active(address, "prometheus")
            polling = threading.Thread(target=poll_until, args=(ended, addresses, last))
            polling.start()
            for pid in job.pids():
                os.kill(pid, signal.SIGINT)
            job.wait()
        finally:
            ended.set()
        polling.join()
        printed = job.output()

    assert list(last.values()) == ["0.0", "0.0"], printed
    assert targets.read_text() == "[]\n"
    assert "KeyboardInterrupt" in printed
    assert "diverged" not in printed
    assert " died" not in printed
