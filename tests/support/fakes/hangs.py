"""Hangs made by hand: a watched rank, and evidence of an all-reduce at which others are missing."""

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
from zerowatch.runtime.cross_rank.hang.evidence import CallLine, Evidence, GroupLine, Peer, Sources
from zerowatch.runtime.cross_rank.hang.hang_watch import HangWatch

KEY = "0-1a2b3c4d"
AT = "all_reduce number 1234 of group dp (64 MiB, backward)"


def call(sequence: int = 1234, *, state: Any = "under way", **changes: Any) -> CallLine:
    facts = {
        "group": KEY,
        "role": "dp",
        "sequence": sequence,
        "op": "all_reduce",
        "payload_bytes": 64 * 2**20,
        "dtype": "float32",
        "phase": "backward",
        "state": state,
        "seconds": 33.0,
    }
    return CallLine(**(facts | changes))


def peer(rank: int, arrived: int, age: float | None = 1.0, pause: str | None = None) -> Peer:
    return Peer(
        rank=rank,
        host=f"node-{rank}",
        heartbeat_age_seconds=age,
        arrived={KEY: arrived},
        pause=pause,
    )


def evidence(
    calls: list[CallLine], peers: list[Peer] | None, *, issued: int = 1234, **changes: Any
) -> Evidence:
    members = (0, *(each.rank for each in peers or [peer(1, 0)]))
    facts = Evidence(
        rank=0,
        host="node-0",
        at_unix_seconds=1e9,
        step=77,
        phase="backward",
        silent_seconds=33.2,
        limit_seconds=30.0,
        told=False,
        place="load (data.py:12)",
        peers=None if peers is None else {each.rank: each for each in peers},
        groups={KEY: GroupLine(key=KEY, role="dp", members=members, issued=issued)},
        calls=calls,
    )
    return replace(facts, **changes)


def run_as(file: str, function: str, inner: Callable[[], object]) -> object:
    """Call `inner` from a function of that name in a file of that name."""
    source = f"def {function}(inner):\n    return inner()\n"
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    return names[function](inner)


class Rank:
    """Rank 0's hang watch with a limit of 30 s, at the end of its third step.

    Attributes:
        issued: The number of its last collective.
        waits: Whether that is under way.
    """

    def __init__(self, folder: Path, *, abort: bool = False, enabled: bool = True) -> None:
        self.now_ns = 10**12
        self.others_hang = self.waits = False
        self.training = True
        self.issued = 1234
        self.peers: dict[int, Peer] | None = {1: peer(1, 1233, age=33.0)}
        self.told: list[bool] = []
        self.exits: list[int] = []
        self.recorder = Recorder()
        self.clock = PhaseTimer(lambda: self.now_ns)
        self.hang = HangWatch(
            rank=0,
            settings=HangSettings(abort=abort, enabled=enabled),
            clock=self.clock,
            sources=Sources(
                folder=lambda: folder,
                last_activity_ns=lambda: 0,
                training=lambda: self.training,
                peers=lambda: self.peers,
                groups=lambda: [self._group],
                last_calls=lambda: [call()],
                flight_dump=lambda: None,
                others_hang=lambda: self.others_hang,
                tell_others=self.told.append,
            ),
            recorder=self.recorder,
            fail_open=FailOpen(),
            now_ns=lambda: self.now_ns,
            leave=self.exits.append,
        )
        for number in (1, 2, 3):
            self.hang.step_ended(step(number))

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += 10**9
            self.hang.look()
        self.hang.close()

    @property
    def hangs(self) -> float:
        return self.recorder.snapshot().values[communication.HANGS][()]

    @property
    def _group(self) -> GroupLine:
        members = (0, *sorted(self.peers or {1: None}))
        return GroupLine(key=KEY, role="dp", members=members, issued=self.issued, waits=self.waits)
