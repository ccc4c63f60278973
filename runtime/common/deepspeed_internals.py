"""Lists DeepSpeed's internals: private names that several packages read or patch.

Check this module when DeepSpeed is upgraded. The tests called `test_*drift.py` look up each name in
the installed DeepSpeed. They also list names that only one module uses, names that are only
written, and names that exist in some configurations only. At run time, a missing name disables the
feature that needs the name.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from .ds_config import MANAGED

logger = logging.getLogger(__name__)

Table = Mapping[str, tuple[str, ...]]  # names by "module" or "module:Class"

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
HYBRID_ENGINE = "deepspeed.runtime.hybrid_engine:DeepSpeedHybridEngine"
ZERO_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
FP16 = "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer"
FP16_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
PARAMETER_OFFLOAD = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator"
HOOK_STATE = "deepspeed.runtime.base_optimizer:BackwardHookStateManager"
BUCKET = "deepspeed.runtime.zero.stage_1_and_2:IPGBucket"

# Classes in DeepSpeed's checkpoint files. Their constructors only set attributes.
CHECKPOINT_CLASSES: Table = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}

# Names by the package that uses them.
INTERNALS: Mapping[str, Table] = {
    "engine/compression": {
        ENGINE: (
            "_reduce_non_expert_gradients",
            "allreduce_bucket",
            "gradient_average",
            "has_moe_layers",
            "seq_data_parallel_group",
            "sequence_parallel_size",
        ),
        ZERO_1_AND_2: (
            "allreduce_and_copy",
            "allreduce_and_copy_with_multiple_ranks",
            "allreduce_bucket",
            "average_tensor",
            "bit16_groups",
            "contiguous_gradients",
            "dp_process_group",
            "extra_large_param_to_reduce",
            "get_gradient_for_reduction",
            "gradient_average",
            "gradient_reduction_w_predivide",
            "ipg_buckets",
            "overlap_comm",
            "reduce_bucket_size",
            "reduce_ipg_grads",
            "reduce_scatter",
        ),
        ZERO_3: (
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
            "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
            "_get_param_partition_group",
            "all2all_process_group",
            "gradient_accumulation_dtype",
            "ipg_buckets",
        ),
        BF16: ("bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat"),
    },
    "engine/rebuild": {
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
    },
    "engine/live_settings": {
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
    },
    "trainer/oom_recovery": {
        ENGINE: (
            "_unmanaged_backward_count",
            "_manual_backward_expected",
            "_running_engine_step",
            "timers",
            "tput_timer",
            "managed_gradient_accumulation",
            "zenflow",
            "has_moe_layers",
        ),
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
    },
    "trainer/checkpoint": {ENGINE: ("_copy_recovery_script",), **CHECKPOINT_CLASSES},
}


# The first release whose engine leaves the end of a window to its caller.
FIRST_FOR_TRAINING_RUN = "0.19.4"


def training_run_refusal() -> str | None:
    """Return why a TrainingRun cannot use the installed DeepSpeed; None if it can."""
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    if hasattr(DeepSpeedEngine, MANAGED):
        return None
    return (
        f"TrainingRun needs DeepSpeed {FIRST_FOR_TRAINING_RUN} or newer, got "
        f"{deepspeed.__version__}, which ends windows itself (it has no {MANAGED}); "
        "pip install -U deepspeed, or keep your own loop: zerowatch.initialize and `zerowatch run` "
        "monitor this release"
    )


def class_path(instance: Any) -> str:
    """Return the class of an object as the tables spell it: "module:Class"."""
    return f"{type(instance).__module__}:{type(instance).__qualname__}"


def attribute(path: str, name: str) -> str:
    """Return the attribute for a name in a class's source: Python mangles `__name`."""
    return f"_{path.rpartition(':')[2]}{name}" if name.startswith("__") else name


def unknown_subclass_reason(optimizer: Any) -> str | None:
    """Return why an optimizer is not one of ZeRO's own classes; None if it is, or has no ZeRO.

    A subclass, such as SuperOffload's or ZenFlow's, has the same attributes, but may move weights
    and gradients in another way.
    """
    first, *bases = (f"{each.__module__}:{each.__qualname__}" for each in type(optimizer).__mro__)
    zero = {ZERO_1_AND_2, ZERO_3}
    if first in zero or zero.isdisjoint(bases):
        return None
    return f"{type(optimizer).__name__} overrides methods of ZeRO's own optimizer"


def missing_names(instance: Any, path: str, names: Iterable[str]) -> list[str]:
    """Return the names that an object of this class lacks."""
    return [name for name in names if not hasattr(instance, attribute(path, name))]


def missing_reason(owner: Any, path: str, *names: str) -> str | None:
    """Return why an object without one of the names cannot be used, or None if it has all."""
    missing = missing_names(owner, path, names)
    return _log_missing(path, missing[0]) if missing else None


@cache
def _log_missing(path: str, name: str) -> str:
    reason = f"this DeepSpeed has no {path.rpartition(':')[2]}.{name}"
    logger.warning("%s; the setting that needs it is disabled. Please report this.", reason)
    return reason


def missing_for_rebuild(engine: Any) -> Iterator[str]:
    """Yield the names for a rebuild that an engine, its optimizer or DeepSpeed's modules lack."""
    present = {type(one).__name__: one for one in (engine, engine.optimizer)}
    for path, names in INTERNALS["engine/rebuild"].items():
        module, _, kind = path.partition(":")
        owner = present.get(kind) if kind else importlib.import_module(module)
        if owner is not None:
            yield from (f"{path} {name}" for name in missing_names(owner, path, names))


def release_cache() -> Any | None:
    """Return DeepSpeed's cache of the parameters that ZeRO 3 releases after each module.

    DeepSpeed keeps the cache for the whole process and never clears it. Without
    `clear_release_cache`, a changed trace, reuse distance or persistence threshold has no effect.
    The cached function is in the closure of a profiling decorator. The result is None if this
    DeepSpeed has no such cache.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    owner = partitioned_param_coordinator.PartitionedParameterCoordinator
    cached = getattr(owner, attribute(COORDINATOR, "__params_to_release"), None)
    cells = (cell.cell_contents for cell in getattr(cached, "__closure__", None) or ())
    return next((each for each in (cached, *cells) if hasattr(each, "cache_clear")), None)


def clear_release_cache() -> None:
    """Make ZeRO 3 compute again which parameters it releases after each module."""
    cached = release_cache()
    if cached is not None:
        cached.cache_clear()
