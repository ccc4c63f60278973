"""Estimates one optimizer step from a model's shape, a DeepSpeed configuration and the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import DsConfigError
from .config_reader import STAGES, ConfigReader
from .ds_options import (
    DsOptions,
    accumulation_steps,
    options_from,
    read_accumulation_auto,
    read_options,
)
from .estimate_remarks import assumptions, config_remarks, inexact_reasons, result_remarks
from .model_memory import ModelPartition, SecondaryPartition, estimate_memory
from .model_shape import BYTES_OF, ModelShape, Topology
from .stage_0_to_2_traffic import flat_groups, stage_0_calls, stage_1_and_2_calls
from .stage_3_traffic import persistent_parameters, stage_3_step, sub_groups
from .step_estimate import EstimatedCall, StepEstimate, reference_wire_bytes, sum_calls
from .zero3_coordinator import TracingError

PIPELINE_STAGES = STAGES[:2]  # pipe/engine.py:76
# Optimizers that are DeepSpeedCPUAdam if they are offloaded; None is one of the script.
_ON_CPU_ADAM = (None, "adam", "adamw", "deepspeedcpuadam")
# Optimizers that ZeRO accepts (zero/utils.py:45), by their names in a ds config and their classes.
_ACCEPTED_BY_ZERO = (
    *_ON_CPU_ADAM,
    "fusedadam",
    "zenflowcpuadam",
    "adagrad",
    "deepspeedcpuadagrad",
    "lion",
    "fusedlion",
    "deepspeedcpulion",
    "muon",
    "muonwithauxadam",
)
_PREFETCH_FAILS = "Not exact: DeepSpeed's prefetching fails on this order of modules."


class UnsupportedStageError(DsConfigError):
    """DeepSpeed rejects the configuration at this ZeRO stage, though not at every stage."""


def estimate_step(
    model: ModelShape,
    config: Mapping[str, Any],
    topology: Topology,
    *,
    stage: int | None = None,
    origin: str = "ds config",
) -> StepEstimate:
    """Return the estimate of one optimizer step after the warm-up.

    Args:
        model: The whole model.
        config: The DeepSpeed configuration.
        topology: The ranks.
        stage: ZeRO stage to estimate; the configuration's own by default.
        origin: Name of the configuration, for errors.

    Raises:
        DsConfigError: The configuration is invalid, or does not work with these ranks.
        UnsupportedStageError: DeepSpeed rejects it at this stage.
    """
    is_pipeline = model.is_pipeline or topology.pipeline_parallel > 1
    stage = ConfigReader(config, origin).stage() if stage is None else stage
    if is_pipeline:
        _check_pipeline(stage, origin)
    options = replace(
        read_options(config, stage=stage, origin=origin),
        is_pipeline=is_pipeline,
        on_cpu=topology.backend == "gloo",
    )
    micro_batches = accumulation_steps(config, topology.data_parallel, origin)
    _check_stage(options, origin)
    _check_ranks(options, topology, origin)
    shard = _shard_of_rank(model, topology)
    step = _simulate(shard, options, topology, micro_batches)
    reasons = (*step.inexact_reasons, *inexact_reasons(shard, options, topology))
    estimate = StepEstimate(
        stage=options.stage,
        collectives=sum_calls(step.calls, topology.backend),
        reference_wire_bytes=_reference_bytes(shard, options, topology, micro_batches),
        memory=estimate_memory(shard, options, step.partition),
        exact=not reasons,
        assumptions=assumptions(shard, options),
        remarks=(),
    )
    on_config = config_remarks(options, topology, micro_batches)
    return replace(
        estimate, remarks=(*reasons, *on_config, *result_remarks(estimate, shard, options))
    )


def stages_for(topology: Topology) -> tuple[int, ...]:
    """Return the ZeRO stages that DeepSpeed supports on these ranks."""
    return PIPELINE_STAGES if topology.pipeline_parallel > 1 else STAGES


def raise_for_auto(config: Mapping[str, Any], stages: Iterable[int], origin: str) -> None:
    """Raise if estimates of these stages need a value that is "auto".

    Raises:
        DsConfigError: Names all such keys; only Hugging Face can fill them in.
    """
    reader = ConfigReader(config, origin)
    read_accumulation_auto(reader)
    for stage in stages:
        options_from(reader, stage)
    reader.raise_for_auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulatedStep:
    """The calls and the partitioning of one step; `inexact_reasons` are sentences."""

    calls: Iterable[EstimatedCall]
    partition: ModelPartition
    inexact_reasons: tuple[str, ...] = ()


def _simulate(
    model: ModelShape, options: DsOptions, topology: Topology, micro_batches: int
) -> _SimulatedStep:
    trained, ranks = model.num_trained, topology.data_parallel
    frozen = _frozen_bytes(model, options, 1)
    if options.stage == 0 and not options.uses_bf16_optimizer:
        return _SimulatedStep(
            calls=stage_0_calls(model, options, topology),
            partition=ModelPartition(part=trained, whole=trained, ranks=ranks, frozen_bytes=frozen),
        )
    if options.stage < 3:
        whole = sum(group.numel for group in flat_groups(model, options, ranks))
        return _SimulatedStep(
            calls=stage_1_and_2_calls(model, options, topology, micro_batches),
            partition=ModelPartition(
                part=whole // ranks, whole=whole, ranks=ranks, frozen_bytes=frozen
            ),
        )
    return _simulate_stage_3(model, options, topology, micro_batches)


def _simulate_stage_3(
    model: ModelShape, options: DsOptions, topology: Topology, micro_batches: int
) -> _SimulatedStep:
    reasons: tuple[str, ...] = ()
    try:
        step = stage_3_step(model, options, topology, micro_batches)
    except TracingError:
        reasons = (_PREFETCH_FAILS,)
        without_prefetch = replace(options, prefetch_bucket_size=0)
        step = stage_3_step(model, without_prefetch, topology, micro_batches)
    ranks = topology.data_parallel
    partition = ModelPartition(
        part=sum(-(-p.numel // ranks) for p in model.parameters if p.is_trained),
        whole=model.num_trained,
        ranks=ranks,
        frozen_bytes=_frozen_bytes(model, options, ranks),
        gathered_bytes=step.gathered_bytes,
        secondary=_secondary_partition(model, options, topology),
        sub_groups=tuple(sub_groups(model, options, ranks)),
    )
    return _SimulatedStep(calls=step.calls, partition=partition, inexact_reasons=reasons)


def _frozen_bytes(model: ModelShape, options: DsOptions, ranks: int) -> int:
    """Return the bytes of the frozen parameters of which each of these ranks keeps a part."""
    frozen = (p for p in model.parameters if not p.is_trained)
    return sum(-(-p.numel // ranks) * p.width_in_training(options.model_dtype) for p in frozen)


def _secondary_partition(
    model: ModelShape, options: DsOptions, topology: Topology
) -> SecondaryPartition | None:
    """Return the secondary partitions of one rank; None without hpZ."""
    if options.hpz_partition_size == 1:
        return None
    persistent = set(persistent_parameters(model, options))
    num_groups = topology.data_parallel // options.hpz_partition_size
    counts = {"released": 0, "persistent": 0}
    for index, parameter in enumerate(model.parameters):
        part = -(-parameter.numel // topology.data_parallel)
        if parameter.is_trained:
            counts["persistent" if index in persistent else "released"] += part * num_groups
    frozen_bytes = _frozen_bytes(model, options, topology.data_parallel) * num_groups
    return SecondaryPartition(**counts, frozen_bytes=frozen_bytes)


def _reference_bytes(
    model: ModelShape, options: DsOptions, topology: Topology, micro_batches: int
) -> float:
    width = BYTES_OF[options.communication_dtype]
    sent = [p for p in model.parameters if p.is_trained or options.stage == 3]
    return reference_wire_bytes(
        options.stage,
        gradient_bytes=model.num_trained * width,
        parameter_bytes=sum(p.numel * p.width_in_training(options.model_dtype) for p in sent),
        micro_batches=micro_batches,
        num_ranks=topology.data_parallel,
    )


def _check_ranks(options: DsOptions, topology: Topology, origin: str) -> None:
    hpz = options.hpz_partition_size
    if hpz > 1 and topology.data_parallel % hpz:
        raise UnsupportedStageError(
            f"{origin}: zero_optimization.zero_hpz_partition_size is {hpz}, which does not divide "
            f"{topology.data_parallel} data-parallel ranks; give a divisor"
        )


def _check_pipeline(stage: int, origin: str) -> None:
    if stage not in PIPELINE_STAGES:
        raise UnsupportedStageError(
            f"{origin}: DeepSpeed does not support ZeRO-{stage} with pipeline parallelism; use "
            "stage 0 or 1"
        )


def _check_stage(options: DsOptions, origin: str) -> None:
    accumulation, model = options.accumulation_dtype, options.model_dtype or "fp32"
    if options.stage == 0 and accumulation != model:  # engine.py:2323
        raise UnsupportedStageError(
            f"{origin}: data_types.grad_accum_dtype is {accumulation}, which DeepSpeed rejects for "
            f"{model} at stage 0; remove it, or use ZeRO"
        )
    if options.offload_optimizer_ratio < 1 and options.stage != 3:  # zero/config.py:396
        raise UnsupportedStageError(
            f"{origin}: zero_optimization.offload_optimizer.ratio is "
            f"{options.offload_optimizer_ratio:g}, which DeepSpeed rejects at stage "
            f"{options.stage}; remove it, or use stage 3"
        )
    is_partial = options.offloads_optimizer and options.offload_optimizer_ratio < 1
    if is_partial and not _has_cpu_adam(options):  # zero/stage3.py:316
        raise UnsupportedStageError(
            f"{origin}: zero_optimization.offload_optimizer.ratio is "
            f"{options.offload_optimizer_ratio:g}, which DeepSpeed rejects for optimizers other "
            "than its own Adam; remove it, or use AdamW"
        )
    is_untested = options.optimizer not in _ACCEPTED_BY_ZERO and not options.allows_untested
    if is_untested and options.stage > 0:  # engine.py:2298
        raise UnsupportedStageError(
            f"{origin}: optimizer.type is {options.optimizer}, which DeepSpeed rejects with ZeRO; "
            "set zero_allow_untested_optimizer to true, or use another optimizer"
        )
    if options.needs_cpu_optimizer and not options.on_cpu:  # ops/adam/cpu_adam.py:148
        raise UnsupportedStageError(
            f"{origin}: zero_optimization.offload_optimizer is set, but stage 0 moves nothing to "
            "the CPU, so DeepSpeed's CPU optimizer fails in its first step on a GPU; remove it, or "
            "use ZeRO"
        )
    if not options.compute_grad_norm and (reason := _needs_norm(options)):
        raise UnsupportedStageError(
            f"{origin}: zero_optimization.compute_grad_norm is false, which DeepSpeed rejects "
            f"{reason}"
        )
    if options.low_precision_states and not options.low_precision_master:  # runtime/config.py:714
        raise DsConfigError(
            f"{origin}: bf16.bf16_optimizer_states is true, which needs "
            "bf16_master_weights_and_grads; set both, or none"
        )
    if reason := _needs_wide_master(options):
        raise UnsupportedStageError(
            f"{origin}: fp16_master_weights_and_grads or bf16_master_weights_and_grads is true, "
            f"which DeepSpeed rejects {reason}"
        )
    if not options.managed_accumulation and (reason := _needs_managed_accumulation(options)):
        raise UnsupportedStageError(
            f"{origin}: managed_gradient_accumulation is false, which DeepSpeed rejects {reason}"
        )
    if options.sums_gradients and options.stage == 3:  # runtime/config.py:694
        raise UnsupportedStageError(
            f"{origin}: gradient_allreduce_op is sum, which DeepSpeed rejects at stage 3; remove "
            "it, or use a lower stage"
        )
    if _scales_before_reduce_scatter(options):
        raise UnsupportedStageError(
            f"{origin}: prescale_gradients or gradient_predivide_factor is set, which DeepSpeed "
            f"rejects at stage {options.stage} with reduce_scatter (true by default); remove it, "
            "or set zero_optimization.reduce_scatter to false"
        )


def _needs_wide_master(options: DsOptions) -> str:
    """Return where DeepSpeed rejects master weights in 16 bits, and what to do; else nothing."""
    if not options.low_precision_master:
        return ""
    if options.stage == 0:  # runtime/config.py:702
        return "at stage 0; remove it, or use ZeRO"
    if options.uses_bf16_optimizer:  # it ignores the keys
        return ""
    if options.mixes_masters:  # runtime/base_optimizer.py:499
        return "if both are; remove one of them"
    if not (options.low_precision_states or options.offloads_optimizer):
        # runtime/base_optimizer.py:507
        return (
            "without zero_optimization.offload_optimizer; set that, or, for bf16, "
            "bf16_optimizer_states too"
        )
    if options.offloads_optimizer and not _has_cpu_adam(options):  # zero/stage_1_and_2.py:331
        return "for an offloaded optimizer other than DeepSpeed's own Adam; use AdamW"
    return ""


def _has_cpu_adam(options: DsOptions) -> bool:
    """Whether DeepSpeed's own Adam updates what is offloaded, or may do so: the script's."""
    return not options.torch_adam and options.optimizer in _ON_CPU_ADAM


def _needs_managed_accumulation(options: DsOptions) -> str:
    """Return where DeepSpeed demands managed accumulation, and what to do: engine.py:2030."""
    if options.is_pipeline:
        return "with pipeline parallelism; remove it"
    if options.stage < 2 and options.overlap_comm:
        return (
            f"with overlap_comm at stage {options.stage}; remove one of them, or use stage 2 or 3"
        )
    return ""


def _scales_before_reduce_scatter(options: DsOptions) -> bool:
    """Whether DeepSpeed rejects it: zero/stage_1_and_2.py:346, zero/stage3.py:392."""
    if not options.scales_before_reduction or not options.reduce_scatter:
        return False
    return options.stage == 3 or (options.stage == 2 and not options.sums_gradients)


def _needs_norm(options: DsOptions) -> str:
    """Return where DeepSpeed demands the norm of the gradients, and what to do; else nothing."""
    if options.stage not in (1, 2):  # zero/config.py:391
        return f"at stage {options.stage}; remove it, or use stage 1 or 2"
    if options.uses_bf16_optimizer:  # engine.py:2307
        return "for bf16 with fp32 accumulation at stage 1; remove it"
    if options.gradient_clipping > 0:  # zero/stage_1_and_2.py:212
        return (
            f"with gradient_clipping above 0, which is {options.gradient_clipping:g} here (1 by "
            "default); remove it, or set gradient_clipping to 0"
        )
    if options.offloads_optimizer:  # zero/stage_1_and_2.py:216
        return "with an offloaded optimizer; remove one of the two"
    return ""


def _shard_of_rank(model: ModelShape, topology: Topology) -> ModelShape:
    """Return one rank's part of the model under tensor and pipeline parallelism."""
    parts = topology.tensor_parallel * topology.pipeline_parallel
    if parts == 1:
        return model
    shares = tuple(replace(p, shape=(-(-p.numel // parts),)) for p in model.parameters)
    buffers = tuple(  # tensor parallelism divides parameters only
        replace(each, numel=-(-each.numel // topology.pipeline_parallel)) for each in model.buffers
    )
    return replace(model, parameters=shares, buffers=buffers)
