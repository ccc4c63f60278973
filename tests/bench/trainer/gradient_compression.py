"""Measures gradient compression: all-reduces on a slow link, and the effect on the loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from bench.bench_options import Options
from bench.rank_processes import BENCH, run_ranks
from bench.result_table import Row
from lab.two_hosts import missing, run_on_both, two_hosts
from scripts.launching import environment

RATE = "200mbit"
NUM_VALUES = 10_000_000
ROUNDS = 9
GOALS = {"bf16": 0.55, "int8": 0.35, "fp8": 0.35}  # of fp32's all-reduce
BASE = "fp32 all_reduce"

SEEDS = (1, 2, 3)
STEPS = 200
MOST_LOSS = 0.01
ARMS = (  # what it is called, the compression format, whether it has feedback
    ("fp32", None, None),
    ("bf16", "bf16", None),
    ("int8", "int8", None),
    ("int8 without feedback", "int8", False),
    ("fp8", "fp8", None),
    ("fp8 without feedback", "fp8", False),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield the times on the link, and the losses."""
    reason = missing()
    if reason is None:
        yield from _link(options)
        yield from _steps(options)
    else:
        print(f"no slow link: {reason}")
    yield from _training(options)


def _link(options: Options) -> Iterator[Row]:
    num_values, rounds = (500_000, 2) if options.quick else (NUM_VALUES, ROUNDS)
    measured = _on_two_hosts("trainer/compression_link_job.py", num_values, rounds)
    fp32 = measured[BASE]["seconds"]
    for name, found in measured.items():
        share = median(own / base for own, base in zip(found["seconds"], fp32, strict=True))
        goal = GOALS.get(name)
        yield Row(
            what=f"sum of {num_values:,} values at {RATE}/s: {name}",
            measured=f"{median(found['seconds']):.3f} s, {share:.2f} of fp32's",
            spread=f"{min(found['seconds']):.3f} to {max(found['seconds']):.3f} s, "
            f"error {found['error']:.1e}",
            goal="" if goal is None else f"{goal:.2f}",
            met=None if goal is None else share <= goal,
        )


def _steps(options: Options) -> Iterator[Row]:
    sizes = (200, 50, 2) if options.quick else (700, 1500, 7)  # width, rows, rounds
    measured = _on_two_hosts("trainer/compression_step_job.py", *sizes)
    for name, found in measured.items():
        shares = [own / base for own, base in zip(found, measured["fp32"], strict=True)]
        yield Row(
            what=f"ZeRO-2 backward with its sums at {RATE}/s: {name}",
            measured=f"{median(found):.3f} s, {median(shares):.2f} of fp32's",
            spread=f"{min(found):.3f} to {max(found):.3f} s",
        )


def _on_two_hosts(job: str, *arguments: int) -> dict[str, Any]:
    variables = environment()
    del variables["GLOO_SOCKET_IFNAME"]
    command = (sys.executable, BENCH / job, *arguments)
    with two_hosts(RATE) as hosts:
        ended = run_on_both(hosts, command, variables, timeout_seconds=600)
    for line in ended[0].stdout.splitlines():
        if line.startswith("report "):
            found: dict[str, Any] = json.loads(line.removeprefix("report "))
            return found
    raise RuntimeError(f"the ranks on the link reported nothing:\n{ended[0].stderr[-3000:]}")


def _training(options: Options) -> Iterator[Row]:
    model = {"hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    asked = {
        "arms": ARMS,
        "model": model,
        "seeds": SEEDS,
        "steps": 10 if options.quick else STEPS,
    }
    losses = run_ranks(
        "trainer/compression_training_job.py", asked, world_size=2, timeout_seconds=3600
    )[0]
    for name, reached in losses.items():
        away = [own / base - 1 for own, base in zip(reached, losses["fp32"], strict=True)]
        judged = name in GOALS
        yield Row(
            what=f"loss after {asked['steps']} steps: {name}",
            measured=f"{mean(reached):.4f}, {mean(away):+.2%} of fp32's",
            spread=", ".join(f"{each:+.2%}" for each in away),
            goal=f"{MOST_LOSS:.0%}" if judged else "",
            met=all(each <= MOST_LOSS for each in away) if judged else None,
        )
