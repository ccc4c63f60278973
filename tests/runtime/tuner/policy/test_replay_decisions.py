"""Recorded decisions are replayed: the same inputs, decided again by today's code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.tuner_decisions import SLOW_LINK, decision
from replay_decisions import ReplayDifference, judge_again, parse_line, replay

from zerowatch.runtime.tuner.policy.decision_log import decision_line, make_record


def decided(found, number=1):
    return make_record(
        found,
        number=number,
        unix_seconds=1.8e9,
        step=41,
        in_use={"micro_batch_samples": 16},
        world_size=2,
        mode="auto",
    )


def record_of(found, **others):
    return parse_line(decision_line(replace(decided(found), **others), found))


@pytest.mark.parametrize("seconds_after", [0.03, 0.069, 0.07, 0.2, None])
def test_the_code_that_decided_decides_the_same_again(seconds_after):
    assert replay(record_of(decision(seconds_after))) == ReplayDifference()


def test_a_verdict_that_the_step_times_do_not_support_is_a_difference():
    found = replay(record_of(decision(0.2), verdict="accepted"))

    assert found.diagnosis is found.proposal is None
    assert found.verdict.startswith("rolled_back: ")
    assert found.verdict.endswith("slower)")


def test_an_unfinished_trial_has_no_verdict():
    record = record_of(decision(0.069))

    found = replay(replace(record, times=record.times[:7]))

    assert found.verdict == "undecided"


def test_a_trial_that_the_run_aborted_is_not_judged():
    found = replay(record_of(decision(0.03), gain=None, verdict="rolled_back"))

    assert found == ReplayDifference()


def test_other_symptoms_are_a_difference():
    record = record_of(decision())
    quiet = replace(SLOW_LINK, exposed_ratio=0.05, cause_ratios={})

    found = replay(replace(record, inputs=replace(record.inputs, reading=quiet)))

    assert found.diagnosis.startswith("found ")
    assert "comm_bandwidth" in found.diagnosis.partition(" instead of ")[2]
    assert found.proposal == "nothing"


def test_another_proposal_is_a_difference():
    record = record_of(decision())
    excluded = frozenset({("micro_batch_samples", 16)})

    found = replay(replace(record, inputs=replace(record.inputs, excluded=excluded)))

    assert found.proposal == "micro_batch_samples 4 -> 8"


def test_unusable_windows_alone_give_no_verdict():
    found = decision()

    assert judge_again(found.design, (None,) * 100) is None
