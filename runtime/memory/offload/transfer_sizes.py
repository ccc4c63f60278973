"""How many bytes each offloading method of DeepSpeed's ZeRO optimizers is about to move.

Read from the optimizer as it stands before the call; sources are DeepSpeed's `stage_1_and_2.py`,
`stage3.py` and `partition_parameters.py`. Where a copy casts too, what crosses is counted: the
destination's type, except where a blocking copy to the host casts there. On the CPU accelerator
host and device are the same memory; what DeepSpeed means to move is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Moves(NamedTuple):
    """Bytes by direction; the names are the values of the metric's `direction` label."""

    to_host: int = 0
    to_device: int = 0
    to_nvme: int = 0
    from_nvme: int = 0


NOTHING = Moves()


def stage_2_accumulated(optimizer: Any, param: Any) -> Moves:
    """Tell what a gradient that waits on the host for the next micro-batch moves.

    From the second micro-batch on the sum so far comes to the device, is added to, and goes back.
    """
    waiting = stage_2_restored(optimizer, param).to_device
    return Moves(to_host=waiting, to_device=waiting if optimizer.micro_step_id > 0 else 0)


def stage_2_restored(optimizer: Any, param: Any) -> Moves:
    """Tell what of a waiting gradient comes back, at the latest for a step the script decides on.

    All of it, though this rank needs its part only, unless the master weights are of 16 bits.
    """
    if optimizer.low_precision_master_weights_and_grads:
        return Moves(to_device=stage_2_finished(optimizer, param).to_host)
    return Moves(to_device=param.numel() * param.element_size())


def stage_2_finished(optimizer: Any, param: Any) -> Moves:
    """Tell what goes to the host as this rank's part of a parameter's final gradient."""
    num_elements = optimizer.grad_position[optimizer.get_param_id(param)][3]
    return Moves(to_host=num_elements * optimizer.master_weights_and_grads_dtype.itemsize)


def stage_2_in_partition(optimizer: Any, param: Any, group_index: int | None = None) -> Moves:
    """Tell the same where gradients accumulate in fp32 on the device, and go once a step."""
    if not optimizer.is_gradient_accumulation_boundary():
        return NOTHING
    if group_index is None:
        group_index = optimizer._get_param_group_idx(param)
    if not optimizer._use_compact_grad_partition_buffer(group_index):
        return NOTHING  # the other methods will be called
    return stage_2_finished(optimizer, param)


def stage_2_updated(optimizer: Any, group_index: int) -> Moves:
    """Tell what returns to the device once the host has updated a group of parameters."""
    return Moves(
        to_device=optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group_index].nbytes
    )


def stage_3_partitioned(optimizer: Any, params: Iterable[Any], partitions: Iterable[Any]) -> Moves:
    """Tell what the reduced gradients of a bucket move.

    Each is put into a buffer on the host and read back; from the second micro-batch on it is summed
    on the device, unless the buffer counts as lying there. The last sum goes to the optimizer.
    """
    held = final = 0
    finishing = optimizer.is_gradient_accumulation_boundary()
    for param, partition in zip(params, partitions, strict=False):
        if not _holds_data(optimizer, param):
            continue
        num_elements = partition.numel()
        held += num_elements
        if finishing and _optimizer_reads_host(optimizer, param):
            final += num_elements
    trip = held * optimizer.gradient_accumulation_dtype.itemsize
    if optimizer.micro_step_id > 0 and counts_as_device(optimizer.grad_partitions_flat_buffer):
        trip = 0
    final *= optimizer.master_weights_and_grads_dtype.itemsize
    return Moves(to_host=trip + final, to_device=trip)


def stage_3_finalized(optimizer: Any) -> Moves:
    """Tell what a step moves first, where the script says when one is due."""
    read = final = 0
    for group in optimizer.fp16_groups:
        for param in group:
            if param.ds_id not in optimizer._offload_boundary_param_ids:
                continue
            read += param.partition_numel()
            if _optimizer_reads_host(optimizer, param):
                final += param.partition_numel()
    if counts_as_device(optimizer.grad_partitions_flat_buffer):
        read = 0
    return Moves(
        to_host=final * optimizer.master_weights_and_grads_dtype.itemsize,
        to_device=read * optimizer.gradient_accumulation_dtype.itemsize,
    )


def stage_3_updated(optimizer: Any, sub_group: int) -> Moves:
    """Tell what crosses when updated master weights become parameters."""
    params = optimizer.fp16_partitioned_groups_flat[sub_group]
    master_on_host = _master_is_on_host(optimizer, sub_group)
    if params is None or master_on_host == optimizer.offload_param:
        return NOTHING  # to NVMe, which the handle tells; or within one memory
    if master_on_host:
        return Moves(to_device=params.nbytes)
    return Moves(to_host=optimizer.fp32_partitioned_groups_flat[sub_group].nbytes)


def stage_3_fetched(params: Iterable[Any]) -> Moves:
    """Tell what comes to the device of this rank's parts of parameters about to be gathered."""
    return Moves(to_device=sum(_fetched(param) for param in params))


def staged_for_nvme(tensor: Any, *_: Any, **__: Any) -> Moves:
    """Tell what a gradient moves into the host buffer that is written to NVMe."""
    return Moves(to_host=tensor.nbytes)


def kept_off_nvme(swap_info: Any, *_: Any, **__: Any) -> Moves:
    """Tell what the pieces of gradients move that are too small for NVMe."""
    return Moves(to_host=sum(piece.nbytes for piece in swap_info.unswapped_gradients.values()))


def _holds_data(optimizer: Any, param: Any) -> bool:
    """Tell whether this rank's part of a parameter is more than padding."""
    rank = optimizer._get_param_partition_rank(param)
    return bool(param.partition_numel() * rank < param.ds_numel)


def _optimizer_reads_host(optimizer: Any, param: Any) -> bool:
    """Tell whether the final gradient is copied into the host's memory by this very call.

    Not where it goes on to NVMe, which other methods do, nor where this part stays on the device.
    """
    sub_group = optimizer.grad_position[optimizer.get_param_id(param)][0]
    if optimizer._swappable_optimizer_subgroup(sub_group):
        return False
    return _master_is_on_host(optimizer, sub_group)


def _master_is_on_host(optimizer: Any, sub_group: int) -> bool:
    return bool(optimizer.offload_optimizer and optimizer.subgroup_to_device[sub_group] == "cpu")


def counts_as_device(tensor: Any) -> bool:
    """Ask as DeepSpeed does: the CPU accelerator says yes to host memory."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().on_accelerator(tensor))


def _fetched(param: Any) -> int:
    if param.ds_status is not type(param.ds_status).NOT_AVAILABLE:
        return 0
    part = param.ds_tensor if param.ds_secondary_tensor is None else param.ds_secondary_tensor
    if part.final_location == "nvme":  # not read yet; what stands in for it has another type
        swapper = param.nvme_swapper
        return 0 if swapper.use_gds else part.ds_numel * swapper.swap_element_size
    if part.device.type != "cpu":
        return 0
    scale = getattr(part, "ds_quant_scale", None)
    return int(part.nbytes + (0 if scale is None else scale.nbytes))
