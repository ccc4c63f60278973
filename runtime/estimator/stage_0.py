"""Collectives of a step without ZeRO: DeepSpeed's engine all-reduces the gradients.

Source: DeepSpeed 0.19.8, runtime/engine.py (buffered_allreduce_fallback, clip_fp32_gradients).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .buckets import combine_messages
from .options import Options
from .plan import PlannedCall
from .shapes import ModelShape, Topology

BUCKET_ELEMENTS = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE, a constant of DeepSpeed


def stage_0_calls(model: ModelShape, options: Options, topology: Topology) -> Iterator[PlannedCall]:
    """Yield the calls of one step; only its last micro-batch reduces."""
    by_dtype: dict[str, list[int]] = {}
    for parameter in model.parameters:
        if parameter.is_trained:
            dtype = options.model_dtype or parameter.dtype
            by_dtype.setdefault(dtype, []).append(parameter.numel)
    for sizes in by_dtype.values():
        yield from engine_all_reduces(sizes, options, topology)
    ranks = topology.data_parallel
    if not options.mixed_precision and options.gradient_clipping > 0:
        yield PlannedCall(
            op="all_reduce", elements=1, dtype="fp32", purpose="norm", group_size=ranks
        )
    if options.mixed_precision and _checks_by_norm(options):
        world = topology.world_size
        yield PlannedCall(
            op="all_reduce",
            elements=1,
            dtype="fp32",
            purpose="overflow",
            group="world",
            group_size=world,
        )
        yield PlannedCall(
            op="barrier",
            elements=0,
            dtype="uint8",
            purpose="overflow",
            group="world",
            group_size=world,
        )


def _checks_by_norm(options: Options) -> bool:
    """Whether the legacy fused code checks for overflow, with an all-reduce and a barrier."""
    fused_adam = options.optimizer in ("adam", "adamw") and options.legacy_fusion
    return fused_adam or options.optimizer == "lamb"


def engine_all_reduces(
    sizes: Sequence[int], options: Options, topology: Topology
) -> Iterator[PlannedCall]:
    """Yield the engine's all-reduces of gradients of these sizes, in elements."""
    for elements in combine_messages(sizes, BUCKET_ELEMENTS):
        yield PlannedCall(
            op="all_reduce",
            elements=elements,
            dtype=options.communication_dtype,
            purpose="gradients",
            group_size=topology.data_parallel,
        )
