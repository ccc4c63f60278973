"""Measures growth of memory, descriptors and threads in ten thousand tiny steps.

With BENCH_SEPARATE=true in the environment, also the memory of the monitoring process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from bench.bench_options import Options
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL_MIB = 5.0
# Some series begin once, such as those of forecasts and of comparisons of ranks.
FIRST_SECONDS = 40.0
# It begins once, whenever the estimates of the link have been clear for long enough.
BEGINS_LATE = "zerowatch_comm_link_best_bandwidth_bytes_per_second"
STAGE = 2


def bench(options: Options) -> Iterator[Row]:
    """Yield what each of two ranks holds after the first steps and at the end."""
    unmonitored = _run(options, watched=False)
    watched = _run(options, watched=True)
    for rank, (plain, seen) in enumerate(zip(unmonitored, watched, strict=True)):
        yield from _rows(rank, plain, seen)


def _run(options: Options, *, watched: bool) -> list[dict[str, Any]]:
    asked = {
        "stage": STAGE,
        "steps": 1000 if options.quick else 10_000,
        "first_steps": 500 if options.quick else 1500,
        "first_seconds": FIRST_SECONDS,
        "watched": watched,
        "separate": _is_separate(),
    }
    return run_ranks("monitoring_cost/soak_job.py", asked, world_size=2, timeout_seconds=1800)


def _rows(rank: int, plain: dict[str, Any], seen: dict[str, Any]) -> Iterator[Row]:
    plain_mib, seen_mib = _growth_mib(plain), _growth_mib(seen)
    yield Row(
        what=f"rank {rank}: RSS growth, monitored - unmonitored",
        measured=f"{seen_mib - plain_mib:+.2f} MiB",
        spread=f"{seen_mib:.2f} in {seen['seconds']:.0f} s - {plain_mib:.2f} in "
        f"{plain['seconds']:.0f} s",
        goal=f"<= {GOAL_MIB:g} MiB",
        met=seen_mib <= plain_mib + GOAL_MIB,
    )
    if _is_separate():
        separate_mib = _growth_mib(seen, "separate_bytes")
        was_there = bool(seen["early"]["separate_bytes"] and seen["late"]["separate_bytes"])
        yield Row(
            what=f"rank {rank}: RSS growth of the monitoring process",
            measured=f"{separate_mib:+.2f} MiB" if was_there else "it did not run",
            spread=f"from {seen['early']['separate_bytes'] / 2**20:.0f} MiB",
            goal=f"<= {GOAL_MIB:g} MiB",
            met=was_there and separate_mib <= GOAL_MIB,
        )
    for what in ("descriptors", "threads"):
        grown, usual = (each["late"][what] - each["early"][what] for each in (seen, plain))
        yield Row(
            what=f"rank {rank}: {what}, growth",
            measured=f"{grown:+d}",
            spread=f"{seen['early'][what]} to {seen['late'][what]}; unmonitored {usual:+d}",
            goal="0 more than unmonitored",
            met=grown <= usual,
        )
    early, late = (set(seen[when]["series"]) for when in ("early", "late"))
    began = ", ".join(sorted(late - early)) or "none"
    budget = 400 if rank == 0 else 300
    yield Row(
        what=f"rank {rank}: series",
        measured=f"{len(late)}",
        spread=f"{len(early)} after the first steps; began later: {began}",
        goal=f"<= {budget}, constant",
        met=all(each.startswith(BEGINS_LATE) for each in early ^ late) and len(late) <= budget,
    )


def _is_separate() -> bool:
    return os.environ.get("BENCH_SEPARATE") == "true"


def _growth_mib(found: dict[str, Any], what: str = "resident_bytes") -> float:
    grown: int = found["late"][what] - found["early"][what]
    return grown / 2**20
