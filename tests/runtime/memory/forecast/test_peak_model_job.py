"""Peaks of real training on CPU, predicted one step ahead from the steps before."""

from __future__ import annotations

import pytest
from scripts.memory.peaks import GIVES_BACK, Job, median_and_p95, one_step_misses

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint

pytestmark = pytest.mark.jobs

STEPS = {"fixed": 28, "sorted": 44, "random": 44}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PeakPoint]]:
    folder = tmp_path_factory.mktemp("peaks")
    jobs = {
        pattern: Job.start(folder / f"{pattern}.jsonl", GIVES_BACK, pattern=pattern, steps=steps)
        for pattern, steps in STEPS.items()
    }
    return {pattern: job.points(timeout_seconds=600) for pattern, job in jobs.items()}


@pytest.mark.parametrize("pattern", STEPS)
def test_next_peaks_are_predicted_within_two_percent_and_six_at_worst(series, pattern):
    median, p95 = median_and_p95([miss.of_peak for miss in one_step_misses(series[pattern])])

    assert median < 0.02
    assert p95 < 0.06


@pytest.mark.parametrize("pattern", STEPS)
def test_the_rise_of_each_step_is_predicted_within_five_percent(series, pattern):
    median, _ = median_and_p95([miss.of_rise for miss in one_step_misses(series[pattern])])

    assert median < 0.05


@pytest.mark.parametrize("pattern", ["sorted", "random"])
def test_peaks_vary_by_more_than_a_factor_of_1_4(series, pattern):
    peaks = [point.peak_bytes for point in series[pattern][1:]]

    assert max(peaks) > 1.4 * min(peaks)
