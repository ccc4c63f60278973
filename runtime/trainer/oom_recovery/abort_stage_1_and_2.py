"""Abandons a window of ZeRO stage 1 or 2."""

from __future__ import annotations

from typing import Any


def abort_stage_1_and_2(engine: Any) -> None:
    """Empty the buckets, the accumulated gradients and the account of what has been reduced."""
    optimizer = engine.optimizer
    _empty_buckets(optimizer)
    _drop_partitions(optimizer)
    if optimizer.cpu_offload:
        _drop_offloaded(optimizer)
    else:
        for partition in optimizer.single_partition_of_fp32_groups:
            partition.grad = None
    optimizer.zero_grad(set_to_none=True)  # grad_accum as well


def _empty_buckets(optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
        bucket.buffer.clear()
        bucket.reuse_events.clear()
        bucket.index = 0
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.previous_reduced_grads.clear()
    reduced = optimizer.params_already_reduced
    reduced[:] = [False] * len(reduced)
    optimizer.ready_for_gradients = False  # the next backward makes new buckets


def _drop_partitions(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer._release_preflattened_grad_buffers()
    optimizer.grads_in_partition, optimizer.grads_in_partition_offset = None, 0
    optimizer.averaged_gradients, optimizer.all_grad_tensors = {}, {}
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID


def _drop_offloaded(optimizer: Any) -> None:
    """Zero what lies on the host, for a parameter's next gradient may be added to it."""
    optimizer.reset_cpu_buffers()  # waits for copies to the host
    optimizer._offload_accumulated_param_ids = set()
    for gradient in optimizer.accumulated_grads_in_cpu.values():
        gradient.zero_()
    for partition in optimizer.single_partition_of_fp32_groups:
        if partition.grad is not None:
            partition.grad.zero_()
