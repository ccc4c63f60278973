"""Tests of peaks of real training on CPU, predicted one step ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import chosen
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS
from scripts.memory.peaks import GIVES_BACK, median_and_p95, one_step_misses, read_series

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

STEPS = {"fixed": 28, "sorted": 44, "random": 34}
each_pattern = pytest.mark.parametrize("pattern", STEPS)


@pytest.fixture(scope="module")
def series(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[PeakPoint]]:
    folder = tmp_path_factory.mktemp("peaks")
    return {pattern: points(folder, pattern) for pattern in chosen(request, "pattern")}


def points(folder: Path, pattern: str) -> list[PeakPoint]:
    script, file = SCRIPTS / "memory" / "peaks_job.py", folder / f"{pattern}.jsonl"
    arguments = json.dumps({"pattern": pattern, "steps": STEPS[pattern]})
    finished = start_ranks(1, script, file, arguments, cwd=folder, variables=GIVES_BACK)
    assert finished.returncode == 0, finished.stderr
    return read_series(file)


@each_pattern
def test_next_peaks_are_predicted_within_two_percent_and_six_at_worst(series, pattern):
    median, p95 = median_and_p95([miss.of_peak for miss in one_step_misses(series[pattern])])

    assert median < 0.02
    assert p95 < 0.06


@each_pattern
def test_the_rise_of_each_step_is_predicted_within_five_percent(series, pattern):
    median, _ = median_and_p95([miss.of_rise for miss in one_step_misses(series[pattern])])

    assert median < 0.05


@pytest.mark.parametrize("pattern", ["sorted", "random"])
def test_peaks_vary_by_more_than_a_factor_of_1_4(series, pattern):
    peaks = [point.peak_bytes for point in series[pattern][1:]]

    assert max(peaks) > 1.4 * min(peaks)
