"""Runs the benches and prints one table; a missed goal is printed, and is no error.

.venv/bin/python tests/bench/run.py [--quick] [--steps N] [names...]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator

import balance
import cross_rank_arithmetic
import estimator
import gradient_compression
import hang
import hot_path
import oom_risk
import otlp
import overhead
import prediction
import rebuild
import restart
import scale
import scrape
import skipped
import soak
import threads
import tuner_cost
import tuner_link
import tuner_link_harmless
import tuner_link_rivals
import tuner_loss
import tuner_memory
import tuner_reaction
import tuner_simulation
import variable_length
from options import Options
from table import Row, render

BENCHES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "overhead": overhead.bench,
    "hot_path": hot_path.bench,
    "threads": threads.bench,
    "scrape": scrape.bench,
    "scale": scale.bench,
    "cross_rank": cross_rank_arithmetic.bench,
    "skipped": skipped.bench,
    "hang": hang.bench,
    "soak": soak.bench,
    "prediction": prediction.bench,
    "oom_risk": oom_risk.bench,
    "estimator": estimator.bench,
    "otlp": otlp.bench,
    "balance": balance.bench,
    "compression": gradient_compression.bench,
    "rebuild": rebuild.bench,
    "restart": restart.bench,
    "tuner_simulation": tuner_simulation.bench,
    "tuner_cost": tuner_cost.bench,
    "tuner_loss": tuner_loss.bench,
    "tuner_link": tuner_link.bench,
    "tuner_link_harmless": tuner_link_harmless.bench,
    "tuner_link_rivals": tuner_link_rivals.bench,
    "tuner_memory": tuner_memory.bench,
    "tuner_reaction": tuner_reaction.bench,
    "variable_length": variable_length.bench,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure overhead, accuracy and tuning.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}; by default all")
    parser.add_argument("--steps", type=int, default=800, help="timed steps of each overhead arm")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the figures mean little")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    for name in asked.names:
        if name not in BENCHES:
            parser.error(f"no bench is called {name!r}; there are {', '.join(BENCHES)}")
    print(_surroundings(), flush=True)
    options = Options(steps=asked.steps, quick=asked.quick)
    rows = [row for name in asked.names or BENCHES for row in _run(name, options)]
    _print_names("GOALS MISSED", [row.what for row in rows if row.met is False])
    _print_names("TOO NOISY TO JUDGE", [row.what for row in rows if row.too_noisy])
    if all(row.met or not row.goal for row in rows):
        print("All goals met.")


def _print_names(heading: str, rows: list[str]) -> None:
    if rows:
        print(f"{heading}: " + "; ".join(rows))


def _run(name: str, options: Options) -> list[Row]:
    print(f"\n## {name}\n", flush=True)
    rows = list(BENCHES[name](options))
    print(render(rows) + "\n", flush=True)
    return rows


def _surroundings() -> str:
    """Describe the machine and its load; other load spoils the figures."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    now = datetime.datetime.now(datetime.UTC)
    return (
        f"{now:%Y-%m-%d %H:%M} UTC, {cores} cores, load before {load:.1f}, "
        f"Python {sys.version.split()[0]}, {versions}"
    )


_PACKAGES = ("torch", "deepspeed", "zerowatch")

if __name__ == "__main__":
    main()
