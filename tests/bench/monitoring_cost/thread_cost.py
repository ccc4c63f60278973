"""Measures the CPU time of zerowatch's threads in a real run that is scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.bench_options import Options
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL_MS = 3.0  # a second, all threads of a rank together
GOAL_STRETCH_MS = 1.0
STEP_SECONDS = 0.055
SCRAPE_SECONDS = 5.0


def bench(options: Options) -> Iterator[Row]:
    """Yield the CPU milliseconds a second of each rank's threads."""
    asked = {
        "step_seconds": STEP_SECONDS,
        "settling_steps": 20 if options.quick else 60,
        "steps": 100 if options.quick else 600,
        "scrape_seconds": SCRAPE_SECONDS,
    }
    for rank, found in enumerate(
        run_ranks("monitoring_cost/thread_cost_job.py", asked, world_size=2, timeout_seconds=900)
    ):
        yield from _rows(rank, found)


def _rows(rank: int, found: dict[str, Any]) -> Iterator[Row]:
    total_ms = 1000 * sum(found["threads"].values())
    yield Row(
        what=f"rank {rank}: all our threads, {1 / found['step_seconds']:.1f} steps/s",
        measured=f"{total_ms:.2f} ms/s",
        spread=_listed(found["threads"]),
        goal=f"<= {GOAL_MS:g} ms/s",
        met=total_ms <= GOAL_MS,
    )
    stretch_ms = 1000 * found["longest_stretch_seconds"]
    yield Row(
        what=f"rank {rank}: longest stretch of a thread",
        measured=f"{stretch_ms:.2f} ms",
        spread="polled every 2 ms",
        goal=f"<= {GOAL_STRETCH_MS:g} ms",
        met=stretch_ms <= GOAL_STRETCH_MS,
    )
    yield Row(
        what=f"rank {rank}: watch_seconds_total says",
        measured=f"{1000 * sum(found['counted'].values()):.2f} ms/s",
        spread=_listed(found["counted"]),
    )


def _listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
