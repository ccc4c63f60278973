"""Measures what monitoring costs the training thread, in CPU time and in steps of 50 ms.

Two ranks, each pinned to a core, do steps of fixed work in short blocks: unmonitored, unmonitored
again, monitored, and with wrappers that only read what a step's record has of torch, at random.
Each of the others is compared with the first, so the A/A rows show what the bench can resolve. "Too
noisy" means that the A/A interval is wider than the margin. On a quiet machine the training thread
hardly waits for other processes.

The added CPU time is measured in steps of about 10 ms, because noise grows with the step and the
added time does not. There the hooks alone are switched, and monitoring's threads are in all blocks.
In steps of 50 ms a watch is opened before each monitored block and closed after it. The block
begins one to six seconds after the opening, so it has the lasting cost only. Memory is read some
times a second, so the longer steps have more of the readings: compare the rows "own clocks".

One more run has a single rank, so there is no exchange between ranks. Our threads are pinned to
another core: they can delay training only by holding the GIL.

The last rows of each rank are with `process.separate`: what our threads still do in the training
process, and a ratio in which they take the place of the threads above.

Where the neighbours of a virtual machine disturb blocks of two seconds too much, the ratio is still
known as the sum of its parts, which are measured in short blocks and from the kernel's accounts.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import Interval, mean_interval, ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row

STEP_SECONDS = 0.05
GOAL_STEP_US, MARGIN_STEP_US = 120.0, 30.0
GOAL_RATIO, EXCLUDED_RATIO = 1.004, 1.007
GOAL_THREADS_MS = 3.0
GOAL_HOLD_MS = 0.5
GOAL_IMPORT_SECONDS, GOAL_OPEN_SECONDS = 0.1, 0.3
IMPORTS = 10
SHORT = {"watches": 4, "first_steps": 100, "settling_steps": 2, "block_steps": 6}
# Ranks exchange figures every 5 s.
LONG = {"first_steps": 20, "period_steps": 100, "settling_steps": 4, "block_steps": 40}
# A round of the longer blocks takes 10 s, one of the shorter blocks 0.3 s.
SHORT_ROUNDS_PER_LONG = 40
OTHER_CORE = LONG | {"rounds": 24}
# About two holds a step: 3,000 are enough for a p99.9.
SAMPLED_STEPS = 1600
# The goal for our threads is for so many steps a second.
PACED_STEPS, PACE = 600, 15
_IMPORT = (
    "import sys, time; begin = time.perf_counter(); import zerowatch; "
    "print(time.perf_counter() - begin, not {'torch', 'deepspeed'} & set(sys.modules))"
)

Block = dict[str, float]


def bench(options: Options) -> Iterator[Row]:
    """Yield the cost for each rank, and that of import and start."""
    yield _import_row(3 if options.quick else IMPORTS)
    asked = {
        "step_seconds": STEP_SECONDS,
        "short": SHORT | {"rounds": 2 * options.steps},
        "long": LONG | {"rounds": max(4, 2 * options.steps // SHORT_ROUNDS_PER_LONG)},
        "sampled_steps": SAMPLED_STEPS,
        "paced_steps": PACED_STEPS,
        "paced_seconds": 1 / PACE,
    }
    if options.quick:
        asked |= {
            "short": SHORT | {"watches": 2, "first_steps": 10, "rounds": 20},
            "long": LONG | {"first_steps": 4, "period_steps": 1, "block_steps": 5, "rounds": 4},
            "sampled_steps": 20,
            "paced_steps": 20,
        }
    ranks = run_ranks(
        "monitoring_cost/training_thread_job.py", asked, world_size=2, timeout_seconds=7200
    )
    threads = [_threads_ms(found["long"]["rounds"]) for found in ranks]
    threads_left = [_milliseconds(found["separate"]["threads"]) for found in ranks]
    for rank, found in enumerate(ranks):
        rounds, name = found["short"]["rounds"], f"rank {rank}"
        yield from _short_rows(rank, found["short"])
        yield from _long_rows(rank, found["long"])
        yield from _sum_rows(name, rounds, threads)
        yield _paced_row(name, found["paced"])
        yield _hold_row(name, found["holds"])
        name += ", process.separate"
        yield _threads_row(name, threads_left[rank])
        yield _paced_row(name, found["separate"]["paced"])
        yield from _sum_rows(name, rounds, threads_left)
        yield _hold_row(name, found["separate"]["holds"])
    if len(os.sched_getaffinity(0)) < 2:
        yield Row(what="our threads on another core", measured="not measured: there is one core")
        return
    (alone,) = run_ranks(
        "monitoring_cost/training_thread_job.py",
        {
            "step_seconds": STEP_SECONDS,
            "other_core": asked["long"] if options.quick else OTHER_CORE,
        },
        world_size=1,
        timeout_seconds=7200,
    )
    yield from _other_core_rows(alone)


def _other_core_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Yield by how much longer a step waits because our threads hold the GIL."""
    rounds: list[dict[str, Block]] = found["rounds"]
    yield _step_row("our threads on another core: step of 50 ms, unmonitored", found)
    for arm, what in (("watched", "further waits, per step"), ("off again", "the same, A/A")):
        added = mean_interval(_differences_us(rounds, arm, "waits"))
        yield _interval_row(f"our threads on another core: {what}", added, "{:.0f} us")


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


def _short_rows(rank: int, found: dict[str, Any]) -> Iterator[Row]:
    rounds: list[dict[str, Block]] = found["rounds"]
    yield _step_row(f"rank {rank}: short step, unmonitored", found)
    added = mean_interval(_differences_us(rounds, "watched"))
    same = mean_interval(_differences_us(rounds, "off again"))
    yield _interval_row(
        f"rank {rank}: CPU time added to the training thread per step",
        added,
        "{:.0f} us",
        goal=f"<= {GOAL_STEP_US:g} us",
        met=_is_added_time_met(added, same),
    )
    yield _interval_row(f"rank {rank}: the same, A/A", same, "{:.0f} us")
    reads = mean_interval(_differences_us(rounds, "reads alone"))
    what = f"rank {rank}: reads of shape, loss, gradient norm and learning rate alone"
    yield _interval_row(what, reads, "{:.0f} us")
    yield _clocks_row(f"rank {rank}: own clocks, short steps", found["clocks"])


def _is_added_time_met(added: Interval, same: Interval) -> bool | None:
    """Return whether the goal is met; None if the A/A interval is too wide to tell."""
    if added.low - _half(same) > GOAL_STEP_US:
        return False
    return added.estimate <= GOAL_STEP_US if _half(same) <= MARGIN_STEP_US else None


def _sum_rows(
    whose: str, rounds: Sequence[dict[str, Block]], threads_ms: Sequence[Interval]
) -> Iterator[Row]:
    """Yield the ratio for steps of 50 ms as the sum of its parts.

    The parts are the wall time that the hooks add to a short step, and the CPU time of our threads
    on all ranks, because each rank waits for its core and for the other ranks. With
    `process.separate` the hooks are the same, and the other process needs cores of its own.
    """
    added, same = (
        mean_interval([(each[arm]["wall"] - each["off"]["wall"]) / STEP_SECONDS for each in rounds])
        for arm in ("watched", "off again")
    )
    threads = [_scaled(each, 1e-3) for each in threads_ms]
    what = f"{whose}: step of 50 ms, sum of the parts"
    yield from _ratio_rows(what, _one_plus([added, *threads]), _one_plus([same]))


def _one_plus(parts: Sequence[Interval]) -> Interval:
    estimate = 1 + sum(each.estimate for each in parts)
    return Interval(
        estimate=estimate,
        low=estimate - math.hypot(*(each.estimate - each.low for each in parts)),
        high=estimate + math.hypot(*(each.high - each.estimate for each in parts)),
    )


def _scaled(found: Interval, factor: float) -> Interval:
    return Interval(
        estimate=factor * found.estimate, low=factor * found.low, high=factor * found.high
    )


def _ratio_rows(what: str, ratio: Interval, same: Interval) -> Iterator[Row]:
    is_met = ratio.estimate <= GOAL_RATIO and ratio.high < EXCLUDED_RATIO
    yield _interval_row(
        what,
        ratio,
        "{:.4f}",
        goal=f"<= {GOAL_RATIO}, interval below {EXCLUDED_RATIO}",
        met=is_met if _half(same) <= EXCLUDED_RATIO - GOAL_RATIO else None,
    )
    yield _interval_row(f"{what}, A/A", same, "{:.4f}")


def _threads_ms(rounds: Sequence[dict[str, Block]]) -> Interval:
    """Return the CPU milliseconds of our threads a second."""
    return _milliseconds([each["watched"]["threads"] for each in rounds])


def _milliseconds(seconds: Sequence[float]) -> Interval:
    return mean_interval([1000 * each for each in seconds])


def _long_rows(rank: int, found: dict[str, Any]) -> Iterator[Row]:
    rounds: list[dict[str, Block]] = found["rounds"]
    yield _step_row(f"rank {rank}: step of 50 ms, unmonitored", found)
    ratio, same = (
        ratio_interval([each[arm]["wall"] / each["off"]["wall"] for each in rounds])
        for arm in ("watched", "off again")
    )
    yield from _ratio_rows(f"rank {rank}: step of 50 ms, watched / unwatched", ratio, same)
    for arm, what in (
        ("watched", "CPU time added, steps of 50 ms"),
        ("off again", "the same, A/A"),
    ):
        difference = mean_interval(_differences_us(rounds, arm))
        yield _interval_row(f"rank {rank}: {what}", difference, "{:.0f} us")
    yield _clocks_row(f"rank {rank}: own clocks, steps of 50 ms", found["clocks"])
    yield _threads_row(f"rank {rank}", _threads_ms(rounds))
    yield Row(
        what=f"rank {rank}: opening a watch",
        measured=f"{found['open_seconds']:.2f} s",
        spread="median of the rounds",
        goal=f"<= {GOAL_OPEN_SECONDS} s",
        met=found["open_seconds"] <= GOAL_OPEN_SECONDS,
    )


def _threads_row(whose: str, threads: Interval) -> Row:
    what = f"{whose}: CPU time of our threads, steps of 50 ms"
    return _interval_row(what, threads, "{:.2f} ms/s")


def _paced_row(whose: str, seconds: Sequence[float]) -> Row:
    threads = _milliseconds(seconds)
    is_unknown = threads.low <= GOAL_THREADS_MS < threads.high
    return _interval_row(
        f"{whose}: CPU time of our threads, {PACE} steps a second",
        threads,
        "{:.2f} ms/s",
        goal=f"<= {GOAL_THREADS_MS:g} ms/s",
        met=None if is_unknown else threads.high <= GOAL_THREADS_MS,
    )


def _step_row(what: str, found: dict[str, Any]) -> Row:
    blocks: list[Block] = [each["off"] for each in found["rounds"]]
    wall, training, delay = (
        1000 * statistics.median(each[kind] for each in blocks)
        for kind in ("wall", "training", "delay")
    )
    return Row(
        what=what,
        measured=f"{wall:.1f} ms: training thread {training:.1f}, waits for others {delay:.1f}",
        spread=f"{len(blocks)} rounds of {found['block_steps']} steps",
    )


def _clocks_row(what: str, clocks: dict[str, float]) -> Row:
    hooks, collectives = 1e6 * clocks["hooks"], 1e6 * clocks["collectives"]
    return Row(
        what=what,
        measured=f"{hooks + collectives:.0f} us a step",
        spread=f"hooks {hooks:.0f}, collectives {collectives:.0f}: {clocks['calls']:.1f} calls",
    )


def _differences_us(
    rounds: Sequence[dict[str, Block]], arm: str, kind: str = "training"
) -> list[float]:
    """Return by how much a step's time of this kind exceeds that of `off`; by default CPU time."""
    return [1e6 * (each[arm][kind] - each["off"][kind]) for each in rounds]


def _half(found: Interval) -> float:
    return (found.high - found.low) / 2


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


def _hold_row(whose: str, holds: dict[str, list[float]] | str) -> Row:
    what = f"{whose}: hold of the GIL by our threads, p99.9"
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
