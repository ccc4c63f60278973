"""Starts `restart_job.py` with restarts, kills random ranks of it, and reads what they logged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.forked_ranks import RunningRanks, running_ranks
from scripts.launching import SCRIPTS, TIMEOUT_SECONDS, TWO_RANKS, ZEROWATCH, environment

POLL_SECONDS = 0.02
SCRIPT = SCRIPTS / "trainer" / "restart_job.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A rank that was killed, the step that it had committed last, and when it was."""

    attempt: int
    rank: int
    step: int | None
    at_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartResult:
    """Outcome of a job: its folder, exit code, the kills, and each rank's events, in order."""

    folder: Path
    code: int
    kills: list[Kill]
    events: list[list[dict[str, Any]]]
    output: str

    def committed(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return by step what the last attempt committed."""
        return {
            event["step"]: {"ids": event["ids"], "loss": event["loss"]}
            for event in self.of(rank, "committed")
        }

    def of(self, rank: int, what: str) -> list[dict[str, Any]]:
        """Return a rank's events of one kind."""
        return [event for event in self.events[rank] if event["what"] == what]


def train(
    folder: Path,
    *,
    steps: int,
    save_every: int,
    kills: int = 0,
    early_kills: int = 0,
    full_after: int | None = None,
    seed: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    launched: bool = True,
    options: Sequence[object] = (),
    **variables: str,
) -> RestartResult:
    """Run the job to its end on two ranks, killing one in each of its attempts but the last.

    Args:
        folder: Empty; of this job.
        steps: Windows to train.
        save_every: Windows between checkpoints.
        kills: Attempts to kill, each a moment after a window of its own.
        early_kills: How many of them to kill while they are starting, wherever they are by then.
        full_after: Windows after which a rank's memory is full; None for never.
        seed: Of moments and ranks.
        timeout_seconds: After this everything is killed.
        launched: Whether `zerowatch run` starts and restarts the ranks, if anything interrupts
            them. Without it they are forked, with the variables that torchrun sets.
        options: More options of the job.
        variables: Of the job's environment.
    """
    restarts = kills + (full_after is not None)
    full = [] if full_after is None else ["--full-after", full_after]
    command = [SCRIPT, folder, steps, save_every, *full, *options]
    moments = _moments(random.Random(seed), steps, kills, early_kills)
    run = _run_launched if launched and restarts else _run_forked
    code, done, output = run(
        folder,
        [str(part) for part in command],
        moments,
        restarts=restarts,
        deadline=time.monotonic() + timeout_seconds,
        variables=variables,
    )
    events = [read_events(folder, rank) for rank in range(2)]
    return RestartResult(folder=folder, code=code, kills=done, events=events, output=output)


def _run_launched(
    folder: Path,
    job: list[str],
    moments: list[_Moment],
    *,
    restarts: int,
    deadline: float,
    variables: dict[str, str],
) -> tuple[int, list[Kill], str]:
    """Run a job by `zerowatch run`; return its exit code, the kills and its output."""
    command = [ZEROWATCH, "run", *TWO_RANKS, "--max-restarts", str(restarts), *job]
    output, done = folder / "output.txt", []
    with output.open("w") as file, _launched(command, folder, file, variables) as launcher:
        killer = _RankKiller(folder, lambda: launcher.poll() is None, output.read_text, deadline)
        for attempt, moment in enumerate(moments):
            done.append(killer.kill(attempt, moment))
        code = launcher.wait(timeout=killer.seconds_left())
    return code, done, output.read_text()


def _run_forked(
    folder: Path,
    job: list[str],
    moments: list[_Moment],
    *,
    restarts: int,
    deadline: float,
    variables: dict[str, str],
) -> tuple[int, list[Kill], str]:
    """Run a job as `_run_launched` does, but fork the ranks of each attempt."""
    output, code, done = "", 0, []
    for attempt in range(restarts + 1):
        places = {
            "ZEROWATCH_RUN_ID": "restarted",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_ERROR_FILE": str(folder / "errors" / f"attempt_{attempt}" / "0" / "e"),
        }
        with running_ranks(2, *job, cwd=folder, variables=places | variables) as ranks:
            killer = _RankKiller(folder, partial(_any_runs, ranks), ranks.output, deadline)
            if attempt < len(moments):
                done.append(killer.kill(attempt, moments[attempt]))
            codes = [rank.returncode for rank in ranks.join()]
            output += ranks.output()
        code = next((each for each in codes if each), 0)
        if not code:
            break
    return code, done, output


def _any_runs(ranks: RunningRanks) -> bool:
    return None in ranks.codes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The rank to kill, and the delay after a window was committed, or after its start."""

    rank: int
    step: int | None
    seconds: float


def _moments(chance: random.Random, steps: int, kills: int, early: int) -> list[_Moment]:
    """Draw the moments in order of steps; those of starting ranks are at random places."""
    drawn = sorted(chance.sample(range(1, steps - 1), kills - early))
    moments = [
        _Moment(rank=chance.randrange(2), step=step, seconds=chance.uniform(0.0, 0.15))
        for step in drawn
    ]
    for _ in range(early):
        at = _Moment(rank=chance.randrange(2), step=None, seconds=chance.uniform(0.0, 6.0))
        moments.insert(chance.randrange(len(moments) + 1), at)
    return moments


class _RankKiller:
    """Follows the events of a job's ranks, and kills ranks."""

    def __init__(
        self,
        folder: Path,
        is_running: Callable[[], bool],
        output: Callable[[], str],
        deadline: float,
    ) -> None:
        self._folder, self._is_running = folder, is_running
        self._output, self._deadline = output, deadline

    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def kill(self, attempt: int, moment: _Moment) -> Kill:
        """Kill a rank at a moment of an attempt."""
        pid = int(self._wait_for("started", attempt, moment.rank, None)["pid"])
        if moment.step is not None:
            self._wait_for("committed", attempt, moment.rank, moment.step)
        time.sleep(moment.seconds)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        events = read_events(self._folder, moment.rank)
        done = [event["step"] for event in events if event["what"] == "committed"]
        return Kill(
            attempt=attempt,
            rank=moment.rank,
            step=max(done, default=None),
            at_unix_seconds=killed_at,
        )

    def _wait_for(self, what: str, attempt: int, rank: int, step: int | None) -> dict[str, Any]:
        """Return an event of an attempt once it is logged, at this step or a later one."""
        while self.seconds_left() and self._is_running():
            for event in read_events(self._folder, rank):
                late_enough = step is None or event.get("step", 0) >= step
                if (event["attempt"], event["what"]) == (attempt, what) and late_enough:
                    return event
            time.sleep(POLL_SECONDS)
        output = self._output()[-3000:]
        raise AssertionError(f"attempt {attempt} did not reach {what} {step}:\n{output}")


@contextmanager
def _launched(
    command: list[str], folder: Path, file: Any, variables: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    job = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        _end(job, folder)


def _end(job: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the launcher and every rank that it started, if they still run."""
    if job.poll() is not None:
        return
    job.kill()
    job.wait()
    for rank in range(2):
        for event in read_events(folder, rank):
            if event["what"] == "started":
                with suppress(ProcessLookupError):
                    os.kill(event["pid"], signal.SIGKILL)


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what a rank has logged in all its attempts."""
    path = folder / f"events-{rank}.jsonl"
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]
