"""Runs the benches and prints one table; a missed goal is printed, and is no error.

.venv/bin/python tests/bench/run.py [--quick] [--steps N] [names...]
.venv/bin/python tests/bench/run.py incidents [--only NAME,NAME] [--resume] [--show]
.venv/bin/python tests/bench/run.py unguarded_oom [--resume]
.venv/bin/python tests/bench/run.py chaos [--minutes N]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for `bench`
sys.path.append(str(Path(__file__).parents[1] / "support"))  # for `scripts`, `fakes`, `servers`

from bench.bench_options import Options
from bench.chaos import chaos
from bench.cross_rank import exchange_cost, skipped_collective, stopped_rank
from bench.incidents import incident_matrix
from bench.memory import oom_risk, peak_prediction, planned_memory
from bench.monitoring_cost import (
    hot_path,
    live_page_cost,
    otlp_cost,
    scrape_cost,
    slow_clients,
    soak,
    step_overhead,
    thread_cost,
    training_thread,
    training_thread_instructions,
)
from bench.mutations import line_coverage, mutation_check
from bench.rank_processes import PYTHONPATH
from bench.reports import report_cost
from bench.result_table import Row, render
from bench.scale import thousand_ranks
from bench.trainer import (
    gradient_compression,
    growing_batches,
    lost_node,
    rebuild_cost,
    repeated_kills,
    save_faults,
    save_pause,
    uneven_ranks,
    unguarded_oom,
    vote_cost,
)
from bench.tuner import idle_cost, link_changes, loss_effect, memory_pressure, simulated_trials
from bench.tuner_link import fast_links, other_tuners, slow_link

BENCHES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "overhead": step_overhead.bench,
    "hot_path": hot_path.bench,
    "threads": thread_cost.bench,
    "training_thread": training_thread.bench,
    "training_thread_instructions": training_thread_instructions.bench,
    "scrape": scrape_cost.bench,
    "slow_clients": slow_clients.bench,
    "live_page": live_page_cost.bench,
    "scale": thousand_ranks.bench,
    "cross_rank": exchange_cost.bench,
    "skipped": skipped_collective.bench,
    "hang": stopped_rank.bench,
    "incidents": incident_matrix.bench,
    "soak": soak.bench,
    "prediction": peak_prediction.bench,
    "oom_risk": oom_risk.bench,
    "estimator": planned_memory.bench,
    "otlp": otlp_cost.bench,
    "balance": uneven_ranks.bench,
    "compression": gradient_compression.bench,
    "rebuild": rebuild_cost.bench,
    "restart": repeated_kills.bench,
    "lost_node": lost_node.bench,
    "saves": save_pause.bench,
    "save_faults": save_faults.bench,
    "unguarded_oom": unguarded_oom.bench,
    "votes": vote_cost.bench,
    "chaos": chaos.bench,
    "tuner_simulation": simulated_trials.bench,
    "tuner_cost": idle_cost.bench,
    "tuner_loss": loss_effect.bench,
    "tuner_link": slow_link.bench,
    "tuner_link_harmless": fast_links.bench,
    "tuner_link_rivals": other_tuners.bench,
    "tuner_memory": memory_pressure.bench,
    "tuner_reaction": link_changes.bench,
    "variable_length": growing_batches.bench,
    "report": report_cost.bench,
    "line_coverage": line_coverage.bench,
    "mutations": mutation_check.bench,
}
RESUMED = (["incidents"], ["unguarded_oom"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure overhead, accuracy and tuning.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHES)}; by default all")
    parser.add_argument("--steps", type=int, default=800, help="timed steps of each overhead arm")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the figures mean little")
    parser.add_argument("--only", default="", help="incidents: a list, or names with commas")
    parser.add_argument("--resume", action="store_true", help="only what has no result yet")
    parser.add_argument("--show", action="store_true", help="incidents: print the kept results")
    parser.add_argument("--minutes", type=float, default=30.0, help="chaos: length of training")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = PYTHONPATH  # for the scripts that benches start
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    if (asked.only or asked.show) and asked.names != ["incidents"]:
        parser.error("--only and --show are options of the bench incidents")
    if asked.resume and asked.names not in RESUMED:
        parser.error("--resume is an option of the benches incidents and unguarded_oom")
    for name in asked.names:
        if name not in BENCHES:
            parser.error(f"no bench is called {name!r}; there are {', '.join(BENCHES)}")
    print(_surroundings(), flush=True)
    options = Options(
        steps=asked.steps,
        quick=asked.quick,
        only=tuple(name for name in asked.only.split(",") if name),
        resume=asked.resume,
        show=asked.show,
        minutes=asked.minutes,
    )
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
