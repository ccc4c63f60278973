"""Compares plain DeepSpeed with a TrainingRun on batches of changing length in little memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.bench_options import Options
from bench.result_table import Row
from scripts.trainer.variable_length import Job, JobResult, compare

WINDOWS, QUICK_WINDOWS = 2000, 60
SAMPLES = 16
ROOM_BYTES = 160 << 20
STAGES = (2,)
PER_WINDOW_SECONDS = 3.0  # on a busy machine, for three runs


def bench(options: Options) -> Iterator[Row]:
    """Yield how far each comes, and how the owned run's losses compare with unlimited ones."""
    windows = QUICK_WINDOWS if options.quick else WINDOWS
    for stage in STAGES:
        with tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as folder:
            plain, owned = (run(mode, windows, stage, Path(folder)) for mode in ("plain", "owned"))
        yield from rows(stage, windows, plain, owned)


def run(mode: str, windows: int, stage: int, folder: Path) -> JobResult:
    job = Job(mode=mode, windows=windows, room_bytes=ROOM_BYTES, stage=stage)
    return job.run(folder, timeout_seconds=120 + PER_WINDOW_SECONDS * windows)


def rows(stage: int, windows: int, plain: JobResult, owned: JobResult) -> Iterator[Row]:
    """Yield the table's lines on one stage."""
    what = f"stage {stage}, 2 ranks, {ROOM_BYTES >> 20} MiB of room"
    reached = len(plain.of("plain")[0])
    yield Row(
        what=f"{what}: plain DeepSpeed dies in window",
        measured=str(reached + 1) if plain.code else "never",
        goal=f"before {windows}",
        met=plain.code != 0,
    )
    if owned.code:
        print(owned.output[-3000:])
    done = len(owned.of("limited")[0])
    yield Row(
        what=f"{what}: windows of a TrainingRun",
        measured=str(done),
        goal=str(windows),
        met=done == windows,
    )
    if owned.code:
        return
    found = compare(owned, windows, SAMPLES)
    yield Row(what=f"{what}: replayed, cut", measured=f"{found.replayed}, {found.cut}")
    yield Row(
        what=f"{what}: samples lost, repeated",
        measured=f"{found.lost}, {found.repeated}",
        goal="0, 0",
        met=found.lost == found.repeated == 0,
    )
    yield Row(
        what=f"{what}: losses as of an unlimited run cut alike",
        measured="bitwise" if found.same_plan_is_bitwise else "different",
        goal="bitwise",
        met=found.same_plan_is_bitwise,
    )
    yield Row(
        what=f"{what}: losses compared with those of an unlimited, uncut run, worst",
        measured=f"{found.worst_ratio:.1e}",
        goal="1e-05",
        met=found.worst_ratio <= 1e-5,
    )
