"""Plans one optimizer step: from a model's shape, a configuration and the ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import DsConfigError
from .assumptions import assumptions, unknowns
from .batch import micro_batches, note_auto
from .config_reader import STAGES, ConfigReader
from .coordinator import TracingError
from .lower_bound import least_wire_bytes
from .memory import Partition, memory_of
from .options import Options, options_from, read_options
from .plan import Call, Plan, sum_calls
from .remarks import remarks_on, remarks_on_result
from .shapes import BYTES_OF, ModelShape, Topology
from .stage_0 import stage_0_calls
from .stage_1_and_2 import flat_groups, stage_1_and_2_calls
from .stage_3 import stage_3_step


def stages_for(topology: Topology) -> tuple[int, ...]:
    """Return the ZeRO stages that DeepSpeed runs on these ranks (pipe/engine.py:76)."""
    return STAGES[:2] if topology.pipeline_parallel > 1 else STAGES


def refuse_auto(config: Mapping[str, Any], stages: Iterable[int], origin: str) -> None:
    """Name every value that plans of these stages need and only Hugging Face could fill in.

    Raises:
        DsConfigError: There are some.
    """
    reader = ConfigReader(config, origin)
    note_auto(reader)
    for stage in stages:
        options_from(reader, stage)
    reader.raise_for_auto()


def plan_step(
    model: ModelShape,
    config: Mapping[str, Any],
    topology: Topology,
    *,
    stage: int | None = None,
    origin: str = "ds config",
) -> Plan:
    """Plan one step once training has settled.

    Args:
        model: The whole model.
        config: The DeepSpeed configuration.
        topology: The ranks.
        stage: ZeRO stage to plan for; the configuration's own by default.
        origin: Name of the configuration, for errors.

    Raises:
        DsConfigError: The configuration cannot be used with these ranks.
    """
    options = read_options(config, stage=stage, origin=origin)
    accumulated = micro_batches(config, topology.data_parallel, origin)
    _check_ranks(options, topology, origin)
    part = _part_of(model, topology)
    calls, partition, faults = _play(part, options, topology, accumulated)
    faults = [*faults, *unknowns(part, options, topology)]
    plan = Plan(
        stage=options.stage,
        collectives=sum_calls(calls, topology.backend),
        least_wire_bytes=_least(part, options, topology, accumulated),
        memory=memory_of(part, options, partition),
        exact=not faults,
        assumptions=assumptions(part, options),
        remarks=(),
    )
    said = remarks_on(options, topology, accumulated)
    return replace(plan, remarks=(*faults, *said, *remarks_on_result(plan, part, options)))


def _play(
    model: ModelShape, options: Options, topology: Topology, accumulated: int
) -> tuple[Iterable[Call], Partition, list[str]]:
    """Return the calls of a step, what a rank holds, and what keeps them from being exact."""
    trained, frozen = model.num_trained, model.num_parameters - model.num_trained
    ranks = topology.data_parallel
    if options.stage == 0:
        partition = Partition(part=trained, whole=trained, frozen=frozen)
        return stage_0_calls(model, options, topology), partition, []
    if options.stage < 3:
        whole = sum(group.numel for group in flat_groups(model, options, ranks))
        partition = Partition(part=whole // ranks, whole=whole, frozen=frozen)
        return stage_1_and_2_calls(model, options, topology, accumulated), partition, []
    faults = []
    try:
        step = stage_3_step(model, options, topology, accumulated)
    except TracingError:
        faults = ["Not exact: DeepSpeed's prefetching would fail on this order of modules."]
        step = stage_3_step(model, replace(options, prefetch_bucket_size=0), topology, accumulated)
    pieces = [(-(-p.numel // ranks), p.trained) for p in model.parameters]
    partition = Partition(
        part=sum(piece for piece, is_trained in pieces if is_trained),
        whole=trained,
        frozen=sum(piece for piece, is_trained in pieces if not is_trained),
        gathered=step.peak_gathered,
    )
    return step.calls, partition, faults


def _least(model: ModelShape, options: Options, topology: Topology, accumulated: int) -> float:
    width = BYTES_OF[options.communication_dtype]
    sent = [p for p in model.parameters if p.trained or options.stage == 3]
    return least_wire_bytes(
        options.stage,
        gradient_bytes=model.num_trained * width,
        parameter_bytes=sum(p.numel * BYTES_OF[options.model_dtype or p.dtype] for p in sent),
        micro_batches=accumulated,
        num_ranks=topology.data_parallel,
    )


def _check_ranks(options: Options, topology: Topology, origin: str) -> None:
    if options.stage not in stages_for(topology):
        raise DsConfigError(
            f"{origin}: ZeRO-{options.stage} does not go with pipeline parallelism in DeepSpeed; "
            "use stage 0 or 1"
        )
    hpz = options.hpz_partition_size
    if hpz > 1 and topology.data_parallel % hpz:
        raise DsConfigError(
            f"{origin}: zero_optimization.zero_hpz_partition_size is {hpz}, which does not divide "
            f"{topology.data_parallel} data-parallel ranks; give a divisor"
        )
    if options.uses_bf16_optimizer and not options.compute_grad_norm:
        raise DsConfigError(
            f"{origin}: zero_optimization.compute_grad_norm is false, which DeepSpeed refuses for "
            "bf16 with fp32 accumulation at stage 1; take it out"
        )


def _part_of(model: ModelShape, topology: Topology) -> ModelShape:
    """Return the share of the model that tensor and pipeline parallelism leave to a rank."""
    parts = topology.tensor_parallel * topology.pipeline_parallel
    if parts == 1:
        return model
    shares = tuple(replace(p, shape=(-(-p.numel // parts),)) for p in model.parameters)
    return replace(model, parameters=shares)
