"""Finds the parts of a DeepSpeed engine that the changes here touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def of_stages_1_and_2(engine: Any) -> Any | None:
    """Return the engine's optimizer if it is that of ZeRO 1 and 2."""
    return engine.optimizer if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) else None


def of_stage_3(engine: Any) -> Any | None:
    """Return the engine's optimizer if it is that of ZeRO 3."""
    return engine.optimizer if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3) else None


def num_elements(parameter: torch.Tensor) -> int:
    """Return the elements of a whole parameter, of which ZeRO 3 may hold a part only."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def total_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return the elements of whole parameters."""
    return sum(map(num_elements, parameters))


def wait_for_device() -> None:
    """Wait until the device does nothing: no collective may still read what is about to change."""
    get_accelerator().synchronize()


def coordinator(zero_3: Any) -> Any:
    """Return what fetches ZeRO 3's parameters."""
    return zero_3.parameter_offload.param_coordinator
