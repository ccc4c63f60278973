"""The collectives of a step with ZeRO-1 and 2: buckets of gradients, a norm, whole parameters.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .buckets import FlatGroup, cut_above, fill_buckets, flatten
from .options import Options
from .plan import Call
from .shapes import ModelShape, Topology
from .stage_0 import engine_all_reduces


def stage_1_and_2_calls(
    model: ModelShape, options: Options, topology: Topology, micro_batches: int
) -> Iterator[Call]:
    """Yield the calls of one step."""
    ranks = topology.data_parallel
    groups = flat_groups(model, options, ranks)
    if options.uses_bf16_optimizer:
        yield from engine_all_reduces([group.numel for group in groups], options, topology)
    else:
        reductions = micro_batches if options.stage == 2 else 1
        for _ in range(reductions):
            yield from _Reduction.of(model, groups, options, ranks).calls()
        yield from _checks(len(groups), options, ranks)
    if ranks > 1:
        for group in groups:
            yield Call(
                op="all_gather",
                elements=group.numel,
                dtype=group.dtype,
                purpose="parameters",
                group_size=ranks,
            )


def flat_groups(model: ModelShape, options: Options, ranks: int) -> list[FlatGroup]:
    """Lay out each param group as a flat buffer."""
    return [flatten(model, group, options, ranks) for group in model.groups()]


def _checks(num_groups: int, options: Options, ranks: int) -> Iterator[Call]:
    """Yield what finds out whether the step is to be skipped, and how far to clip."""
    if options.checks_overflow:
        yield Call(op="all_reduce", elements=1, dtype="uint8", purpose="overflow", group_size=ranks)
    for _ in range(num_groups if options.compute_grad_norm else 0):
        yield Call(op="all_reduce", elements=1, dtype="fp32", purpose="norm", group_size=ranks)


def gradients_as_they_come(options: Options) -> bool:
    """Tell whether gradients are reduced in the order of backward, else in that of parameters."""
    return options.stage >= 2 or options.overlap_comm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """One reduction of all gradients."""

    order: Sequence[int]
    sizes: Mapping[int, int]
    home: Mapping[int, FlatGroup]
    options: Options
    ranks: int

    @classmethod
    def of(
        cls, model: ModelShape, groups: Sequence[FlatGroup], options: Options, ranks: int
    ) -> _Reduction:
        in_groups = [index for group in model.groups() for index in group]
        return cls(
            order=model.gradient_order() if gradients_as_they_come(options) else in_groups,
            sizes={index: model.parameters[index].numel for index in in_groups},
            home={index: group for group in groups for index in group.offsets},
            options=options,
            ranks=ranks,
        )

    def calls(self) -> Iterator[Call]:
        for bucket in fill_buckets(self.order, self.sizes, self.options.reduce_bucket_size):
            yield from self._bucket(bucket)

    def _bucket(self, bucket: Sequence[int]) -> Iterator[Call]:
        """Yield the calls for one bucket (average_tensor, reduce_ipg_grads)."""
        contiguous = self.options.contiguous_gradients or self.options.offload_optimizer != "none"
        if not contiguous or not self.options.reduce_scatter:
            yield self._call("all_reduce", sum(self.sizes[index] for index in bucket))
            return
        limit = self.options.reduce_bucket_size
        slices = [piece for index in bucket for piece in self._slices(index)]
        if self.options.use_multi_rank_bucket_allreduce:
            for elements in cut_above([elements for _, elements in slices], limit):
                yield self._call("all_reduce", elements)
            return
        for owner in dict.fromkeys(owner for owner, _ in slices):
            for elements in cut_above([size for rank, size in slices if rank == owner], limit):
                yield self._call("reduce", elements)

    def _slices(self, index: int) -> Iterator[tuple[int, int]]:
        group = self.home[index]
        return group.slices(group.offsets[index], self.sizes[index])

    def _call(self, op: str, elements: int) -> Call:
        return Call(
            op=op,
            elements=elements,
            dtype=self.options.communication_dtype,
            purpose="gradients",
            group_size=self.ranks,
        )
