"""Measures time and memory of engine rebuilds: all 16 transitions of stages, and offload.

The host memory of a rebuild is its peak RSS less the larger of what was in use before and after it:
what is needed for a while, in addition to the engines. The bench compares it with the states that
a rank moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from bench.bench_options import Options
from bench.rank_processes import run_ranks
from bench.result_table import Row

GOAL = 1.3
# A way through all 16 edges between four stages, each once.
STAGES = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
CPU = {"device": "cpu", "pin_memory": False}
OFFLOADS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (1, ("optimizer",)),
    (2, ()),
    (2, ("optimizer",)),
    (3, ()),
    (3, ("optimizer",)),
    (3, ("optimizer", "param")),
    (3, ()),
    (2, ("optimizer",)),
    (1, ()),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each rebuild, on one rank and on two."""
    for world_size in (1, 2):
        yield from _rows("stages", [(stage, ()) for stage in STAGES], world_size, options)
        yield from _rows("offloading", OFFLOADS, world_size, options)


def _rows(what: str, path: Any, world_size: int, options: Options) -> Iterator[Row]:
    path = list(path)[: 3 if options.quick else None]
    asked = {"path": [_ds_config(*one) for one in path]}
    ranks = run_ranks(
        "trainer/rebuild_cost_job.py", asked, world_size=world_size, timeout_seconds=1800
    )
    worst = 0.0
    for number, (old, new) in enumerate(pairwise(path)):
        found = [rank["rebuilds"][number] for rank in ranks]
        ratio = max(map(_ratio, found))
        worst = max(worst, ratio)
        yield Row(
            what=f"{world_size} rank(s): {_name(*old)} to {_name(*new)}",
            measured=f"{max(one['seconds'] for one in found):.1f} s, {ratio:.2f} x",
            spread=f"{max(one['moved'] for one in found) / 2**20:.0f} MiB moved",
            goal=f"<= {GOAL} x",
            met=ratio <= GOAL,
        )
    millions = ranks[0]["parameters"] / 1e6
    yield Row(
        what=f"{world_size} rank(s): {what}, the most of {len(path) - 1} rebuilds",
        measured=f"{worst:.2f} x of the states moved",
        spread=f"{millions:.1f} million parameters",
        goal=f"<= {GOAL} x",
        met=worst <= GOAL,
    )


def _ratio(found: dict[str, float]) -> float:
    return (found["peak"] - max(found["before"], found["after"])) / found["moved"]


def _name(stage: int, offloaded: tuple[str, ...]) -> str:
    return f"stage {stage}" + "".join(f", {one} on the host" for one in offloaded)


def _ds_config(stage: int, offloaded: tuple[str, ...]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1_000_000,
            **{f"offload_{one}": CPU for one in offloaded},
        },
    }
