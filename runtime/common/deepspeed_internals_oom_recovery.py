"""What abandoning a window leans on in DeepSpeed 0.19.8, by the class that owns it.

Names that it only writes, and that some configurations do not have, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from .deepspeed_internals import BF16, COORDINATOR, ENGINE, FP16, FP16_UNFUSED, ZERO_1_AND_2, ZERO_3

HOOK_STATE = "deepspeed.runtime.base_optimizer:BackwardHookStateManager"
BUCKET = "deepspeed.runtime.zero.stage_1_and_2:IPGBucket"

_ENGINE_NAMES = (
    "_unmanaged_backward_count",
    "_manual_backward_expected",
    "_running_engine_step",
    "timers",
    "tput_timer",
    "managed_gradient_accumulation",
    "zenflow",
    "has_moe_layers",
)

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    ENGINE: _ENGINE_NAMES,
    ZERO_1_AND_2: (
        "ipg_buckets",
        "extra_large_param_to_reduce",
        "previous_reduced_grads",
        "params_already_reduced",
        "ready_for_gradients",
        "averaged_gradients",
        "all_grad_tensors",
        "micro_step_id",
        "cpu_offload",
        "single_partition_of_fp32_groups",
        "_release_preflattened_grad_buffers",
        "_backward_hook_state",
    ),
    ZERO_3: (
        "parameter_offload",
        "ipg_buckets",
        "params_already_reduced",
        "param_reduce_events",
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "inf_or_nan_tracker",
        "offload_optimizer",
        "swap_optimizer",
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "_offload_boundary_param_ids",
        "reset_cpu_buffers",
        "_backward_hook_state",
    ),
    BF16: ("clear_hp_grads", "clear_lp_grads", "_backward_hook_state"),
    FP16: ("zero_grad",),
    FP16_UNFUSED: ("zero_grad",),
    HOOK_STATE: ("backward_active_depth", "reset_for_new_step", "remaining_grad_acc_hooks"),
    BUCKET: ("clear", "buffer", "reuse_events", "index"),
    COORDINATOR: (
        "is_invalid_trace",
        "_invalidate_trace",
        "_clean_inflight_param_registry",
        "release_backward_leftovers",
        "release_and_reset_all",
        "_PartitionedParameterCoordinator__params_to_release",
    ),
}
