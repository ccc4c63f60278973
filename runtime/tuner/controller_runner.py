"""Runs the controller on rank 0, so that its errors never reach training. Reads the stop file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from ..common.fail_open import FailOpen
from .policy.controller import Controller
from .policy.policy_types import StepTime, SwitchRequest, SwitchResult

logger = logging.getLogger(__name__)

_OWN_FAILURE = "the tuner itself failed"
POLL_SECONDS = 1.0  # time between two batches of windows, and between two checks of the stop file

T = TypeVar("T")


class StopFile:
    """Pauses the tuner while a certain file exists.

    Args:
        path: Path that the user set; None for `tuner.stop` in the run folder.
        watch: Source of the run folder, once the run has a name.
    """

    def __init__(self, path: Path | None, watch: Any) -> None:
        self._path, self._watch = path, watch

    @property
    def path(self) -> Path | None:
        """Path of the file; None without a run folder."""
        folder = self._watch.run_folder
        return self._path or (None if folder is None else folder / "tuner.stop")

    def exists(self) -> bool | None:
        """Whether the file exists; None if a disk error prevents the check."""
        path = self.path
        try:
            return path is not None and path.exists()
        except OSError:
            return None


class ControllerRunner:
    """Runs the controller. After its first error, all ranks roll back to the known good values.

    Code that runs only once per window finds cold CPU caches, and takes ten times as long. If there
    is no trial, windows are therefore buffered, and passed to the controller about once a second.

    Args:
        controller: The run's controller.
        fail_open: Disables the controller at its first error.
        stop_file: Pauses the tuner.

    Attributes:
        needs_exchange: Whether all ranks have to exchange a switch request after the next window.
        is_on_trial: Whether the ranks use a configuration that is not known to be good.
    """

    def __init__(self, controller: Controller, fail_open: FailOpen, stop_file: StopFile) -> None:
        self._controller, self._stop_file = controller, stop_file
        self._guarded = fail_open.wrap("tuner", self._call, is_retried=False)
        self._in_use = controller.configuration.known_good
        self._is_stopped = False
        self._next_poll = 0.0
        self._buffered: list[StepTime] = []
        self.needs_exchange = self.is_on_trial = self._accepts_batches = False

    def on_window_end(self, step: StepTime) -> None:
        """Handle a committed window."""
        self._buffered.append(step)
        now = monotonic()
        is_urgent = step.replays or step.is_risky
        if self._accepts_batches and not is_urgent and now < self._next_poll:
            return
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._poll_stop_file()
        self._flush()

    def on_window_failed(self) -> None:
        """Handle a window that ended by an error."""
        self._flush()
        self._guarded(self._controller.on_window_failed)

    def next_switch(self, *, pause_trial: bool = False) -> SwitchRequest | None:
        """Return the switch that all ranks have to make; None if nothing has to be switched.

        Args:
            pause_trial: Whether the configuration on trial must be taken out of use, e.g. for a
                checkpoint.
        """
        self._flush()
        next_switch = (
            self._controller.pause_trial
            if pause_trial
            else self._controller.configuration.pending_switch
        )
        answer = self._guarded(lambda: (next_switch(),))  # in a tuple: None is an error
        self._sync_state()
        if answer is not None:
            request: SwitchRequest | None = answer[0]
            return request
        return self._rollback_switch if self._needs_rollback else None

    def on_switched(self, request: SwitchRequest, result: SwitchResult) -> None:
        """Handle the result of a switch request."""
        if result.done:
            self._in_use = request.target
        elif not request.checked:  # a failed rollback is not repeated
            self._in_use = self._controller.configuration.known_good
        if request.reason == _OWN_FAILURE:  # the controller reports nothing any more
            _log_rollback(result)
        self._guarded(lambda: self._controller.on_switched(request, result))
        self._sync_state()

    def on_user_change(self) -> None:
        """Treat the present values of the knobs as known to be good, because the user set them."""
        self._buffered.clear()
        self._guarded(self._controller.on_user_change)
        self._in_use = self._controller.configuration.known_good
        self._sync_state()

    def close(self) -> None:
        """Record that the run ends normally."""
        self._guarded(self._controller.close)

    def _flush(self) -> None:
        """Pass the buffered windows to the controller."""
        buffered, self._buffered = self._buffered, []
        for step in buffered:
            self._guarded(partial(self._controller.on_window_end, step))
        self._sync_state()

    def _sync_state(self) -> None:
        """Copy the controller's state; after its first error only a rollback is left to do."""
        state = self._guarded(
            lambda: (self._controller.needs_exchange, self._controller.configuration.is_on_trial)
        )
        needs_rollback = self._needs_rollback
        self.needs_exchange, self.is_on_trial = state or (needs_rollback, needs_rollback)
        self._accepts_batches = self._controller.accepts_batches

    @property
    def _needs_rollback(self) -> bool:
        return self._in_use != self._controller.configuration.known_good

    @property
    def _rollback_switch(self) -> SwitchRequest:
        known_good = self._controller.configuration.known_good
        return SwitchRequest(target=known_good, reason=_OWN_FAILURE, checked=False)

    def _call(self, function: Callable[[], T]) -> T:
        return function()

    def _poll_stop_file(self) -> None:
        exists = self._stop_file.exists()
        if exists is None or exists == self._is_stopped:
            return
        self._is_stopped = exists
        path = self._stop_file.path
        if exists:
            logger.warning("tuner paused by stop file %s, trial rolled back", path)
            self._guarded(self._controller.freeze)
        else:
            logger.warning("tuner resumed, stop file %s is gone", path)
            self._guarded(self._controller.thaw)


def _log_rollback(result: SwitchResult) -> None:
    if result.done:
        logger.warning("trial rolled back on all ranks: %s", _OWN_FAILURE)
    else:
        left = f"; left: {result.remaining_changes}" if result.remaining_changes else ""
        logger.error(
            "trial could not be undone, training continues with it (%s%s)", result.reason, left
        )
