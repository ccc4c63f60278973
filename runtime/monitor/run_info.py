"""Says once what run this is, and publishes the facts about it and its engine."""

from __future__ import annotations

import logging

from ...metrics.catalog import training
from ..instrumentation.watch_context import WatchContext
from .engine_info import run_info_labels
from .run_folder import RunFolder

logger = logging.getLogger(__name__)


class RunInfoPublisher:
    """Introduces one watch as soon as its run has a name; used on the watch thread.

    Args:
        context: The watch.
        folder: Learns the run's name.
        address: "host:port" at which this rank serves; None where it does not.
    """

    def __init__(self, context: WatchContext, folder: RunFolder, address: str | None) -> None:
        self._context = context
        self._folder = folder
        self._address = address
        self._told = self._announced = False

    def look(self) -> None:
        """Learn the run's name and, on rank 0, where the other ranks serve."""
        self._folder.look_around()
        engine, run_id = self._context.engine(), self._context.run_id()
        recorder, world_size = self._context.recorder, self._context.identity.world_size
        if engine is None:  # collected without a close
            recorder.set(training.RUN_ACTIVE, 0)
        if not self._told and engine is not None and run_id is not None:
            self._told = True
            self._announce()
            recorder.set_info(training.RUN_INFO, *run_info_labels(engine, run_id, world_size))

    def begin_anew(self) -> None:
        """Publish the facts of another engine of the same run."""
        self._context.recorder.set(training.RUN_ACTIVE, 1)  # there may have been none a moment
        self._told = False

    def _announce(self) -> None:
        if self._context.identity.rank != 0 or self._announced:
            return
        self._announced = True
        logger.info(
            "watching %d rank(s); metrics %s; run log %s",
            self._context.identity.world_size,
            f"http://{self._address}/metrics" if self._address else "not served",
            self._folder.path or "not written",
        )
