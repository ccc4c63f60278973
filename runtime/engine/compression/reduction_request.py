"""One sum that ZeRO 1 or 2 wants: slices of gradients, and who of the ranks needs which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist

from .collective_steps import CollectiveSteps
from .compressor import Compressor
from .parameter_index import ParameterIndex
from .shards import direct_is_cheaper


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of a bucket.

    Attributes:
        source: This rank's gradient.
        target: Where the sum goes.
        owner: The rank of the group that needs it; None: all do.
        output: What the sum is added to as well, where DeepSpeed gathers it in another dtype.
    """

    source: torch.Tensor
    target: torch.Tensor
    owner: int | None = None
    output: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """What is to be summed, and how.

    Attributes:
        slices: Parts of the bucket.
        group: The ranks.
        dtype: What sums are rounded to: DeepSpeed's communication_data_type.
        divisor: What makes an average of the sum; 1 where the gradients were divided before.
        root: The one rank that DeepSpeed itself would reduce to; None: it would reduce to all.
    """

    slices: Sequence[Slice]
    group: Any
    dtype: torch.dtype
    divisor: float
    root: int | None = None

    @property
    def lengths(self) -> list[int]:
        """How many values each slice has."""
        return [one.source.numel() for one in self.slices]

    def deliver(self, sums: torch.Tensor) -> None:
        """Write to this rank's slices what they came to.

        Args:
            sums: All slices' sums, flat; those of others' slices may be anything.
        """
        rank = dist.get_rank(group=self.group)
        for one, part in zip(self.slices, sums.split(self.lengths), strict=True):
            if one.target.is_cuda:  # DeepSpeed may free it while this stream still works on it
                one.target.record_stream(torch.cuda.current_stream())
            if one.owner not in (None, rank):
                continue
            rounded = part.to(self.dtype)
            if one.output is not None:
                one.output.add_(rounded.view(one.output.shape).to(one.output.dtype))
            one.target.copy_(rounded.view(one.target.shape))


ReductionSteps = tuple[Iterable[CollectiveSteps], Callable[[], None]]
"""What is to travel, and what is to be done when it has arrived."""


def plain_reduction(errand: ReductionRequest) -> ReductionSteps:
    """Sum up by DeepSpeed's own collective."""
    flat = torch.cat([one.source.reshape(-1).to(errand.dtype) for one in errand.slices])
    if errand.divisor != 1.0:
        flat.div_(errand.divisor)

    def steps() -> CollectiveSteps:
        if errand.root is None:
            yield dist.all_reduce(flat, group=errand.group, async_op=True)
        else:
            root = dist.get_global_rank(errand.group, errand.root)
            yield dist.reduce(flat, root, group=errand.group, async_op=True)

    return [steps()], lambda: errand.deliver(flat)


def compressed(
    errand: ReductionRequest, compressor: Compressor, known: ParameterIndex
) -> ReductionSteps:
    """Sum up in a codec's form: straight to the owners where that is cheaper, else by all ranks."""
    exchange = compressor.exchange(errand.group)
    ordered = sorted(errand.slices, key=lambda one: -1 if one.owner is None else one.owner)
    errand = replace(errand, slices=ordered)
    sources = [one.source for one in ordered]
    places = [known.of(source) for source in sources]
    values = compressor.load(sources, places, errand.divisor)
    sizes = _sizes_of_owners(errand, exchange.num_ranks)
    if sizes is None or not direct_is_cheaper(sizes):
        result = torch.empty_like(values)

        def finish() -> None:
            errand.deliver(result)
            compressor.keep(values, places)

        return exchange.sum_for_all(values, result), finish

    rank = dist.get_rank(group=errand.group)

    def finish_straight() -> None:
        errand.deliver(values)
        # What this rank owns was never compressed.
        values.narrow(0, sum(sizes[:rank]), sizes[rank]).zero_()
        compressor.keep(values, places)

    return exchange.scatter(values, sizes), finish_straight


def _sizes_of_owners(errand: ReductionRequest, num_ranks: int) -> list[int] | None:
    """Return how many values each rank owns; None where some slice is everybody's."""
    sizes = [0] * num_ranks
    for one, length in zip(errand.slices, errand.lengths, strict=True):
        if one.owner is None:
            return None
        sizes[one.owner] += length
    return sizes
