"""Tests of the loss of a node, on two hosts made of network namespaces.

The ranks are a script that sleeps, as ranks that wait in a collective do.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from lab.node_launchers import STORE_PORT, NodeLaunchers
from lab.switched_hosts import switched_hosts
from lab.two_hosts import Host, cut, missing, reconnect
from scripts.launching import TORCHRUN, ZEROWATCH

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
while not os.path.exists(sys.argv[1] + ".fail"):
    time.sleep(0.5)
sys.exit(3)
"""


class SleepingRanks(NodeLaunchers):
    """A job of two hosts that sleeps. The store is on one of them, or on a third host."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        store: int,
        max_restarts: int = 3,
        nodes: str = "1:2",
    ) -> None:
        path = folder / "sleeper.py"
        path.write_text(SLEEPER)
        self._started = [folder / f"started-{number}.txt" for number in range(2)]
        super().__init__(
            folder,
            hosts[:2],
            store=hosts[store],
            nodes=nodes,
            max_restarts=max_restarts,
            script=lambda number: (path, self._started[number]),
        )

    def fail(self, number: int) -> None:
        """Let the rank of a host fail."""
        path = self._started[number]
        path.with_name(f"{path.name}.fail").touch()

    def starts(self, number: int) -> list[dict[str, str]]:
        """Return the places of the ranks that have started on a host."""
        path = self._started[number]
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def sleeping_ranks(
    folder: Path, undo: ExitStack, store: int, second: Sequence[str] = (ZEROWATCH, "run")
) -> SleepingRanks:
    """Return a job that runs on both hosts; `second` is the launcher of the second one."""
    hosts = undo.enter_context(switched_hosts(2))
    launched = undo.enter_context(closing(SleepingRanks(folder, hosts, store)))
    launched.start(0)
    launched.start(1, second)
    wait_until(lambda: all(_has_met(launched, number) for number in (0, 1)))
    time.sleep(10.0)  # some heartbeats
    return launched


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the launchers took too long"
        time.sleep(0.2)


def _has_met(launched: SleepingRanks, number: int) -> bool:
    assert launched.code(number) is None, launched.output(number)
    return any(start["WORLD_SIZE"] == "2" for start in launched.starts(number))


def test_a_host_whose_link_is_down_is_left_and_training_starts_without_it(
    tmp_path: Path, undo: ExitStack
) -> None:
    launched = sleeping_ranks(tmp_path, undo, store=0)
    before = len(launched.starts(0))

    cut(launched.hosts[1])

    wait_until(lambda: len(launched.starts(0)) > before)
    assert launched.starts(0)[-1]["WORLD_SIZE"] == "1"
    assert f"node lost: {launched.hosts[1].address}" in launched.output(0)
    wait_until(lambda: launched.code(1) is not None)  # its store is out of reach
    assert f"{launched.hosts[0].address}:29400 (--rdzv-endpoint)" in launched.output(1)
    assert launched.code(1) == 1


def test_a_host_that_is_lost_before_its_first_heartbeat_is_left(
    tmp_path: Path, undo: ExitStack
) -> None:
    launched = sleeping_ranks(tmp_path, undo, store=0, second=(TORCHRUN,))  # sends none
    before = len(launched.starts(0))

    launched.kill(1)

    wait_until(lambda: len(launched.starts(0)) > before)
    assert launched.starts(0)[-1]["WORLD_SIZE"] == "1"
    assert f"node lost: {launched.hosts[1].address}" in launched.output(0)


@pytest.mark.parametrize("loss", ["kill", "cut"])
def test_a_lost_store_ends_the_launcher_with_an_error_that_names_it(
    tmp_path: Path, undo: ExitStack, loss: str
) -> None:
    launched = sleeping_ranks(tmp_path, undo, store=1)

    if loss == "kill":
        launched.kill(1)
    else:
        cut(launched.hosts[1])

    wait_until(lambda: launched.code(0) is not None)
    assert launched.code(0) != 0
    assert f"{launched.hosts[1].address}:29400 (--rdzv-endpoint)" in launched.output(0)


def test_a_job_whose_restarts_are_used_up_starts_again_with_the_same_store(
    tmp_path: Path, undo: ExitStack
) -> None:
    """Then the store is lost, without which the node that runs alone trains on."""
    hosts = undo.enter_context(switched_hosts(3))
    launched = undo.enter_context(closing(SleepingRanks(tmp_path, hosts, 2, max_restarts=1)))
    launched.start_store()
    launched.start(0)
    launched.start(1)
    wait_until(lambda: all(_has_met(launched, number) for number in (0, 1)))
    lose_second(launched)
    wait_until(lambda: launched.starts(0)[-1]["WORLD_SIZE"] == "1")
    launched.start(1)
    wait_until(lambda: launched.starts(0)[-1]["WORLD_SIZE"] == "2")
    lose_second(launched)
    wait_until(lambda: launched.code(0) is not None)
    assert "no restart is left" in launched.output(0)
    before = len(launched.starts(0))

    launched.start(0)

    wait_until(lambda: len(launched.starts(0)) > before)
    assert launched.starts(0)[-1]["WORLD_SIZE"] == "1"
    time.sleep(10.0)  # some heartbeats
    cut(launched.store)
    wait_until(lambda: "The ranks train on" in launched.output(0))
    time.sleep(10.0)
    assert launched.code(0) is None
    launched.fail(0)
    wait_until(lambda: launched.code(0) is not None)
    assert launched.code(0) == 1
    output = launched.output(0)
    assert output.count(f"{launched.store.address}:29400 (--rdzv-endpoint) has not") == 2


def test_a_launcher_that_waits_for_others_notices_that_the_store_is_lost(
    tmp_path: Path, undo: ExitStack
) -> None:
    hosts = undo.enter_context(switched_hosts(3))
    launched = undo.enter_context(closing(SleepingRanks(tmp_path, hosts, 2, nodes="2")))
    launched.start_store()
    launched.start(0)
    wait_until(lambda: has_connected(launched, 2))

    cut(launched.store)

    wait_until(lambda: launched.code(0) is not None)
    assert launched.code(0) == 1
    assert f"{launched.store.address}:29400 (--rdzv-endpoint) has not" in launched.output(0)


def test_a_node_that_trains_alone_trains_on_without_the_store_and_others_join_it_later(
    tmp_path: Path, undo: ExitStack
) -> None:
    hosts = undo.enter_context(switched_hosts(3))
    launched = undo.enter_context(closing(SleepingRanks(tmp_path, hosts, 2)))
    launched.start_store()
    launched.start(0)
    wait_until(lambda: bool(launched.starts(0)))
    time.sleep(10.0)  # some heartbeats

    cut(launched.store)
    wait_until(lambda: "The ranks train on" in launched.output(0))
    time.sleep(60.0)  # above the time after which torch gives up a call
    reconnect(launched.store)
    launched.start(1)

    wait_until(lambda: all(_has_met(launched, number) for number in (0, 1)))


def has_connected(launched: SleepingRanks, num: int) -> bool:
    """Return whether a host has this many connections to the store."""
    command = launched.hosts[0].command("cat", "/proc/net/tcp", "/proc/net/tcp6")
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    port = f":{STORE_PORT:04X}"
    states = [line.split()[2:4] for line in listed.splitlines()]
    return sum(peer.endswith(port) and state == "01" for peer, state in states) >= num


def lose_second(launched: SleepingRanks) -> None:
    time.sleep(10.0)  # some heartbeats
    launched.kill(1)
