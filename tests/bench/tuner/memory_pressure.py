"""Counts how often memory runs out without a tuner, and with a tuner that may act."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.bench_options import Options
from bench.result_table import Row
from scripts.tuner.run_tuner_memory import JobResult, run

KINDS = ("leak", "growing")


def bench(options: Options) -> Iterator[Row]:
    """Yield a row for each job."""
    for kind in KINDS[:1] if options.quick else KINDS:
        for arm in ("plain", "off", "auto"):
            ended = _run(kind, arm)
            lived, num_errors, alarm = ended.code == 0, _num_errors(ended), _first_alarm(ended)
            risky = "" if alarm is None else f"risk over 0.5 at {alarm}; "
            smallest = min((one.get("micro_batch", 16) for one in ended.windows), default=16)
            yield Row(
                what=f"{kind}, {arm}: times that memory ran out",
                measured=str(num_errors),
                spread=f"{len(ended.windows)} windows, {'done' if lived else 'dead'}; "
                f"{risky}micro-batches down to {smallest}",
                goal="0" if arm == "auto" else "",
                met=lived and num_errors == 0 if arm == "auto" else None,
            )


def _run(kind: str, arm: str) -> JobResult:
    with tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as name:
        return run(Path(name, arm), kind, arm)


def _num_errors(ended: JobResult) -> int:
    """Return the number of OOM errors; of a plain loop only the exit code shows one."""
    ooms = (ended.windows[-1].get("ooms") or {}) if ended.windows else {}
    return int(sum(each or 0 for each in ooms.values())) + (ended.code != 0 and not ooms)


def _first_alarm(ended: JobResult) -> int | None:
    """Return the window with which the risk was first above a half."""
    return next((one["window"] for one in ended.windows if (one.get("risk") or 0) > 0.5), None)
