"""Measures the cost of a tuner that finds nothing to do, against a run without a tuner.

The bench measures the tuner's four calls of a window on rank 0's training thread. They include the
readings of the metrics, as often as by default. CPU time is measured, because wall time includes
other work of the machine. The same calls are measured with the tuner off, after a step's arithmetic
has emptied the caches. The time that the clocks themselves take is thereby known.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL = 0.001  # of a step
DIAGNOSIS_INTERVAL_SECONDS = 20.0  # the default of tuner.diagnosis_interval_seconds
STEP_DURATION = (0.05, 0.2)


def bench(options: Options) -> Iterator[Row]:
    """Yield the tuner's share of steps of either length, and what the parts cost."""
    asked = {
        "step_seconds": STEP_DURATION,
        "diagnosis_interval_seconds": 2.0 if options.quick else DIAGNOSIS_INTERVAL_SECONDS,
        "seconds": 8.0 if options.quick else 65.0,
        "pairs": 4 if options.quick else 24,
        "block_steps": 5,
        "gathers": 200 if options.quick else 4000,
    }
    found = run_ranks("tuner/idle_cost_job.py", asked, world_size=2, timeout_seconds=1800)[0]
    yield _gathers(found["gathers"])
    for each in found["steps"].values():
        yield from _rows(each, found["off"])


def _gathers(pairs: list[list[float]]) -> Row:
    own, with_asides = (1e6 * median(each) for each in zip(*pairs, strict=True))
    more = sorted(1e6 * (after - before) for before, after in pairs)
    low, high = more[len(more) // 4], more[-len(more) // 4]
    return Row(
        what="the gather that opens a window, of 7 floats instead of 5",
        measured=f"{with_asides:.0f} us instead of {own:.0f} us",
        spread=f"{low:+.0f} .. {high:+.0f} us, the middle half of {len(pairs)} pairs",
    )


def _rows(found: dict[str, Any], off_seconds: float) -> Iterator[Row]:
    metered, empty = found["metered"], found["empty"]
    num, step_seconds = metered["steps"], metered["seconds"] / metered["steps"]
    steps = f"steps of {1000 * step_seconds:.0f} ms"
    clocks = empty["cpu"] / empty["steps"]
    seconds = metered["cpu"] / num - clocks
    yield Row(
        what=f"{steps}: tuner in OBSERVE, CPU time of the training thread",
        measured=f"{seconds / step_seconds:.3%}, {1e6 * seconds:.0f} us a window",
        spread=f"{num} windows, the dearest {1e3 * metered['dearest']:.1f} ms; "
        f"without {1e6 * clocks:.0f} us for the clocks",
        goal=f"<= {GOAL:.1%}",
        met=seconds <= GOAL * step_seconds,
    )
    walls = [each["wall"] / each["steps"] for each in (metered, empty)]
    yield Row(
        what=f"{steps}: the same in wall time",
        measured=f"{walls[0] / step_seconds:.3%}, {1e6 * walls[0]:.0f} us",
        spread=f"{1e6 * walls[1]:.0f} us of it for clocks and other threads",
    )
    yield Row(
        what=f"{steps}: tuner off, warm",
        measured=f"{off_seconds / step_seconds:.5%}, {1e6 * off_seconds:.2f} us a window",
    )
    between = ratio_interval([on / off for on, off in found["in turns"]])
    is_sure = (between.high - between.low) / 2 <= GOAL
    yield Row(
        what=f"{steps}: step time in OBSERVE over off, blocks alternating",
        measured=f"{between.estimate:.4f}",
        spread=f"{between.low:.4f} .. {between.high:.4f}",
        goal=f"<= {1 + GOAL}",
        met=between.estimate <= 1 + GOAL if is_sure else None,
    )
