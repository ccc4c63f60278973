"""Measures the cost of the votes of a TrainingRun's ranks before collectives.

Blocks of windows with and without votes alternate, on two ranks of one machine. The goal is the
same as for monitoring. A guarded window has no goal: while memory is in doubt, a vote precedes each
collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import ratio_interval, trimmed_mean
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL = 0.02  # of a window
STAGES = (2, 3)
MICRO_BATCHES = 4


def bench(options: Options) -> Iterator[Row]:
    """Yield the time of a single vote, and what votes add to a window of each stage."""
    asked = {
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "single_votes": 50 if options.quick else 2000,
        "pairs": 3 if options.quick else 100,
        "block_windows": 1,  # so that a pair is short, and the machine's other work the same
    }
    found = run_ranks("trainer/vote_cost_job.py", asked, world_size=2, timeout_seconds=1800)[0]
    for stage, each in found.items():
        yield from _rows(f"ZeRO {stage}, {MICRO_BATCHES} micro-batches", each)


def _rows(job: str, found: dict[str, Any]) -> Iterator[Row]:
    single = sorted(1e6 * each for each in found["single"])
    yield Row(
        what=f"{job}: one vote",
        measured=f"{median(single):.0f} us",
        spread=f"{single[len(single) // 4]:.0f} .. {single[-len(single) // 4]:.0f} us, the middle "
        f"half of {len(single)}",
    )
    same = ratio_interval([one / other for one, other in found["A/A"]["seconds"]])
    noise = (same.high - same.low) / 2
    for name in ("unguarded", "guarded"):
        pairs, votes = found[name]["seconds"], found[name]["votes"][0]
        ratio = ratio_interval([voting / none for voting, none in pairs])
        added = trimmed_mean([voting - none for voting, none in pairs])
        has_goal = name == "unguarded"
        is_sure = max(noise, (ratio.high - ratio.low) / 2) <= GOAL
        yield Row(
            what=f"{job}, {name}: window of {1e3 * median(none for _, none in pairs):.0f} ms with "
            f"{votes} votes over none",
            measured=f"{ratio.estimate:.4f}, {1e6 * added / votes:.0f} us a vote",
            spread=f"{ratio.low:.4f} .. {ratio.high:.4f}",
            goal=f"<= {1 + GOAL}" if has_goal else "",
            met=(ratio.estimate <= 1 + GOAL if is_sure else None) if has_goal else None,
        )
    yield Row(
        what=f"{job}: none over none (A/A)",
        measured=f"{same.estimate:.4f}",
        spread=f"{same.low:.4f} .. {same.high:.4f}",
    )
