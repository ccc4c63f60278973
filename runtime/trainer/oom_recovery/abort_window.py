"""Aborts an accumulation window: removes its gradients and other state from the engine.

Weights, optimizer state, loss scale and random generators are not touched. All ranks call
`abort_window` between two calls of the engine, after they have released the exception that ended
the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ....errors import ZerowatchError
from ...common.deepspeed_internals import (
    BF16,
    COORDINATOR,
    ENGINE,
    FP16,
    FP16_UNFUSED,
    HYBRID_ENGINE,
    INTERNALS,
    ZERO_1_AND_2,
    ZERO_3,
    class_path,
    clear_release_cache,
    missing_names,
)

_INTERNALS = INTERNALS["trainer/oom_recovery"]


def abort_window(engine: Any) -> None:
    """Drop the gradients and all other state of the micro-batches since the last `engine.step()`.

    Waits for the device, and for the collectives in flight. All ranks must have issued these.

    Raises:
        ZerowatchError: The engine is of a kind whose windows cannot be aborted completely.
    """
    reason = abort_unsupported_reason(engine)
    if reason is not None:
        raise ZerowatchError(f"a window of this engine cannot be aborted: {reason}")
    _synchronize()
    _abort_engine(engine)
    _ABORTS.get(class_path(engine.optimizer), _abort_unwrapped)(engine)
    hooks = getattr(engine.optimizer, "_backward_hook_state", None)
    if hooks is not None:
        hooks.backward_active_depth = 0
        hooks.remaining_grad_acc_hooks = 0
        hooks.reset_for_new_step()


def abort_unsupported_reason(engine: Any) -> str | None:
    """Return why a window of this engine cannot be aborted; None if it can."""
    if class_path(engine) == HYBRID_ENGINE:
        return "the hybrid engine replaces layers for generation, which an abort does not restore"
    if class_path(engine) != ENGINE:
        return f"{type(engine).__name__} runs its own schedule; only DeepSpeedEngine is supported"
    if missing := missing_names(engine, ENGINE, _INTERNALS[ENGINE]):
        return _missing_reason("engine", missing)
    if engine.managed_gradient_accumulation():
        return "set managed_gradient_accumulation to false, so that step() ends a window"
    if engine.has_moe_layers:
        return "it has mixture-of-experts layers, whose ranks do not all run the same collectives"
    if engine.zenflow:
        return "ZenFlow updates weights within a window"
    if "Muon" in type(engine.basic_optimizer).__name__:
        return "Muon keeps state of its own between micro-batches"
    return _optimizer_reason(engine.optimizer)


def _optimizer_reason(optimizer: Any) -> str | None:
    place = class_path(optimizer)
    if place not in _ABORTS:
        if type(optimizer).__module__.startswith("deepspeed.runtime"):
            return f"{type(optimizer).__name__} is not supported"
        return None
    if missing := missing_names(optimizer, place, _INTERNALS[place]):
        return _missing_reason("optimizer", missing)
    if place != ZERO_3:
        return None
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if missing := missing_names(coordinator, COORDINATOR, _INTERNALS[COORDINATOR]):
        return _missing_reason("coordinator of parameters", missing)
    if optimizer.swap_optimizer or getattr(optimizer, "params_in_nvme_and_cpu", False):
        return "its states are on NVMe, where reads and writes may be in flight"
    return None


def _missing_reason(what: str, missing: list[str]) -> str:
    names = ", ".join(missing)
    return f"this version's {what} has no {names}; zerowatch knows DeepSpeed 0.19.8"


def _synchronize() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_synchronized_device():
        get_accelerator().synchronize()


def _abort_engine(engine: Any) -> None:
    """Reset the engine's counters and timers, and the state of activation checkpointing."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    engine._unmanaged_backward_count = 0
    engine._manual_backward_expected = False
    engine._running_engine_step = False
    for timer in engine.timers.get_timers().values():
        timer.started_, timer.start_event = False, None  # or its next start is refused
    engine.tput_timer.started = False
    profiler = getattr(engine, "flops_profiler", None)
    if profiler is not None:
        profiler.end_profile()
    checkpointing.reset()


def _abort_unwrapped(engine: Any) -> None:
    """Drop the gradients of an engine whose optimizer updates the module's own parameters."""
    engine.zero_grad()


def _abort_fp16(engine: Any) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad(set_to_none=True)


def _abort_bf16(engine: Any) -> None:
    """Drop BF16_Optimizer's gradients: bf16 with stage 1 and accumulation in float32."""
    engine.optimizer.clear_lp_grads(set_to_none=True)
    engine.optimizer.clear_hp_grads()


def _abort_stage_1_and_2(engine: Any) -> None:
    """Empty the buckets, the accumulated gradients and the flags of reduced parameters."""
    optimizer = engine.optimizer
    _empty_buckets(optimizer)
    _drop_partitions(optimizer)
    if optimizer.cpu_offload:
        _drop_offloaded(optimizer)
    else:
        for partition in optimizer.single_partition_of_fp32_groups:
            partition.grad = None
    optimizer.zero_grad(set_to_none=True)  # clears grad_accum too


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
    optimizer.ready_for_gradients = False  # the next backward creates new buckets


def _drop_partitions(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    optimizer._release_preflattened_grad_buffers()
    optimizer.grads_in_partition, optimizer.grads_in_partition_offset = None, 0
    optimizer.averaged_gradients, optimizer.all_grad_tensors = {}, {}
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID


def _drop_offloaded(optimizer: Any) -> None:
    """Zero the window's gradients on the host, because DeepSpeed may add the next ones to them.

    Gradients of parameters that the window has not used stay, because DeepSpeed uses those of an
    earlier window again in the update. The result is then as without the abort.
    """
    optimizer.reset_cpu_buffers()  # waits for copies to the host
    used, optimizer._offload_accumulated_param_ids = optimizer._offload_accumulated_param_ids, set()
    for number in used:
        if number in optimizer.accumulated_grads_in_cpu:
            optimizer.accumulated_grads_in_cpu[number].zero_()
        group, _, start, length = optimizer.grad_position[number]
        partition = optimizer.single_partition_of_fp32_groups[group]
        if partition.grad is not None:
            partition.grad.view(-1).narrow(0, start, length).zero_()


def _abort_stage_3(engine: Any) -> None:
    """Put every parameter back into its partition, and drop the partitions of gradients.

    The ranks may be at different points between two collectives. So all state that decides which
    parameters are gathered next is reset. No parameter stays gathered, the trace of the modules is
    recorded again, and results derived from the trace are cleared.
    """
    optimizer, module = engine.optimizer, engine.module
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    _reset_module_hooks(module)
    _drop_in_flight(module)
    coordinator.release_backward_leftovers()
    if coordinator.is_invalid_trace():
        coordinator._clean_inflight_param_registry()
    else:
        coordinator._invalidate_trace()
    coordinator.release_and_reset_all(module)
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None  # hpZ's copy; some ranks may not have one
    clear_release_cache()
    _drop_gradients(optimizer)


def _reset_module_hooks(module: Any) -> None:
    """Reset what hooks recorded in unfinished forwards and for backwards that did not begin."""
    from deepspeed.runtime.zero import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    within = set(module.modules())
    # The bottom of the stack holds each engine's root module. Other engines' entries must stay.
    while stack and stack[-1] in within and (stack[-1] is not module or stack.count(module) > 1):
        stack.pop()
    for submodule in within:
        submodule.__dict__.pop("applied_pre_backward_ref_cnt", None)
        submodule.ds_grads_remaining = 0
        getattr(submodule, "ds_recompute_parameters", set()).clear()
        if hasattr(submodule._parameters, "_in_forward"):
            submodule._parameters._in_forward = False


def _drop_in_flight(module: Any) -> None:
    """Wait for all-gathers in flight, and free the gathered parameters.

    DeepSpeed's own wait would first assemble the parameters, which takes memory. If a parameter has
    the status INFLIGHT but no handle, its collective was never issued.
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
    """Yield the work objects behind one of DeepSpeed's handles; none if nothing was sent."""
    if hasattr(handle, "handles"):  # MultipleAllGatherHandles
        for inner_handle in handle.handles:
            yield from _works(inner_handle)
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
            parameter.grad = None  # first, as zero_grad() needs streams and a CPU has none
    optimizer.zero_grad(set_to_none=True)


_ABORTS: Mapping[str, Callable[[Any], None]] = {
    ZERO_1_AND_2: _abort_stage_1_and_2,
    ZERO_3: _abort_stage_3,
    BF16: _abort_bf16,
    FP16: _abort_fp16,
    FP16_UNFUSED: _abort_fp16,
}
