"""Monitors what a framework trains, from before it creates the engine to the end of training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ...metrics.settings import load_settings
from ..common.interrupts import is_interrupt
from ..entry_points import attach, current_watch, expect_training, is_opened_in_step
from ..monitor.watch import NullWatch, Watch, WatchHandle
from ..sinks.sink import Sink

logger = logging.getLogger(__name__)


class Attachment:
    """What the callbacks of all frameworks have in common.

    Args:
        callback: Name of the callback, for log lines.
        settings: Settings nested as in zerowatch.toml.
        sinks: Sinks to add to the watch.

    Raises:
        SettingsError: A setting is wrong.
    """

    def __init__(
        self, callback: str, settings: Mapping[str, Any] | None, sinks: Iterable[Sink]
    ) -> None:
        self._callback, self._sinks = callback, tuple(sinks)
        self._begun: Watch | None = None
        self._is_closed = False
        self._is_on = load_settings(settings, {"enabled": True}).enabled
        self._detach = attach(settings)

    @property
    def watch(self) -> WatchHandle:
        """The watch of the engine, or one that does nothing."""
        return current_watch() or NullWatch()

    def begin_training(self) -> None:
        """Begin a training, and end the run of the one before, if it raised: no event did that.

        A watch that is opened before its training, as that of a DeepSpeed engine, stays.
        """
        watch = current_watch()
        if watch is not None and is_opened_in_step():
            interrupted = is_interrupt(watch.uncaught_error)  # the cell of a notebook
            # How a training that had no callback, or another one, has ended is not known.
            failed = watch is self._begun and not interrupted
            watch.close(failed=failed, interrupted=interrupted)
            expect_training()
        self.begin()

    def begin(self) -> None:
        """Add the sinks as soon as there is a watch. Has an effect once per watch."""
        self._is_closed = False
        watch = current_watch()
        if watch is not None and watch is not self._begun:
            self._begun = watch
            for sink in self._sinks:
                watch.add_sink(sink)

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending and remove all hooks from the engine.

        A later training has a watch of its own. Safe to call twice.
        """
        watch = current_watch()
        if watch is not None:
            watch.close(failed=failed)
        elif self._begun is None and not self._is_closed and not failed:
            self._report_no_watch()
        self._begun, self._is_closed = None, True
        expect_training()

    def _report_no_watch(self) -> None:
        if not self._is_on:
            logger.info("nothing of this training was monitored: the setting `enabled` is false")
            return
        logger.warning(
            "nothing of this training was monitored. Either it made no step, or %s was created "
            "after the model was prepared for training, or the ds config switches monitoring off, "
            "or monitoring could not start, which is an earlier line of the log",
            self._callback,
        )

    def detach(self) -> None:
        """Restore `deepspeed.initialize`, unless the script runs under `zerowatch run`."""
        self._detach()
