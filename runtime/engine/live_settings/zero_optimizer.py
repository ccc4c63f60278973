"""Accessors of an engine's ZeRO optimizer and of the sizes of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def zero_1_2_optimizer(engine: Any) -> Any | None:
    """Return the engine's optimizer if it is the one of ZeRO 1 and 2."""
    return engine.optimizer if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) else None


def zero_3_optimizer(engine: Any) -> Any | None:
    """Return the engine's optimizer if it is the one of ZeRO 3."""
    return engine.optimizer if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) else None


def num_elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of the whole parameter; ZeRO 3 may hold only a partition."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def total_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of elements of whole parameters."""
    return sum(map(num_elements, parameters))


def largest_itemsize(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes per element of the widest parameter dtype; 0 without parameters."""
    return max((parameter.element_size() for parameter in parameters), default=0)


def param_coordinator(zero_3: Any) -> Any:
    """Return the coordinator that gathers the parameters of ZeRO 3."""
    return zero_3.parameter_offload.param_coordinator


def synchronize_device() -> None:
    """Wait until the device is idle, so that no collective reads a buffer that will change."""
    get_accelerator().synchronize()
