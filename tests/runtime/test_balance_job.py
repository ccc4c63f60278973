"""Ranks of unequal speed get unequal shares, and the weights come out as with even ones."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from scripts.balance_job import BATCH, DATA_SAMPLES, WINDOWS, data
from scripts.launching import SCRIPTS, TORCHRUN, TWO_RANKS, start

from zerowatch.runtime.loader import resumable_loader

pytestmark = pytest.mark.jobs

STAGES = ["1", "2"]  # without and with collectives in the passes that are timed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("balance")
    job = SCRIPTS / "balance_job.py"
    finished = start(TORCHRUN, *TWO_RANKS, job, folder, *STAGES, cwd=folder)
    assert (folder / "rank-1.json").exists(), finished.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_slow_rank_is_given_fewer_samples_than_the_fast_one(ranks, stage):
    """And keeps them unless windows became no faster, as on a busy machine."""
    fast, slow = ([len(samples) for samples in rank[stage]["balanced"]["seen"]] for rank in ranks)

    assert (fast[0], slow[0]) == (BATCH // 2, BATCH // 2)
    assert max(fast) > max(slow) == BATCH // 2
    assert min(slow) >= 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arm", ["balanced", "even"])
def test_the_ranks_together_see_each_batch_of_the_order_exactly(ranks, stage, arm):
    alone = resumable_loader(data(), batch_samples=BATCH, rank=0, world_size=1)
    windows = WINDOWS[int(stage)]
    whole = [batch[2].tolist() for batch in islice(alone.forever(), windows)]

    both = zip(ranks[0][stage][arm]["seen"], ranks[1][stage][arm]["seen"], strict=True)

    assert [fast + slow for fast, slow in both] == whole
    assert ranks[0][stage][arm]["samples"] == windows * BATCH
    assert windows > DATA_SAMPLES // BATCH  # over the end of an epoch


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_are_those_of_even_shares(ranks, stage):
    balanced, even = (
        torch.tensor(ranks[0][stage][arm]["weights"], dtype=torch.float64)
        for arm in ("balanced", "even")
    )

    assert float((balanced - even).norm() / even.norm()) <= 1e-6
