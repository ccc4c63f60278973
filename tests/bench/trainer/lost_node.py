"""Loses nodes of a job on two hosts, and compares its training with that of undisturbed ranks.

The hosts are network namespaces of this machine (`lab.switched_hosts`); this needs root and
iproute2. A lost node is one with all processes killed, or one with its link down.

Every job has its rendezvous store on a third host, apart from those that lose the store.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from bench.bench_options import Options
from bench.result_table import Row
from lab.node_launchers import NodeLaunchers, process_ids
from lab.switched_hosts import switched_hosts
from lab.two_hosts import Host, cut, missing, reconnect
from scripts.trainer.run_restart_job import SCRIPT, read_events, train

LOSSES, EARLY_LOSSES = 10, 2
STEPS, SAVE_EVERY = 200, 5
SEED = 466351
# Launchers that start take up to this time to train, on an idle machine.
EARLY_SECONDS = 20.0
# Steps that are compared after a change of the number of ranks, and the goals of their losses.
FIRST_STEPS, CHANGED_STEPS = 5, 50
FIRST_GOAL, CHANGED_GOAL = 1e-6, 1e-4
# Dropout of ranks that did not exist before draws other numbers. The pause lets a host join before
# many steps are trained without it.
WITHOUT_CHANCE = ("--dropout", 0, "--pause", 0.2)
LEFT_GOAL, ERROR_GOAL = 30.0, 60.0  # seconds
LIMIT_SECONDS = 900.0
POLL_SECONDS = 0.1

Event = Mapping[str, Any]


def bench(options: Options) -> Iterator[Row]:
    """Yield how long a lost node takes, and whether training is as without the loss."""
    reason = missing()
    if reason is not None:
        yield Row(what="not measured", measured=reason)
        return
    num, early, steps = (2, 1, 30) if options.quick else (LOSSES, EARLY_LOSSES, STEPS)
    changed = 10 if options.quick else CHANGED_STEPS
    yield from _replaced_nodes(num, early, steps)
    for loss in ("kill", "link down"):
        yield from _fewer_and_more_nodes(loss, changed)
    for loss in ("kill", "link down"):
        yield _lost_store(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What the ranks of one attempt logged, by rank.

    Attributes:
        started_at: When its first rank started, in Unix seconds.
        ranks: Number of ranks.
        resumed: The step of the checkpoint that it loaded.
        committed: The committed windows of each rank, by step.
    """

    started_at: float
    ranks: int
    resumed: int
    committed: Sequence[Mapping[int, Event]]

    def trained_at(self) -> float:
        """Return when its first window was committed."""
        return min(float(event["at"]) for event in self.committed[0].values())


class TwoHostJob:
    """`restart_job.py` with one rank on each of two hosts."""

    def __init__(self, folder: Path, launchers: NodeLaunchers) -> None:
        self.launchers, self._folder = launchers, folder

    @property
    def hosts(self) -> Sequence[Host]:
        return self.launchers.hosts

    def attempts(self, since: float = 0.0) -> list[Attempt]:
        """Return the attempts that started since then and have trained, in order."""
        parts: dict[str, list[list[Event]]] = {}
        for rank in range(2):
            for part in _parts(read_events(self._folder, rank)):
                parts.setdefault(part[0]["port"], []).append(part)
        attempts = [_attempt(found) for found in parts.values() if _has_trained(found)]
        return sorted(
            (each for each in attempts if each.started_at > since),
            key=lambda each: each.started_at,
        )

    def train_to(self, step: int, ranks: int, since: float = 0.0) -> Attempt:
        """Wait until an attempt that started since then has committed a step; return it."""

        def last() -> Attempt | None:
            found = [each for each in self.attempts(since) if each.ranks == ranks]
            return found[-1] if found and max(found[-1].committed[0]) >= step else None

        return self.wait(last, f"step {step} on {ranks} ranks")

    def rank_of(self, number: int) -> int | None:
        """Return the process of the rank that runs on a host, or None if none runs."""
        started = {
            event["pid"]
            for rank in range(2)
            for event in read_events(self._folder, rank)
            if event["what"] == "started"
        }
        return next(iter(started & process_ids(self.hosts[number])), None)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Return the first result of a function that is true."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                printed = "\n".join(self.launchers.output(number)[-3000:] for number in (0, 1))
                raise RuntimeError(f"no {what} within {LIMIT_SECONDS:.0f} s:\n{printed}")
            time.sleep(POLL_SECONDS)
        return found

    def wait_for_launcher(self, number: int) -> int:
        """Wait until the launcher of a host has ended; return its exit code."""
        self.wait(lambda: self.launchers.code(number) is not None, f"end of launcher {number}")
        code = self.launchers.code(number)
        assert code is not None
        return code

    def wait_until_ended(self, process: int) -> float:
        """Return when a process has ended, in Unix seconds."""
        self.wait(lambda: not _is_running(process), f"end of process {process}")
        return time.time()


@contextmanager
def _job(
    nodes: str, *options: object, steps: int = 10**6, store: int = 2, restarts: int = 3
) -> Iterator[TwoHostJob]:
    """Start a job whose store is on the host of this number; 2 is no node."""
    with (
        tempfile.TemporaryDirectory(prefix="zerowatch-lost-node-") as name,
        switched_hosts(3) as hosts,
    ):
        folder = Path(name)
        launchers = NodeLaunchers(
            folder,
            hosts[:2],
            store=hosts[store],
            nodes=nodes,
            script=lambda _: (SCRIPT, folder, steps, SAVE_EVERY, *options),
            max_restarts=restarts,
        )
        with closing(launchers):
            if store == 2:
                launchers.start_store()
            for number in (0, 1):
                launchers.start(number)
            yield TwoHostJob(folder, launchers)


def _replaced_nodes(num: int, early: int, steps: int) -> Iterator[Row]:
    """Kill a host of the two at random moments, and start its launcher again each time."""
    killed_at, left, restarts = [], [], 2 * num
    with _job("2", steps=steps, restarts=restarts) as job:
        for moment in _moments(Random(SEED), steps, num, early):
            if moment.step is not None:
                job.train_to(moment.step, 2, since=max(killed_at, default=0.0))
            time.sleep(moment.seconds)
            survivor = job.rank_of(1 - moment.host)
            killed_at.append(time.time())
            job.launchers.kill(moment.host)
            job.launchers.start(moment.host)
            if survivor is not None:
                left.append(job.wait_until_ended(survivor) - killed_at[-1])
        codes = [job.wait_for_launcher(number) for number in (0, 1)]
        attempts = job.attempts()
    through = _undisturbed(steps)
    same = all(
        {"ids": event["ids"], "loss": event["loss"]} == through[rank][step]
        for attempt in attempts
        for rank, windows in enumerate(attempt.committed)
        for step, event in windows.items()
    )
    whole = all(
        {step for attempt in attempts for step in attempt.committed[rank]}
        == set(range(1, steps + 1))
        for rank in (0, 1)
    )
    yield Row(
        what=f"two nodes, {num} kills of one: samples and losses of {steps} windows",
        measured="equal bit for bit" if same and whole else "differ",
        spread=f"{early} while starting; saved every {SAVE_EVERY} windows; exit codes {codes}",
        goal="as undisturbed",
        met=same and whole and codes == [0, 0],
    )
    yield _seconds("the other node leaves, after a kill", left, LEFT_GOAL)
    yield _seconds(
        "from a kill until all train again, another node started at once",
        [
            next(each.trained_at() for each in attempts if each.started_at > at) - at
            for at, until in zip(killed_at, [*killed_at[1:], time.time()], strict=True)
            if any(at < each.started_at < until for each in attempts)
        ],
    )


def _fewer_and_more_nodes(loss: str, changed: int) -> Iterator[Row]:
    """Lose a node, train without it, and let it join again."""
    with _job("1:2", *WITHOUT_CHANCE) as job:
        first = job.train_to(4 * SAVE_EVERY, 2)
        survivor, lost_at = job.rank_of(0), time.time()
        assert survivor is not None
        if loss == "kill":
            job.launchers.kill(1)
        else:
            cut(job.hosts[1])
        left = job.wait_until_ended(survivor) - lost_at
        if loss != "kill":
            error = _error_row(job, 1, lost_at, "the node without a link ends")
        alone = job.train_to(1, 1, since=lost_at)
        alone = job.train_to(alone.resumed + changed, 1, since=lost_at)
        if loss != "kill":
            reconnect(job.hosts[1])
        joined_at = time.time()
        job.launchers.start(1)
        joined = job.train_to(1, 2, since=joined_at)
        joined = job.train_to(joined.resumed + changed, 2, since=joined_at)
        attempts = job.attempts()
    last = max(attempts[-1].committed[0])
    reference = _undisturbed(last, *WITHOUT_CHANCE[:2])
    yield _seconds(f"{loss}: the other node leaves", [left], LEFT_GOAL)
    yield _seconds(f"{loss}: it trains alone", [alone.trained_at() - lost_at])
    if loss != "kill":
        yield error
    yield _seconds(
        f"{loss}: both train, after the node was started again", [joined.trained_at() - joined_at]
    )
    alone = next(each for each in attempts if each.started_at == alone.started_at)
    same = all(_same_samples(each, reference) for each in (first, alone, joined))
    yield Row(
        what=f"{loss}, 2 to 1 to 2 nodes: samples of {last} windows",
        measured="equal" if same else "differ",
        spread=f"changes after windows {alone.resumed} and {joined.resumed}",
        goal="as undisturbed",
        met=same,
    )
    for what, attempt in (("2 to 1", alone), ("1 to 2", joined)):
        for steps, goal in ((FIRST_STEPS, FIRST_GOAL), (changed, CHANGED_GOAL)):
            worst = _worst_loss(attempt, reference, steps)
            yield Row(
                what=f"{loss}, {what} nodes: losses of {steps} windows, relative difference",
                measured=f"{worst:.1e}",
                goal=f"<= {goal:.0e}",
                met=worst <= goal,
            )


def _lost_store(loss: str) -> Row:
    """Lose the node whose host has the store."""
    with _job("2", store=1) as job:
        job.train_to(2 * SAVE_EVERY, 2)
        lost_at = time.time()
        if loss == "kill":
            job.launchers.kill(1)
        else:
            cut(job.hosts[1])
        return _error_row(job, 0, lost_at, f"{loss} of the node with the store: the other ends")


def _error_row(job: TwoHostJob, number: int, lost_at: float, what: str) -> Row:
    """Return the row on a launcher that ends with an error about the store, after its rank."""
    code = job.wait_for_launcher(number)
    job.wait(lambda: job.rank_of(number) is None, f"end of the rank on host {number}")
    seconds = time.time() - lost_at
    is_clear = f"{job.launchers.store.address}:" in job.launchers.output(number)
    return Row(
        what=f"{what}, with an error that names the store",
        measured=f"{seconds:.1f} s",
        spread=f"exit code {code}{'' if is_clear else ', error unclear'}",
        goal=f"<= {ERROR_GOAL:.0f} s",
        met=seconds <= ERROR_GOAL and is_clear and code != 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The host to kill, and the delay after a committed step, or after the last start."""

    host: int
    step: int | None
    seconds: float


def _moments(chance: Random, steps: int, num: int, early: int) -> list[_Moment]:
    moments = [
        _Moment(host=chance.randrange(2), step=step, seconds=chance.uniform(0.0, 0.15))
        for step in sorted(chance.sample(range(1, steps - 1), num - early))
    ]
    for _ in range(early):
        at = _Moment(host=chance.randrange(2), step=None, seconds=chance.uniform(0, EARLY_SECONDS))
        moments.insert(chance.randrange(1, len(moments) + 1), at)
    return moments


@cache
def _undisturbed(steps: int, *options: object) -> list[dict[int, dict[str, Any]]]:
    """Return the windows of each rank of a job on two ranks of one host that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-lost-node-") as name:
        result = train(Path(name), steps=steps, save_every=SAVE_EVERY, options=options)
        return [result.committed(rank) for rank in (0, 1)]


def _same_samples(attempt: Attempt, reference: Sequence[Mapping[int, Event]]) -> bool:
    steps = attempt.committed[0]
    return list(steps) == list(range(attempt.resumed + 1, max(steps) + 1)) and all(
        _samples(attempt.committed, step) == _samples(reference, step)
        for step in min(attempt.committed, key=len)
    )


def _samples(ranks: Sequence[Mapping[int, Event]], step: int) -> list[int]:
    return sorted(sample for windows in ranks for sample in windows[step]["ids"])


def _worst_loss(attempt: Attempt, reference: Sequence[Mapping[int, Event]], steps: int) -> float:
    """Return the largest relative difference of the first losses of an attempt."""
    resumed = attempt.resumed
    return max(
        abs(attempt.committed[0][step]["loss"] / reference[0][step]["loss"] - 1.0)
        for step in range(resumed + 1, resumed + steps + 1)
    )


def _seconds(what: str, seconds: Sequence[float], goal: float | None = None) -> Row:
    several = len(seconds) > 1
    return Row(
        what=f"{what}, median" if several else what,
        measured=f"{median(seconds):.1f} s" if seconds else "never",
        spread=f"{min(seconds):.1f} to {max(seconds):.1f} s, {len(seconds)}" if several else "",
        goal="" if goal is None else f"<= {goal:.0f} s",
        met=None if goal is None else bool(seconds) and max(seconds) <= goal,
    )


def _parts(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Divide the events of a rank by attempts; the first event of each is its start."""
    part: list[Event] = []
    for event in events:
        if event["what"] == "started" and part:
            yield part
            part = []
        part.append(event)
    if part:
        yield part


def _has_trained(parts: Sequence[Sequence[Event]]) -> bool:
    is_complete = len(parts) == parts[0][0]["ranks"]
    return is_complete and all(any(e["what"] == "committed" for e in part) for part in parts)


def _attempt(parts: Sequence[Sequence[Event]]) -> Attempt:
    return Attempt(
        started_at=min(part[0]["at"] for part in parts),
        ranks=parts[0][0]["ranks"],
        resumed=next(event["step"] for event in parts[0] if event["what"] == "resumed"),
        committed=[
            {event["step"]: event for event in part if event["what"] == "committed"}
            for part in parts
        ],
    )


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
