"""Tests of estimated memory against real engines of two ranks, and real passes."""

from __future__ import annotations

from statistics import median

import pytest
from chosen_cases import chosen, tiers
from scripts.estimator.run_estimate_job import Compared, compare, compare_activations

pytestmark = pytest.mark.jobs

# The most different ones of the bench's twelve cases.
STATES = (
    "0, bf16",
    "1, bf16 over fp32",
    "2, fp32",
    "2, bf16 over fp32, optimizer on cpu",
    "3, fp32",
    "3, bf16, all on cpu",
)
FURTHER = (
    "1, bf16 over fp32, immediate_grad_update",
    "2, fp32, frozen in bf16",
    "2, bf16, frozen in 8 bits",
    "3, bf16, hpZ",
    "3, fp32, hpZ, released at once",
)
QUICK = ("3, bf16, all on cpu",)
WITH_ACTIVATIONS = ("2, bf16, 4 x 256 tokens", "2, bf16, overlap_comm, 1 x 256 tokens")
each_state = pytest.mark.parametrize("name", tiers(STATES + FURTHER, QUICK))
ALONE = ("fp32, 4 x 256", "fp32, 8 x 128, recomputed")


@pytest.fixture(scope="module")
def compared(tmp_path_factory, request) -> dict[str, Compared]:
    folder = tmp_path_factory.mktemp("estimates")
    series = [name for names in chosen(request, "names") for name in names]
    names = dict.fromkeys([*chosen(request, "name"), *series])
    return {one.name: one for one in compare([*names], "small", folder)}


@pytest.mark.parametrize("names", [pytest.param(STATES, marks=pytest.mark.slow)])
def test_the_peak_of_model_states_is_estimated_within_five_percent_on_the_median(compared, names):
    assert median(abs(compared[name].error) for name in names) < 0.05


@pytest.mark.parametrize("name", tiers(STATES + FURTHER + WITH_ACTIVATIONS, QUICK))
def test_each_peak_is_estimated_within_ten_percent(compared, name):
    assert abs(compared[name].error) < 0.10


@each_state
def test_memory_between_steps_is_estimated_as_a_walk_over_tensors_finds_it(compared, name):
    one = compared[name]

    assert one.held_estimated == pytest.approx(one.held_measured, rel=0.01)


@pytest.mark.slow
def test_activations_are_within_ten_percent_by_tracing_and_by_formula(tmp_path):
    pairs = list(compare_activations(ALONE, tmp_path))

    assert {one.name: one.error for pair in pairs for one in pair if abs(one.error) > 0.10} == {}
