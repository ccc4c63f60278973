"""The update does not depend on how a batch is split into micro-batches, on 1, 2 and 4 ranks.

Covers `step_result.py` and `window_runner.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

FP32 = ["stage 0", "stage 1", "stage 2", "stage 3", "stage 1, offload", "stage 3, small buckets"]
HALF = ["bf16, stage 0", "bf16", "BF16_Optimizer"]
PLANS = ["three", "changing"]
WORLDS = [1, 2, 4]


CASES = tiers(
    [(world, name) for world in WORLDS for name in (FP32 if world == 2 else FP32[:4])],
    quick=[(1, "stage 0"), (2, "stage 0"), (2, "stage 3")],
)


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict]:
    names: dict[int, list[str]] = {}
    halves = [(2, name) for name in chosen(request, "name") if name in HALF]
    for world, name in [*chosen(request, "world", "name"), *halves]:
        names.setdefault(world, []).append(name)
    found = {}
    for world in names:
        folder: Path = tmp_path_factory.mktemp(f"windows-{world}")
        finished = start_ranks(
            world, SCRIPTS / "trainer" / "window_checks.py", folder, *names[world], cwd=folder
        )
        assert (folder / "rank-0.json").exists(), finished.stderr[-3000:]
        found[world] = json.loads((folder / "rank-0.json").read_text())
    return found


@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_update_does_not_depend_on_how_a_batch_is_split(found, world, name):
    differences = found[world][name]["difference"]

    assert all(differences[plan] <= 1e-6 for plan in PLANS), differences


@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_same_split_is_bitwise_reproducible(found, world, name):
    assert found[world][name]["difference"]["again"] == 0


@pytest.mark.parametrize(("world", "name"), CASES)
def test_token_means_over_uneven_padded_local_batches_equal_float64_arithmetic(found, world, name):
    assert found[world][name]["tokens, uneven"] <= 1e-6


@pytest.mark.parametrize("name", tiers(HALF, quick=["bf16"]))
def test_splits_in_bfloat16_differ_by_rounding_only(found, name):
    case = found[2][name]

    assert max(case["difference"].values()) < 2e-3
    assert case["tokens, uneven"] < 5e-3


@pytest.mark.parametrize(("world", "name"), CASES)
def test_samples_are_counted_once_however_they_are_split(found, world, name):
    assert found[world][name]["counts"] == [4, 32 * world, 32 * world]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_reported_loss_is_that_of_the_whole_batch(found, world, name):
    case = found[world][name]

    for plan in PLANS:
        assert case[f"losses, {plan}"] == pytest.approx(case["losses"], rel=1e-6)
