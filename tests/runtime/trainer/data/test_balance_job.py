"""Tests of load balancing with a slow rank: uneven local batches, the same weights."""

from __future__ import annotations

import json
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS
from scripts.trainer.balance_job import (
    BATCH,
    DATA_SAMPLES,
    SAMPLE_SECONDS,
    TURNED_OFF,
    TURNED_ON,
    WINDOWS,
    data,
)

from zerowatch.runtime.trainer.data.resumable_loader import resumable_loader

pytestmark = [pytest.mark.jobs, pytest.mark.slow]

STAGES = ["1", "2"]  # without and with collectives in the passes that are timed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("balance")
    job = SCRIPTS / "trainer" / "balance_job.py"
    finished = start_ranks(2, job, folder, *STAGES, cwd=folder)
    assert (folder / "rank-1.json").exists(), finished.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", STAGES)
def test_the_slow_rank_gets_fewer_samples_than_the_fast_one(ranks, stage):
    """The split may be reverted later, on a machine so busy that windows became no faster."""
    fast, slow = ([len(samples) for samples in rank[stage]["balanced"]["seen"]] for rank in ranks)

    assert (fast[0], slow[0]) == (BATCH // 2, BATCH // 2)
    assert max(fast) > max(slow) == BATCH // 2
    assert min(slow) >= 1


@pytest.mark.parametrize("stage", STAGES)
def test_no_rank_counts_as_faster_than_its_model(ranks, stage):
    """Of waits for the other rank, some are in votes: each is subtracted once."""
    exchanged = ranks[0][stage]["balanced"]["exchanged"]

    assert exchanged
    for by_rank in exchanged:
        for measured, slept in zip(by_rank, SAMPLE_SECONDS, strict=True):
            assert measured >= 0.98 * slept


def in_one_piece(windows: int) -> list[list[int]]:
    """Return the batches, as loaded by a single rank."""
    alone = resumable_loader(data(), batch_samples=BATCH, rank=0, world_size=1)
    return [batch[2].tolist() for batch in islice(alone.forever(), windows)]


def together(arms: list[dict]) -> list[list[int]]:
    return [fast + slow for fast, slow in zip(*(arm["seen"] for arm in arms), strict=True)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("arm", ["balanced", "even"])
def test_the_ranks_together_see_each_batch_of_the_order_exactly(ranks, stage, arm):
    windows = WINDOWS[int(stage)]

    assert together([rank[stage][arm] for rank in ranks]) == in_one_piece(windows)
    assert ranks[0][stage][arm]["samples"] == windows * BATCH
    assert windows > DATA_SAMPLES // BATCH  # over the end of an epoch


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_equal_those_of_an_even_split(ranks, stage):
    balanced, even = (
        torch.tensor(ranks[0][stage][arm]["weights"], dtype=torch.float64)
        for arm in ("balanced", "even")
    )

    assert float((balanced - even).norm() / even.norm()) <= 1e-6


def test_the_split_changes_when_balancing_is_turned_on_and_reverts_when_turned_off(ranks):
    """The change applies one window later, after the two batches that a worker has loaded ahead."""
    fast, slow = ([len(samples) for samples in rank["by turns"]["seen"]] for rank in ranks)
    even = {BATCH // 2}

    assert set(fast[: TURNED_ON + 1]) == set(slow[: TURNED_ON + 1]) == even
    uneven = slice(TURNED_ON + 4, TURNED_OFF + 1)
    assert all(more > fewer >= 1 for more, fewer in zip(fast[uneven], slow[uneven], strict=True))
    assert set(fast[TURNED_OFF + 1 :]) == set(slow[TURNED_OFF + 1 :]) == even


def test_each_sample_is_seen_once_over_changes_and_a_resume(ranks):
    windows = WINDOWS[1]
    turned = [rank["by turns"] for rank in ranks]

    assert together(turned) == in_one_piece(windows)
    assert turned[0]["samples"] == windows * BATCH


def test_the_weights_equal_those_of_an_even_split_over_changes(ranks):
    turned, even = (
        torch.tensor(arm["weights"], dtype=torch.float64)
        for arm in (ranks[0]["by turns"], ranks[0]["1"]["even"])
    )

    assert float((turned - even).norm() / even.norm()) <= 1e-6


def test_the_knob_is_supported_once_the_run_has_a_loader_and_reads_back(ranks):
    for rank in ranks:
        found = rank["by turns"]
        assert not found["without loader"]
        assert (found["options"], found["reads"]) == ([False, True], [True, True])


def test_larger_batches_start_where_the_previous_ones_ended_also_after_a_resume(ranks):
    seen = together([rank["larger"] for rank in ranks])

    sizes = [len(batch) // BATCH for batch in seen]
    assert sizes == [1] * 6 + [2] * 8 + [1] * 2  # over two ends of an epoch
    assert [*chain(*seen)] == [*chain(*in_one_piece(sum(sizes)))]
    assert ranks[0]["larger"]["samples"] == sum(sizes) * BATCH


def test_larger_batches_scale_the_learning_rate_of_their_updates_only(ranks):
    larger = ranks[0]["larger"]
    scaled, by_hand = (
        torch.tensor(larger[how], dtype=torch.float64) for how in ("weights", "by hand")
    )

    assert float((scaled - by_hand).norm() / by_hand.norm()) <= 1e-6
    assert larger["rate"] == 0.05


def test_the_batch_size_reads_back_and_equals_that_of_the_checkpoint(ranks):
    for rank in ranks:
        larger = rank["larger"]
        assert larger["options"] == [BATCH, 2 * BATCH, 4 * BATCH]
        assert larger["reads"] == [2 * BATCH, True]
        assert larger["loaded"] == 2 * BATCH
