"""What watching costs and what it lost, as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..metrics.catalog import training, watching
from ..metrics.recorder import Recorder
from .hooks import Hooks
from .phase_clock import PhaseClock


class OwnCosts:
    """Publishes them each second, on the watch thread.

    Args:
        recorder: Gets the values.
        clock: Tells when training last moved.
        hooks: Counts what failed.
        seconds: By part, the seconds spent so far.
        dropped: By part, the records lost so far.
    """

    def __init__(
        self,
        recorder: Recorder,
        clock: PhaseClock,
        hooks: Hooks,
        *,
        seconds: Mapping[str, Callable[[], float]],
        dropped: Mapping[str, Callable[[], int]],
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._hooks = hooks
        self._seconds = seconds
        self._dropped = dropped

    def publish(self) -> None:
        """Publish all of it as it stands."""
        put = self._recorder
        with put.commit():
            put.set(training.LAST_ACTIVITY_TIMESTAMP, time.time() - self._clock.idle_seconds())
            put.set(watching.WATCH_LAST_UPDATE_TIMESTAMP, time.time())
            for part, spent in self._seconds.items():
                put.set(watching.WATCH_SECONDS, spent(), part)
            for part, lost in self._dropped.items():
                put.set(watching.DROPPED_RECORDS, lost(), part)
            for hook, failures in list(self._hooks.failures.items()):
                put.set(watching.HOOK_FAILURES, failures, hook)
