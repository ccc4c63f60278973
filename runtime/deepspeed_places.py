"""Where the parts of DeepSpeed stand that a run changes, and which of their names are gone.

Each room that leans on private names lists them by these places, for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
FP16 = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
FP16_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
PARAMETER_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"


def place_of(thing: Any) -> str:
    """Return where the class of a thing stands, spelled as above."""
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def attribute(place: str, name: str) -> str:
    """Return the attribute that a name in a class's own source is on its instances."""
    return f"_{place.rpartition(':')[2]}{name}" if name.startswith("__") else name


def missing_names(thing: Any, place: str, names: Iterable[str]) -> list[str]:
    """Name what a thing of that place should have and has not."""
    return [name for name in names if not hasattr(thing, attribute(place, name))]
