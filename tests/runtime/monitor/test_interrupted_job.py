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
from pathlib import Path

import pytest
from fakes.scraper import eventually, get
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TWO_RANKS, ZEROWATCH, environment

pytestmark = pytest.mark.jobs

# A rank waits for 1.2 intervals of a scraper, if its last scrape is at most 3 intervals ago.
INTERVAL_SECONDS = 6.0


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


def test_ctrl_c_ends_a_run_visibly_and_is_not_reported_as_the_failure_of_a_rank(
    tmp_path: Path,
) -> None:
    command = [ZEROWATCH, "run", *TWO_RANKS, str(SCRIPTS / "monitor" / "train_until_killed.py")]
    folder = tmp_path / "runs" / "stopped"
    logs, targets = [folder / f"rank-{rank}.jsonl" for rank in (0, 1)], folder / "targets.json"
    variables = environment(ZEROWATCH_RUN_ID="stopped", RANKS_FOLDER=str(tmp_path))
    ended, last = threading.Event(), {}
    with (tmp_path / "output").open("w+") as output:
        job = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=output)
        try:
            listed = eventually(lambda: len(addresses_in(targets)) == 2, TIMEOUT_SECONDS, pause=0.1)
            assert listed, (tmp_path / "output").read_text()
            addresses = addresses_in(targets)
            for address in addresses:
                run_active(address, "prometheus")
            time.sleep(INTERVAL_SECONDS)
            trains = eventually(
                lambda: all(log.exists() for log in logs), TIMEOUT_SECONDS, pause=0.1
            )
            assert trains, (tmp_path / "output").read_text()
            for address in addresses:
                run_active(address, "prometheus")
            polling = threading.Thread(target=poll_until, args=(ended, addresses, last))
            polling.start()
            for rank in (0, 1):  # a terminal sends the signal to all of them
                os.kill(int((tmp_path / f"rank-{rank}.pid").read_text()), signal.SIGINT)
            job.send_signal(signal.SIGINT)
            job.wait(timeout=TIMEOUT_SECONDS)
        finally:
            ended.set()
            job.kill()
            job.wait()
    polling.join()
    printed = (tmp_path / "output").read_text()

    assert list(last.values()) == ["0.0", "0.0"], printed
    assert targets.read_text() == "[]\n"
    assert "KeyboardInterrupt" in printed
    assert "diverged" not in printed
    assert " died" not in printed
