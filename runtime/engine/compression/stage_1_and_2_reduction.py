"""Compresses the gradient reduction of ZeRO 1 and 2, or makes it asynchronous.

DeepSpeed decides what a bucket contains and which rank owns which slice. Only the summation of the
slices is replaced. If DeepSpeed has divided the gradients already, the divisor is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as dist

from ...common import accelerator
from ...common.patching import MethodPatches
from .async_reducer import AsyncBucketReducer
from .bucket_compressor import BucketCompressor, GradientSpan, ParameterIndex, ParameterNames
from .compressed_all_reduce import (
    CollectiveSteps,
    InFlightReduction,
    Reduction,
    direct_is_cheaper,
    run_collective_steps,
)

Tensors = Sequence[torch.Tensor]


class Stage1And2Reduction:
    """Patches the optimizer's bucket reduction: compressed, asynchronous, or both."""

    def __init__(
        self,
        optimizer: Any,
        compressor: BucketCompressor | None,
        names: ParameterNames,
        *,
        asynchronous: bool,
    ) -> None:
        """Patch the optimizer; without `compressor` values are summed uncompressed."""
        self._optimizer = optimizer
        self._compressor = compressor
        self._buckets = BucketIndex(optimizer, names)
        self._async_reducer: AsyncBucketReducer | None = None
        self._patches = MethodPatches(optimizer)
        self._patches.replace("allreduce_and_copy_with_multiple_ranks", self._reduce_to_owners)
        if compressor is not None:
            self._patches.replace("allreduce_bucket", self._all_reduce_bucket)
            self._patches.replace("gradient_reduction_w_predivide", self._all_reduce_tensor)
        if asynchronous:
            self._patches.replace("allreduce_and_copy", self._reduce_to_one_rank)
            self._async_reducer = AsyncBucketReducer(optimizer, self._patches, self._buckets)
        else:
            self._patches.replace("reduce_ipg_grads", self._indexing)

    def close(self) -> None:
        """Restore the original methods."""
        self._patches.close()

    def discard(self) -> None:
        """Discard the reductions in flight."""
        if self._async_reducer is not None:
            self._async_reducer.discard()

    def _indexing(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(comm_dtype: torch.dtype | None = None) -> None:
            self._buckets.update(
                self._optimizer.ipg_buckets if comm_dtype is None else [comm_dtype]
            )
            original(comm_dtype)

        return reduce

    def _reduce_to_owners(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(
            small_bucket: Tensors,
            communication_data_type: torch.dtype,
            log: Any = None,
            divide: bool = True,
            process_group: Any = None,
            bucket_ranks: Sequence[Any] = (),
            output_bucket: Sequence[torch.Tensor | None] | None = None,
        ) -> None:
            slices = [
                Slice(source=part, target=part, owner=_single_owner(owner), output=output)
                for part, owner, output in zip(
                    small_bucket, bucket_ranks, _outputs(output_bucket, small_bucket), strict=True
                )
            ]
            self._start(self._request(slices, communication_data_type, process_group, divide))

        return reduce

    def _reduce_to_one_rank(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(
            small_bucket: Tensors,
            communication_data_type: torch.dtype,
            rank: int | None = None,
            log: Any = None,
            divide: bool = True,
            process_group: Any = None,
            output_bucket: Sequence[torch.Tensor | None] | None = None,
        ) -> None:
            slices = [
                Slice(source=part, target=part, owner=rank, output=output)
                for part, output in zip(
                    small_bucket, _outputs(output_bucket, small_bucket), strict=True
                )
            ]
            self._start(self._request(slices, communication_data_type, process_group, divide, rank))

        return reduce

    def _all_reduce_bucket(
        self, original: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def reduce(
            bucket: Tensors,
            communication_data_type: torch.dtype,
            rank: int | None = None,
            log: Any = None,
            divide: bool = True,
            process_group: Any = None,
        ) -> torch.Tensor:
            lengths = [part.numel() for part in bucket]
            flat = bucket[0].new_empty(sum(lengths), dtype=communication_data_type)
            slices = [
                Slice(source=source, target=target, owner=rank)
                for source, target in zip(bucket, flat.split(lengths), strict=True)
            ]
            self._run(self._request(slices, communication_data_type, process_group, divide, rank))
            return flat

        return reduce

    def _all_reduce_tensor(
        self, original: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        def reduce(tensor: torch.Tensor, communication_data_type: torch.dtype) -> torch.Tensor:
            if not tensor.numel():
                return tensor
            same = tensor.dtype == communication_data_type
            reduced = tensor if same else torch.empty_like(tensor, dtype=communication_data_type)
            slices = [Slice(source=tensor, target=reduced)]
            self._run(self._request(slices, communication_data_type, None, divide=True))
            if not same:
                tensor.copy_(reduced)
            return reduced

        return reduce

    def _request(
        self,
        slices: Sequence[Slice],
        dtype: torch.dtype,
        group: Any,
        divide: bool,
        root: int | None = None,
    ) -> ReductionRequest:
        group = group or self._optimizer.dp_process_group
        is_averaged = divide and self._optimizer.gradient_average
        return ReductionRequest(
            slices=slices,
            group=group,
            dtype=dtype,
            divisor=float(dist.get_world_size(group=group)) if is_averaged else 1.0,
            root=root,
        )

    def _start(self, request: ReductionRequest) -> None:
        """Run a reduction, or only start it if a bucket is reduced asynchronously."""
        if self._async_reducer is not None and self._async_reducer.is_launching:
            self._async_reducer.add(InFlightReduction(self._reduction(request)))
        else:
            self._run(request)

    def _run(self, request: ReductionRequest) -> None:
        reduction = self._reduction(request)
        run_collective_steps(reduction.exchanges())
        reduction.finish()

    def _reduction(self, request: ReductionRequest) -> Reduction:
        if self._compressor is None:
            return _PlainReduction(request)
        return _compressed_reduction(request, self._compressor, self._buckets.parameters)


class BucketIndex:
    """Finds the gradients in the buckets that are about to be reduced, by their addresses.

    Attributes:
        parameters: The index, as of the last update.
    """

    def __init__(self, optimizer: Any, names: ParameterNames) -> None:
        self._optimizer = optimizer
        self._names = names
        self.parameters = ParameterIndex()

    def update(self, dtypes: Iterable[torch.dtype]) -> None:
        """Index the present gradients of the buckets of these dtypes."""
        groups = self._optimizer.bit16_groups
        self.parameters = ParameterIndex(
            (self._names[id(groups[group][index])], gradient)
            for bucket in (self._optimizer.ipg_buckets[dtype] for dtype in dtypes)
            for (group, index, _), gradient in zip(bucket.params, bucket.grads, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Part of a bucket whose sum goes to one rank, or to all.

    Attributes:
        source: This rank's gradient.
        target: Tensor to which the sum is written.
        owner: Rank in the group that needs the sum; None if all ranks need it.
        output: Tensor to which the sum is also added, if DeepSpeed accumulates in another dtype.
    """

    source: torch.Tensor
    target: torch.Tensor
    owner: int | None = None
    output: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRequest:
    """Request to reduce one bucket.

    Attributes:
        slices: Parts of the bucket.
        group: Process group of the reduction.
        dtype: Dtype to which sums are rounded: DeepSpeed's communication_data_type.
        divisor: Divisor that turns the sum into an average; 1 if gradients were divided before.
        root: The only rank that DeepSpeed itself would reduce to; None for all ranks.
    """

    slices: Sequence[Slice]
    group: Any
    dtype: torch.dtype
    divisor: float
    root: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of values of each slice."""
        return [one.source.numel() for one in self.slices]

    def write_back(self, sums: torch.Tensor) -> None:
        """Write the sums to the slices that this rank needs.

        Args:
            sums: Sums of all slices, flat. The sums of other ranks' slices are ignored.
        """
        rank = dist.get_rank(group=self.group)
        for slice_, values in zip(self.slices, sums.split(self.lengths), strict=True):
            if slice_.target.device.type == accelerator.current.kind:
                # DeepSpeed may free the target while this stream still uses it.
                slice_.target.record_stream(accelerator.current.current_stream())
            if slice_.owner not in (None, rank):
                continue
            rounded = values.to(self.dtype)
            if slice_.output is not None:
                slice_.output.add_(rounded.view(slice_.output.shape).to(slice_.output.dtype))
            slice_.target.copy_(rounded.view(slice_.target.shape))


class _PlainReduction:
    """Reduces without compression, by the collective that DeepSpeed itself would use."""

    def __init__(self, request: ReductionRequest) -> None:
        self._request = request
        parts = [one.source.reshape(-1).to(request.dtype) for one in request.slices]
        self._flat = torch.cat(parts)
        if request.divisor != 1.0:
            self._flat.div_(request.divisor)

    def exchanges(self) -> Iterable[CollectiveSteps]:
        return [self._steps()]

    def finish(self) -> None:
        self._request.write_back(self._flat)

    def _steps(self) -> CollectiveSteps:
        group, root = self._request.group, self._request.root
        if root is None:
            yield dist.all_reduce(self._flat, group=group, async_op=True)
        else:
            global_root = dist.get_global_rank(group, root)
            yield dist.reduce(self._flat, global_root, group=group, async_op=True)


def _compressed_reduction(
    request: ReductionRequest, compressor: BucketCompressor, index: ParameterIndex
) -> Reduction:
    """Return a reduction to the owners if that is cheaper, else to all ranks."""
    ordered = sorted(request.slices, key=lambda one: -1 if one.owner is None else one.owner)
    packed = _PackedRequest(replace(request, slices=ordered), compressor, index)
    sizes = packed.sizes_of_owners()
    if sizes is None or not direct_is_cheaper(sizes):
        return _ReductionToAll(packed)
    return _ReductionToOwners(packed, sizes)


class _PackedRequest:
    """Holds a reduction request whose gradients are packed in one buffer, and its all-reduce."""

    def __init__(
        self, request: ReductionRequest, compressor: BucketCompressor, index: ParameterIndex
    ) -> None:
        self.request = request
        self.exchange = compressor.exchange(request.group)
        self._compressor = compressor
        sources = [one.source for one in request.slices]
        self._spans: list[list[GradientSpan]] = [index.spans_of(source) for source in sources]
        self.values = compressor.pack(sources, self._spans, request.divisor)

    def keep_errors(self) -> None:
        """Keep the errors that `values` hold after the exchange as residuals."""
        self._compressor.keep_errors(self.values, self._spans)

    def sizes_of_owners(self) -> list[int] | None:
        """Return how many values each rank owns; None if all ranks need some slice."""
        sizes = [0] * self.exchange.num_ranks
        for one, length in zip(self.request.slices, self.request.lengths, strict=True):
            if one.owner is None:
                return None
            sizes[one.owner] += length
        return sizes


class _ReductionToAll:
    """Reduces with compression; all ranks receive the sums, as in an all-reduce."""

    def __init__(self, packed: _PackedRequest) -> None:
        self._packed = packed
        self._result = torch.empty_like(packed.values)

    def exchanges(self) -> Iterable[CollectiveSteps]:
        return self._packed.exchange.all_reduce(self._packed.values, self._result)

    def finish(self) -> None:
        self._packed.request.write_back(self._result)
        self._packed.keep_errors()


class _ReductionToOwners:
    """Reduces with compression; each owner receives the sums of its slices, ordered by owner."""

    def __init__(self, packed: _PackedRequest, sizes: list[int]) -> None:
        self._packed, self._sizes = packed, sizes
        self._rank = dist.get_rank(group=packed.request.group)

    def exchanges(self) -> Iterable[CollectiveSteps]:
        return self._packed.exchange.reduce_scatter(self._packed.values, self._sizes)

    def finish(self) -> None:
        values, sizes, rank = self._packed.values, self._sizes, self._rank
        self._packed.request.write_back(values)
        # The values that this rank owns were never compressed.
        values.narrow(0, sum(sizes[:rank]), sizes[rank]).zero_()
        self._packed.keep_errors()


def _single_owner(owner: int | frozenset[int]) -> int:
    """Return the rank that owns a slice. Only Muon has several owners, and is not supported."""
    (only,) = owner if isinstance(owner, frozenset) else (owner,)
    return only


def _outputs(
    given: Sequence[torch.Tensor | None] | None, bucket: Tensors
) -> Sequence[torch.Tensor | None]:
    return [None] * len(bucket) if given is None else given
