"""Peaks of real training on CPU, foretold one step ahead from the steps before."""

from __future__ import annotations

import pytest
from scripts.peaks import GIVES_BACK, Job, middle_and_p95, misses

from zerowatch.runtime.memory.forecast.series import PeakPoint

pytestmark = pytest.mark.jobs

STEPS = {"fixed": 28, "sorted": 44, "random": 44}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PeakPoint]]:
    folder = tmp_path_factory.mktemp("peaks")
    jobs = {
        pattern: Job.start(folder / f"{pattern}.jsonl", GIVES_BACK, pattern=pattern, steps=steps)
        for pattern, steps in STEPS.items()
    }
    return {pattern: job.points(timeout_seconds=300) for pattern, job in jobs.items()}


@pytest.mark.parametrize("pattern", STEPS)
def test_next_peaks_are_foretold_within_two_percent_and_six_at_worst(series, pattern):
    middle, p95 = middle_and_p95([miss.of_peak for miss in misses(series[pattern])])

    assert middle < 0.02
    assert p95 < 0.06


@pytest.mark.parametrize("pattern", STEPS)
def test_what_steps_add_is_foretold_too_not_only_what_is_always_there(series, pattern):
    middle, _ = middle_and_p95([miss.of_rise for miss in misses(series[pattern])])

    assert middle < 0.05


@pytest.mark.parametrize("pattern", ["sorted", "random"])
def test_peaks_differ_enough_to_be_worth_foretelling(series, pattern):
    peaks = [point.peak_bytes for point in series[pattern][1:]]

    assert max(peaks) > 1.4 * min(peaks)
