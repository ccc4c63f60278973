"""Kills ranks at random moments, restarts them, and compares with a run without kills."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.bench_options import Options
from bench.result_table import Row
from scripts.trainer.run_restart_job import RestartResult, train

KILLS, EARLY_KILLS = 50, 10
STEPS, SAVE_EVERY = 400, 5
SEED = 127057
SECONDS_A_KILL = 180.0  # a start takes five to ten on two cores that are idle


def bench(options: Options) -> Iterator[Row]:
    """Yield the differences of a killed run from an undisturbed one, and the time of a restart."""
    kills, early, steps = (3, 1, 30) if options.quick else (KILLS, EARLY_KILLS, STEPS)
    through = _train(steps, 0, 0)
    killed = _train(steps, kills, early)
    ranks = (0, 1)
    same = [killed.committed(rank) == through.committed(rank) for rank in ranks]
    whole = [list(killed.committed(rank)) == list(range(1, steps + 1)) for rank in ranks]
    yield Row(
        what=f"samples and losses of {steps} windows after {len(killed.kills)} kills",
        measured="equal bit for bit" if all(same) and all(whole) else "differ",
        spread=f"{early} while starting; saved every {SAVE_EVERY} windows",
        goal="as undisturbed",
        met=all(same) and all(whole) and len(killed.kills) == kills and killed.code == 0,
    )
    weights = [_ended(killed, rank) == _ended(through, rank) for rank in ranks]
    yield Row(
        what="weights in the end, and the account of samples",
        measured="equal bit for bit" if all(weights) else "differ",
        goal="as undisturbed",
        met=all(weights),
    )
    done = len(killed.of(0, "committed"))
    yield Row(
        what="replayed windows",
        measured=f"{done - steps}",
        spread=f"{(done - steps) / max(1, len(killed.kills)):.1f} a kill",
    )
    seconds = _restart_seconds(killed)
    yield Row(
        what="from a kill until all train again, median",
        measured=f"{median(seconds):.1f} s",
        spread=f"{min(seconds):.1f} to {max(seconds):.1f} s",
    )


def _train(steps: int, kills: int, early: int) -> RestartResult:
    with tempfile.TemporaryDirectory(prefix="zerowatch-restart-") as name:
        return train(
            Path(name),
            steps=steps,
            save_every=SAVE_EVERY,
            kills=kills,
            early_kills=early,
            seed=SEED,
            timeout_seconds=SECONDS_A_KILL * (kills + 2),
        )


def _ended(course: RestartResult, rank: int) -> tuple[list[float], int]:
    (event,) = course.of(rank, "ended")
    return event["weights"], event["samples"]


def _restart_seconds(killed: RestartResult) -> list[float]:
    """Return the seconds from each kill to the next attempt's first window, if it trained."""
    trained: dict[int, float] = {}
    for event in killed.of(0, "committed"):
        trained.setdefault(event["attempt"], event["at"])
    return [
        trained[kill.attempt + 1] - kill.at_unix_seconds
        for kill in killed.kills
        if kill.attempt + 1 in trained
    ]
