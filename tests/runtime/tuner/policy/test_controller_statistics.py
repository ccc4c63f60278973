"""The controller with one knob in simulated training; see tests/bench/tuner/simulated_trials.py."""

from __future__ import annotations

import pytest
from fakes.noisy_steps import noisy_steps
from fakes.one_knob_job import OneKnobJob

SESSIONS, STEPS = 8, 250


def jobs(first_seed: int, gain: float, step_seconds: float = 0.1) -> dict[int, OneKnobJob]:
    """Return jobs of a knob with this gain, by the seed of their noise."""
    done = {}
    for seed in range(first_seed, first_seed + SESSIONS):
        done[seed] = OneKnobJob(gain, step_seconds=step_seconds)
        done[seed].run(noisy_steps(seed, STEPS))
    return done


@pytest.mark.parametrize("step_seconds", [0.1, 7.0])
def test_a_change_that_helps_is_accepted(step_seconds: float, seed: int) -> None:
    done = jobs(seed, 0.1, step_seconds)

    assert [each for each, job in done.items() if not job.uses_new or not job.accepted_after] == []


def test_a_knob_that_does_harm_is_never_accepted(seed: int) -> None:
    done = jobs(seed, -0.05)

    assert [each for each, job in done.items() if job.accepted_after is not None] == []


def test_a_far_slower_value_is_rolled_back_at_once(seed: int) -> None:
    job = OneKnobJob(-0.6, step_seconds=0.1)

    job.run(noisy_steps(seed, 60))

    assert not job.uses_new
    assert job.decisions[0].result is not None
    assert job.decisions[0].result.steps < 12
