"""Tests of `tiers` and `chosen`."""

from __future__ import annotations

import pytest
from chosen_cases import chosen, tiers

CASES = tiers([(1, "a"), (1, "b"), (2, "a")], quick=[(1, "a"), (2, "a")])


@pytest.fixture(scope="module")
def run_cases(request):
    return chosen(request, "ranks", "name")


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_job_has_the_cases_of_the_selected_tests(run_cases, ranks, name):
    assert (ranks, name) in run_cases
    assert len(run_cases) == len(set(run_cases)) <= len(CASES)


def test_only_the_quick_cases_are_not_slow():
    assert [[mark.name for mark in case.marks] for case in CASES] == [[], ["slow"], []]


def test_a_quick_case_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="no such case: \\['z'\\]"):
        tiers(["a"], quick=["z"])
