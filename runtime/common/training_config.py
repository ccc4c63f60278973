"""The ds config of a TrainingRun, derived from the caller's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from ...errors import DsConfigError
from .ds_config import config_origin, read_config

logger = logging.getLogger(__name__)

MICRO_BATCH = "train_micro_batch_size_per_gpu"
MANAGED = "managed_gradient_accumulation"


def training_config(config: object) -> dict[str, Any]:
    """Return a copy of a ds config in which the caller, not the engine, ends a window.

    Args:
        config: A mapping, or the path of a JSON file.

    Raises:
        DsConfigError: It cannot be read, has no micro-batch size, or asks for pipelines.
    """
    given = read_config(config)
    if not given:
        raise DsConfigError(
            f"{config_origin(config)}: cannot be read or is empty; TrainingRun takes a ds config "
            "as a dict or as the path of a JSON file"
        )
    ours = copy.deepcopy(dict(given))
    _check_micro_batch(ours, config)
    # DeepSpeed requires that the batch sizes multiply; here the size of each batch decides.
    ours.pop("train_batch_size", None)
    ours["gradient_accumulation_steps"] = 1
    ours[MANAGED] = False
    zero = ours.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("overlap_comm") and int(zero.get("stage", 0)) < 2:
        # All reduction is in step() then, with nothing to overlap with.
        ours["zero_optimization"] = {**zero, "overlap_comm": False}
        logger.warning(
            "zero_optimization.overlap_comm disabled: it has no effect below stage 2, where a "
            "TrainingRun reduces gradients once per step"
        )
    fp16 = ours.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled") and zero_stage(ours) == 0:
        logger.warning(
            "fp16 at ZeRO stage 0: DeepSpeed 0.19 divides gradients by a loss scale that the loss "
            "was not multiplied by, so updates are too small. Use bf16, or stage 1"
        )
    return ours


def _check_micro_batch(ours: Mapping[str, Any], config: object) -> None:
    size = ours.get(MICRO_BATCH)
    if size is None and isinstance(ours.get("train_batch_size"), int):
        raise DsConfigError(
            f"{config_origin(config)}: give {MICRO_BATCH}, the samples of the first micro-batches; "
            "train_batch_size is what you pass to train_batch, over all ranks"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DsConfigError(
            f"{config_origin(config)}: {MICRO_BATCH} must be a whole number of samples, 1 or more, "
            f"got {size!r}"
        )


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested mapping with changes merged into it."""
    result = copy.deepcopy(dict(config))
    for name, value in changes.items():
        below = config.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[name] = merged(below, value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a ds config asks for."""
    zero = config.get("zero_optimization")
    return int(zero.get("stage", 0)) if isinstance(zero, Mapping) else 0
