"""Tests of the verdicts of A/B tests in simulated training, with loose bounds.

`tests/bench/tuner/simulated_trials.py` has the figures.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest
from fakes.noisy_steps import Noise, noisy_steps, tried

from zerowatch.runtime.tuner.policy.ab_comparison import TrialDesign, TrialResult, design_trial

SESSIONS = 150
FIRST_SEED = 1_000
LIVE = design_trial(0.1, number=1, apply_mode="live", settle_steps=2)
LONG_STEPS = design_trial(7.0, number=1, apply_mode="live", settle_steps=2)
REBUILD = design_trial(1.0, number=1, apply_mode="rebuild", settle_steps=3)
PLANS = pytest.mark.parametrize(
    "design", [LIVE, LONG_STEPS, REBUILD], ids=["live", "long", "rebuild"]
)


@cache
def runs() -> tuple[list[float], ...]:
    return tuple(noisy_steps(FIRST_SEED + index, 450) for index in range(SESSIONS))


def results(design: TrialDesign, gain: float) -> list[TrialResult]:
    return [tried(design, gain, run) for run in runs()]


def share(found: list[TrialResult], verdict: str) -> float:
    return fmean(one.verdict == verdict for one in found)


@PLANS
def test_a_knob_without_effect_is_rarely_accepted(design: TrialDesign) -> None:
    assert share(results(design, 0.0), "accepted") < 0.05


@PLANS
def test_a_knob_that_does_harm_is_never_accepted(design: TrialDesign) -> None:
    assert share(results(design, -0.03), "accepted") == 0


@pytest.mark.parametrize("design", [LIVE, LONG_STEPS], ids=["live", "long"])
def test_a_gain_of_three_percent_is_found_within_300_steps(design: TrialDesign) -> None:
    found = results(design, 0.03)

    in_time = [one for one in found if one.verdict == "accepted" and one.steps <= 300]

    assert len(in_time) / len(found) >= 0.9
    assert fmean(one.gain for one in in_time) == pytest.approx(0.03, abs=0.005)


@PLANS
def test_large_gains_are_always_found_with_their_size(design: TrialDesign) -> None:
    found = results(design, 0.3)

    assert share(found, "accepted") == 1
    assert fmean(one.gain for one in found) == pytest.approx(0.3, abs=0.01)


def test_the_lower_bound_nearly_always_holds_and_the_upper_one_in_nine_of_ten() -> None:
    found = [(gain, one) for gain in (0.0, 0.05) for one in results(LIVE, gain)]

    assert fmean(one.lower <= gain for gain, one in found) > 0.95
    assert fmean(gain <= one.upper for gain, one in found) > 0.85


def test_harm_of_five_percent_is_rolled_back_within_the_first_interim_analyses() -> None:
    found = results(LIVE, -0.05)

    assert share(found, "rolled_back") > 0.8
    assert max(one.steps for one in found) < 100


def test_temporary_shifts_of_speed_by_a_sixth_are_not_accepted_as_gains() -> None:
    rough = Noise(shift=0.16, shifts_every=100, shift_steps=40)

    found = [tried(LIVE, 0.0, noisy_steps(FIRST_SEED + index, 450, rough)) for index in range(150)]

    assert share(found, "accepted") < 0.05
