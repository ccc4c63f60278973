"""Peaks of real training on a GPU, predicted one step ahead from the steps before."""

from __future__ import annotations

import pytest
import torch
from scripts.memory.peaks import Job, median_and_p95, misses_on_longer, one_step_misses

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS = 100
PATTERNS = ("fixed", "sorted", "random", "rising")
ON_CUDA = {"DS_ACCELERATOR": "cuda"}


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[PeakPoint]]:
    folder = tmp_path_factory.mktemp("peaks")
    return {
        pattern: Job.start(
            folder / f"{pattern}.jsonl", ON_CUDA, pattern=pattern, steps=STEPS
        ).points(timeout_seconds=180)
        for pattern in PATTERNS
    }


@pytest.mark.parametrize("pattern", PATTERNS)
def test_next_peaks_are_predicted_within_one_percent_and_three_at_worst(series, pattern):
    median, p95 = median_and_p95([miss.of_peak for miss in one_step_misses(series[pattern])])

    assert median < 0.01
    assert p95 < 0.03


def test_lengths_twice_the_longest_are_predicted(series):
    longer = misses_on_longer(series["rising"], times=2)

    median, _ = median_and_p95([miss.of_peak for miss in longer])
    assert len(longer) > 20
    assert median < 0.1
