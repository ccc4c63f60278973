"""Measures the throughput of two ranks, one slowed, with shares by speed and even shares.

One run finds its shares; then blocks of windows of both kinds take turns, in the same engine.
Asleep, the slow rank leaves the cores alone; at work it computes for so much CPU time of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL = 1.25
SLOWNESS = 2
BATCH = 24
SAMPLE_SECONDS = 0.004
ROOMY, FULL = 16, 4  # the larger share in one micro-batch as well; and in one micro-batch more
CASES = (
    *((stage, ROOMY, True) for stage in (0, 1, 2, 3)),
    *((stage, FULL, True) for stage in (1, 2, 3)),
    (1, ROOMY, False),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield the gain by ZeRO stage, micro-batch and way to be slow."""
    for stage, micro_batch, asleep in CASES:
        ranks = _measure(stage, micro_batch, options, asleep=asleep)
        how = f"{'asleep' if asleep else 'at work'}, micro-batches of {micro_batch} at most"
        yield _row(f"ZeRO-{stage}, rank 1 {SLOWNESS} x slower {how}", ranks)


def _measure(
    stage: int, micro_batch: int, options: Options, *, asleep: bool
) -> list[dict[str, Any]]:
    asked = {
        "stage": stage,
        "asleep": asleep,
        "slowness": SLOWNESS,
        "batch": BATCH,
        "micro_batch": micro_batch,
        "sample_seconds": SAMPLE_SECONDS / 4 if options.quick else SAMPLE_SECONDS,
        "settling_windows": 64,
        "block_windows": 4 if options.quick else 10,
        "blocks": 4 if options.quick else 8,
    }
    return run_ranks("trainer/uneven_ranks_job.py", asked, world_size=2, timeout_seconds=600)


def _row(what: str, ranks: list[dict[str, Any]]) -> Row:
    blocks = ranks[0]["blocks"]
    gain = ratio_interval([block["even"] / block["balanced"] for block in blocks])
    even, balanced = (
        BATCH / statistics.median(block[arm] for block in blocks) for arm in ("even", "balanced")
    )
    shares = " + ".join(str(rank["found"]) for rank in ranks)
    return Row(
        what=f"{what}: {shares} after {ranks[0]['settled_after']} windows",
        measured=f"{gain.estimate:.2f} x ({even:.0f} -> {balanced:.0f} samples/s)",
        spread=f"{gain.low:.2f} .. {gain.high:.2f}",
        goal=f">= {GOAL} x",
        met=gain.estimate >= GOAL,
    )
