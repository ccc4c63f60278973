"""Abandons the accumulation window under way, as if its forwards and backwards had never been.

Weights, optimizer state, loss scale and random generators stay as they are. To be called between
calls of the engine, on all ranks, after the exception that ended the window has been let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....errors import ZerowatchError
from ...common.deepspeed_internals import (
    BF16,
    COORDINATOR,
    ENGINE,
    FP16,
    FP16_UNFUSED,
    INTERNALS,
    ZERO_1_AND_2,
    ZERO_3,
    class_path,
    missing_names,
)
from .abort_stage_1_and_2 import abort_stage_1_and_2
from .abort_stage_3 import abort_stage_3

_INTERNALS = INTERNALS["trainer/oom_recovery"]


def abort_window(engine: Any) -> None:
    """Drop every trace of the micro-batches since the last `engine.step()`.

    Waits for what the device still computes and for collectives under way, which all ranks have
    issued.

    Raises:
        ZerowatchError: It is an engine of which that is not known to be complete.
    """
    reason = can_abort(engine)
    if reason is not None:
        raise ZerowatchError(f"a window of this engine cannot be abandoned: {reason}")
    _synchronize()
    _abort_engine(engine)
    _ABORTS.get(class_path(engine.optimizer), _abort_plain)(engine)
    hooks = getattr(engine.optimizer, "_backward_hook_state", None)
    if hooks is not None:
        hooks.backward_active_depth = 0
        hooks.remaining_grad_acc_hooks = 0
        hooks.reset_for_new_step()


def can_abort(engine: Any) -> str | None:
    """Say why a window of this engine cannot be abandoned; None if it can."""
    if class_path(engine) != ENGINE:
        return f"{type(engine).__name__} runs its own schedule; only DeepSpeedEngine is known"
    if missing := missing_names(engine, ENGINE, _INTERNALS[ENGINE]):
        return _unknown("engine", missing)
    if engine.managed_gradient_accumulation():
        return "set managed_gradient_accumulation to false, so that step() ends a window"
    if engine.has_moe_layers:
        return "it has mixture-of-experts layers, whose ranks do not all run the same collectives"
    if engine.zenflow:
        return "ZenFlow updates weights within a window"
    if "Muon" in type(engine.basic_optimizer).__name__:
        return "Muon keeps state of its own between micro-batches"
    return _can_abort_optimizer(engine.optimizer)


def _can_abort_optimizer(optimizer: Any) -> str | None:
    place = class_path(optimizer)
    if place not in _ABORTS:
        if type(optimizer).__module__.startswith("deepspeed.runtime"):
            return f"{type(optimizer).__name__} is not known"
        return None
    if missing := missing_names(optimizer, place, _INTERNALS[place]):
        return _unknown("optimizer", missing)
    if place != ZERO_3:
        return None
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    if missing := missing_names(coordinator, COORDINATOR, _INTERNALS[COORDINATOR]):
        return _unknown("coordinator of parameters", missing)
    if optimizer.swap_optimizer or getattr(optimizer, "params_in_nvme_and_cpu", False):
        return "its states are on NVMe, where reads and writes may be under way"
    return None


def _unknown(what: str, missing: list[str]) -> str:
    names = ", ".join(missing)
    return f"this version's {what} has no {names}; zerowatch knows DeepSpeed 0.19.8"


def _synchronize() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_synchronized_device():
        get_accelerator().synchronize()


def _abort_engine(engine: Any) -> None:
    """Reset what the engine counts and times, and what its checkpointing keeps of activations."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    engine._unmanaged_backward_count = 0
    engine._manual_backward_expected = False
    engine._running_engine_step = False
    for timer in engine.timers.get_timers().values():
        timer.started_, timer.start_event = False, None  # else its next start is refused
    engine.tput_timer.started = False
    profiler = getattr(engine, "flops_profiler", None)
    if profiler is not None:
        profiler.end_profile()
    checkpointing.reset()


def _abort_plain(engine: Any) -> None:
    """Drop the gradients of an engine whose optimizer updates the module's own parameters."""
    engine.zero_grad()


def _abort_fp16(engine: Any) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad(set_to_none=True)


def _abort_bf16(engine: Any) -> None:
    """Drop BF16_Optimizer's gradients: bf16 with stage 1 and accumulation in float32."""
    engine.optimizer.clear_lp_grads(set_to_none=True)
    engine.optimizer.clear_hp_grads()


_ABORTS: Mapping[str, Callable[[Any], None]] = {
    ZERO_1_AND_2: abort_stage_1_and_2,
    ZERO_3: abort_stage_3,
    BF16: _abort_bf16,
    FP16: _abort_fp16,
    FP16_UNFUSED: _abort_fp16,
}
