"""Publishes the run's info metric, and logs where the metrics and the run log are."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import deepspeed
import deepspeed.comm.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ...metrics.catalog import training
from ..instrumentation.watch_context import WatchContext
from .run_folder import RunFolder

logger = logging.getLogger(__name__)


class RunInfoPublisher:
    """Publishes the info metric once the run has an id. Used on the watch thread.

    Args:
        context: The watch.
        folder: The run folder, which knows the run id once rank 0 has shared it.
        address: "host:port" at which this rank serves its metrics. None if it serves none.
    """

    def __init__(self, context: WatchContext, folder: RunFolder, address: str | None) -> None:
        self._context = context
        self._folder = folder
        self._address = address
        self._published = self._logged = False

    def poll(self) -> None:
        """Read the run id, and on rank 0 the other ranks' targets. Publish the info once."""
        self._folder.poll()
        engine, run_id = self._context.engine(), self._context.run_id()
        recorder, world_size = self._context.recorder, self._context.identity.world_size
        if engine is None:  # garbage-collected before `close`
            recorder.set(training.RUN_ACTIVE, 0)
        if not self._published and engine is not None and run_id is not None:
            self._published = True
            self._log()
            recorder.set_info(training.RUN_INFO, *run_info_labels(engine, run_id, world_size))

    def rebind_engine(self) -> None:
        """Publish the info again, for another engine of the same run."""
        self._context.recorder.set(training.RUN_ACTIVE, 1)  # it was 0 while no engine existed
        self._published = False

    def _log(self) -> None:
        if self._context.identity.rank != 0 or self._logged:
            return
        self._logged = True
        logger.info(
            "watching %d rank(s); metrics %s; run log %s",
            self._context.identity.world_size,
            f"http://{self._address}/metrics" if self._address else "not served",
            self._folder.path or "not written",
        )


def publish_thresholds(context: WatchContext) -> None:
    """Publish the thresholds of alerts that the settings of this run replace, on rank 0."""
    if context.identity.rank == 0:
        for name, value in context.settings.alerts.thresholds.items():
            context.recorder.set(training.ALERT_THRESHOLD, value, name)


def run_info_labels(engine: Any, run_id: str, world_size: int) -> tuple[str, ...]:
    """Return the label values of the info metric, in the order of its labels."""
    return (
        run_id,
        version("zerowatch"),
        torch.__version__,
        deepspeed.__version__,
        dist.get_backend() if dist.is_initialized() else "none",
        get_accelerator().device_name(),
        str(engine.zero_optimization_stage()),
        str(world_size),
    )


def warn_of_comms_logger() -> None:
    """Log a warning if DeepSpeed's comms_logger is on, because it changes the measured times."""
    if deepspeed.comm.comm.comms_logger.enabled:
        logger.warning(
            "DeepSpeed's comms_logger is on: it synchronizes the device after every collective, so "
            "nothing overlaps, and since 0.18.3 its n-th latency is the sum of the first n. Remove "
            '"comms_logger" from the ds config; zerowatch measures without it.'
        )
