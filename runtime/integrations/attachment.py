"""Monitors what a framework trains, from before it creates the engine to the end of training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ..entry_points import attach, current_watch
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
        self._detach = attach(settings)

    @property
    def watch(self) -> WatchHandle:
        """The watch of the engine, or one that does nothing."""
        return current_watch() or NullWatch()

    def begin(self) -> None:
        """Add the sinks as soon as there is a watch. Has an effect once per watch."""
        watch = current_watch()
        if watch is not None and watch is not self._begun:
            self._begun = watch
            for sink in self._sinks:
                watch.add_sink(sink)

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending and remove all hooks from the engine."""
        watch = current_watch()
        if watch is not None:
            watch.close(failed=failed)
        elif self._begun is None and not failed:
            logger.warning(
                "nothing of this training was monitored: create %s before the model is prepared "
                "for training, and check ZEROWATCH_ENABLED",
                self._callback,
            )

    def detach(self) -> None:
        """Restore `deepspeed.initialize`, unless the script runs under `zerowatch run`."""
        self._detach()
