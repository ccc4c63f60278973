"""Abandons a window of ZeRO stage 3: parameters under way, the trace of modules, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...common.deepspeed_internals import clear_release_cache


def abort_stage_3(engine: Any) -> None:
    """Put every parameter back into its partition, and drop the partitions of gradients.

    Ranks may stand at different points between two collectives. So nothing is kept that decides
    what will be gathered next: no parameter stays gathered, the trace is recorded anew, and what
    was worked out from it is forgotten.
    """
    optimizer, module = engine.optimizer, engine.module
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    _leave_modules(module)
    _drop_in_flight(module)
    coordinator.release_backward_leftovers()
    if coordinator.is_invalid_trace():
        coordinator._clean_inflight_param_registry()
    else:
        coordinator._invalidate_trace()
    coordinator.release_and_reset_all(module)
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # hpZ's copy, which some ranks may have made already
    clear_release_cache()
    _drop_gradients(optimizer)


def _leave_modules(module: Any) -> None:
    """Undo what the hooks noted of forwards that did not end and backwards that did not begin."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    within = set(module.modules())
    # The bottom holds the root of each engine. Other engines' entries are not ours to take.
    while stack and stack[-1] in within and (stack[-1] is not module or stack.count(module) > 1):
        stack.pop()
    for each in within:
        each.__dict__.pop("applied_pre_backward_ref_cnt", None)
        each.ds_grads_remaining = 0
        getattr(each, "ds_recompute_parameters", set()).clear()
        if hasattr(each._parameters, "_in_forward"):
            each._parameters._in_forward = False


def _drop_in_flight(module: Any) -> None:
    """Wait for gathers under way, and throw away what they gathered.

    DeepSpeed's own waiting would first put the parameters together, which takes memory. A status
    may say that a parameter is in flight with no handle to it: the collective was never issued.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param

    registry = module.ds_inflight_param_registry
    for handle in {id(each): each for each in registry.data.values()}.values():
        for work in _works(handle):
            work.wait()
    registry.clear()
    for parameter in module.parameters():
        if parameter.ds_status == ZeroParamStatus.INFLIGHT:
            parameter.ds_active_sub_modules.clear()
            free_param(parameter)


def _works(handle: Any) -> Iterator[Any]:
    """Yield the collectives behind one of DeepSpeed's handles; none if nothing had to be sent."""
    if hasattr(handle, "handles"):  # MultipleAllGatherHandles
        for each in handle.handles:
            yield from _works(each)
        return
    for name in ("allgather_handle", "handle", "_AllGatherHandle__handle"):
        if hasattr(handle, name):
            yield getattr(handle, name)
    for name in ("quantization", "_AllGatherHandle__quantization"):
        quantization = getattr(handle, name, None)
        if quantization is not None:
            yield quantization.quant_handle


def _drop_gradients(optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    for parameter in optimizer.params_already_reduced:
        optimizer.params_already_reduced[parameter] = False
    optimizer.param_reduce_events.clear()
    optimizer.averaged_gradients = {}
    optimizer._offload_boundary_param_ids = set()
    optimizer.inf_or_nan_tracker.zero_()
    if optimizer.grad_partitions_flat_buffer is not None:
        optimizer.grad_partitions_flat_buffer.zero_()
    for partition in optimizer.fp32_partitioned_groups_flat:
        if not optimizer.offload_optimizer:
            partition.grad = None
        elif partition.grad is not None:
            partition.grad.zero_()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    for group in optimizer.fp16_groups:
        for parameter in group:
            parameter.grad = None  # before zero_grad(), which calls for streams a CPU has not
    optimizer.zero_grad(set_to_none=True)
