"""The controller with one knob in simulated training; see tests/bench/tuner/simulated_trials.py."""

from __future__ import annotations

import pytest
from fakes.noisy_steps import noisy_steps
from fakes.one_knob_job import OneKnobJob

SESSIONS, STEPS = 8, 250


def jobs(gain: float, step_seconds: float = 0.1) -> list[OneKnobJob]:
    done = []
    for seed in range(SESSIONS):
        job = OneKnobJob(gain, step_seconds=step_seconds)
        job.run(noisy_steps(seed, STEPS))
        done.append(job)
    return done


@pytest.mark.parametrize("step_seconds", [0.1, 7.0])
def test_a_change_that_helps_is_accepted(step_seconds: float) -> None:
    done = jobs(0.1, step_seconds)

    assert all(job.uses_new and job.accepted_after for job in done)


def test_a_knob_that_does_harm_is_never_accepted() -> None:
    assert {job.accepted_after for job in jobs(-0.05)} == {None}


def test_a_far_slower_value_is_rolled_back_at_once() -> None:
    job = OneKnobJob(-0.6, step_seconds=0.1)

    job.run(noisy_steps(1, 60))

    assert not job.uses_new
    assert job.decisions[0].result is not None
    assert job.decisions[0].result.steps < 12
