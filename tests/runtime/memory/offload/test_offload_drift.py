"""The DeepSpeed internals that offload traffic uses still exist, with the same signatures."""

from __future__ import annotations

import importlib
import inspect
import warnings
from types import ModuleType
from typing import Any

import pytest
from class_source import source_of

from zerowatch.runtime.memory.offload import traffic as offload_traffic

STAGE_1_AND_2 = "zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE_3 = "zero.stage3:DeepSpeedZeroOptimizer_Stage3"
PARAMETERS = "zero.partition_parameters"
PIPELINED = "swap_tensor.pipelined_optimizer_swapper:PipelinedOptimizerSwapper"
UNPIPELINED = "swap_tensor.partitioned_optimizer_swapper:PartitionedOptimizerSwapper"
OPTIMIZER_SWAPPER = "swap_tensor.optimizer_utils:OptimizerSwapper"
PARAM_SWAPPER = "swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"
GRADIENT_SWAPPER = "swap_tensor.async_swapper:AsyncTensorSwapper"

# A class, and the names it must have as methods or set on `self`.
ATTRIBUTES: tuple[tuple[str, str], ...] = (
    (
        STAGE_1_AND_2,
        "cpu_offload bit16_groups grad_position get_param_id micro_step_id zenflow "
        "master_weights_and_grads_dtype low_precision_master_weights_and_grads "
        "param_buffer_of_bit16_for_cpu_offload_groups is_gradient_accumulation_boundary "
        "_get_param_group_idx _use_compact_grad_partition_buffer offloaded_states "
        "single_partition_of_fp32_groups bit16_groups_flat averaged_gradients",
    ),
    (
        STAGE_3,
        "offload_optimizer offload_param optimizer_swapper module grad_position get_param_id "
        "micro_step_id gradient_accumulation_dtype master_weights_and_grads_dtype zenflow "
        "grad_partitions_flat_buffer fp16_groups _offload_boundary_param_ids subgroup_to_device "
        "_swappable_optimizer_subgroup fp16_partitioned_groups_flat fp32_partitioned_groups_flat "
        "_get_param_partition_rank is_gradient_accumulation_boundary offloaded_states "
        "lp_param_buffer",
    ),
    (OPTIMIZER_SWAPPER, offload_traffic.NVME_REMAINDERS[0]),
    (GRADIENT_SWAPPER, f"aio_handle {offload_traffic.NVME_STAGING[0]}"),
    (UNPIPELINED, "aio_handle gradient_swapper"),
    (PIPELINED, "read_aio_handle write_aio_handle gradient_swapper"),
    (PARAM_SWAPPER, " ".join((*offload_traffic.PARAMETER_HANDLES, "use_gds swap_element_size"))),
)
CASES = [(place, name) for place, names in ATTRIBUTES for name in names.split()]
# Arguments of the patched methods, by name and order.
SIGNATURES = {
    (STAGE_1_AND_2, "async_accumulate_grad_in_cpu_via_gpu"): ["param"],
    (STAGE_1_AND_2, "async_inplace_copy_grad_to_fp32_buffer_from_gpu"): ["param"],
    (STAGE_1_AND_2, "_restore_cpu_offload_grad_to_gpu"): ["param"],
    (STAGE_1_AND_2, "copy_grads_in_partition"): ["param", "group_idx"],
    (STAGE_1_AND_2, "_optimizer_step"): ["group_no"],
    (STAGE_1_AND_2, "_release_preflattened_grad_buffers"): ["group_idx"],
    (STAGE_3, "partition_grads"): ["params_to_release", "grad_partitions"],
    (STAGE_3, "_finalize_offload_gradient_accumulation"): [],
    (STAGE_3, "_reassign_or_swap_out_partitioned_parameters"): ["sub_group_id"],
    (GRADIENT_SWAPPER, "_swap_out_tensor"): ["tensor", "swap_path"],
    (OPTIMIZER_SWAPPER, "_retrieve_unswapped_grad_partitions"): ["swap_info", "dest_buffer"],
    (STAGE_3, "reload_states"): ["non_blocking"],
    (STAGE_3, "offload_states"): ["include", "device", "pin_memory", "non_blocking"],
    (STAGE_1_AND_2, "reload_states"): ["non_blocking"],
    (STAGE_1_AND_2, "offload_states"): ["include", "device", "pin_memory", "non_blocking"],
}


def resolve(place: str) -> Any:
    module, _, name = place.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: ModuleType = importlib.import_module(f"deepspeed.runtime.{module}")
    return getattr(found, name) if name else found


def source(kind: type) -> str:
    return "".join(source_of(k) for k in kind.__mro__ if k.__module__[:4] == "deep")


@pytest.mark.parametrize(("place", "name"), CASES)
def test_the_attribute_that_offload_traffic_reads_still_exists(place: str, name: str) -> None:
    kind = resolve(place)

    assert hasattr(kind, name) or f"self.{name}" in source(kind)


@pytest.mark.parametrize(("place", "name"), SIGNATURES)
def test_the_method_still_has_the_arguments_that_are_read(place: str, name: str) -> None:
    method = getattr(resolve(place), name)
    hidden = inspect.getclosurevars(method).nonlocals.get("func", method)  # DeepSpeed's decorator

    assert list(inspect.signature(hidden).parameters)[1:] == SIGNATURES[place, name]


def test_every_patched_method_of_the_optimizers_is_checked_here() -> None:
    wrapped = {
        *offload_traffic.STAGE_1_AND_2_METHODS,
        *offload_traffic.COMPACT_METHODS,
        *offload_traffic.STAGE_3_GRADIENT_METHODS,
        *offload_traffic.STATE_METHODS,
        offload_traffic.STAGE_3_UPDATE,
        offload_traffic.UPDATE,
        offload_traffic.RELEASE,
    }

    assert wrapped <= {name for _, name in SIGNATURES}


def test_updated_parameters_are_copied_between_the_update_and_the_release() -> None:
    step = inspect.getsource(resolve(STAGE_1_AND_2).step)
    update = step.index(f"self.{offload_traffic.UPDATE}(")
    release = step.index(f"self.{offload_traffic.RELEASE}(i)")

    between = step[update:release]

    assert between.count("bit16_partitions[partition_id].data.copy_(bit16_partition_buffer") == 1


def test_handles_are_used_through_the_methods_that_are_counted() -> None:
    for place in (OPTIMIZER_SWAPPER, UNPIPELINED, PIPELINED, PARAM_SWAPPER, GRADIENT_SWAPPER):
        text = inspect.getsource(resolve(place.partition(":")[0]))

        assert not any(f".{name}(" in text for name in ("sync_pread", "sync_pwrite", "pread"))


def test_parameters_are_gathered_through_functions_of_their_own() -> None:
    text = inspect.getsource(resolve(PARAMETERS))

    assert "param.all_gather = all_gather\n" in text
    assert "param.all_gather_coalesced = all_gather_coalesced\n" in text
    for name in ("ds_status", "ds_tensor", "ds_secondary_tensor", "nvme_swapper", "ds_quant_scale"):
        assert f".{name}" in text
    assert resolve(f"{PARAMETERS}:ZeroParamStatus").NOT_AVAILABLE
