"""Tests of the loss of a node, on two hosts made of network namespaces.

The ranks are a script that sleeps, as ranks that wait in a collective do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab.two_hosts import Host, cut, missing, two_hosts
from scripts.launching import ZEROWATCH, environment

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

# On a busy machine a launcher takes long to start. The times of a loss are not those of this limit.
LIMIT_SECONDS = 600.0
SLEEPER = """
import json, os, sys, time

with open(sys.argv[1], "a") as file:
    file.write(json.dumps({name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}) + "\\n")
time.sleep(10_000)
"""


class Launchers:
    """Launchers on two hosts, whose store is on one of them."""

    def __init__(self, folder: Path, hosts: Sequence[Host], store: int, undo: ExitStack) -> None:
        self.hosts, self._folder = hosts, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "sleeper.py").write_text(SLEEPER)
        for number, host in enumerate(hosts):
            command = host.command(
                *(ZEROWATCH, "run", "--nnodes", "1:2", "--nproc-per-node", 1),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[store].address}:29400"),
                *("--rdzv-conf", f"is_host={int(number == store)},read_timeout=600"),
                *("--rdzv-id", "job", "--local-addr", host.address, "--max-restarts", 3),
                *(folder / "sleeper.py", self._started(number)),
            )
            with (folder / f"output-{number}.txt").open("w") as file:
                process = subprocess.Popen(
                    command, env=environment(), stdout=file, stderr=file, start_new_session=True
                )
            undo.callback(self.kill, number)
            self._processes.append(process)

    def starts(self, number: int) -> list[dict[str, str]]:
        """Return the places of the ranks that have started on a host."""
        path = self._started(number)
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def output(self, number: int) -> str:
        return (self._folder / f"output-{number}.txt").read_text()

    def code(self, number: int) -> int | None:
        return self._processes[number].poll()

    def kill(self, number: int) -> None:
        """Kill every process of a host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.hosts[number].namespace], capture_output=True, text=True
        )
        for pid in map(int, listed.stdout.split()):
            os.kill(pid, signal.SIGKILL)
        self._processes[number].wait()

    def _started(self, number: int) -> Path:
        return self._folder / f"started-{number}.txt"


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def launchers(folder: Path, undo: ExitStack, store: int) -> Launchers:
    """Return launchers whose ranks have met on both hosts."""
    launched = Launchers(folder, undo.enter_context(two_hosts(None)), store, undo)
    wait_until(lambda: all(_has_met(launched.starts(number)) for number in (0, 1)))
    time.sleep(10.0)  # some heartbeats
    return launched


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the launchers took too long"
        time.sleep(0.2)


def _has_met(starts: Sequence[dict[str, str]]) -> bool:
    return any(start["WORLD_SIZE"] == "2" for start in starts)


def test_a_host_whose_link_is_down_is_left_and_training_starts_without_it(
    tmp_path: Path, undo: ExitStack
) -> None:
    launched = launchers(tmp_path, undo, store=0)
    before = len(launched.starts(0))

    cut(launched.hosts[1])

    wait_until(lambda: len(launched.starts(0)) > before)
    assert launched.starts(0)[-1]["WORLD_SIZE"] == "1"
    assert f"node lost: {launched.hosts[1].address}" in launched.output(0)
    wait_until(lambda: launched.code(1) is not None)  # its store is out of reach
    assert f"{launched.hosts[0].address}:29400 (--rdzv-endpoint)" in launched.output(1)
    assert launched.code(1) == 1


@pytest.mark.parametrize("loss", ["kill", "cut"])
def test_a_lost_store_ends_the_launcher_with_an_error_that_names_it(
    tmp_path: Path, undo: ExitStack, loss: str
) -> None:
    launched = launchers(tmp_path, undo, store=1)

    if loss == "kill":
        launched.kill(1)
    else:
        cut(launched.hosts[1])

    wait_until(lambda: launched.code(0) is not None)
    assert launched.code(0) != 0
    assert f"{launched.hosts[1].address}:29400 (--rdzv-endpoint)" in launched.output(0)
