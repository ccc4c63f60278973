"""Tests of memory savings on a running engine: single savings, and all at once.

Covers `optimizer_state_offload.py`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

CHECKPOINTED = [
    *(f"checkpointing, stage {stage}" for stage in range(4)),
    "checkpointing by pattern, stage 3",
    "checkpointing of transformers, stage 3",
]
OFFLOADED = [*(f"offload, stage {stage}" for stage in range(4)), "offload, BF16_Optimizer"]
ALL_SAVINGS = ["every saving, stage 3"]
QUICK = [
    "checkpointing, stage 0",
    "checkpointing by pattern, stage 3",
    "offload, stage 1",
    "offload, BF16_Optimizer",
    *ALL_SAVINGS,
]


def each_of(*names: str) -> pytest.MarkDecorator:
    cases = tiers(names, quick=[name for name in names if name in QUICK])
    return pytest.mark.parametrize("name", cases)


BEFORE, ON, AFTER = slice(3), slice(3, 5), slice(5, None)


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("switches")
    script, names = SCRIPTS / "engine" / "memory_savings_job.py", chosen(request, "name")
    finished = start_ranks(2, script, folder, *names, cwd=folder)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@each_of(*CHECKPOINTED, *OFFLOADED)
def test_each_memory_saving_leaves_weights_bitwise_unchanged(ranks, name: str):
    assert [rank[name]["bitwise"] for rank in ranks] == [True, True]


@each_of(*ALL_SAVINGS)
def test_all_savings_at_once_only_change_the_order_of_sums(ranks, name: str):
    assert all(rank[name]["difference"] <= 1e-6 for rank in ranks)


@each_of(*CHECKPOINTED, *ALL_SAVINGS)
def test_autograd_keeps_less_than_half_while_checkpointing_is_on(ranks, name: str):
    for rank in ranks:
        saved = rank[name]["saved"]

        assert max(saved[ON]) < 0.5 * min(saved[BEFORE])
        assert set(saved[AFTER]) == set(saved[BEFORE])


@each_of(*CHECKPOINTED, *OFFLOADED)
def test_undo_restores_the_original_forwards_and_step(ranks, name: str):
    for rank in ranks:
        assert rank[name]["forwards_restored"]
        assert rank[name]["step_restored"]


@each_of(*OFFLOADED)
def test_states_have_no_bytes_on_the_device_between_updates(ranks, name: str):
    for rank in ranks:
        num_offloaded = rank[name]["num_offloaded"]

        assert min(num_offloaded[ON]) >= 2
        assert set(num_offloaded[BEFORE] + num_offloaded[AFTER]) == {0}


@each_of(*(name for name in OFFLOADED if name != "offload, stage 0"))
def test_reloaded_states_can_be_read_by_deepspeeds_own_functions(ranks, name: str):
    assert all(rank[name]["state_can_be_read"] for rank in ranks)


def test_offload_is_unsupported_on_a_cpu_as_it_would_free_nothing(ranks):
    assert "the host's own" in ranks[0]["offload, stage 1"]["unsupported_reason"]
