"""Plan of a trial: length and order of its blocks, number of looks, and levels of its bounds.

The constants were swept on simulated training (`tests/bench/tuner/simulated_trials.py`, with seeds
other than those it reports). Step times are correlated over about ten steps, so distant blocks
differ although nothing changed: many short blocks show more than few long ones. In 360 steps,
blocks of 4 find 97 of 100 gains of 3 % with 3 false accepts in 1,000; blocks of 10 find 94 with 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, log
from typing import Literal

from .types import Tier

# A is the configuration in use, B the proposed one.
Arm = Literal["A", "B"]

# Probability of one or more false accepts in a session, for any number of trials.
SESSION_ALPHA = 0.05
# The first trials, the most promising ones, have equal shares; later ones fall with the square.
EVEN_TRIALS = 5
SHARES = EVEN_TRIALS + EVEN_TRIALS**2 * 0.18133  # 0.18133: the sum of 1/k^2 from 6 on
BLOCK_SECONDS, MIN_BLOCK_STEPS, MAX_BLOCK_STEPS = 2.0, 2, 4
LIVE_PAIRS, MIN_MEASURED_LIVE_GAIN = 32, 0.01
# A rebuild takes seconds, so blocks are longer, and small gains are not searched for.
REBUILD_BLOCK_SECONDS, MIN_REBUILD_STEPS, MAX_REBUILD_STEPS = 10.0, 4, 10
REBUILD_PAIRS, MIN_MEASURED_REBUILD_GAIN = 8, 0.03
# In simulation, all looks of a trial together falsely accept a knob without effect with twice the
# level of one look; where a gain of 3 % is required, with at most a fifth of that level.
LIVE_LOOK_SHARE, REBUILD_LOOK_SHARE = 0.5, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """Plan of one trial; the field names are keys of `decisions.jsonl`.

    Attributes:
        block_steps: Usable steps in a block.
        settle_steps: Steps ignored after each switch.
        min_gain: Least gain of throughput worth a change, 0.01 for 1 %.
        alpha: Probability of accepting a knob without effect.
        look_level: Level of one look, so that all looks together keep to `alpha`.
        first_look: Pairs before the first look.
        max_pairs: Pairs after which an inconclusive trial is given up.
        few_switches: Whether a switch is expensive.
        starts_with: The arm in use when the trial starts.
        overwhelming: Log ratio of step times that two consecutive pairs must show for an early
            accept, with each step of one arm faster than each of the other.
        overwhelming_at_once: The same for the first pair; None where one pair is not enough.
        noise: Standard deviation of the log of step times before the trial. Only what exceeds it
            ends a trial early.
        lead: Seconds per sample of the steps right before the trial, used as the first block of A;
            empty where something came in between.
    """

    block_steps: int
    settle_steps: int
    min_gain: float
    alpha: float
    look_level: float
    first_look: int
    max_pairs: int
    few_switches: bool
    starts_with: Arm = "A"
    overwhelming: float = log(1.25)
    overwhelming_at_once: float | None = None
    noise: float = 0.0
    lead: Sequence[float] = ()


def plan_trial(step_seconds: float, *, number: int, tier: Tier, settle_steps: int) -> TrialPlan:
    """Return the plan of a trial.

    Args:
        step_seconds: Usual time of a step, above 0.
        number: 1 + the session's trials that accepted nothing. A trial that accepts passes its
            share of alpha on to the next (online fallback of Tian and Ramdas).
        tier: Whether the change needs a rebuild.
        settle_steps: Steps ignored after each switch.
    """
    alpha = trial_alpha(number)
    if tier == "rebuild":
        return TrialPlan(
            block_steps=_steps(
                REBUILD_BLOCK_SECONDS / step_seconds, MIN_REBUILD_STEPS, MAX_REBUILD_STEPS
            ),
            settle_steps=settle_steps,
            min_gain=MIN_MEASURED_REBUILD_GAIN,
            alpha=alpha,
            look_level=REBUILD_LOOK_SHARE * alpha,
            first_look=3,
            max_pairs=REBUILD_PAIRS,
            few_switches=True,
            overwhelming_at_once=log(1.5),
        )
    return TrialPlan(
        block_steps=_steps(BLOCK_SECONDS / step_seconds, MIN_BLOCK_STEPS, MAX_BLOCK_STEPS),
        settle_steps=settle_steps,
        min_gain=MIN_MEASURED_LIVE_GAIN,
        alpha=alpha,
        look_level=LIVE_LOOK_SHARE * alpha,
        first_look=4,
        max_pairs=LIVE_PAIRS,
        few_switches=False,
    )


def trial_alpha(number: int) -> float:
    """Return a trial's share of `SESSION_ALPHA`; the shares of all trials sum to less than it."""
    return SESSION_ALPHA / SHARES * min(1.0, (EVEN_TRIALS / number) ** 2)


def arm_sequence(*, starts_with: Arm, few_switches: bool) -> Iterator[Arm]:
    """Yield the arm of each block, without end; two consecutive blocks are a pair of both arms.

    The order within pairs follows the Thue-Morse sequence, so that neither linear nor quadratic
    drift nor anything periodic favours an arm. With few switches pairs alternate between A B and
    B A, which cancels linear drift only, but switches once per pair.
    """
    other: Arm = "A" if starts_with == "B" else "B"
    for pair in count():
        is_reversed = pair % 2 if few_switches else pair.bit_count() % 2
        yield from (other, starts_with) if is_reversed else (starts_with, other)


def _steps(wanted: float, least: int, most: int) -> int:
    return min(most, max(least, ceil(wanted)))
