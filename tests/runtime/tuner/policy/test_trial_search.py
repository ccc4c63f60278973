"""Tests of the budget of trials, and of whether a trial pays back its cost."""

from __future__ import annotations

import pytest

from zerowatch.runtime.tuner.policy.trial_search import ExplorationBudget, pays_back


def test_a_run_without_training_time_may_spend_the_ratio_of_its_grant() -> None:
    budget = ExplorationBudget(0.05)

    assert budget.allows(30.0)
    assert not budget.allows(30.1)


def test_training_time_adds_its_ratio_to_the_budget() -> None:
    budget = ExplorationBudget(0.05, grant_seconds=0.0)

    budget.elapse(1000.0)

    assert budget.left_seconds == pytest.approx(50.0)


def test_only_lost_time_is_charged() -> None:
    budget = ExplorationBudget(0.05)

    budget.spend(-3.0)
    budget.spend(2.0)

    assert budget.spent_seconds == 2.0


def test_an_overdrawn_budget_allows_nothing_until_it_recovers() -> None:
    budget = ExplorationBudget(0.05)

    budget.spend(40.0)

    assert not budget.allows(0.0)
    budget.elapse(201.0)
    assert budget.allows(0.0)


@pytest.mark.parametrize(
    ("gain", "remaining_seconds", "cost_seconds", "pays"),
    [
        (0.25, 110.0, 10.0, True),  # 100 s then take 80 s
        (0.25, 60.0, 10.0, False),  # saves just what it costs
        (0.25, None, 1e9, True),
        (0.0, None, 0.0, False),
        (-0.1, 1e9, 0.0, False),
        (0.25, 5.0, 10.0, False),
    ],
)
def test_a_trial_pays_if_it_saves_more_than_it_costs(
    gain: float, remaining_seconds: float | None, cost_seconds: float, pays: bool
) -> None:
    assert pays_back(gain, remaining_seconds, cost_seconds) is pays
