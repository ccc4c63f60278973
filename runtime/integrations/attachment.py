"""Monitors the engine that a framework creates, from before its creation to the end of training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ..entry_points import attach, current_watch
from ..monitor.watch import NullWatch, WatchHandle
from ..sinks.sink import Sink

logger = logging.getLogger(__name__)


class Attachment:
    """What the callbacks of all frameworks have in common.

    Args:
        framework: Name of the framework, for log lines.
        settings: Settings nested as in zerowatch.toml.
        sinks: Sinks to add to the watch.

    Raises:
        SettingsError: A setting is wrong.
    """

    def __init__(
        self, framework: str, settings: Mapping[str, Any] | None, sinks: Iterable[Sink]
    ) -> None:
        self._framework, self._sinks = framework, tuple(sinks)
        self._begun: WatchHandle | None = None
        self._detach = attach(settings)

    @property
    def watch(self) -> WatchHandle:
        """The watch of the engine, or one that does nothing."""
        return current_watch() or NullWatch()

    def begin(self) -> None:
        """Add the sinks, once the engine exists. Has an effect once per watch."""
        watch = self.watch
        if isinstance(watch, NullWatch):
            if not self._begun:
                self._begun = watch
                logger.warning(
                    "%s has created no DeepSpeed engine that is monitored: nothing is recorded; "
                    "configure DeepSpeed, and create the callback before the engine",
                    self._framework,
                )
        elif watch is not self._begun:
            self._begun = watch
            for sink in self._sinks:
                watch.add_sink(sink)

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending and remove all hooks from the engine."""
        watch = current_watch()
        if watch is not None:
            watch.close(failed=failed)

    def detach(self) -> None:
        """Restore `deepspeed.initialize`, unless the script runs under `zerowatch run`."""
        self._detach()
