"""Measures the overhead of monitoring on a step, against comms_logger and torch.profiler.

Arms are interleaved in one process per rank. Each arm's block is compared with the mean of the two
unmonitored blocks of its round; the two compared with each other show the noise floor. Wall time is
what counts; CPU time of rank 0's process agrees with it, and other load on the machine disturbs it
less.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import Interval, ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row

Rounds = list[dict[str, dict[str, float]]]  # by arm, then wall or cpu seconds of a step

GOAL = 1.004
STAGES = (0, 1, 2, 3)
EVERY_ROUND = ["off", "off again", "watched"]
SOME_ROUNDS = ["comms_logger", "torch.profiler"]
# The block must span a whole period of the 1 Hz device sampling, or its cost is left out.
BLOCK_STEPS = 25
STEP_SECONDS = 0.065


def bench(options: Options) -> Iterator[Row]:
    """Yield the ratio of each tool for each ZeRO stage."""
    for stage in STAGES:
        yield from _rows(stage, _measure(stage, options))


def _measure(stage: int, options: Options) -> dict[str, Any]:
    block_steps = 8 if options.quick else BLOCK_STEPS
    asked = {
        "stage": stage,
        "rounds": 4 if options.quick else max(4, round(options.steps / block_steps)),
        "block_steps": block_steps,
        "settling_steps": 4,
        "step_seconds": 0.03 if options.quick else STEP_SECONDS,
        "every_round": EVERY_ROUND,
        "some_rounds": SOME_ROUNDS,
    }
    return run_ranks(
        "monitoring_cost/step_overhead_job.py", asked, world_size=2, timeout_seconds=3600
    )[0]


def _rows(stage: int, found: dict[str, Any]) -> Iterator[Row]:
    rounds: Rounds = found["rounds"]
    step_seconds = statistics.median(each["off"]["wall"] for each in rounds)
    yield Row(
        what=f"ZeRO-{stage} step, unmonitored",
        measured=f"{1000 * step_seconds:.1f} ms",
        spread=f"{len(rounds)} rounds, batch {found['batch']}",
    )
    for kind in ("wall", "cpu"):
        floor = ratio_interval([each["off again"][kind] / each["off"][kind] for each in rounds])
        yield _row(f"ZeRO-{stage} {kind}: off / off (noise floor)", floor)
        for arm in ("watched", *SOME_ROUNDS):
            interval = ratio_interval(ratios_to_unmonitored(rounds, arm, kind))
            yield _row(f"ZeRO-{stage} {kind}: {arm} / off", interval, arm == "watched")


def ratios_to_unmonitored(rounds: Rounds, arm: str, kind: str) -> list[float]:
    """Compare an arm with the mean of its round's two unmonitored blocks."""
    return [
        2 * each[arm][kind] / (each["off"][kind] + each["off again"][kind])
        for each in rounds
        if arm in each
    ]


def _row(what: str, found: Interval, has_goal: bool = False) -> Row:
    # An interval wider than the goal's margin decides nothing.
    is_sure = (found.high - found.low) / 2 <= GOAL - 1
    return Row(
        what=what,
        measured=f"{found.estimate:.4f}",
        spread=f"{found.low:.4f} .. {found.high:.4f}",
        goal=f"<= {GOAL}" if has_goal else "",
        met=found.estimate <= GOAL if has_goal and is_sure else None,
    )
