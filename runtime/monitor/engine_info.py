"""What is asked of an engine once, when its watch begins."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import deepspeed
import deepspeed.comm.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

logger = logging.getLogger(__name__)


def run_info_labels(engine: Any, run_id: str, world_size: int) -> tuple[str, ...]:
    """Return the label values of the run's info metric, in their order."""
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
    """Say that DeepSpeed's comms_logger is on, which changes what is measured; leave it on."""
    if deepspeed.comm.comm.comms_logger.enabled:
        logger.warning(
            "DeepSpeed's comms_logger is on: it waits for the device after every collective, so "
            "nothing overlaps, and since 0.18.3 its n-th latency is the sum of the first n. Take "
            '"comms_logger" out of the ds config; zerowatch measures without it.'
        )
