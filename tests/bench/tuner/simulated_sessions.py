"""Simulates trials of several knobs in a row, and whole sessions with one knob."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from bench.result_table import Row
from bench.tuner.simulated_rules import before_after, best_of
from fakes.noisy_steps import noisy_steps, tried
from fakes.one_knob_job import OneKnobJob

from zerowatch.runtime.tuner.policy.ab_comparison import design_trial

FAMILY_SEED, SESSION_SEED = 71_000_000, 73_000_000
FAMILY, TRIAL_STEPS = 8, 450
MOST_FALSE, LEAST_FOUND, LEAST_SPEED = 0.05, 0.95, 0.99
SESSION_STEPS, STEP_DURATION = 600, 0.1
SESSION_GAINS = (-0.05, -0.03, 0.0, 0.03, 0.1)


def families(num: int) -> Iterator[Row]:
    """Yield how often one or more of several knobs without effect are accepted."""
    runs = [noisy_steps(FAMILY_SEED + index, FAMILY * TRIAL_STEPS) for index in range(num)]
    false = fmean(_any_accepted(run) for run in runs)
    yield Row(
        what=f"trials of {FAMILY} knobs without effect in a row: any accepted",
        measured=f"{false:.1%}",
        goal=f"below {MOST_FALSE:.0%}",
        met=false < MOST_FALSE,
    )
    starts = range(0, FAMILY * TRIAL_STEPS, TRIAL_STEPS)
    in_a_row = fmean(
        any(before_after(0.0, run[at : at + TRIAL_STEPS]).accepted for at in starts) for run in runs
    )
    yield Row(what="20 steps before and after, the same", measured=f"{in_a_row:.1%}")
    best = [best_of([0.0] * FAMILY, run) for run in runs]
    yield Row(
        what=f"best of {FAMILY + 1}, the same",
        measured=f"{fmean(one.accepted for one in best):.1%}",
        spread=f"measured gain {fmean(one.gain for one in best):+.1%}",
    )


def _any_accepted(run: Sequence[float]) -> bool:
    at = 0
    for number in range(1, FAMILY + 1):
        design = design_trial(STEP_DURATION, number=number, apply_mode="live", settle_steps=2)
        found = tried(design, 0.0, run[at:])
        if found.verdict == "accepted":
            return True
        at += found.steps
    return False


def sessions(num: int) -> Iterator[Row]:
    """Yield how often a controller accepts its one knob, and the effect on training."""
    for gain in SESSION_GAINS:
        jobs = []
        speeds = []
        for index in range(num):
            noise = noisy_steps(SESSION_SEED + index, SESSION_STEPS)
            job = OneKnobJob(gain, step_seconds=STEP_DURATION)
            job.run(noise)
            jobs.append(job)
            speeds.append(sum(noise) * STEP_DURATION / job.seconds)
        yield from _session_rows(gain, jobs, sorted(speeds))


def _session_rows(
    gain: float, jobs: Sequence[OneKnobJob], speeds: Sequence[float]
) -> Iterator[Row]:
    effect = f"{100 * gain:+.0f} %" if gain else "no effect"
    what = f"sessions of {SESSION_STEPS} steps, {effect}"
    accepted_after = [job.accepted_after for job in jobs]
    found = sorted(after for after in accepted_after if after is not None)
    share = len(found) / len(jobs)
    trials = fmean(len(job.decisions) for job in jobs)
    when = (
        f", after {fmean(found):.0f}, 95 of 100 in {found[int(0.95 * len(found))]}" if found else ""
    )
    goals = {True: ("none", share == 0), False: (f"{LEAST_FOUND:.0%}", share >= LEAST_FOUND)}
    goal, met = goals[gain < 0]
    if gain == 0:
        goal, met = f"below {MOST_FALSE:.0%}", share < MOST_FALSE
    yield Row(
        what=f"{what}: accepted",
        measured=f"{share:.1%}",
        spread=f"{trials:.1f} trials{when}",
        goal=goal,
        met=met,
    )
    yield Row(
        what=f"{what}: speed, with trials",
        measured=f"{fmean(speeds):.3f}",
        spread=f"5 of 100 below {speeds[len(speeds) // 20]:.3f}",
        goal=f"{LEAST_SPEED}",
        met=fmean(speeds) >= LEAST_SPEED,
    )
