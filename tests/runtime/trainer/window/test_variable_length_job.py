"""Tests of variable-length batches under a memory limit at which a plain loop fails."""

from __future__ import annotations

import pytest
from scripts.trainer.variable_length import Comparison, Job, compare

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

WINDOWS = 100  # three of them, the first at 34, have batches that do not fit in one piece
SAMPLES = 16
ROOM_BYTES = 160 << 20


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    job = Job(mode="owned", windows=WINDOWS, room_bytes=ROOM_BYTES)
    ended = job.run(tmp_path_factory.mktemp("owned"), timeout_seconds=600)
    assert ended.code == 0, ended.output[-3000:]
    return compare(ended, WINDOWS, SAMPLES)


def test_a_plain_loop_fails_at_the_first_long_batch(tmp_path):
    job = Job(mode="plain", windows=WINDOWS, room_bytes=ROOM_BYTES)

    ended = job.run(tmp_path, timeout_seconds=600)

    assert ended.code != 0
    assert "can't allocate memory" in ended.output
    assert len(ended.of("plain")[0]) == 33


def test_a_training_run_completes_by_splitting_the_long_batches(comparison: Comparison):
    assert comparison.windows == WINDOWS
    assert comparison.replayed > 0
    assert 3 <= comparison.cut < 10


def test_no_sample_is_lost_or_repeated(comparison: Comparison):
    assert (comparison.lost, comparison.repeated) == (0, 0)


def test_the_losses_are_those_of_a_run_without_a_limit(comparison: Comparison):
    assert comparison.same_plan_is_bitwise
    assert comparison.worst_ratio <= 1e-5
