"""What trials may cost: a share of the training so far, and no more than they can win back."""

from __future__ import annotations

from math import inf

RATIO = 0.05
# So that a young run, where a gain pays longest, may try at once.
GRANT_SECONDS = 600.0


class ExplorationBudget:
    """Keeps the books of what trials cost this session.

    Attributes:
        spent_seconds: Of training, so far.
    """

    def __init__(self, ratio: float = RATIO, *, grant_seconds: float = GRANT_SECONDS) -> None:
        self.spent_seconds = 0.0
        self._ratio = ratio
        self._grant_seconds = grant_seconds
        self._elapsed_seconds = 0.0

    @property
    def left_seconds(self) -> float:
        """What may still be spent; below 0 where trials were dearer than expected."""
        allowed = self._ratio * (self._elapsed_seconds + self._grant_seconds)
        return allowed - self.spent_seconds

    def elapse(self, seconds: float) -> None:
        """Count time that the job trained, within trials as well."""
        self._elapsed_seconds += seconds

    def spend(self, seconds: float) -> None:
        """Charge time without training, or what a step on trial took longer than it would have.

        What it took less earns nothing.
        """
        self.spent_seconds += max(0.0, seconds)

    def allows(self, expected_cost_seconds: float) -> bool:
        """Whether a trial that is expected to cost so much fits in."""
        return expected_cost_seconds <= self.left_seconds


def pays_back(expected_gain: float, remaining_seconds: float | None, cost_seconds: float) -> bool:
    """Whether a gain of throughput is expected to save more time than it costs to find out.

    Args:
        expected_gain: 0.5 for half as much again.
        remaining_seconds: Of training as it is; None, as it is not known, is for ever.
        cost_seconds: Of the trial.
    """
    remaining = inf if remaining_seconds is None else remaining_seconds - cost_seconds
    return expected_gain > 0 and remaining * expected_gain / (1 + expected_gain) > cost_seconds
