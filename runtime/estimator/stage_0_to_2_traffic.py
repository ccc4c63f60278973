"""Estimates the collectives of a step without ZeRO, and with ZeRO-1 and 2.

Without ZeRO, DeepSpeed's engine all-reduces the gradients. ZeRO-1 and 2 reduce gradient buckets,
check for overflow, and gather the parameters.

Source: DeepSpeed 0.19.8, runtime/engine.py (buffered_allreduce_fallback, clip_fp32_gradients),
runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .buckets import FlatGroup, combine_messages, fill_buckets, flatten
from .ds_options import DsOptions
from .model_shape import ModelShape, Topology
from .step_estimate import EstimatedCall

BUCKET_ELEMENTS = 500_000_000  # MEMORY_OPT_ALLREDUCE_SIZE, a constant of DeepSpeed


def stage_0_calls(
    model: ModelShape, options: DsOptions, topology: Topology
) -> Iterator[EstimatedCall]:
    """Yield the calls of one step without ZeRO; only its last micro-batch reduces gradients."""
    by_dtype: dict[str, list[int]] = {}
    for parameter in model.parameters:
        if parameter.is_trained:
            dtype = options.model_dtype or parameter.dtype
            by_dtype.setdefault(dtype, []).append(parameter.numel)
    for sizes in by_dtype.values():
        yield from engine_all_reduces(sizes, options, topology)
    ranks = topology.data_parallel
    if not options.mixed_precision and options.gradient_clipping > 0:
        yield EstimatedCall(
            op="all_reduce", elements=1, dtype="fp32", purpose="norm", group_size=ranks
        )
    if options.mixed_precision and _checks_by_norm(options):
        world = topology.world_size
        yield EstimatedCall(
            op="all_reduce",
            elements=1,
            dtype="fp32",
            purpose="overflow",
            group="world",
            group_size=world,
        )
        yield EstimatedCall(
            op="barrier",
            elements=0,
            dtype="uint8",
            purpose="overflow",
            group="world",
            group_size=world,
        )


def _checks_by_norm(options: DsOptions) -> bool:
    """Return whether the legacy fused code checks for overflow, by an all-reduce and a barrier."""
    fused_adam = options.optimizer in ("adam", "adamw") and options.legacy_fusion
    return fused_adam or options.optimizer == "lamb"


def engine_all_reduces(
    sizes: Sequence[int], options: DsOptions, topology: Topology
) -> Iterator[EstimatedCall]:
    """Yield the engine's all-reduces of gradients of these sizes, in elements."""
    for elements in combine_messages(sizes, BUCKET_ELEMENTS):
        yield EstimatedCall(
            op="all_reduce",
            elements=elements,
            dtype=options.communication_dtype,
            purpose="gradients",
            group_size=topology.data_parallel,
        )


def stage_1_and_2_calls(
    model: ModelShape, options: DsOptions, topology: Topology, micro_batches: int
) -> Iterator[EstimatedCall]:
    """Yield the calls of one step with ZeRO-1 or 2."""
    ranks = topology.data_parallel
    groups = flat_groups(model, options, ranks)
    if options.uses_bf16_optimizer:
        yield from engine_all_reduces([group.numel for group in groups], options, topology)
    else:
        reductions = micro_batches if options.stage == 2 else 1
        for call in _GradientReduction.of(model, groups, options, ranks).calls():
            yield replace(call, times=reductions)
        yield from _step_checks(len(groups), options, ranks)
    if ranks > 1:
        for group in groups:
            yield EstimatedCall(
                op="all_gather",
                elements=group.numel,
                dtype=group.dtype,
                purpose="parameters",
                group_size=ranks,
            )


def flat_groups(model: ModelShape, options: DsOptions, ranks: int) -> list[FlatGroup]:
    """Return each param group as a flat buffer."""
    return [flatten(model, group, options, ranks) for group in model.param_groups()]


def _step_checks(num_groups: int, options: DsOptions, ranks: int) -> Iterator[EstimatedCall]:
    """Yield the calls that check for overflow and compute the gradient norm."""
    if options.checks_overflow:
        yield EstimatedCall(
            op="all_reduce", elements=1, dtype="uint8", purpose="overflow", group_size=ranks
        )
    for _ in range(num_groups if options.compute_grad_norm else 0):
        yield EstimatedCall(
            op="all_reduce", elements=1, dtype="fp32", purpose="norm", group_size=ranks
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientReduction:
    """Estimate the collectives of one reduction of all gradients.

    Attributes:
        order: Parameters in the order in which they enter buckets.
        sizes: Elements of each parameter.
        group_of: The flat param group of each parameter.
        options: The configuration.
        ranks: Data-parallel ranks.
    """

    order: Sequence[int]
    sizes: Mapping[int, int]
    group_of: Mapping[int, FlatGroup]
    options: DsOptions
    ranks: int

    @classmethod
    def of(
        cls, model: ModelShape, groups: Sequence[FlatGroup], options: DsOptions, ranks: int
    ) -> _GradientReduction:
        in_groups = [index for group in model.param_groups() for index in group]
        return cls(
            order=model.gradient_order() if options.reduces_in_backward_order else in_groups,
            sizes={index: model.parameters[index].numel for index in in_groups},
            group_of={index: group for group in groups for index in group.offsets},
            options=options,
            ranks=ranks,
        )

    def calls(self) -> Iterator[EstimatedCall]:
        for bucket in fill_buckets(self.order, self.sizes, self.options.reduce_bucket_size):
            yield from self._bucket(bucket)

    def _bucket(self, bucket: Sequence[int]) -> Iterator[EstimatedCall]:
        """Yield the calls of one bucket (average_tensor, reduce_ipg_grads)."""
        contiguous = self.options.contiguous_gradients or self.options.offloads_optimizer
        if not contiguous or not self.options.reduce_scatter:
            yield self._call("all_reduce", sum(self.sizes[index] for index in bucket))
            return
        limit = self.options.reduce_bucket_size
        slices = [each for index in bucket for each in self._slices(index)]
        if self.options.use_multi_rank_bucket_allreduce:
            for elements in combine_messages([elements for _, elements in slices], limit):
                yield self._call("all_reduce", elements)
            return
        for owner in dict.fromkeys(owner for owner, _ in slices):
            for elements in combine_messages(
                [size for rank, size in slices if rank == owner], limit
            ):
                yield self._call("reduce", elements)

    def _slices(self, index: int) -> Iterator[tuple[int, int]]:
        group = self.group_of[index]
        return group.slices(group.offsets[index], self.sizes[index])

    def _call(self, op: str, elements: int) -> EstimatedCall:
        return EstimatedCall(
            op=op,
            elements=elements,
            dtype=self.options.communication_dtype,
            purpose="gradients",
            group_size=self.ranks,
        )
