"""Measures what monitoring costs the training thread, in CPU time and in steps of 50 ms.

Blocks of steps with and without monitoring alternate at random in one process per rank, and each
rank is pinned to a core. Two of the three blocks of a round are unmonitored: compared with each
other, they show what the bench can resolve (A/A). Monitoring is opened some steps before its block,
so the block has only its lasting cost. CPU time of a thread is the kernel's account (schedstat).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import Interval, mean_interval, ratio_interval
from bench.monitoring_cost.step_overhead import ratios_to_unmonitored
from bench.rank_processes import run_ranks
from bench.result_table import Row

STEP_SECONDS = 0.05
GOAL_STEP_US = 120.0
GOAL_RATIO, EXCLUDED_RATIO = 1.004, 1.007
GOAL_THREADS_MS = 3.0
GOAL_HOLD_MS = 0.5
GOAL_IMPORT_SECONDS, GOAL_OPEN_SECONDS = 0.1, 0.3
BLOCK_STEPS, SETTLING_STEPS = 20, 20
IMPORTS = 10
_IMPORT = (
    "import sys, time; begin = time.perf_counter(); import zerowatch; "
    "print(time.perf_counter() - begin, not {'torch', 'deepspeed'} & set(sys.modules))"
)

Block = dict[str, float]


def bench(options: Options) -> Iterator[Row]:
    """Yield the cost for each rank, and that of import and start."""
    yield _import_row(3 if options.quick else IMPORTS)
    asked = {
        "step_seconds": 0.02 if options.quick else STEP_SECONDS,
        "rounds": 4 if options.quick else max(4, round(options.steps / BLOCK_STEPS)),
        "block_steps": 5 if options.quick else BLOCK_STEPS,
        "settling_steps": 3 if options.quick else SETTLING_STEPS,
        "sampled_steps": 20 if options.quick else 1200,
    }
    ranks = run_ranks(
        "monitoring_cost/training_thread_job.py", asked, world_size=2, timeout_seconds=7200
    )
    for rank, found in enumerate(ranks):
        yield from _rows(rank, found)


def _import_row(times: int) -> Row:
    found = []
    for _ in range(times):
        command = [sys.executable, "-c", _IMPORT]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(output.split())
    seconds = statistics.median(float(each) for each, _ in found)
    is_light = all(light == "True" for _, light in found)
    return Row(
        what="import zerowatch",
        measured=f"{1000 * seconds:.0f} ms, {'without' if is_light else 'WITH'} torch or deepspeed",
        goal=f"<= {1000 * GOAL_IMPORT_SECONDS:.0f} ms, without",
        met=is_light and seconds <= GOAL_IMPORT_SECONDS,
    )


def _rows(rank: int, found: dict[str, Any]) -> Iterator[Row]:
    rounds: list[dict[str, Block]] = found["rounds"]
    yield Row(
        what=f"rank {rank}: step, unmonitored",
        measured=f"{1000 * statistics.median(each['off']['wall'] for each in rounds):.1f} ms",
        spread=f"{len(rounds)} rounds of {found['block_steps']} steps, batch {found['batch']}",
    )
    added = mean_interval([1e6 * _added_seconds(each) for each in rounds])
    same = mean_interval(
        [1e6 * (each["off again"]["training"] - each["off"]["training"]) for each in rounds]
    )
    yield _interval_row(
        f"rank {rank}: CPU time added to the training thread per step",
        added,
        "{:.0f} us",
        goal=f"<= {GOAL_STEP_US:g} us",
        met=_verdict(added, GOAL_STEP_US),
    )
    yield _interval_row(f"rank {rank}: the same, A/A", same, "{:.0f} us")
    ratio = ratio_interval(ratios_to_unmonitored(rounds, "watched", "wall"))
    floor = ratio_interval([each["off again"]["wall"] / each["off"]["wall"] for each in rounds])
    yield _interval_row(
        f"rank {rank}: wall time of a step, watched / unwatched",
        ratio,
        "{:.4f}",
        goal=f"<= {GOAL_RATIO}, interval below {EXCLUDED_RATIO}",
        met=_ratio_verdict(ratio, floor),
    )
    yield _interval_row(f"rank {rank}: the same, A/A", floor, "{:.4f}")
    threads = mean_interval([1000 * each["watched"]["threads"] for each in rounds])
    yield _interval_row(
        f"rank {rank}: CPU time of our threads",
        threads,
        "{:.2f} ms/s",
        goal=f"<= {GOAL_THREADS_MS:g} ms/s",
        met=_verdict(threads, GOAL_THREADS_MS),
    )
    yield _hold_row(rank, found["holds"])
    yield Row(
        what=f"rank {rank}: opening a watch",
        measured=f"{found['open_seconds']:.2f} s",
        spread="median of the rounds",
        goal=f"<= {GOAL_OPEN_SECONDS} s",
        met=found["open_seconds"] <= GOAL_OPEN_SECONDS,
    )


def _added_seconds(each: dict[str, Block]) -> float:
    """Return by how much the training thread's CPU time exceeds the mean of both other blocks."""
    unmonitored = (each["off"]["training"] + each["off again"]["training"]) / 2
    return each["watched"]["training"] - unmonitored


def _interval_row(
    what: str, found: Interval, written: str, *, goal: str = "", met: bool | None = None
) -> Row:
    """Return the row of an estimate; `written` is the format of its figures, with their unit."""
    number = written.partition(" ")[0]
    return Row(
        what=what,
        measured=written.format(found.estimate),
        spread=f"{number.format(found.low)} .. {number.format(found.high)}",
        goal=goal,
        met=met,
    )


def _verdict(found: Interval, goal: float) -> bool | None:
    """Return whether a goal is met; None if the interval contains it."""
    if found.high <= goal:
        return True
    return False if found.low > goal else None


def _ratio_verdict(found: Interval, floor: Interval) -> bool | None:
    """Return whether the goal is met; None if the ratio, or the A/A one, is not known as well."""
    if max(floor.high - 1, 1 - floor.low) > EXCLUDED_RATIO - 1:
        return None
    if found.estimate <= GOAL_RATIO and found.high < EXCLUDED_RATIO:
        return True
    return False if found.low > GOAL_RATIO else None


def _hold_row(rank: int, holds: dict[str, list[float]] | str) -> Row:
    what = f"rank {rank}: hold of the GIL by our threads, p99.9"
    if isinstance(holds, str):
        return Row(what=what, measured=f"not measured: {holds}")
    in_order = sorted(1000 * each for own in holds.values() for each in own)
    if not in_order:
        return Row(what=what, measured="no hold was seen")
    high = _quantile(in_order, 0.999)
    by_thread = (f"{name} {1000 * max(own, default=0.0):.2f}" for name, own in holds.items())
    return Row(
        what=what,
        measured=f"{high:.2f} ms",
        spread=f"{len(in_order)} holds, median {_quantile(in_order, 0.5):.2f}, 99 % "
        f"{_quantile(in_order, 0.99):.2f}; longest: {', '.join(by_thread)}",
        goal=f"<= {GOAL_HOLD_MS} ms",
        met=high <= GOAL_HOLD_MS,
    )


def _quantile(in_order: Sequence[float], share: float) -> float:
    return in_order[min(len(in_order) - 1, int(share * len(in_order)))]
