"""Peaks of real training on a GPU, foretold one step ahead from the steps before."""

from __future__ import annotations

import pytest
import torch
from scripts.peaks import Job, foretold_unseen, middle_and_p95, misses

from zerowatch.runtime.memory.forecast.series import PeakPoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STEPS = 100
PATTERNS = ("fixed", "sorted", "random", "rising")
ON_CUDA = {"DS_ACCELERATOR": "cuda", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29656"}


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
def test_next_peaks_are_foretold_within_one_percent_and_three_at_worst(series, pattern):
    middle, p95 = middle_and_p95([miss.of_peak for miss in misses(series[pattern])])

    assert middle < 0.01
    assert p95 < 0.03


def test_lengths_twice_as_long_as_any_seen_are_foretold(series):
    unseen = foretold_unseen(series["rising"], times=2)

    middle, _ = middle_and_p95([miss.of_peak for miss in unseen])
    assert len(unseen) > 20
    assert middle < 0.1
