"""Constructed hangs: a monitored rank, and evidence of an all-reduce that other ranks miss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes.steps import step

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import HangSettings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.cross_rank.exchange.rank_messages import Heartbeat
from zerowatch.runtime.cross_rank.hang.hang_evidence import (
    CallSummary,
    HangEvidence,
    RankSetSummary,
)
from zerowatch.runtime.cross_rank.hang.hang_monitor import HangMonitor

KEY = "0-1a2b3c4d"
CALL = "all_reduce number 1234 of group dp (64 MiB, backward)"


def call(sequence: int = 1234, *, in_flight: bool = True, **changes: Any) -> CallSummary:
    fields = {
        "key": KEY,
        "role": "dp",
        "sequence": sequence,
        "op": "all_reduce",
        "payload_bytes": 64 * 2**20,
        "dtype": "float32",
        "phase": "backward",
        "in_flight": in_flight,
        "seconds": 33.0,
    }
    return CallSummary(**(fields | changes))


def peer(
    rank: int, issued: int, age_seconds: float | None = 1.0, pause: str | None = None
) -> Heartbeat:
    return Heartbeat(
        rank=rank,
        host=f"node-{rank}",
        age_seconds=age_seconds,
        issued={KEY: issued},
        pause=pause,
    )


def evidence(
    calls: list[CallSummary], peers: list[Heartbeat] | None, *, issued: int = 1234, **changes: Any
) -> HangEvidence:
    members = (0, *(each.rank for each in peers or [peer(1, 0)]))
    found = HangEvidence(
        rank=0,
        host="node-0",
        at_unix_seconds=1e9,
        step=77,
        phase="backward",
        silent_seconds=33.2,
        limit_seconds=30.0,
        is_announced=False,
        location="load (data.py:12)",
        peers=None if peers is None else {each.rank: each for each in peers},
        rank_sets={KEY: RankSetSummary(key=KEY, role="dp", members=members, issued=issued)},
        calls=calls,
    )
    return replace(found, **changes)


def run_as(file: str, function: str, inner: Callable[[], object]) -> object:
    """Call `inner` from a function of that name in a file of that name."""
    source = f"def {function}(inner):\n    return inner()\n"
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    return names[function](inner)


class FakeHangContext:
    """Rank 0's view of a hang: one peer, and one all-reduce in a group with it.

    Attributes:
        issued: The number of its last collective.
        is_waiting: Whether that is in flight.
        announced: What it has announced to the others.
        started: Whether the thread that asks the driver was started.
        driver_blocks: Whether the driver does not answer.
    """

    rank = 0

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.hang_announced = self.is_waiting = False
        self.in_training_mode = True
        self.issued = 1234
        self.known_peers: dict[int, Heartbeat] | None = {1: peer(1, 1233, age_seconds=33.0)}
        self.announced: list[bool] = []
        self.started = self.driver_blocks = False

    def start(self) -> None:
        self.started = True

    def close(self) -> None:
        """There is no thread."""

    def is_driver_blocked(self) -> bool:
        return self.driver_blocks

    def folder(self) -> Path:
        return self.path

    def last_activity_ns(self) -> int:
        return 0

    def is_training(self) -> bool:
        return self.in_training_mode

    def peers(self) -> dict[int, Heartbeat] | None:
        return self.known_peers

    def rank_sets(self) -> list[RankSetSummary] | None:
        if self.driver_blocks:
            return None
        members = (0, *sorted(self.known_peers or {1: None}))
        return [
            RankSetSummary(
                key=KEY,
                role="dp",
                members=members,
                issued=self.issued,
                is_waiting=self.is_waiting,
            )
        ]

    def last_calls(self) -> list[CallSummary] | None:
        return None if self.driver_blocks else [call()]

    def divergence(self) -> str | None:
        return None

    def flight_recorder_dump(self) -> bytes | None:
        return None

    def others_hang(self) -> bool:
        return self.hang_announced

    def announce_hang(self, hangs: bool) -> None:
        self.announced.append(hangs)


class WatchedRank:
    """Rank 0's hang monitor with a limit of 30 s, at the end of its third step."""

    def __init__(self, folder: Path, *, abort: bool = False, enabled: bool = True) -> None:
        self.now_ns = 10**12
        self.exits: list[int] = []
        self.said: list[str] = []
        self.context = FakeHangContext(folder)
        self.recorder = Recorder()
        self.phase_timer = PhaseTimer(lambda: self.now_ns)
        self.watch = HangMonitor(
            context=self.context,
            settings=HangSettings(abort=abort, enabled=enabled),
            phase_timer=self.phase_timer,
            recorder=self.recorder,
            fail_open=FailOpen(),
            now_ns=lambda: self.now_ns,
            exit_process=self.exits.append,
            on_hang=self.said.append,
        )
        for number in (1, 2, 3):
            self.watch.on_step_end(step(number))

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += 10**9
            self.watch.check()
        self.watch.close()

    @property
    def num_hangs(self) -> float:
        return self.recorder.snapshot().values[communication.HANGS][()]
