"""Compares two configurations by a sequential A/B test: its design, statistics and result.

The two configurations take turns in blocks of steps. Two consecutive blocks, one of each
configuration, form a pair. The module does not depend on what the configurations are. The time of a
block is the lower median of its steps, so that spikes do not change it. The difference of a pair is
log(time of A / time of B), which is positive if B is faster. After each pair, an interim analysis
computes confidence bounds of the mean difference.

The constants were chosen on simulated training (`tests/bench/tuner/simulated_trials.py`, with seeds
other than those that it reports). Step times are correlated over about ten steps, so distant blocks
differ even if nothing changed. Many short blocks therefore show more than a few long blocks. In 360
steps, a trial with blocks of 4 steps finds 97 of 100 gains of 3 %, with 3 false accepts in 1,000
trials. With blocks of 10 steps, it finds 94 gains, with 13 false accepts. docs/trust.md reports
sessions with a single trial each, on other seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, expm1, inf, log, log1p
from statistics import fmean, median_low
from typing import Literal

from .confidence import winsorized_mean
from .policy_types import ApplyMode, Verdict

# A is the configuration in use, B the proposed one.
Variant = Literal["A", "B"]

# Maximum probability of one or more false accepts in a session, for any number of trials.
SESSION_ALPHA = 0.05
# The first trials are the most promising, and have equal parts of SESSION_ALPHA. The parts of later
# trials fall with the square of the trial's number.
EVEN_TRIALS = 5
# The sum of all parts, if the part of the first trial is 1. 0.18133 is the sum of 1/k^2 for k >= 6.
SUM_OF_PARTS = EVEN_TRIALS + EVEN_TRIALS**2 * 0.18133

# Live changes.
BLOCK_SECONDS = 2.0  # intended length of a block
MIN_BLOCK_STEPS = 2
MAX_BLOCK_STEPS = 4
LIVE_PAIRS = 32  # pairs of blocks after which an inconclusive trial ends
MIN_MEASURED_LIVE_GAIN = 0.01
# In simulation, a trial's false-accept rate is twice the level of one interim analysis. Each
# analysis therefore uses half of the trial's alpha.
LIVE_LEVEL_RATIO = 0.5

# Changes with a rebuild. A rebuild takes seconds, so blocks are longer, and small gains are not
# searched for.
REBUILD_BLOCK_SECONDS = 10.0
MIN_REBUILD_STEPS = 4
MAX_REBUILD_STEPS = 10
REBUILD_PAIRS = 8
MIN_MEASURED_REBUILD_GAIN = 0.03
# An accept requires a mean gain of 3 % besides the lower bound. A knob without effect rarely shows
# such a gain. In simulation, a trial's false-accept rate is at most a fifth of the level of one
# interim analysis. The level may therefore be four times the trial's alpha.
REBUILD_LEVEL_RATIO = 4.0

# A trial ends early if B is slower by HARM in two pairs. It also ends early if RUNAWAY_STEPS
# consecutive steps of B are all slower than A's slowest step by RUNAWAY. Fewer steps could all be
# spikes.
HARM = log(1.15)  # log ratio of step times
RUNAWAY = log(1.5)  # log ratio of step times
RUNAWAY_STEPS = 3
# A log ratio ends a trial early only if it is also above this multiple of the noise. The noise is
# the standard deviation of the log of step times before the trial.
NOISE_DEVIATIONS = 4.0
HARM_GAIN = -0.01  # an upper bound of the gain below this value shows harm
MAX_PAUSES = 3  # pauses within one block, after which a trial is aborted
MAX_UNUSABLE = 50  # consecutive unusable steps, after which a trial is aborted
# Level of the upper bound of the gain. A trial ends as futile if this bound is below the minimum
# gain. A trial that ends wrongly misses a gain, but does not do harm. In simulation, a knob without
# effect takes half as many steps as with a level of 0.02, and one more of 100 gains of 3 % is
# missed.
FUTILITY_LEVEL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialDesign:
    """Length, order and statistics of one trial; written to `decisions.jsonl`.

    Attributes:
        block_steps: Usable steps in a block.
        settle_steps: Usable steps ignored after each switch.
        min_gain: Minimum gain of throughput that is worth a change; 0.01 means 1 %.
        alpha: Maximum probability of accepting a knob without effect.
        interim_level: Level of one interim analysis. It is chosen so that the analyses of a trial
            together accept a knob without effect with a probability of at most `alpha`.
        first_interim_pair: Number of the pair after which the first interim analysis is made.
        max_pairs: Pairs after which an inconclusive trial ends.
        few_switches: Whether switches are expensive, so that there is only one switch per pair.
        starts_with: The variant of the first block, which is in use when the trial starts.
        early_accept_log_ratio: Log ratio of step times that two consecutive pairs must exceed for
            an early accept. In addition, each step of B must be faster than each step of A.
        first_pair_accept_log_ratio: Log ratio that the first pair must exceed for an early accept
            without a second pair. None if one pair is never enough.
        noise: Standard deviation of the log of step times before the trial. A log ratio ends a
            trial early only if it also exceeds NOISE_DEVIATIONS times this noise.
        initial_a_block: Seconds per sample of the steps right before the trial, used as the first
            block of A. Empty if these steps cannot be used.
    """

    block_steps: int
    settle_steps: int
    min_gain: float
    alpha: float
    interim_level: float
    first_interim_pair: int
    max_pairs: int
    few_switches: bool
    starts_with: Variant = "A"
    early_accept_log_ratio: float = log(1.25)
    first_pair_accept_log_ratio: float | None = None
    noise: float = 0.0
    initial_a_block: Sequence[float] = ()


def design_trial(
    step_seconds: float, *, number: int, apply_mode: ApplyMode, settle_steps: int
) -> TrialDesign:
    """Return the design of a trial.

    Args:
        step_seconds: Usual time of a step, above 0.
        number: 1 + the number of the session's trials that did not accept a change. A trial that
            accepts a change passes its alpha on to the next trial (online fallback procedure: Tian
            and Ramdas 2021, https://arxiv.org/abs/1910.04900).
        apply_mode: Whether the change needs a rebuild.
        settle_steps: Usable steps ignored after each switch.
    """
    alpha = trial_alpha(number)
    if apply_mode == "rebuild":
        return TrialDesign(
            block_steps=_steps(
                REBUILD_BLOCK_SECONDS / step_seconds, MIN_REBUILD_STEPS, MAX_REBUILD_STEPS
            ),
            settle_steps=settle_steps,
            min_gain=MIN_MEASURED_REBUILD_GAIN,
            alpha=alpha,
            interim_level=REBUILD_LEVEL_RATIO * alpha,
            first_interim_pair=3,
            max_pairs=REBUILD_PAIRS,
            few_switches=True,
            first_pair_accept_log_ratio=log(1.5),
        )
    return TrialDesign(
        block_steps=_steps(BLOCK_SECONDS / step_seconds, MIN_BLOCK_STEPS, MAX_BLOCK_STEPS),
        settle_steps=settle_steps,
        min_gain=MIN_MEASURED_LIVE_GAIN,
        alpha=alpha,
        interim_level=LIVE_LEVEL_RATIO * alpha,
        first_interim_pair=4,
        max_pairs=LIVE_PAIRS,
        few_switches=False,
    )


def trial_alpha(number: int) -> float:
    """Return a trial's part of `SESSION_ALPHA`.

    The parts of all trials together do not exceed `SESSION_ALPHA`.
    """
    return SESSION_ALPHA / SUM_OF_PARTS * min(1.0, (EVEN_TRIALS / number) ** 2)


def variant_sequence(*, starts_with: Variant, few_switches: bool) -> Iterator[Variant]:
    """Yield the variant of each block, without end.

    Every two blocks form a pair, with one block of each variant. The order within the pairs follows
    the Thue-Morse sequence, so that linear drift, quadratic drift and periodic changes do not favor
    a variant. With `few_switches`, the pairs alternate between A B and B A. This order needs only
    one switch per pair, but cancels linear drift only.
    """
    other: Variant = "A" if starts_with == "B" else "B"
    for pair in count():
        is_reversed = pair % 2 if few_switches else pair.bit_count() % 2
        yield from (other, starts_with) if is_reversed else (starts_with, other)


def _steps(wanted: float, least: int, most: int) -> int:
    return min(most, max(least, ceil(wanted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The measurements and the verdict of a trial.

    Attributes:
        verdict: "accepted" if B is faster, "rolled_back" if B does harm, else "rejected". A change
            is rejected if its gain is too small or uncertain.
        gain: Throughput of B divided by throughput of A, minus 1. It is the mean over all pairs.
        lower: Lower bound of the gain, at the level of an interim analysis. After an early end, the
            bound compares B's slowest step with A's fastest step.
        upper: Upper bound of the gain, at FUTILITY_LEVEL. After an early end, the bound compares
            B's fastest step with A's slowest step.
        pairs: Number of compared pairs of blocks.
        steps: Number of steps of the trial.
        reason: Why the trial ended, as half a sentence.
    """

    verdict: Verdict
    gain: float
    lower: float
    upper: float
    pairs: int
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A block of A and a block of B, each as the seconds per sample of its steps."""

    a: Sequence[float]
    b: Sequence[float]

    @property
    def difference(self) -> float:
        """Log of A's time divided by B's time."""
        return log(median_low(self.a) / median_low(self.b))

    @property
    def lowest(self) -> float:
        """Log gain if B's slowest step is compared with A's fastest step."""
        return log(min(self.a) / max(self.b))

    @property
    def highest(self) -> float:
        """Log gain if B's fastest step is compared with A's slowest step."""
        return log(max(self.a) / min(self.b))


class AbComparison:
    """Chooses the variant of the next step, and ends the trial as soon as the data allow.

    Attributes:
        variant: Variant of the next step. Once there is a result, the variant of the last step.
        result: The result; None while the trial runs.
    """

    def __init__(self, design: TrialDesign) -> None:
        self.result: TrialResult | None = None
        self._design = design
        self._sequence = variant_sequence(
            starts_with=design.starts_with, few_switches=design.few_switches
        )
        self.variant: Variant = next(self._sequence)
        # A is in use already, so only B has to settle.
        self._unsettled = design.settle_steps if self.variant == "B" else 0
        self._block: list[float] = []  # seconds per sample of the steps of the current block
        self._last: dict[Variant, Sequence[float]] = {}  # the latest complete block of each variant
        self._pairs: list[_Pair] = []
        self._first_of_pair = True
        self._steps = 0
        self._pauses = 0
        self._unusable = 0
        if design.initial_a_block and self.variant == "A":
            self._block = list(design.initial_a_block)
            self._end_block()

    @property
    def is_stalled(self) -> bool:
        """Whether the trial is interrupted too often to come to a result."""
        return self._pauses >= MAX_PAUSES or self._unusable >= MAX_UNUSABLE

    @property
    def is_settling(self) -> bool:
        """Whether the next step is not measured, because it follows a switch."""
        return self._unsettled > 0

    @property
    def may_end_block(self) -> bool:
        """Whether the next step ends a block if the step is usable."""
        if self.result or self._unsettled:
            return False
        length = len(self._block) + 1
        is_full = length >= self._design.block_steps
        return is_full or (length >= RUNAWAY_STEPS and self._is_runaway())

    def pause(self) -> None:
        """Discard the current block, because the trial is interrupted, e.g. by a checkpoint."""
        self._block = []
        self._unsettled = self._design.settle_steps
        self._pauses += 1

    def add(self, seconds_per_sample: float | None) -> None:
        """Add the next step's time. None, infinity, and values of 0 or less are unusable."""
        if self.result:
            return
        self._steps += 1
        if seconds_per_sample is None or not 0 < seconds_per_sample < inf:
            self._unusable += 1
            return
        self._unusable = 0
        if self._unsettled:
            self._unsettled -= 1
            return
        self._block.append(seconds_per_sample)
        if len(self._block) >= RUNAWAY_STEPS and self._is_runaway():
            self._stop_runaway()
        elif len(self._block) >= self._design.block_steps:
            self._end_block()

    def _is_runaway(self) -> bool:
        """Whether all steps of this block of B are far slower than the last block of A."""
        if self.variant == "A" or "A" not in self._last or not self._block:
            return False
        return log(min(self._block) / max(self._last["A"])) > self._noise_margin(RUNAWAY)

    def _noise_margin(self, ratio: float) -> float:
        """Return `ratio`, or NOISE_DEVIATIONS times the noise if that is larger."""
        return max(ratio, NOISE_DEVIATIONS * self._design.noise)

    def _stop_runaway(self) -> None:
        pair = _Pair(a=self._last["A"], b=self._block)
        self._pairs.append(pair)
        self._end_by_steps("rolled_back", [pair], "far slower from its first steps on")

    def _end_block(self) -> None:
        self._last[self.variant] = self._block
        self._block = []
        self._pauses = 0
        if not self._first_of_pair:
            self._pairs.append(_Pair(a=self._last["A"], b=self._last["B"]))
            self._check_pairs()
        self._first_of_pair = not self._first_of_pair
        if self.result is None:
            before, self.variant = self.variant, next(self._sequence)
            self._unsettled = self._design.settle_steps if self.variant != before else 0

    def _check_pairs(self) -> None:
        slower = [pair for pair in self._pairs if pair.difference < -self._noise_margin(HARM)]
        if len(slower) > 1:
            self._end_by_steps("rolled_back", slower, "two blocks were far slower")
        elif convincing := self._early_accept():
            self._end_by_steps("accepted", convincing, "each step was far faster")
        elif len(self._pairs) >= self._design.first_interim_pair:
            self._check_bounds()

    def _early_accept(self) -> Sequence[_Pair]:
        """Return the latest pairs if they suffice for an early accept, else an empty sequence."""
        design = self._design
        if len(self._pairs) > 1:
            needed, latest = design.early_accept_log_ratio, self._pairs[-2:]
        elif design.first_pair_accept_log_ratio is not None:
            needed, latest = design.first_pair_accept_log_ratio, self._pairs
        else:
            return ()
        margin = self._noise_margin(needed)
        is_far_faster = all(pair.lowest > 0 and pair.difference > margin for pair in latest)
        return latest if is_far_faster else ()

    def _check_bounds(self) -> None:
        design = self._design
        mean = winsorized_mean([pair.difference for pair in self._pairs])
        lower, upper = mean.lower(design.interim_level), mean.upper(FUTILITY_LEVEL)
        verdict: Verdict = "rejected"
        if lower > log1p(design.min_gain / 2) and mean.mean > log1p(design.min_gain):
            verdict, reason = "accepted", "its lower bound is above half the minimum gain"
        elif upper < log1p(min(HARM_GAIN, design.min_gain / 2)):
            verdict, reason = "rolled_back", "its upper bound shows harm"
        elif upper < log1p(design.min_gain):
            reason = "its upper bound is below the minimum gain"
        elif len(self._pairs) >= design.max_pairs:
            reason = "inconclusive after the maximum of pairs"
        else:
            return
        self._end(verdict, mean.mean, (lower, upper), reason)

    def _end_by_steps(self, verdict: Verdict, pairs: Sequence[_Pair], reason: str) -> None:
        mean = fmean(pair.difference for pair in self._pairs)
        bounds = min(pair.lowest for pair in pairs), max(pair.highest for pair in pairs)
        self._end(verdict, mean, bounds, reason)

    def _end(
        self,
        verdict: Verdict,
        mean: float,
        bounds: tuple[float, float],
        reason: str,
    ) -> None:
        self.result = TrialResult(
            verdict=verdict,
            gain=expm1(mean),
            lower=expm1(bounds[0]),
            upper=expm1(bounds[1]),
            pairs=len(self._pairs),
            steps=self._steps,
            reason=reason,
        )
