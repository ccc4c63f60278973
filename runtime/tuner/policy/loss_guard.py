"""Notices a loss that went astray after a change of how numbers are rounded."""

from __future__ import annotations

from collections import deque
from statistics import median

from .types import Numerics, Proposal, StepTime

WINDOWS = 50
LEAST_WINDOWS = 10
FAR = 6.0  # standard deviations
NORMAL = 1.4826  # of a normal distribution, standard deviations in a median deviation
LEAST_SPREAD = 0.01  # of the loss; below it a steady loss would seem to leap


class LossGuard:
    """Knows the losses of the last windows, until something is tried that may move them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOWS)

    def learn(self, loss: float | None) -> None:
        """Take a loss that is beyond doubt."""
        if loss is not None:
            self._losses.append(loss)

    def check(self, proposal: Proposal, step: StepTime) -> str | None:
        """Say why a change must not stay, as a window with it shows; None where it may."""
        if step.replays:
            return "memory ran out"
        if proposal.numerics >= Numerics.STATISTICAL and self._is_far_off(step.loss):
            return f"the loss went up to {step.loss:.4g}"
        return None

    def _is_far_off(self, loss: float | None) -> bool:
        """Whether a loss is far above what was known."""
        if loss is None or len(self._losses) < LEAST_WINDOWS:
            return False
        middle = median(self._losses)
        spread = NORMAL * median(abs(each - middle) for each in self._losses)
        return loss - middle > FAR * max(spread, LEAST_SPREAD * abs(middle))
