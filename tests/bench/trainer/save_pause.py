"""Measures how long training pauses for a checkpoint that it waits for, and for one in background.

Saves of both kinds take turns on two ranks. An A/A run compares two saves that training waits for.
The windows that run while a checkpoint is written are compared with the windows after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.bench_options import Options
from bench.confidence_intervals import ratio_interval
from bench.rank_processes import run_ranks
from bench.result_table import Row

STAGES = (2, 3)


def bench(options: Options) -> Iterator[Row]:
    """Yield the pause of each kind of save, their ratio, and the time of windows beside a save."""
    for stage in STAGES:
        asked = {
            "stage": stage,
            "pairs": 3 if options.quick else 15,
            "layers": 1 if options.quick else 7,
        }
        found = run_ranks("trainer/save_pause_job.py", asked, world_size=2, timeout_seconds=1800)[0]
        yield from _rows(f"ZeRO {stage}, {found['bytes'] / 2**20:.0f} MiB", found)


def _rows(job: str, found: dict[str, Any]) -> Iterator[Row]:
    for name, pauses in (("waited for", found["waited"]), ("in background", found["copied"])):
        yield Row(
            what=f"{job}: pause of a save {name}",
            measured=f"{1e3 * median(pauses):.0f} ms",
            spread=f"{1e3 * min(pauses):.0f} .. {1e3 * max(pauses):.0f} ms of {len(pauses)}",
        )
    yield _ratio(f"{job}: pause in background over waited for", found["copied"], found["waited"])
    yield _ratio(f"{job}: pause waited for over waited for (A/A)", found["again"], found["waited"])
    yield Row(
        what=f"{job}: writing in background",
        measured=f"{1e3 * median(found['writing']):.0f} ms",
        spread=f"{1e3 * min(found['writing']):.0f} .. {1e3 * max(found['writing']):.0f} ms",
    )
    yield _ratio(f"{job}: window beside a save over one after it", found["beside"], found["after"])
    yield Row(
        what=f"{job}: files in background equal to those waited for",
        measured="yes" if found["equal"] else "no",
        goal="yes",
        met=found["equal"],
    )


def _ratio(what: str, these: list[float], others: list[float]) -> Row:
    ratio = ratio_interval([one / other for one, other in zip(these, others, strict=True)])
    return Row(
        what=what, measured=f"{ratio.estimate:.3f}", spread=f"{ratio.low:.3f} .. {ratio.high:.3f}"
    )
