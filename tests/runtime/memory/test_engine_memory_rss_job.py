"""Real RSS peaks by category: the category other is small, and all categories add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

MIB = 2**20


@pytest.mark.parametrize("stage", range(4))
def test_less_than_a_tenth_of_a_peak_is_other(stage: int, tmp_path: Path) -> None:
    script = SCRIPTS / "memory" / "engine_memory_rss_job.py"
    job = start_ranks(2, script, tmp_path, f"fp32 stage {stage}", 2, cwd=tmp_path)

    assert job.returncode == 0, job.stderr[-3000:]
    for rank in range(2):
        last = json.loads((tmp_path / f"rank-{rank}.json").read_text())[-1]
        above = last["peak"] - last["baseline"]
        assert sum(last["categories"].values()) == pytest.approx(above)
        assert last["categories"]["other"] < 0.1 * above
        assert last["categories"]["activations"] > 20 * MIB  # the logits alone are more
