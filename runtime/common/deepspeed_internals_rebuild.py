"""Every private name of DeepSpeed that a rebuild leans on, by where it stands.

A drift test looks for each of them in the installed DeepSpeed; where one is gone nothing is
rebuilt.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from .deepspeed_internals import (
    BF16,
    COORDINATOR,
    ENGINE,
    FP16,
    FP16_UNFUSED,
    PARAMETER_OFFLOAD,
    ZERO_1_AND_2,
    ZERO_3,
    missing_names,
)

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    ENGINE: (
        "destroy",
        "basic_optimizer",
        "client_optimizer",
        "lr_scheduler",
        "module_forward_pre_hook",
        "module_forward_post_hook",
        "seq_data_parallel_group",
        "global_steps",
        "global_samples",
        "skipped_steps",
        "micro_steps",
        "_unmanaged_backward_count",
        "torch_autocast_z0_gradscaler",
        "managed_gradient_accumulation",
        "has_moe_layers",
        "is_compiled",
    ),
    ZERO_1_AND_2: (
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "real_dp_process_group",
        "partition_size",
        "single_partition_of_fp32_groups",
        "loss_scaler",
        "torch_autocast_gradscaler",
        "custom_loss_scaler",
        "external_loss_scale",
    ),
    ZERO_3: (
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "sub_group_to_group_id",
        "_reassign_or_swap_out_partitioned_parameters",
        "invalidate_secondary_tensor",
        "_get_param_partition_rank",
        "loss_scaler",
        "torch_autocast_gradscaler",
    ),
    BF16: (
        "bf16_groups",
        "bf16_groups_flat",
        "fp32_groups_flat_partition",
        "real_dp_process_group",
    ),
    FP16: (
        "fp16_groups",
        "fp16_groups_flat",
        "fp32_groups_flat",
        "loss_scale_config",
    ),
    FP16_UNFUSED: (
        "fp16_groups",
        "fp32_groups",
        "loss_scale_config",
    ),
    "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
    PARAMETER_OFFLOAD: ("_register_deepspeed_module",),
    "deepspeed.runtime.zero.partition_parameters:Init": ("param_id",),
    COORDINATOR: ("_PartitionedParameterCoordinator__params_to_release",),
    "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses": (
        "linear_bk",
    ),
    "deepspeed.runtime.zero.partition_parameters": ("zero3_linear_wrap", "Init"),
    "deepspeed.utils.groups": ("_ZERO_PARAM_INTRA_PARALLEL_GROUP",),
    "deepspeed.comm.comm": ("cdb",),
}


def missing(engine: Any) -> Iterator[str]:
    """Yield the private names that an engine, its optimizer or DeepSpeed's modules do not have."""
    present = {type(one).__name__: one for one in (engine, engine.optimizer)}
    for place, names in PRIVATE_NAMES.items():
        module, _, kind = place.partition(":")
        owner = present.get(kind) if kind else importlib.import_module(module)
        if owner is not None:
            yield from (f"{place} {name}" for name in missing_names(owner, place, names))
