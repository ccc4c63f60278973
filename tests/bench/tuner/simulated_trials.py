"""Simulates trials, and compares their results with two simpler rules.

Step times carry correlated noise (2 %), a slow wave (3 %), level shifts (8 % for 100 steps) and
spikes (1.3 to 2 times, 2 % of steps). The trial's constants were swept on other seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.bench_options import Options
from bench.result_table import Row
from bench.tuner.simulated_rules import Decided, before_after, best_of
from bench.tuner.simulated_sessions import families, sessions
from bench.tuner.simulated_shifts import shifts
from fakes.noisy_steps import noisy_steps, tried

from zerowatch.runtime.tuner.policy.ab_comparison import TrialDesign, design_trial

SESSIONS, QUICK_SESSIONS = 1000, 40
FIRST_SEED = 70_000_000
RUN_STEPS = 450  # more than any trial takes
GAINS = (-0.05, -0.03, 0.0, 0.02, 0.03, 0.05, 0.1)
MOST_FALSE, LEAST_FOUND, FOUND_WITHIN_STEPS = 0.05, 0.95, 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of trial, and the gains that it is given."""

    what: str
    design: TrialDesign
    gains: Sequence[float] = GAINS
    rebuild: bool = False


CASES = (
    Case(what="blocks of 4", design=design_trial(0.1, number=1, apply_mode="live", settle_steps=2)),
    Case(
        what="as the 8th without success",
        design=design_trial(0.1, number=8, apply_mode="live", settle_steps=2),
        gains=(-0.03, 0.0, 0.03),
    ),
    Case(
        what="steps of 7 s", design=design_trial(7.0, number=1, apply_mode="live", settle_steps=2)
    ),
    Case(
        what="rebuild",
        design=design_trial(1.0, number=1, apply_mode="rebuild", settle_steps=3),
        gains=(-0.03, 0.0, 0.05, 0.1, 0.3),
        rebuild=True,
    ),
    Case(
        what="rebuild, steps of 7 s",
        design=design_trial(7.0, number=1, apply_mode="rebuild", settle_steps=3),
        gains=(-0.03, 0.0, 0.05, 0.1, 0.3),
        rebuild=True,
    ),
)


def bench(options: Options) -> Iterator[Row]:
    """Yield how often each rule accepts a knob of a given gain, and the gain that it reports."""
    num = QUICK_SESSIONS if options.quick else SESSIONS
    runs = [noisy_steps(FIRST_SEED + index, RUN_STEPS) for index in range(num)]
    for case in CASES:
        for gain in case.gains:
            decided = [_tried(case.design, gain, run) for run in runs]
            yield from _rows(case, gain, decided)
    for gain in GAINS:
        yield _row("20 steps before and after", gain, [before_after(gain, run) for run in runs])
    for gain in GAINS:
        yield _row("better of two", gain, [best_of([gain], run) for run in runs])
    yield from families(num)
    yield from sessions(num)
    yield from shifts(num)


def _tried(design: TrialDesign, gain: float, steps: Sequence[float]) -> Decided:
    found = tried(design, gain, steps)
    return Decided(accepted=found.verdict == "accepted", gain=found.gain, steps=found.steps)


def _rows(case: Case, gain: float, decided: Sequence[Decided]) -> Iterator[Row]:
    what, accepted = f"trial, {case.what}", _share(decided)
    if gain < 0:
        yield _row(what, gain, decided, "none", accepted == 0)
    elif gain == 0:
        yield _row(what, gain, decided, f"below {MOST_FALSE:.0%}", accepted < MOST_FALSE)
    elif gain == 0.03 and not case.rebuild:
        goal = f"{LEAST_FOUND:.0%}"
        yield _row(what, gain, decided, goal, accepted >= LEAST_FOUND)
        in_time = fmean(one.accepted and one.steps <= FOUND_WITHIN_STEPS for one in decided)
        yield Row(
            what=f"{what}, +3 %: accepted within {FOUND_WITHIN_STEPS} steps",
            measured=f"{in_time:.1%}",
            goal=goal,
            met=in_time >= LEAST_FOUND,
        )
    else:
        yield _row(what, gain, decided)


def _row(
    what: str, gain: float, decided: Sequence[Decided], goal: str = "", met: bool | None = None
) -> Row:
    steps = sorted(one.steps for one in decided)
    accepted = [one.gain for one in decided if one.accepted]
    gains = f"; measured gain {fmean(accepted):+.1%}" if accepted else ""
    high = steps[int(0.95 * len(steps))]
    return Row(
        what=f"{what}, {_percent(gain)}: accepted",
        measured=f"{_share(decided):.1%}",
        spread=f"steps {fmean(steps):.0f}, 95 of 100 in {high}{gains}",
        goal=goal,
        met=met,
    )


def _percent(gain: float) -> str:
    return f"{100 * gain:+.0f} %" if gain else "no effect"


def _share(decided: Sequence[Decided]) -> float:
    return fmean(one.accepted for one in decided)
