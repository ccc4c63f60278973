"""Preconditions of a rebuild: checks an engine and its new ds config before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from ...common.deepspeed_internals import missing_for_rebuild
from ...common.ds_config import zero_stage
from ...common.ds_config_errors import misspelled_keys, value_fault
from ...common.undo import FAILURES
from .optimizer_layout import base_optimizer, group_members, layout_of
from .state_snapshot import ADAMS

# A change of these blocks would change the training itself, or leave state that does not fit the
# new tensors.
KEPT_BLOCKS = (
    "fp16",
    "bf16",
    "bfloat16",
    "torch_autocast",
    "data_types",
    "optimizer",
    "scheduler",
)
_16_BITS = ("fp16", "bf16", "bfloat16")
UNSUPPORTED_BLOCKS = {
    "compile": "DeepCompile bakes its buckets in",
    "tensor_parallel": "its shards cannot be moved",
    "hybrid_engine": "it changes the module",
    "data_efficiency": "its schedules cannot be moved",
    "expert_parallel": "its experts cannot be moved",
}
UNSUPPORTED_ZERO = {
    "zenflow": "its optimizer has a layout of its own",
    "zero_quantized_nontrainable_weights": "frozen weights would be rounded again",
}


def zero_block(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the zero_optimization block of a ds config."""
    zero = config.get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def unsupported_reason(engine: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why an engine cannot be rebuilt with another ds config; None if nothing prevents it.

    Args:
        engine: The running engine.
        old: The engine's ds config.
        new: The requested ds config.
    """
    for problems in (
        _engine_problems(engine),
        _freezing_problems(engine),
        _config_problems(old, "the present ds config"),
        _config_problems(new, "the new ds config"),
        _change_problems(old, new),
        _optimizer_problems(engine, new),
    ):
        for problem in problems:
            return problem
    return _deepspeed_error(new)


def _engine_problems(engine: Any) -> Iterator[str]:
    for name in missing_for_rebuild(engine):
        yield f"this version of DeepSpeed has no {name}, which a rebuild needs"
    if hasattr(type(engine), "train_batch"):
        yield "pipeline engines cannot be rebuilt: their layers are split over ranks"
    if engine.has_moe_layers:
        yield "mixtures of experts cannot be rebuilt: experts cannot be moved"
    if engine.is_compiled:
        yield "the engine is compiled"
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        yield "the engine has no optimizer"
    if dist.get_world_size(engine.seq_data_parallel_group) != dist.get_world_size():
        yield "tensor and sequence parallelism cannot be rebuilt; only data parallelism can"
    if _is_within_window(engine):
        yield "a window is under way; rebuild between two windows"
    try:
        layout_of(engine)
    except LookupError as error:
        yield f"the layout of {error} is not known"


def _freezing_problems(engine: Any) -> Iterator[str]:
    """Yield the parameters that were frozen or unfrozen after the engine was built.

    The optimizer of a new engine would have other parameters than this one has.
    """
    optimizer = engine.optimizer
    members = {name for group in group_members(engine) for name in group}
    # The caller's own optimizer may leave parameters out, and have frozen ones at stage 0 in fp32.
    is_own = engine.client_optimizer is not None
    may_have_frozen = is_own and optimizer is base_optimizer(optimizer)
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            size = getattr(parameter, "ds_numel", parameter.numel())
            if size and name not in members and not is_own:
                yield (
                    f"parameter {name} was unfrozen after the engine was built, and its optimizer "
                    "does not update it"
                )
        elif name in members and (not may_have_frozen or optimizer.state.get(parameter)):
            yield (
                f"parameter {name} was frozen after the engine was built, and its optimizer states "
                "would be lost"
            )


def _is_within_window(engine: Any) -> bool:
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def _config_problems(config: Mapping[str, Any], which: str) -> Iterator[str]:
    for key, why in UNSUPPORTED_BLOCKS.items():
        if config.get(key):
            yield f"{which} has {key!r}: {why}"
    zero, stage = zero_block(config), zero_stage(config)
    for key, why in UNSUPPORTED_ZERO.items():
        if zero.get(key):
            yield f"{which} has zero_optimization.{key}: {why}"
    for what in ("offload_optimizer", "offload_param"):
        block = zero.get(what) or {}
        device = str(block.get("device") or "none")
        if device == "nvme":
            yield f"{which} keeps states on NVMe (zero_optimization.{what}); they cannot be moved"
        if block.get("super_offload"):
            yield f"{which} has zero_optimization.{what}.super_offload, whose layout is not known"
        least = 3 if what == "offload_param" else 1
        if device != "none" and stage < least:
            yield f"{which}: zero_optimization.{what} needs stage {least} or more, got {stage}"


def _change_problems(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in KEPT_BLOCKS:
        if (old.get(key) or {}) != (new.get(key) or {}):
            yield f"{key!r} differs; a rebuild keeps precision, optimizer and scheduler"
    added = {key: None for key in new if key not in old}
    for key, meant in misspelled_keys(added) if added else ():
        yield f"DeepSpeed does not know the key {key!r}; did you mean {meant!r}?"
    zero = zero_block(new)
    secondary = int(zero.get("zero_hpz_partition_size", 1) or 1)
    if secondary > 1 and (zero_stage(new) != 3 or dist.get_world_size() % secondary):
        yield (
            "zero_optimization.zero_hpz_partition_size needs stage 3 and must divide the "
            f"{dist.get_world_size()} ranks, got {secondary} at stage {zero_stage(new)}"
        )
    if not new.get("managed_gradient_accumulation", True) and (
        zero.get("overlap_comm") and zero_stage(new) < 2
    ):
        yield "zero_optimization.overlap_comm needs stage 2 or 3 where the caller ends windows"
    if _is_on(new, "fp16") and (zero_stage(old) == 0) != (zero_stage(new) == 0):
        # In DeepSpeed 0.19.8, only ZeRO's optimizers scale the loss, but all optimizers divide by
        # the scale.
        yield "in fp16 DeepSpeed's stage 0 has gradients of another size than the other stages"
    in_fp32 = str((new.get("data_types") or {}).get("grad_accum_dtype")) == "fp32"
    if zero_stage(new) == 0 and in_fp32 and any(_is_on(new, key) for key in _16_BITS):
        yield "stage 0 does not accumulate 16-bit gradients in fp32 (data_types.grad_accum_dtype)"


def _is_on(config: Mapping[str, Any], block: str) -> bool:
    return bool((config.get(block) or {}).get("enabled"))


def _optimizer_problems(engine: Any, new: Mapping[str, Any]) -> Iterator[str]:
    kind = type(base_optimizer(engine.optimizer))
    name = kind.__name__
    if name == "MuonWithAuxAdam":
        yield "Muon's momentum is laid out by stage and cannot be moved"
    is_untested = zero_stage(new) > 0 and kind not in ZERO_SUPPORTED_OPTIMIZERS
    if is_untested and not new.get("zero_allow_untested_optimizer"):
        yield (
            f"DeepSpeed refuses {name} at stage {zero_stage(new)}; set "
            "zero_allow_untested_optimizer to true"
        )
    block = zero_block(new).get("offload_optimizer") or {}
    if str(block.get("device") or "none") == "none":
        return
    client = engine.client_optimizer is not None
    own = name.startswith("DeepSpeedCPU")
    if client and not own and new.get("zero_force_ds_cpu_optimizer", True):
        yield (
            f"DeepSpeed refuses to offload {name}; set zero_force_ds_cpu_optimizer to false, "
            "or train with DeepSpeedCPUAdam"
        )
    if client and name != "DeepSpeedCPUAdam" and float(block.get("ratio", 1.0)) != 1.0:
        yield f"zero_optimization.offload_optimizer.ratio needs DeepSpeedCPUAdam, got {name}"
    if not client and not own and name not in ADAMS:
        yield f"DeepSpeed offloads {name} with a class of its own, which keeps other states"


def _deepspeed_error(config: Mapping[str, Any]) -> str | None:
    """Return DeepSpeed's own error about the config; None if it accepts it."""
    try:
        DeepSpeedConfig(copy.deepcopy(dict(config)))
    except FAILURES as error:
        return f"DeepSpeed refuses it: {value_fault(error, config) or type(error).__name__}"
    return None
