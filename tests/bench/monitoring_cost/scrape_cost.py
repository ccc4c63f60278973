"""Measures the cost of a scrape of the full catalog on the rank that serves it."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.bench_options import Options
from bench.monitoring_cost.scrape_client import scrape, series_of
from bench.result_table import Row

GOAL_MS = 4.0
SCRAPES_A_BATCH = 10


def bench(options: Options) -> Iterator[Row]:
    """Yield the CPU milliseconds a scrape, and how much one carries."""
    command = [sys.executable, str(Path(__file__).with_name("scrape_cost_job.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            yield from _rows(server, batches=5 if options.quick else 50)
        finally:
            server.kill()


def _rows(server: subprocess.Popen[str], batches: int) -> Iterator[Row]:
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    text, wire_bytes = scrape(address)
    costs = sorted(_batch_ms(server, address) for _ in range(batches))
    median = statistics.median(costs)
    yield Row(
        what=f"scrape of {len(series_of(text))} series",
        measured=f"{median:.2f} ms CPU",
        spread=f"{costs[0]:.2f} .. {costs[-1]:.2f} (batches of {SCRAPES_A_BATCH})",
        goal=f"<= {GOAL_MS:g} ms",
        met=median <= GOAL_MS,
    )
    yield Row(what="its size", measured=f"{len(text)} bytes", spread=f"{wire_bytes} on the wire")


def _batch_ms(server: subprocess.Popen[str], address: str) -> float:
    before = _cpu_seconds(server)
    for _ in range(SCRAPES_A_BATCH):
        scrape(address)
    return 1000 * (_cpu_seconds(server) - before) / SCRAPES_A_BATCH


def _cpu_seconds(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return float(server.stdout.readline())
