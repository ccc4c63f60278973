"""Recorded series of real peak memory, and the errors of predicting them one step ahead."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from scripts.launching import SCRIPTS, environment

from zerowatch.runtime.memory.forecast.peak_model import PeakModel, fit_peaks
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, Shape

# With it glibc returns freed memory, so that RSS shows what is in use; by default it keeps much.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
DEFAULT_ALLOCATOR: dict[str, str] = {}
REPLAYS = Path(__file__).parents[2] / "replays"

WARM_UP_STEPS = 20
REFIT_STEPS = 3  # the live model is fitted once a second


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionMiss:
    """Relative error of one predicted peak.

    Attributes:
        of_peak: Predicted over actual peak, less 1.
        of_rise: The same bytes over the height of the peak above the lowest floor so far.
    """

    of_peak: float
    of_rise: float


@dataclass(frozen=True, slots=True)
class Job:
    """A running job that writes `series`, and its output in the same folder."""

    series: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, series: Path, variables: Mapping[str, str], **arguments: object) -> Job:
        """Start the job; its `arguments` are those of peaks_job.main."""
        command = [sys.executable, str(SCRIPTS / "memory" / "peaks_job.py"), str(series)]
        with series.with_suffix(".out").open("wb") as output:
            process = subprocess.Popen(
                [*command, json.dumps(arguments)],
                env=environment(**variables),
                cwd=series.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return cls(series, process)

    def points(self, timeout_seconds: float) -> list[PeakPoint]:
        """Wait for the job's end and return its readings."""
        try:
            self.process.wait(timeout_seconds)
        finally:
            self.process.kill()
            self.process.wait()
        if self.process.returncode:
            output = self.series.with_suffix(".out").read_text(errors="replace")
            raise RuntimeError(f"the job exited with {self.process.returncode}:\n{output[-3000:]}")
        return read_series(self.series)


def read_series(path: Path) -> list[PeakPoint]:
    """Read the series that a job wrote."""
    return [_point(json.loads(line)) for line in path.read_text().splitlines()]


def one_step_misses(points: Sequence[PeakPoint]) -> Iterator[PredictionMiss]:
    """Predict each step after the warm-up from the steps before it."""
    model = None
    for at in range(WARM_UP_STEPS, len(points)):
        if (at - WARM_UP_STEPS) % REFIT_STEPS == 0:
            model = fit_peaks(points[:at])
        yield _miss(model, points[at - 1], points[at], points[:at])


def misses_on_longer(points: Sequence[PeakPoint], *, times: float) -> list[PredictionMiss]:
    """Predict each step only from steps whose batches were shorter by this factor."""
    found = []
    for before, after in itertools.pairwise(points):
        longest = max(shape.length for shape in after.shapes) / times
        seen = [p for p in points if max(shape.length for shape in p.shapes) <= longest]
        if len(seen) < WARM_UP_STEPS or seen[-1].step >= after.step:
            continue
        found.append(_miss(fit_peaks(seen), before, after, seen))
    return found


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile of the sizes of `values`."""
    sizes = [abs(value) for value in values]
    return median(sizes), quantiles(sizes, n=20, method="inclusive")[-1]


def _miss(
    model: PeakModel | None, before: PeakPoint, after: PeakPoint, known: Sequence[PeakPoint]
) -> PredictionMiss:
    assert model is not None
    missed = model.predict(after.shapes, before.between_steps_bytes) - after.peak_bytes
    lowest = min(point.between_steps_bytes for point in known)
    return PredictionMiss(
        of_peak=missed / after.peak_bytes,
        of_rise=missed / max(after.peak_bytes - lowest, 1.0),
    )


def _point(record: dict) -> PeakPoint:
    return PeakPoint(
        step=record["step"],
        peak_bytes=record["peak"],
        between_steps_bytes=record["floor"],
        limit_bytes=math.inf,
        reserved_bytes=record["peak"],
        shapes=tuple(Shape(*sizes) for sizes in record["shapes"]),
    )
