"""What this room leans on inside DeepSpeed; a name that is gone disables what needs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from .deepspeed_internals import (
    BF16,
    COORDINATOR,
    ENGINE,
    FP16,
    PARAMETER_OFFLOAD,
    ZERO_1_AND_2,
    ZERO_3,
    missing_names,
)

logger = logging.getLogger(__name__)

CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    ENGINE: (
        "allreduce_gradients",
        "tput_timer",
        "basic_optimizer",
        "managed_gradient_accumulation",
    ),
    "deepspeed.runtime.engine": ("MEMORY_OPT_ALLREDUCE_SIZE",),
    ZERO_1_AND_2: (
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
    BF16: ("fp32_groups_flat_partition",),
    FP16: ("fp32_groups_flat",),
    CHECKPOINTING: ("CPU_CHECKPOINT", "PARTITION_ACTIVATIONS", "_cpu_offload_engine"),
}


def missing(owner: Any, place: str, *names: str) -> str | None:
    """Say which of these names of the table an object does not have; None if it has all."""
    gone = missing_names(owner, place, names)
    return _tell(place, gone[0]) if gone else None


@cache
def _tell(place: str, name: str) -> str:
    reason = f"this DeepSpeed has no {place.rpartition(':')[2]}.{name}"
    logger.warning("%s, so what needs it is switched off. Please report this.", reason)
    return reason
