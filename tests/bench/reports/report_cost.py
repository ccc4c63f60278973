"""Measures the report of a long run: time, memory and size of the page.

The logs are generated: 8 ranks with 100,000 steps, and a metrics log of each rank.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import orjson
from bench.bench_options import Options
from bench.result_table import Row
from recorded_metrics import RecordedRank
from recorded_runs import step_record, write_run

from zerowatch.metrics.catalog import communication, memory, overhead, training
from zerowatch.metrics.catalog.labels import CAUSE, COMPARED_PHASES

RANKS = 8
STEPS = 100_000
QUICK_STEPS = 2_000
MAX_SECONDS = 30.0
MAX_MEMORY_BYTES = 600e6
MAX_PAGE_BYTES = 10e6
# About one step of a log in a second: as many snapshots as a day of training has.
SNAPSHOT_STEPS = 17


def bench(options: Options) -> Iterator[Row]:
    """Generate the logs, make the report in a process of its own, and yield the rows."""
    steps = QUICK_STEPS if options.quick else STEPS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "long"
        num_bytes = generate(folder, steps)
        started = time.monotonic()
        command = [sys.executable, "-c", _SCRIPT, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = time.monotonic() - started
        measured = json.loads(done.stdout.splitlines()[-1])
        page_bytes = (folder / "report.html").stat().st_size
    what = f"report of {steps:,} steps on {RANKS} ranks ({num_bytes / 1e6:,.0f} MB of logs)"
    yield Row(
        what=what,
        measured=f"{seconds:.1f} s, of which {measured['cpu_seconds']:.1f} s CPU",
        goal=f"below {MAX_SECONDS:g} s",
        met=seconds < MAX_SECONDS,
    )
    yield Row(
        what="its peak memory",
        measured=f"{measured['peak_bytes'] / 1e6:.0f} MB",
        goal=f"below {MAX_MEMORY_BYTES / 1e6:.0f} MB",
        met=measured["peak_bytes"] < MAX_MEMORY_BYTES,
    )
    yield Row(
        what="its page",
        measured=f"{page_bytes / 1e6:.2f} MB",
        goal=f"below {MAX_PAGE_BYTES / 1e6:.0f} MB",
        met=page_bytes < MAX_PAGE_BYTES,
    )


_SCRIPT = """
import json, re, sys, time
from zerowatch.__main__ import commands
commands(["report", sys.argv[1]], standalone_mode=False)
# Not ru_maxrss, which keeps the memory of the process that started this one.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"peak_bytes": peak, "cpu_seconds": time.process_time()}))
"""


def generate(folder: Path, steps: int) -> int:
    """Write the logs of a run and return their bytes.

    The values of a step come from a few hundred prepared lines, since random ones would take longer
    to generate than to read.
    """
    write_run(folder, ranks=RANKS, steps=1)
    draw = random.Random(1)
    for rank in range(RANKS):
        identity = {
            "schema": 1,
            "run_id": folder.name,
            "rank": rank,
            "local_rank": rank,
            "world_size": RANKS,
            "host": "node-0",
            "attempt": 0,
        }
        bodies = [_body(draw) for _ in range(500)]
        head = orjson.dumps(identity)[:-1]
        with open(folder / f"rank-{rank}.jsonl", "wb", buffering=2**20) as file:
            for step in range(1, steps + 1):
                ended = f"{1_790_000_000 + 0.5 * step:.6f}".encode()
                file.write(
                    b'%s,"step":%d,"ended_at_unix_seconds":%s,%s\n'
                    % (head, step, ended, bodies[step % len(bodies)])
                )
        _write_metrics(folder, rank, steps)
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def _body(draw: random.Random) -> bytes:
    """Return the fields of a step after `step` and `ended_at_unix_seconds`."""
    share = draw.uniform(0.9, 1.1)
    record = asdict(
        step_record(
            1,
            seconds=0.5 * share,
            phase_seconds={
                phase: part * share
                for phase, part in {
                    "data": 0.01,
                    "forward": 0.13,
                    "backward": 0.3,
                    "optimizer": 0.04,
                    "other": 0.02,
                }.items()
            },
            loss=draw.uniform(2, 3),
            comm_exposed_seconds=0.1 * share,
            memory_bytes={
                device: {"allocated": 30e9 * share, "peak_allocated": 60e9 * share, "limit": 80e9}
                for device in ("cpu", "cuda:0")
            },
            device_readings={
                "cpu": {"utilization_ratio": 0.3},
                "cuda:0": {"utilization_ratio": 0.9 * share, "temperature_celsius": 60 * share},
            },
        )
    )
    del record["step"], record["ended_at_unix_seconds"]
    return orjson.dumps(record)[1:]


def _write_metrics(folder: Path, rank: int, steps: int) -> None:
    with RecordedRank(folder, rank, metrics_interval_seconds=0.5 * SNAPSHOT_STEPS) as log:
        recorder = log.recorder
        for _ in range(0, steps, SNAPSHOT_STEPS):
            recorder.add(training.STEPS, SNAPSHOT_STEPS)
            for phase, seconds in {"forward": 0.13, "backward": 0.3, "optimizer": 0.04}.items():
                recorder.add(training.PHASE_SECONDS, SNAPSHOT_STEPS * seconds, phase)
            recorder.add(communication.COMM_EXPOSED_SECONDS, 0.1 * SNAPSHOT_STEPS, "dp")
            for cause in CAUSE.values:
                recorder.add(communication.COMM_CAUSE_SECONDS, 0.02 * SNAPSHOT_STEPS, cause)
            for phase in COMPARED_PHASES:
                recorder.set(communication.STRAGGLER_SCORE, 0.01 * rank, phase)
            recorder.set(training.MFU, 0.4)
            recorder.set(memory.MEMORY_HEADROOM, 20e9, "cuda:0")
            recorder.add(overhead.WATCH_SECONDS, 0.001, "hooks")
            log.tick()
