"""Computes the bytes that each offload method of DeepSpeed's ZeRO optimizers is about to move.

The source is the optimizer's state before the call, following DeepSpeed's `stage_1_and_2.py`,
`stage3.py` and `partition_parameters.py`. If a copy also casts, the bytes transferred are counted:
those of the destination's type, unless a blocking copy to the host casts there. On the CPU
accelerator host and device are the same memory; the transfers that DeepSpeed intends are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch


class TransferBytes(NamedTuple):
    """The bytes of a transfer by direction; the names are values of the label `direction`."""

    to_host: int = 0
    to_device: int = 0
    to_nvme: int = 0
    from_nvme: int = 0


NO_TRANSFER = TransferBytes()


def stage_2_accumulated(optimizer: Any, param: Any) -> TransferBytes:
    """Return the bytes of a gradient that is accumulated on the host.

    From the second micro-batch on the sum is copied to the device, added to, and copied back.
    """
    waiting = stage_2_restored(optimizer, param).to_device
    return TransferBytes(to_host=waiting, to_device=waiting if optimizer.micro_step_id > 0 else 0)


def stage_2_restored(optimizer: Any, param: Any) -> TransferBytes:
    """Return the bytes of an accumulated gradient that is copied back to the device.

    DeepSpeed copies the whole gradient, although this rank needs only its partition. With master
    weights of 16 bits it copies the partition.
    """
    if optimizer.low_precision_master_weights_and_grads:
        return TransferBytes(to_device=stage_2_finished(optimizer, param).to_host)
    return TransferBytes(to_device=param.numel() * param.element_size())


def stage_2_finished(optimizer: Any, param: Any) -> TransferBytes:
    """Return the bytes of this rank's partition of a final gradient, copied to the host."""
    num_elements = optimizer.grad_position[optimizer.get_param_id(param)][3]
    return TransferBytes(to_host=num_elements * optimizer.master_weights_and_grads_dtype.itemsize)


def stage_2_in_partition(
    optimizer: Any, param: Any, group_index: int | None = None
) -> TransferBytes:
    """Return the bytes of a final gradient that was accumulated in fp32 on the device.

    It is copied once a step; the bytes are 0 before the last micro-batch.
    """
    if not optimizer.is_gradient_accumulation_boundary():
        return NO_TRANSFER
    if group_index is None:
        group_index = optimizer._get_param_group_idx(param)
    if not optimizer._use_compact_grad_partition_buffer(group_index):
        return NO_TRANSFER  # the other methods are called
    return stage_2_finished(optimizer, param)


def stage_2_updated(optimizer: Any, group_index: int) -> TransferBytes:
    """Return the bytes of a group of parameters, copied to the device after the host's update."""
    return TransferBytes(
        to_device=optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group_index].nbytes
    )


def stage_3_partitioned(
    optimizer: Any, params: Iterable[Any], partitions: Iterable[Any]
) -> TransferBytes:
    """Return the bytes that the reduced gradients of a bucket move.

    Each is copied to a host buffer and back; from the second micro-batch on it is summed on the
    device, unless the buffer counts as device memory. The last sum goes to the optimizer.
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
    return TransferBytes(to_host=trip + final, to_device=trip)


def stage_3_finalized(optimizer: Any) -> TransferBytes:
    """Return the bytes moved before a step whose boundary the script sets."""
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
    return TransferBytes(
        to_host=final * optimizer.master_weights_and_grads_dtype.itemsize,
        to_device=read * optimizer.gradient_accumulation_dtype.itemsize,
    )


def stage_3_updated(optimizer: Any, sub_group: int) -> TransferBytes:
    """Return the bytes copied when updated master weights become parameters."""
    params = optimizer.fp16_partitioned_groups_flat[sub_group]
    master_on_host = _master_is_on_host(optimizer, sub_group)
    if params is None or master_on_host == optimizer.offload_param:
        return NO_TRANSFER  # to NVMe, counted by the handle; or within one memory
    if master_on_host:
        return TransferBytes(to_device=params.nbytes)
    return TransferBytes(to_host=optimizer.fp32_partitioned_groups_flat[sub_group].nbytes)


def stage_3_fetched(params: Iterable[Any]) -> TransferBytes:
    """Return the bytes of this rank's partitions fetched to the device for a gather."""
    return TransferBytes(to_device=sum(_fetched(param) for param in params))


def staged_for_nvme(tensor: Any, *_: Any, **__: Any) -> TransferBytes:
    """Return the bytes of a gradient copied to the host buffer that is written to NVMe."""
    return TransferBytes(to_host=tensor.nbytes)


def kept_off_nvme(swap_info: Any, *_: Any, **__: Any) -> TransferBytes:
    """Return the bytes of gradient pieces too small for NVMe, copied to the host."""
    return TransferBytes(
        to_host=sum(piece.nbytes for piece in swap_info.unswapped_gradients.values())
    )


def states_offloaded(
    optimizer: Any, include: Container[str] | None = None, *_: Any, **__: Any
) -> TransferBytes:
    """Return the bytes that `offload_states` moves, called with the same arguments."""
    names = [
        name
        for name in _state_readers(optimizer)
        if name not in optimizer.offloaded_states and (include is None or name in include)
    ]
    on_device = filter(counts_as_device, _state_tensors(optimizer, names))
    return TransferBytes(to_host=sum(tensor.nbytes for tensor in on_device))


def states_reloaded(optimizer: Any, *_: Any, **__: Any) -> TransferBytes:
    """Return the bytes that `reload_states` moves."""
    names = [name for name in _state_readers(optimizer) if name in optimizer.offloaded_states]
    return TransferBytes(
        to_device=sum(tensor.nbytes for tensor in _state_tensors(optimizer, names))
    )


def _holds_data(optimizer: Any, param: Any) -> bool:
    """Return whether this rank's partition of a parameter is more than padding."""
    rank = optimizer._get_param_partition_rank(param)
    return bool(param.partition_numel() * rank < param.ds_numel)


def _optimizer_reads_host(optimizer: Any, param: Any) -> bool:
    """Return whether this call copies the final gradient to host memory.

    False if it goes to NVMe, by other methods, or if this partition stays on the device.
    """
    sub_group = optimizer.grad_position[optimizer.get_param_id(param)][0]
    if optimizer._swappable_optimizer_subgroup(sub_group):
        return False
    return _master_is_on_host(optimizer, sub_group)


def _master_is_on_host(optimizer: Any, sub_group: int) -> bool:
    return bool(optimizer.offload_optimizer and optimizer.subgroup_to_device[sub_group] == "cpu")


def counts_as_device(tensor: Any) -> bool:
    """Return whether DeepSpeed counts a tensor as device memory, as the CPU accelerator does."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().on_accelerator(tensor))


def _fetched(param: Any) -> int:
    if param.ds_status is not type(param.ds_status).NOT_AVAILABLE:
        return 0
    part = param.ds_tensor if param.ds_secondary_tensor is None else param.ds_secondary_tensor
    if part.final_location == "nvme":  # not read yet; its placeholder has another type
        swapper = param.nvme_swapper
        return 0 if swapper.use_gds else part.ds_numel * swapper.swap_element_size
    if part.device.type != "cpu":
        return 0
    scale = getattr(part, "ds_quant_scale", None)
    return int(part.nbytes + (0 if scale is None else scale.nbytes))


def _state_tensors(optimizer: Any, names: Iterable[str]) -> Iterable[torch.Tensor]:
    readers = _state_readers(optimizer)
    tensors = chain.from_iterable(readers[name](optimizer) for name in names)
    return (tensor for tensor in tensors if tensor is not None)


def _state_readers(optimizer: Any) -> Mapping[str, Callable[[Any], Iterable[torch.Tensor]]]:
    return _STAGE_2 if hasattr(optimizer, "single_partition_of_fp32_groups") else _STAGE_3


def _gradients(optimizer: Any) -> Iterable[torch.Tensor]:
    groups = (group for group in optimizer.averaged_gradients.values() if group is not None)
    for group in groups:
        flat = getattr(group, "flat_partition", None)
        yield from group if flat is None else (flat,)


def _all_states(optimizer: Any) -> Iterable[torch.Tensor]:
    states = optimizer.optimizer.state.values()
    return (value for state in states for value in state.values() if torch.is_tensor(value))


def _adam_states(optimizer: Any) -> Iterable[torch.Tensor]:
    states = optimizer.optimizer.state.values()
    return (state[name] for state in states for name in ("exp_avg", "exp_avg_sq") if name in state)


_STAGE_2: Mapping[str, Callable[[Any], Iterable[torch.Tensor]]] = {
    "hp_params": lambda optimizer: optimizer.single_partition_of_fp32_groups,
    "lp_params": lambda optimizer: optimizer.bit16_groups_flat,
    "lp_grads": _gradients,
    "optim_states": _all_states,
}
# The bucket's buffer is freed and allocated again: nothing is copied.
_STAGE_3: Mapping[str, Callable[[Any], Iterable[torch.Tensor]]] = {
    "hp_params": lambda optimizer: optimizer.fp32_partitioned_groups_flat,
    "lp_params": lambda optimizer: (optimizer.lp_param_buffer,),
    "lp_grads": lambda optimizer: (optimizer.grad_partitions_flat_buffer,),
    "optim_states": _adam_states,
}
