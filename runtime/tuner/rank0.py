"""Rank 0's side of the tuner: its controller, kept from ever reaching into the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TypeVar

from ...metrics.thresholds import OOM_RISK_HIGH
from ..common.fail_open import FailOpen
from .policy.controller import Controller
from .policy.types import Order, Outcome, StepTime

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at kept windows, and for the stop file

T = TypeVar("T")


class RankZeroTuner:
    """Asks the controller, and goes back to what is known to be good should that fail.

    Code that runs once a window finds cold caches, and costs ten times what it would. So while
    nothing is on trial, windows are kept and told about once a second.

    Args:
        controller: Of the run.
        fail_open: Drops the controller at its first exception.
        stop_file: Returns the file that stops the tuner while it exists; None where there is none.

    Attributes:
        meets_next: Whether all ranks are to meet after the next window.
        is_on_trial: Whether the ranks work with something that may be taken back.
    """

    def __init__(
        self, controller: Controller, fail_open: FailOpen, stop_file: Callable[[], Path | None]
    ) -> None:
        self._controller, self._stop_file = controller, stop_file
        self._ask = fail_open.wrap("tuner", self._call)
        self._in_use = controller.course.known_good
        self._is_stopped = False
        self._next_look = 0.0
        self._kept: list[StepTime] = []
        self.meets_next = self.is_on_trial = self._is_calm = False

    def window_ended(self, step: StepTime) -> None:
        """Take a committed window."""
        self._kept.append(step)
        now = monotonic()
        is_urgent = step.replays or step.oom_risk >= OOM_RISK_HIGH
        if self._is_calm and not is_urgent and now < self._next_look:
            return
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look_for_stop()
        self._flush()

    def window_failed(self) -> None:
        """Take a window that ended by an error."""
        self._flush()
        self._ask(self._controller.window_failed)

    def order(self, *, settle: bool = False) -> Order | None:
        """Return what all ranks are to do now; to `settle`, nothing stays on trial."""
        self._flush()
        asked = self._controller.settle if settle else self._controller.course.order
        found = self._ask(lambda: (asked(),))
        self._sync_state()
        if found is not None:
            order: Order | None = found[0]
            return order
        return self._rollback_order if self._needs_rollback else None

    def carried_out(self, order: Order, outcome: Outcome) -> None:
        """Take how an order ended."""
        if outcome.done:
            self._in_use = order.target
        elif not order.checked:  # there is no way back
            self._in_use = self._controller.course.known_good
        self._ask(lambda: self._controller.carried_out(order, outcome))
        self._sync_state()

    def changed(self) -> None:
        """Take it that the user changed something."""
        self._kept.clear()
        self._ask(self._controller.changed)
        self._in_use = self._controller.course.known_good
        self._sync_state()

    def close(self) -> None:
        """Take it that the run comes to its end."""
        self._ask(self._controller.close)

    def _flush(self) -> None:
        """Tell the controller of the windows that were kept."""
        kept, self._kept = self._kept, []
        for step in kept:
            self._ask(partial(self._controller.window_ended, step))
        self._sync_state()

    def _sync_state(self) -> None:
        """Learn where the controller stands; where it failed, whether the job must be put back."""
        seen = self._ask(lambda: (self._controller.meets_next, self._controller.course.is_on_trial))
        self.meets_next, self.is_on_trial = seen or (self._needs_rollback, self._needs_rollback)
        self._is_calm = self._controller.is_calm

    @property
    def _needs_rollback(self) -> bool:
        return self._in_use != self._controller.course.known_good

    @property
    def _rollback_order(self) -> Order:
        return Order(
            target=self._controller.course.known_good, why="the tuner itself failed", checked=False
        )

    def _call(self, question: Callable[[], T]) -> T:
        return question()

    def _look_for_stop(self) -> None:
        path = self._stop_file()
        try:
            stopped = path is not None and path.exists()
        except OSError:  # a disk that is gone says nothing
            return
        if stopped == self._is_stopped:
            return
        self._is_stopped = stopped
        does = "stands still, nothing stays on trial" if stopped else "goes on"
        logger.warning("%s: the tuner %s", path, does)
        self._ask(self._controller.freeze if stopped else self._controller.thaw)
