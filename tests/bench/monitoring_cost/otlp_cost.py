"""Measures the cost of OTLP without a working collector: of a step, and of the threads."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import Interval, ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row
from fakes.otlp_collector import Collector

GOAL = 1.004
GOAL_MS = 3.0  # a second, all threads of a rank together
ARMS = ["watched", "watched again", "refused", "unanswered"]
BLOCK_STEPS = 25
STEP_SECONDS = 0.065


def bench(options: Options) -> Iterator[Row]:
    """Yield each dead collector's ratio to a watch that sends nothing, then the threads' cost."""
    found = _measure(options)
    rounds = found[0]["rounds"]
    step_seconds = statistics.median(each["watched"]["wall"] for each in rounds)
    yield Row(
        what="ZeRO-2 step, watched, nothing sent",
        measured=f"{1000 * step_seconds:.1f} ms",
        spread=f"{len(rounds)} rounds, batch {found[0]['batch']}",
    )
    for kind in ("wall", "cpu"):
        floor = [each["watched again"][kind] / each["watched"][kind] for each in rounds]
        yield _row(f"{kind}: nothing sent / nothing sent (noise floor)", ratio_interval(floor))
        for arm in ("refused", "unanswered"):
            ratios = [
                2 * each[arm][kind] / (each["watched"][kind] + each["watched again"][kind])
                for each in rounds
            ]
            yield _row(f"{kind}: collector {arm} / nothing sent", ratio_interval(ratios), kind)
    for rank, each in enumerate(found):
        yield _threads(rank, each["answered"])


def _measure(options: Options) -> list[dict[str, Any]]:
    block_steps = 8 if options.quick else BLOCK_STEPS
    with Collector() as collector, socket.create_server(("127.0.0.1", 0)) as silent:
        asked = {
            "rounds": 4 if options.quick else max(4, round(options.steps / block_steps)),
            "block_steps": block_steps,
            "settling_steps": 4,
            "counted_steps": 60 if options.quick else 600,
            "step_seconds": 0.03 if options.quick else STEP_SECONDS,
            "arms": ARMS,
            "refusing": "http://127.0.0.1:1",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "answering": collector.endpoint,
        }
        return run_ranks(
            "monitoring_cost/otlp_cost_job.py", asked, world_size=2, timeout_seconds=3600
        )


def _row(what: str, found: Interval, kind: str = "") -> Row:
    has_goal = kind == "wall"
    # An interval wider than the goal's margin decides nothing.
    is_sure = (found.high - found.low) / 2 <= GOAL - 1
    return Row(
        what=what,
        measured=f"{found.estimate:.4f}",
        spread=f"{found.low:.4f} .. {found.high:.4f}",
        goal=f"<= {GOAL}" if has_goal else "",
        met=found.estimate <= GOAL if has_goal and is_sure else None,
    )


def _threads(rank: int, seconds: dict[str, float]) -> Row:
    total_ms = 1000 * sum(seconds.values())
    return Row(
        what=f"rank {rank}: all our threads, collector answers, one step in 100 traced",
        measured=f"{total_ms:.2f} ms/s",
        spread=", ".join(f"{name} {1000 * each:.2f}" for name, each in seconds.items()),
        goal=f"<= {GOAL_MS:g} ms/s",
        met=total_ms <= GOAL_MS,
    )
