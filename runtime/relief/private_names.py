"""What this room leans on inside DeepSpeed; a name that is gone disables what needs it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
ZERO_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
PARAMETER_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    ENGINE: (
        "allreduce_gradients",
        "tput_timer",
        "basic_optimizer",
        "managed_gradient_accumulation",
    ),
    "deepspeed.runtime.engine": ("MEMORY_OPT_ALLREDUCE_SIZE",),
    ZERO_1_2: (
        "reduce_bucket_size",
        "ipg_buckets",
        "_gradient_reduction_buffer_dtype",
        "_release_ipg_buffers",
        "_grad_acc_hooks",
        "contiguous_gradients",
        "overlap_comm",
        "reduce_scatter",
        "use_multi_rank_bucket_allreduce",
        "partition_gradients",
        "gradient_predivide_factor",
        "postscale_gradients",
        "cpu_offload",
        "single_partition_of_fp32_groups",
    ),
    ZERO_3: (
        "reduce_bucket_size",
        "ipg_buckets",
        "contiguous_gradients",
        "reduce_scatter",
        "gradient_predivide_factor",
        "postscale_gradients",
        "use_muon",
        "all2all_process_group",
        "parameter_offload",
        "persistent_parameters",
        "reduce_and_partition_stream",
        "fp32_partitioned_groups_flat",
    ),
    PARAMETER_OFFLOAD: (
        "param_coordinator",
        "mark_persistent_parameters",
        "persistent_parameters",
        "param_numel_persistence_threshold",
        "model_persistence_threshold",
        "__allgather_stream",
    ),
    COORDINATOR: (
        "__prefetch_bucket_sz",
        "__max_n_available_params",
        "__max_reuse_dist_in_numel",
        "__allgather_stream",
        "__params_to_release",
    ),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": ("fp32_groups_flat_partition",),
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": ("fp32_groups_flat",),
    CHECKPOINTING: ("CPU_CHECKPOINT", "PARTITION_ACTIVATIONS", "_cpu_offload_engine"),
}


def mangled(place: str, name: str) -> str:
    """Return the attribute that a name of a class in the table is on its instances."""
    return f"_{place.rpartition(':')[2]}{name}" if name.startswith("__") else name


def missing(owner: Any, place: str, *names: str) -> str | None:
    """Say which of these names of the table an object does not have; None if it has all."""
    for name in names:
        if not hasattr(owner, mangled(place, name)):
            return _tell(place, name)
    return None


@cache
def _tell(place: str, name: str) -> str:
    reason = f"this DeepSpeed has no {place.rpartition(':')[2]}.{name}"
    logger.warning("%s, so what needs it is switched off. Please report this.", reason)
    return reason
