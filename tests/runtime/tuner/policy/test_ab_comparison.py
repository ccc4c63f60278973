"""Tests of the A/B test of a trial: order of variants, unmeasured steps, early ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from zerowatch.runtime.tuner.policy.ab_comparison import (
    SESSION_ALPHA,
    AbComparison,
    TrialResult,
    design_trial,
    trial_alpha,
    variant_sequence,
)

LIVE = design_trial(0.1, number=1, apply_mode="live", settle_steps=2)
REBUILD = design_trial(1.0, number=1, apply_mode="rebuild", settle_steps=3)


def run_steps(trial: AbComparison, num: int, seconds: float = 1.0) -> str:
    """Run steps of equal time; return their variants, with a bar where a block may end."""
    variants = ""
    for _ in range(num):
        variants += trial.variant + ("|" if trial.may_end_block else "")
        trial.add(seconds)
    return variants


def end(trial: AbComparison, a: float, b: float) -> TrialResult:
    for _ in range(500):
        trial.add(b if trial.variant == "B" else a)
        if trial.result:
            return trial.result
    raise AssertionError("no verdict")


def test_the_variants_of_a_live_trial_follow_the_thue_morse_sequence() -> None:
    order = "".join(islice(variant_sequence(starts_with="A", few_switches=False), 16))

    assert order == "ABBABAABBAABABBA"


def test_expensive_switches_happen_once_per_pair() -> None:
    order = "".join(islice(variant_sequence(starts_with="B", few_switches=True), 8))

    assert order == "BAABBAAB"


def test_steps_after_a_switch_are_ignored() -> None:
    trial = AbComparison(LIVE)

    assert run_steps(trial, 24) == "AAAA|BBBBBB|BBBB|AAAAAA|BBBB"


def test_a_trial_that_starts_with_b_ignores_its_first_steps() -> None:
    trial = AbComparison(replace(LIVE, starts_with="B"))

    assert run_steps(trial, 12) == "BBBBBB|AAAAAA|"


def test_an_unusable_step_extends_its_block() -> None:
    trial = AbComparison(LIVE)

    for useless in (None, 0.0, float("nan"), float("inf")):
        trial.add(useless)

    assert run_steps(trial, 6) == "AAAA|BB"


def test_a_trial_settles_by_usable_steps() -> None:
    trial = AbComparison(LIVE)
    run_steps(trial, 4)

    for _ in range(5):
        trial.add(None)

    assert run_steps(trial, 8) == "BBBBBB|BB"


def test_settle_steps_are_not_measured() -> None:
    trial = AbComparison(LIVE)
    for _ in range(4):
        trial.add(1.0)

    for seconds in (9.0, 9.0, 1.0, 1.0, 1.0, 1.0):
        trial.add(seconds)

    assert trial.result is None and trial.variant == "B"


@pytest.mark.parametrize(
    ("step_seconds", "live", "rebuild"), [(0.01, 4, 10), (0.6, 4, 10), (1.0, 2, 10), (7.0, 2, 4)]
)
def test_blocks_are_shorter_with_long_steps(step_seconds: float, live: int, rebuild: int) -> None:
    blocks = [
        design_trial(step_seconds, number=1, apply_mode=apply_mode, settle_steps=2).block_steps
        for apply_mode in ("live", "rebuild")
    ]

    assert blocks == [live, rebuild]


def test_the_trials_of_a_session_spend_at_most_its_alpha() -> None:
    spent = sum(trial_alpha(number) for number in range(1, 100_000))

    assert 0.99 * SESSION_ALPHA < spent <= SESSION_ALPHA


def test_a_steady_gain_is_accepted_at_its_value() -> None:
    found = end(AbComparison(LIVE), a=1.0, b=1 / 1.05)

    assert (found.verdict, found.pairs) == ("accepted", 4)
    assert found.gain == pytest.approx(0.05)
    assert found.lower < found.gain < found.upper


@pytest.mark.parametrize("b", [1.0, 1 / 1.005])
def test_a_gain_below_the_minimum_is_rejected(b: float) -> None:
    found = end(AbComparison(LIVE), a=1.0, b=b)

    assert (found.verdict, found.pairs) == ("rejected", LIVE.first_interim_pair)


def test_slight_harm_is_rolled_back_at_the_first_interim_analysis() -> None:
    found = end(AbComparison(LIVE), a=1.0, b=1.03)

    assert (found.verdict, found.pairs) == ("rolled_back", LIVE.first_interim_pair)
    assert found.upper < -0.01


def test_the_recorded_bounds_support_the_reason_of_the_verdict(seed: int) -> None:
    reasons = set()
    for each in range(seed, seed + 300):
        noise, trial = Random(each), AbComparison(LIVE)
        factor = noise.choice((0.9, 0.97, 1.0, 1.03, 1.1))
        while trial.result is None:
            seconds = noise.gauss(1.0, 0.05)
            trial.add(seconds * factor if trial.variant == "B" else seconds)
        found = trial.result

        reasons.add(found.reason)
        assert found.lower <= found.gain <= found.upper, f"seed {each}"
        if found.reason == "its upper bound shows harm":
            assert found.upper < min(-0.01, LIVE.min_gain / 2), f"seed {each}"
        elif found.reason == "its upper bound is below the minimum gain":
            assert found.upper < LIVE.min_gain, f"seed {each}"
    assert {"its upper bound shows harm", "its upper bound is below the minimum gain"} <= reasons


def test_an_allowed_loss_is_not_rolled_back() -> None:
    may_cost = replace(LIVE, min_gain=-0.04)

    assert end(AbComparison(may_cost), a=1.0, b=1.015).verdict == "accepted"
    assert end(AbComparison(may_cost), a=1.0, b=1.03).verdict == "rolled_back"


def test_a_change_that_makes_steps_a_fifth_slower_is_rolled_back_after_two_pairs() -> None:
    found = end(AbComparison(LIVE), a=1.0, b=1.2)

    assert (found.verdict, found.pairs) == ("rolled_back", 2)


def test_a_far_slower_change_is_rolled_back_within_its_first_block() -> None:
    trial = AbComparison(LIVE)

    variants = run_steps(trial, 6) + run_steps(trial, 3, seconds=2.0)

    assert variants == "AAAA|BBBBB|"
    assert trial.result is not None
    assert (trial.result.verdict, trial.result.steps) == ("rolled_back", 9)
    assert trial.result.gain == pytest.approx(-0.5)


def test_two_consecutive_slow_steps_do_not_end_a_trial() -> None:
    trial = AbComparison(LIVE)

    run_steps(trial, 6)
    run_steps(trial, 2, seconds=2.0)
    run_steps(trial, 2)

    assert trial.result is None


def test_a_large_gain_is_accepted_after_two_pairs() -> None:
    long_steps = design_trial(7.0, number=1, apply_mode="live", settle_steps=2)

    found = end(AbComparison(long_steps), a=7.0, b=3.5)

    assert (found.verdict, found.pairs, found.steps) == ("accepted", 2, 12)
    assert (found.lower, found.gain, found.upper) == pytest.approx((1.0, 1.0, 1.0))


def test_a_rebuild_that_gains_half_as_much_again_is_accepted_after_one_pair() -> None:
    found = end(AbComparison(REBUILD), a=1.0, b=0.6)

    assert (found.verdict, found.pairs, found.steps) == ("accepted", 1, 23)


def test_a_single_slow_step_prevents_an_early_accept() -> None:
    trial = AbComparison(REBUILD)

    run_steps(trial, 22)
    trial.add(1.1)

    assert trial.result is None


def test_a_shift_of_speed_between_blocks_is_not_a_gain() -> None:
    trial = AbComparison(LIVE)

    run_steps(trial, 4, seconds=1.0)
    variants = run_steps(trial, 200, seconds=0.7)

    assert "A" in variants
    assert trial.result is not None and trial.result.verdict == "rejected"


def test_an_inconclusive_trial_is_rejected() -> None:
    trial = AbComparison(replace(LIVE, max_pairs=6))
    blocks = 0

    while trial.result is None:
        gain = -0.1 if blocks // 2 % 2 else 0.2  # of every other pair
        blocks += trial.may_end_block
        trial.add(1 / (1 + gain) if trial.variant == "B" else 1.0)

    assert (trial.result.verdict, trial.result.pairs) == ("rejected", 6)
    assert trial.result.lower < 0 < trial.result.upper


def test_steps_after_the_result_are_ignored() -> None:
    trial = AbComparison(LIVE)
    found = end(trial, a=1.0, b=1.2)

    trial.add(0.1)

    assert trial.result is found and not trial.may_end_block
