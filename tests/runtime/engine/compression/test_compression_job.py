"""Tests of gradient compression on real engines of all ZeRO stages, on two and four ranks.

Covers `async_reducer.py`, `stage_0_reduction.py`, `stage_1_and_2_reduction.py` and
`stage_3_reduction.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from chosen_cases import chosen, tiers
from scripts.forked_ranks import start_ranks
from scripts.launching import SCRIPTS

pytestmark = pytest.mark.jobs

THOROUGH = ("stage 0", "stage 1", "stage 2", "stage 3")
TWO = (
    *THOROUGH,
    "stage 2, to each owner",
    "stage 1, to all",
    "stage 2, no buckets",
    "stage 2, overlap",
    "stage 2, bf16",
    "stage 2, bf16, sums in fp32",
    "BF16_Optimizer",
    "stage 3, to all",
)
FOUR = ("stage 0", "stage 2", "stage 2, to each owner", "stage 3")
QUICK = (
    "stage 0",
    "stage 2",
    "stage 2, to each owner",
    "stage 2, bf16, sums in fp32",
    "stage 3",
)
# Relative to how far training moved the weights. Rounding of bf16 weights alone is larger.
LIMITS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 5e-3, "int8": 1e-2, "fp8": 3e-2}
LIMIT_OF_BF16_WEIGHTS = 5e-2
# Norm of the errors over norm of the gradients: a bf16 value errs by 2^-9 at most, an fp8 one by
# 2^-4, an int8 one by 1/254 of its block's largest.
RATIOS = {"fp32": (0, 0), "fp16": (5e-5, 4e-4), "bf16": (8e-4, 2**-9), "int8": (4e-3, 0.02)}
RATIOS["fp8"] = (0.015, 2**-4)


def check(folder: Path, num_ranks: int, names: Iterable[str]) -> list[dict]:
    """Run the checks; return the results of each rank."""
    script = SCRIPTS / "engine" / "compression_checks.py"
    finished = start_ranks(num_ranks, script, folder, *names, cwd=folder)
    files = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
    assert all(file.exists() for file in files), finished.stderr[-3000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    names = [name for name in chosen(request, "name") if name in TWO]
    return check(tmp_path_factory.mktemp("two"), 2, names)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return check(tmp_path_factory.mktemp("four"), 4, FOUR)


def each_of(names: Iterable[str]) -> pytest.MarkDecorator:
    cases = tiers(names, quick=[name for name in names if name in QUICK])
    return pytest.mark.parametrize("name", cases)


def assert_close_to_fp32(found: dict, name: str) -> None:
    for kind in LIMITS.keys() & found.keys():
        has_bf16_weights = "bf16" in name.lower()
        limit = LIMIT_OF_BF16_WEIGHTS if has_bf16_weights else LIMITS[kind]
        assert found[kind]["difference"] <= limit * found["moved"]
        assert found[kind]["same on all ranks"]
        low, high = RATIOS[kind]
        assert low <= found[kind]["ratio"] <= high


@each_of(TWO)
def test_weights_equal_those_of_fp32_within_the_error(two: list[dict], name: str) -> None:
    for rank in two:
        assert_close_to_fp32(rank[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks_weights_equal_those_of_fp32_too(four: list[dict], name: str) -> None:
    for rank in four:
        assert_close_to_fp32(rank[name], name)


@each_of(THOROUGH)
def test_on_two_ranks_uncompressed_sums_are_bitwise_deepspeeds(two: list[dict], name: str) -> None:
    assert [rank[name]["fp32"]["difference"] for rank in two] == [0.0, 0.0]


@each_of(THOROUGH)
def test_after_an_undo_training_is_as_without_compression(two: list[dict], name: str) -> None:
    for rank in two:
        assert rank[name]["undone"] == {"attributes": True, "weights": True}


@each_of(THOROUGH)
def test_replayed_and_resumed_windows_are_bitwise_the_same(two: list[dict], name: str) -> None:
    for rank in two:
        assert rank[name]["repeated"] == {"replayed": True, "states agree": True, "states": True}


@each_of(("stage 1", "stage 2", "stage 2, to each owner", "stage 2, bf16"))
def test_asynchronous_sums_are_bitwise_equal_to_synchronous_ones(
    two: list[dict], name: str
) -> None:
    for rank in two:
        assert rank[name]["asynchronous"] == {"plain": True, "int8": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage 2", "stage 2, to each owner"])
def test_on_four_ranks_asynchronous_sums_are_bitwise_equal_too(four: list[dict], name: str) -> None:
    for rank in four:
        assert rank[name]["asynchronous"] == {"plain": True, "int8": True}


@pytest.mark.slow
def test_residuals_equal_the_error_of_the_sums(two: list[dict], four: list[dict]) -> None:
    for rank in (*two, *four):
        assert all(away < 1e-6 for away in rank["conserved"].values())


@pytest.mark.parametrize("name", ["stage 0", "stage 2", "stage 3"])
def test_an_infinite_gradient_of_one_rank_reaches_all_ranks(two: list[dict], name: str) -> None:
    for rank in two:
        found = rank["non finite"][name]

        assert found["detected"]
        assert found["residuals"], "residuals are not finite"
    assert two[0]["non finite"][name]["ratio"] is None  # the rank with the infinite gradient


def test_fp16_skips_the_same_steps_with_compression(two: list[dict]) -> None:
    for rank in two:
        plain, compressed = rank["loss scaling"]

        assert compressed[3], "errors are kept at the loss scale of another window"
        assert plain == compressed
        assert plain[0] > 0, "nothing overflowed: the test proves nothing"


def test_compressed_bytes_are_counted_by_the_watch(two: list[dict]) -> None:
    block_bytes, num_values = 256 + 4, 640 * 100

    for rank in two:
        payload = rank["recorded"]
        # Half of the values to the other rank, and all sums to all.
        assert payload["all_to_all/dp"] == num_values / 2 / 256 * block_bytes
        assert payload["all_gather/dp"] == num_values / 256 * block_bytes
        assert payload.get("all_reduce/dp", 0.0) < 100  # norms and flags
