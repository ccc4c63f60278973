"""How a trial is laid out: how long its blocks are, how often it may look, and what convinces it.

The constants were swept on simulated training (`tests/bench/tuner_simulation.py`, other seeds than
those it reports). Step times hang together over some ten steps, so that blocks far apart differ
although nothing changed: many short blocks tell more than few long ones. In 360 steps blocks of 4
find 97 of 100 gains of 3 % with 3 false accepts in 1,000, blocks of 10 find 94 with 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

from .trial_order import Arm
from .types import Tier

# Of one false accept or more in a session, however many trials it has.
SESSION_ALPHA = 0.05
# The first trials, the most promising ones, share evenly; from then on it falls with the square.
EVEN_TRIALS = 5
SHARES = EVEN_TRIALS + EVEN_TRIALS**2 * 0.18133  # 0.18133: the sum of 1/k^2 from 6 on
BLOCK_SECONDS, LEAST_BLOCK_STEPS, MOST_BLOCK_STEPS = 2.0, 2, 4
LIVE_PAIRS, LIVE_MIN_GAIN = 32, 0.01
# A switch costs seconds there, so that blocks are longer, and small gains are not looked for.
REBUILD_BLOCK_SECONDS, LEAST_REBUILD_STEPS, MOST_REBUILD_STEPS = 10.0, 4, 10
REBUILD_PAIRS, REBUILD_MIN_GAIN = 8, 0.03
# By simulation all looks of a trial together falsely accept a knob without effect with twice the
# level of one look. Where 3 % have to be shown it is a fifth of that level at most.
LIVE_LOOK_SHARE, REBUILD_LOOK_SHARE = 0.5, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPlan:
    """How one trial is to go.

    Attributes:
        block_steps: Usable ones of one arm in a row.
        settle_steps: Dropped after each change of the setting.
        min_gain: The least that is worth a change; of throughput, 0.01 for 1 %.
        alpha: With which probability a knob without effect may be accepted.
        look_level: Of one look, so that all looks together keep to `alpha`.
        first_look: After so many pairs.
        max_pairs: After which a trial without an answer is given up.
        few_switches: Whether a switch is dear.
        starts_with: What runs as the trial begins.
        overwhelming: Log of the ratio of step times that two pairs in a row have to show for an
            early end, with each step of one arm faster than each of the other.
        overwhelming_at_once: The same of the very first pair; None where one pair cannot do.
        noise: Standard deviation of the log of step times before the trial. Where it is large, as
            on a machine that is shared, only what stands out from it ends a trial early.
        lead: Seconds per sample of the steps right before the trial, a block of A already; empty
            where something came between.
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
    """Return how to try a knob of that tier.

    Args:
        step_seconds: The usual time of a step, above 0.
        number: One more than this session's trials that accepted nothing. Those that did pass
            their share on to the next (Tian and Ramdas' online fallback): while no accept was
            false, each trial of a knob without effect has a number of its own.
        tier: Of the knob.
        settle_steps: Dropped after each change.
    """
    alpha = trial_alpha(number)
    if tier == "rebuild":
        return TrialPlan(
            block_steps=_steps(
                REBUILD_BLOCK_SECONDS / step_seconds, LEAST_REBUILD_STEPS, MOST_REBUILD_STEPS
            ),
            settle_steps=settle_steps,
            min_gain=REBUILD_MIN_GAIN,
            alpha=alpha,
            look_level=REBUILD_LOOK_SHARE * alpha,
            first_look=3,
            max_pairs=REBUILD_PAIRS,
            few_switches=True,
            overwhelming_at_once=log(1.5),
        )
    return TrialPlan(
        block_steps=_steps(BLOCK_SECONDS / step_seconds, LEAST_BLOCK_STEPS, MOST_BLOCK_STEPS),
        settle_steps=settle_steps,
        min_gain=LIVE_MIN_GAIN,
        alpha=alpha,
        look_level=LIVE_LOOK_SHARE * alpha,
        first_look=4,
        max_pairs=LIVE_PAIRS,
        few_switches=False,
    )


def trial_alpha(number: int) -> float:
    """Return a trial's share of `SESSION_ALPHA`; those of any number of trials stay below it."""
    return SESSION_ALPHA / SHARES * min(1.0, (EVEN_TRIALS / number) ** 2)


def _steps(wanted: float, least: int, most: int) -> int:
    return min(most, max(least, ceil(wanted)))
