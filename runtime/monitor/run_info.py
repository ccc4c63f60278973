"""Publishes what is constant in a run, and logs where the metrics and the run log are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from ...metrics.backoff import Backoff
from ...metrics.catalog import training
from ..common import accelerator
from ..common.group_backend import backend_name
from ..common.rank_store import FIRST_POLL_SECONDS, MAX_POLL_SECONDS, RankStore
from ..instrumentation.watch_context import WatchContext
from ..live_page.live_page import page_url
from .ds_config_file import write_ds_config
from .run_attempts import RunStart, begin_attempt
from .run_folder import RunFolder

logger = logging.getLogger(__name__)


class RunInfoPublisher:
    """Publishes properties and the start of the run once it has an id. Used on the watch thread.

    Args:
        context: The watch.
        store: The store in which rank 0 shares the start of the run.
        folder: The run folder, which knows the run id once rank 0 has shared it.
        address: "host:port" at which this rank serves its metrics. None if it serves none.
        info_of: Returns the labels of the info metric but for the run id, given the engine.
        is_listening: Returns whether the address is served now: its port may still be taken.
    """

    def __init__(
        self,
        context: WatchContext,
        store: RankStore,
        folder: RunFolder,
        address: str | None,
        info_of: Callable[[Any], tuple[str, ...]] | None = None,
        is_listening: Callable[[], bool] = lambda: True,
    ) -> None:
        self._context = context
        self._info_of = info_of or partial(engine_info, world_size=context.identity.world_size)
        self._store = store
        self._start: RunStart | None = None
        self._start_backoff = Backoff(FIRST_POLL_SECONDS, MAX_POLL_SECONDS)
        self._folder = folder
        self._address, self._is_listening = address, is_listening
        self._published = self._logged = self._has_written_config = False
        context.recorder.set(training.WORLD_SIZE, context.identity.world_size)

    def poll(self) -> None:
        """Read the run id, and on rank 0 the other ranks' targets. Publish the info once."""
        self._folder.poll()
        engine, run_id = self._context.engine(), self._context.run_id()
        recorder = self._context.recorder
        if engine is None:  # garbage-collected before `close`
            recorder.set(training.RUN_ACTIVE, 0)
        if not self._published and engine is not None and run_id is not None:
            self._published = True
            self._log()
            recorder.set_info(training.RUN_INFO, run_id, *self._info_of(engine))
            self._write_ds_config(engine)
        if self._start is None and run_id is not None and self._start_backoff.is_due:
            self._publish_start()

    def rebind_engine(self) -> None:
        """Publish the info again, for another engine of the same run."""
        self._context.recorder.set(training.RUN_ACTIVE, 1)  # it was 0 while no engine existed
        self._published = False

    def _write_ds_config(self, engine: Any) -> None:
        """Write the ds config of the first engine; `decisions.jsonl` has what a run changes."""
        folder = self._folder.path
        if self._context.identity.rank == 0 and folder is not None and not self._has_written_config:
            self._has_written_config = True
            write_ds_config(folder, engine, self._folder.files)

    def _publish_start(self) -> None:
        """Publish when the run started, which rank 0 reads from the run folder and shares."""
        identity, recorder = self._context.identity, self._context.recorder
        self._start_backoff.start_delay()
        if identity.rank == 0:
            self._start = begin_attempt(self._folder.path, restarts=identity.attempt)
            self._store.put("run_start", self._start.to_text())
        else:
            text = self._store.get("run_start")
            self._start = None if text is None else RunStart.from_text(text)
        if self._start is not None:
            with recorder.commit():
                recorder.set(training.RUN_START_TIMESTAMP, self._start.unix_seconds)
                recorder.set(training.RUN_ATTEMPT, self._start.earlier_attempts)

    def _log(self) -> None:
        if self._context.identity.rank != 0 or self._logged:
            return
        self._logged = True
        logger.info(
            "watching %d rank(s); %s; run log %s",
            self._context.identity.world_size,
            self._pages(),
            self._folder.path or "not written",
        )

    def _pages(self) -> str:
        if self._address is None:
            return "metrics not served"
        metrics = f"metrics http://{self._address}/metrics"
        page = page_url(self._address, self._context.settings.serve)
        pages = metrics if page is None else f"live page {page}, {metrics}"
        if self._is_listening():
            return pages
        return f"{pages}, not before port {self._address.rpartition(':')[2]} is free"


def publish_thresholds(context: WatchContext) -> None:
    """Publish the thresholds of alerts that the settings of this run replace, on rank 0."""
    if context.identity.rank == 0:
        for name, value in context.settings.alerts.thresholds.items():
            context.recorder.set(training.ALERT_THRESHOLD, value, name)


def engine_info(engine: Any, world_size: int) -> tuple[str, ...]:
    """Return the label values of the info metric after the run id, in the order of its labels."""
    return (
        version("zerowatch"),
        torch.__version__,
        getattr(sys.modules.get("deepspeed"), "__version__", "none"),
        backend_name() if dist.is_initialized() else "none",
        accelerator.device_kind(),
        str(engine.zero_optimization_stage()),
        str(world_size),
    )


def warn_of_comms_logger() -> None:
    """Log a warning if DeepSpeed's comms_logger is on, because it changes the measured times."""
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.comms_logger.enabled:
        logger.warning(
            "DeepSpeed's comms_logger is on: it synchronizes the device after every collective, so "
            "nothing overlaps, and since 0.18.3 its n-th latency is the sum of the first n. Remove "
            '"comms_logger" from the ds config; zerowatch measures without it.'
        )
