"""A rank that leaves out one collective is named, with any effect on the backend.

Three of many cases; `make bench ARGS=skipped` runs twenty.
"""

from __future__ import annotations

import pytest
from scripts.cross_rank.run_skip_job import Trial

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize(
    ("rank", "call", "skipped", "step"),
    [
        pytest.param(0, 1, "all_reduce of 200000 bytes", 6, id="another operation comes next"),
        pytest.param(1, 3, "all_reduce of 28 bytes", 12, id="another group comes next"),
    ],
)
def test_the_rank_that_skips_a_collective_is_named_with_it(tmp_path, rank, call, skipped, step):
    trial = Trial(tmp_path, rank, call, step, 15.0, ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS="1")

    assert trial.named == rank
    assert skipped in trial.line
    assert trial.seconds < 15.0


def test_where_gloo_kills_a_process_the_other_names_the_rank(tmp_path):
    trial = Trial(tmp_path, 1, 0, 9, 15.0, ZEROWATCH_CROSS_RANK_INTERVAL_SECONDS="1")

    assert trial.named == 1
    assert "all_reduce of 4 bytes" in trial.line
