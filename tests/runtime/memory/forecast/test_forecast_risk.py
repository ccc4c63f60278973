"""The risk is a calibrated, early probability on generated runs, and beats simple rules.

The bench `oom_risk` does the same on 600 runs, with the actual goals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from bench.memory.oom_risk_followed import (
    LINE,
    OURS,
    THRESHOLD,
    Followed,
    false_alarms_per_10k,
    follow,
    leads,
    pooled,
    warnings,
)
from bench.memory.oom_risk_runs import KINDS, generate, generate_run
from bench.memory.oom_risk_scores import LEAD_STEPS, brier

from zerowatch.runtime.memory.forecast.risk import PRIOR_EXCESSES, PRIOR_SHAPE, fit_tail

NUM_RUNS, NUM_LEAKS, FIRST_SEED = 30, 12, 2000


@pytest.fixture(scope="module")
def followed() -> Sequence[Followed]:
    return [follow(run) for run in generate(NUM_RUNS, FIRST_SEED)]


@pytest.fixture(scope="module")
def leaking() -> Sequence[Followed]:
    seeds = range(FIRST_SEED + NUM_RUNS, FIRST_SEED + NUM_RUNS + NUM_LEAKS)
    return [follow(generate_run("leak", seed, ends_badly=True)) for seed in seeds]


@pytest.mark.slow
def test_the_runs_are_of_all_kinds_and_half_end_out_of_memory(
    followed: Sequence[Followed],
) -> None:
    assert {each.run.kind for each in followed} == set(KINDS)
    ends_badly = sum(each.run.oom_step is not None for each in followed)
    assert abs(ends_badly - NUM_RUNS / 2) <= 2


@pytest.mark.parametrize("rule", (THRESHOLD, LINE))
@pytest.mark.slow
def test_the_brier_score_beats_a_simple_rule(followed: Sequence[Followed], rule: str) -> None:
    assert brier(*pooled(followed, OURS)) < brier(*pooled(followed, rule))


@pytest.mark.slow
def test_the_brier_score_beats_a_constant_forecast(followed: Sequence[Followed]) -> None:
    risks, came = pooled(followed, OURS)

    assert brier(risks, came) < 0.9 * came.mean() * (1 - came.mean())


@pytest.mark.slow
def test_predicted_probabilities_match_observed_frequencies(followed: Sequence[Followed]) -> None:
    risks, came = pooled(followed, OURS)

    unlikely, likely = risks < 0.1, risks > 0.7
    assert came[unlikely].mean() == pytest.approx(risks[unlikely].mean(), abs=0.04)
    assert came[likely].mean() == pytest.approx(risks[likely].mean(), abs=0.2)


@pytest.mark.slow
def test_leaks_are_predicted_twenty_steps_ahead(leaking: Sequence[Followed]) -> None:
    found = leads(leaking, OURS, "leak")

    assert len(found) >= 5
    assert np.mean([lead >= LEAD_STEPS for lead in found]) >= 0.75


@pytest.mark.slow
def test_a_fatal_batch_is_predicted_before_it_runs(followed: Sequence[Followed]) -> None:
    found = warnings(followed, OURS)

    assert len(found) >= 3
    assert np.mean(found) >= 0.8


@pytest.mark.slow
def test_false_alarms_are_rare(followed: Sequence[Followed]) -> None:
    count, _ = false_alarms_per_10k(followed, OURS)

    assert count <= 4  # of some 14,000 safe steps


def test_the_fitted_tail_is_that_of_the_true_distribution(seed: int) -> None:
    drawn = np.random.default_rng(seed).standard_t(4, 20_000) * 1e6

    tail = fit_tail(drawn[:256], expected=1e6, min_width=1e3)

    for margin in (0.0, 1e6, 2e6, 5e6):
        assert tail.exceedance(margin) == pytest.approx((drawn > margin).mean(), rel=0.6)


def test_the_scalar_and_the_vectorized_tail_agree(seed: int) -> None:
    tail = fit_tail(np.random.default_rng(seed).normal(0, 1e6, 100), expected=1e6, min_width=1e3)
    margins = np.linspace(-8e6, 8e6, 101)

    one_by_one = [tail.exceedance(margin) for margin in margins.tolist()]

    assert one_by_one == pytest.approx(tail.exceedances(margins).tolist(), rel=1e-9)
    assert one_by_one == sorted(one_by_one, reverse=True)


@pytest.mark.parametrize("errors", ([], [0.0], [0.0] * 200, [-5e9, 5e9]))
def test_no_probability_is_zero_or_one(errors: list[float]) -> None:
    tail = fit_tail(errors, expected=1e7, min_width=1e6)

    for margin in (-1e12, 0.0, 1e6, 1e12, np.inf):
        assert 0.0 < tail.exceedance(margin) < 1.0


def test_with_few_errors_the_expected_width_counts() -> None:
    few = fit_tail([0.0] * 3, expected=1e7, min_width=1e5)
    many = fit_tail([0.0] * 100, expected=1e7, min_width=1e5)

    assert few.exceedance(1e7) > 0.05 > many.exceedance(1e7)


@pytest.mark.parametrize("shape", [0.05, 0.3])
def test_the_shape_of_the_tail_is_fitted_and_shrunk_to_the_typical_shape(shape: float) -> None:
    ranks = (np.arange(8000) + 0.5) / 8000
    errors = 1e6 * ((1 - ranks) ** -shape - 1) / shape  # a generalized Pareto distribution

    tail = fit_tail(errors, expected=1e6, min_width=1e3)

    weight = 400 / (400 + PRIOR_EXCESSES)  # 400 errors are above the 95th percentile
    assert tail.shape == pytest.approx(weight * shape + (1 - weight) * PRIOR_SHAPE, abs=0.01)
    assert tail.scale == pytest.approx(1e6 * 0.05**-shape, rel=0.05)
