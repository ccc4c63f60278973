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


def remembered_releases() -> Any | None:
    """Return the cache of what each ZeRO-3 coordinator releases after each module, if found.

    DeepSpeed keeps it for the process and never empties it, so that a changed trace, reuse
    distance or persistence would not be looked at again. A decorator for profiling stands around
    the cached function.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    owner = partitioned_param_coordinator.PartitionedParameterCoordinator
    cached = getattr(owner, attribute(COORDINATOR, "__params_to_release"), None)
    cells = (cell.cell_contents for cell in getattr(cached, "__closure__", None) or ())
    return next((each for each in (cached, *cells) if hasattr(each, "cache_clear")), None)


def forget_releases() -> None:
    """Have ZeRO 3 decide anew which parameters it releases after which module."""
    remembered = remembered_releases()
    if remembered is not None:
        remembered.cache_clear()
