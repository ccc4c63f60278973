"""Writes run folders as a run would, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerowatch.metrics.step_record import CollectiveTotals, LineWriter, StepRecord
from zerowatch.runtime.monitor.step_log import is_logged, keeps_every_step

STARTED = 1_790_000_000.0


def step_record(step: int, **changes: Any) -> StepRecord:
    """A step of half a second: 0.1 s forward, 0.3 s backward, 0.05 s each optimizer and other."""
    fields: dict[str, Any] = {
        "step": step,
        "ended_at_unix_seconds": STARTED + 0.5 * step,
        "seconds": 0.5,
        "phase_seconds": {"forward": 0.1, "backward": 0.3, "optimizer": 0.05, "other": 0.05},
        "micro_batches": 1,
        "samples": 8,
        "tokens": 1024,
        "loss": 5.0 / step,
        "nonfinite_loss": False,
        "gradient_norm": 1.5,
        "learning_rate": 1e-3,
        "loss_scale": None,
        "skipped": False,
        "collectives": {
            "all_reduce": CollectiveTotals(
                calls=2, payload_bytes=1000, wire_bytes=1000.0, seconds=0.1
            )
        },
        "comm_seconds": 0.125,
        "comm_exposed_seconds": 0.05,
        "memory_bytes": {"cpu": {"allocated": 600e6, "limit": 2e9, "peak_allocated": 650e6}},
        "device_readings": {"cpu": {"utilization_ratio": 0.75}},
        "oom_risk_ratio": {"cpu": 0.01},
        "comm_exposed_phase_seconds": {"backward": 0.05},
    }
    return StepRecord(**{**fields, **changes})


def elastic_run(folder: Path, **lost: Any) -> Path:
    """A job of 4 ranks that loses a node at step 100, and goes on with 2 ranks from step 91.

    The launcher counts no restart.

    Args:
        folder: The run folder.
        lost: Values of the steps of ranks 2 and 3, which are lost.
    """

    def record(rank: int, step: int) -> StepRecord:
        return step_record(step, **lost) if rank > 1 else step_record(step)

    def resumed(rank: int, step: int) -> StepRecord:
        return step_record(90 + step, ended_at_unix_seconds=STARTED + 200 + 0.5 * step)

    write_run(folder, ranks=4, steps=100, record=record)
    later = write_run(folder.with_name("later") / folder.name, steps=110, record=resumed)
    for rank in range(2):
        with open(folder / f"rank-{rank}.jsonl", "ab") as log:
            log.write((later / f"rank-{rank}.jsonl").read_bytes())
    with open(folder / "attempts.jsonl", "a") as attempts:
        attempts.write(json.dumps({"started_at_unix_seconds": STARTED + 200}) + "\n")
    return folder


def run_of_attempts(
    folder: Path,
    *attempts: tuple[int, int],
    record: Callable[[int, int], StepRecord] = lambda rank, step: step_record(step),
    noted_after: float = 0.0,
) -> Path:
    """A job on nodes of 8 ranks that each write the steps that a step log contains.

    The launcher counts no restart. A minute passes between two attempts.

    Args:
        folder: The run folder.
        attempts: The number of ranks, and the last step, of each attempt.
        record: Returns the record of a rank and step. The time of its end is changed.
        noted_after: Seconds from the end of the first step of an attempt to the time at which the
            attempt is noted.
    """
    write_run(folder, ranks=0)
    starts, first = [], 1
    for number, (world_size, last) in enumerate(attempts):
        begins_at = STARTED + 60.0 * number
        starts.append(begins_at + 0.5 * first + noted_after)
        for rank in range(world_size):
            local_rank = rank % 8
            identity: dict[str, str | int] = {
                "run_id": folder.name,
                "rank": rank,
                "local_rank": local_rank,
                "world_size": world_size,
                "host": f"node-{rank // 8}",
                "attempt": 0,
            }
            writer, every_step = LineWriter(identity), keeps_every_step(world_size, local_rank)
            lines = [
                writer.line(replace(record(rank, step), ended_at_unix_seconds=begins_at + step / 2))
                for step in range(first, last + 1)
                if is_logged(step, every_step=every_step)
            ]
            if lines:
                with open(folder / f"rank-{rank}.jsonl", "ab") as log:
                    log.writelines(lines)
        first = last + 1
    text = "".join(json.dumps({"started_at_unix_seconds": start}) + "\n" for start in starts)
    (folder / "attempts.jsonl").write_text(text)
    return folder


def write_run(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 10,
    record: Callable[[int, int], StepRecord] = lambda rank, step: step_record(step),
    settings: Mapping[str, Any] | None = None,
    ds_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the logs of some ranks, settings and an empty list of targets; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        identity: dict[str, str | int] = {
            "run_id": folder.name,
            "rank": rank,
            "local_rank": rank,
            "world_size": ranks,
            "host": "node-0",
            "attempt": 0,
        }
        writer = LineWriter(identity)
        with open(folder / f"rank-{rank}.jsonl", "wb") as file:
            for step in range(1, steps + 1):
                file.write(writer.line(record(rank, step)))
    (folder / "settings.json").write_text(json.dumps(settings or {"enabled": True}))
    if ds_config is not None:
        (folder / "ds_config.json").write_text(json.dumps(ds_config))
    start = json.dumps({"started_at_unix_seconds": STARTED})
    (folder / "attempts.jsonl").write_text(f"{start}\n")
    (folder / "targets.json").write_text("[]\n")
    return folder
