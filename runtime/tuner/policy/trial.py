"""Sequential A/B test: both configurations take turns in blocks, and paired blocks are compared.

Independent of what is changed. A block's time is its lower median, which spikes do not move. A
pair's difference is the log of A's time over B's, so it is positive where B is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, inf, log, log1p
from statistics import fmean, median_low
from typing import Literal

from .confidence import winsorized_mean
from .trial_plan import Arm, TrialPlan, arm_sequence

# Harm ends a trial early: two pairs slower by HARM, or RUNAWAY_STEPS consecutive steps of B that
# are all slower than A's slowest by RUNAWAY; two steps may both be spikes.
HARM, RUNAWAY, RUNAWAY_STEPS = log(1.15), log(1.5), 3
# Both must also exceed so many standard deviations of a step before the trial.
NOISE_DEVIATIONS = 4.0
HARM_GAIN = -0.01
# Pauses within one block, and consecutive unusable windows, after which a trial is given up.
MAX_PAUSES, MAX_UNUSABLE = 3, 50
# Level of the upper bound for giving up. Giving up wrongly costs a gain, not harm. In simulation, a
# knob without effect takes half the steps of a level of 0.02, and one more of 100 gains of 3 % is
# missed.
FUTILITY_LEVEL = 0.1


TrialVerdict = Literal["accepted", "rejected", "rolled_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of a trial.

    Attributes:
        verdict: Rolled back where B does harm, rejected where its gain is too small or uncertain.
        gain: Throughput of B over A, minus 1; the mean of all pairs.
        lower: Lower bound of the gain, at the level of acceptance; after an early end, by the least
            favourable single steps of A and B.
        upper: Upper bound of the gain.
        pairs: Compared pairs of blocks.
        steps: Windows of the trial.
        reason: Half a sentence for people.
    """

    verdict: TrialVerdict
    gain: float
    lower: float
    upper: float
    pairs: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Seconds per sample of the steps of a block of A and of a block of B."""

    a: Sequence[float]
    b: Sequence[float]

    @property
    def difference(self) -> float:
        return log(median_low(self.a) / median_low(self.b))

    @property
    def least(self) -> float:
        """Log gain of B's slowest step over A's fastest."""
        return log(min(self.a) / max(self.b))

    @property
    def most(self) -> float:
        return log(max(self.a) / min(self.b))


class Trial:
    """Chooses the configuration of the next window, and judges as soon as the data allow.

    Attributes:
        arm: Configuration of the next window; after the verdict, of the last one.
        verdict: None while the trial runs.
    """

    def __init__(self, plan: TrialPlan) -> None:
        self.verdict: Judgement | None = None
        self._plan = plan
        self._order = arm_sequence(starts_with=plan.starts_with, few_switches=plan.few_switches)
        self.arm: Arm = next(self._order)
        # A is in use already; B has to settle.
        self._unsettled = plan.settle_steps if self.arm == "B" else 0
        self._block: list[float] = []  # seconds per sample of the steps of the current block
        self._last: dict[Arm, Sequence[float]] = {}  # the latest complete block of each arm
        self._pairs: list[_Pair] = []
        self._first_of_pair = True
        self._steps = 0
        self._pauses = self._unusable = 0
        if plan.lead and self.arm == "A":
            self._block = list(plan.lead)
            self._end_block()

    @property
    def is_stalled(self) -> bool:
        """Whether it is interrupted too often to come to a verdict."""
        return self._pauses >= MAX_PAUSES or self._unusable >= MAX_UNUSABLE

    @property
    def is_settling(self) -> bool:
        """Whether the next window is ignored, because it follows a switch."""
        return self._unsettled > 0

    @property
    def may_end_block(self) -> bool:
        """Whether the next window, if usable, ends a block."""
        if self.verdict or self._unsettled:
            return False
        num = len(self._block) + 1
        return num >= self._plan.block_steps or (num >= RUNAWAY_STEPS and self._is_runaway())

    def pause(self) -> None:
        """Discard the current block, because something else comes in between."""
        self._block = []
        self._unsettled = self._plan.settle_steps
        self._pauses += 1

    def add(self, seconds_per_sample: float | None) -> None:
        """Add the next window's time; None and values of 0 or less are unusable."""
        if self.verdict:
            return
        self._steps += 1
        if self._unsettled:
            self._unsettled -= 1
            return
        if seconds_per_sample is None or not 0 < seconds_per_sample < inf:
            self._unusable += 1
            return
        self._unusable = 0
        self._block.append(seconds_per_sample)
        if len(self._block) >= RUNAWAY_STEPS and self._is_runaway():
            self._stop_runaway()
        elif len(self._block) >= self._plan.block_steps:
            self._end_block()

    def _is_runaway(self) -> bool:
        """Whether all steps of this block of B are far slower than the last block of A."""
        if self.arm == "A" or "A" not in self._last or not self._block:
            return False
        return log(min(self._block) / max(self._last["A"])) > self._noise_margin(RUNAWAY)

    def _noise_margin(self, ratio: float) -> float:
        """Return the larger one of a log ratio and of what exceeds the noise."""
        return max(ratio, NOISE_DEVIATIONS * self._plan.noise)

    def _stop_runaway(self) -> None:
        pair = _Pair(a=self._last["A"], b=self._block)
        self._pairs.append(pair)
        self._judge_by_steps("rolled_back", [pair], "far slower from its first steps on")

    def _end_block(self) -> None:
        self._last[self.arm] = self._block
        self._block = []
        self._pauses = 0
        if not self._first_of_pair:
            self._pairs.append(_Pair(a=self._last["A"], b=self._last["B"]))
            self._judge_pairs()
        self._first_of_pair = not self._first_of_pair
        if self.verdict is None:
            before, self.arm = self.arm, next(self._order)
            self._unsettled = self._plan.settle_steps if self.arm != before else 0

    def _judge_pairs(self) -> None:
        slower = [pair for pair in self._pairs if pair.difference < -self._noise_margin(HARM)]
        if len(slower) > 1:
            self._judge_by_steps("rolled_back", slower, "two blocks were far slower")
        elif convincing := self._early_accept():
            self._judge_by_steps("accepted", convincing, "each step was far faster")
        elif len(self._pairs) >= self._plan.first_look:
            self._judge_by_bounds()

    def _early_accept(self) -> Sequence[_Pair]:
        """Return the pairs that are convincing without statistics, if there are any."""
        plan = self._plan
        if len(self._pairs) > 1:
            needed, last = plan.overwhelming, self._pairs[-2:]
        elif plan.overwhelming_at_once is not None:
            needed, last = plan.overwhelming_at_once, self._pairs
        else:
            return ()
        far = all(pair.least > 0 and pair.difference > self._noise_margin(needed) for pair in last)
        return last if far else ()

    def _judge_by_bounds(self) -> None:
        plan = self._plan
        found = winsorized_mean([pair.difference for pair in self._pairs])
        lower, upper = found.lower(plan.look_level), found.upper(plan.look_level)
        highest = found.upper(FUTILITY_LEVEL)
        verdict: TrialVerdict = "rejected"
        if lower > log1p(plan.min_gain / 2) and found.mean > log1p(plan.min_gain):
            verdict, reason = "accepted", "its lower bound is above half the least gain"
        elif highest < log1p(min(HARM_GAIN, plan.min_gain / 2)):
            verdict, reason = "rolled_back", "its upper bound shows harm"
        elif highest < log1p(plan.min_gain):
            reason = "its upper bound is below the least gain"
        elif len(self._pairs) >= plan.max_pairs:
            reason = "inconclusive after the maximum of pairs"
        else:
            return
        self._judge(verdict, found.mean, (lower, upper), reason)

    def _judge_by_steps(self, verdict: TrialVerdict, pairs: Sequence[_Pair], reason: str) -> None:
        mean = fmean(pair.difference for pair in self._pairs)
        bounds = min(pair.least for pair in pairs), max(pair.most for pair in pairs)
        self._judge(verdict, mean, bounds, reason)

    def _judge(
        self,
        verdict: TrialVerdict,
        mean: float,
        bounds: tuple[float, float],
        reason: str,
    ) -> None:
        self.verdict = Judgement(
            verdict=verdict,
            gain=expm1(mean),
            lower=expm1(bounds[0]),
            upper=expm1(bounds[1]),
            pairs=len(self._pairs),
            steps=self._steps,
            reason=reason,
        )
