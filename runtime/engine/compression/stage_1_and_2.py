"""ZeRO 1 and 2: a bucket's sums go to the ranks that own them, straight or by way of all ranks.

DeepSpeed decides what is in a bucket and who owns which slice; only how the slices are added up is
another way. Nothing is averaged twice: where DeepSpeed has divided already, the divisor is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from .async_reducer import AsyncBucketReducer
from .collective_steps import InFlightReduction, run_all
from .compressor import Compressor
from .parameter_index import ParameterIndex
from .reduction_patch import Names, PatchSet
from .reduction_request import ReductionRequest, ReductionSteps, Slice, compressed, plain_reduction

Tensors = Sequence[torch.Tensor]


class Stage1And2:
    """Compresses the sums of buckets, or lets them travel while backward goes on, or both."""

    def __init__(
        self,
        optimizer: Any,
        compressor: Compressor | None,
        names: Names,
        *,
        asynchronous: bool,
    ) -> None:
        """`compressor`: None leaves the sums as DeepSpeed makes them."""
        self._optimizer = optimizer
        self._compressor = compressor
        self._names = names
        self._places = ParameterIndex()
        self._departures: AsyncBucketReducer | None = None
        self._wraps = PatchSet(optimizer)
        self._wraps.replace("allreduce_and_copy_with_multiple_ranks", self._to_owners)
        if compressor is not None:
            self._wraps.replace("allreduce_bucket", self._bucket)
            self._wraps.replace("gradient_reduction_w_predivide", self._whole)
        if asynchronous:
            self._wraps.replace("allreduce_and_copy", self._to_one)
            self._departures = AsyncBucketReducer(optimizer, self._wraps, self._note)
        else:
            self._wraps.replace("reduce_ipg_grads", self._noted)

    def close(self) -> None:
        """Put everything back."""
        self._wraps.close()

    def drop(self) -> None:
        """Forget the reductions that are under way."""
        if self._departures is not None:
            self._departures.drop()

    def _noted(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(comm_dtype: torch.dtype | None = None) -> None:
            self._note(self._optimizer.ipg_buckets if comm_dtype is None else [comm_dtype])
            original(comm_dtype)

        return reduce

    def _note(self, dtypes: Iterable[torch.dtype]) -> None:
        """Learn where the gradients of the buckets lie."""
        groups = self._optimizer.bit16_groups
        self._places = ParameterIndex(
            (self._names[id(groups[group][index])], gradient)
            for bucket in (self._optimizer.ipg_buckets[dtype] for dtype in dtypes)
            for (group, index, _), gradient in zip(bucket.params, bucket.grads, strict=True)
        )

    def _to_owners(self, original: Callable[..., None]) -> Callable[..., None]:
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
                Slice(source=piece, target=piece, owner=_only(owner), output=output)
                for piece, owner, output in zip(
                    small_bucket, bucket_ranks, _outputs(output_bucket, small_bucket), strict=True
                )
            ]
            self._send(self._errand(slices, communication_data_type, process_group, divide))

        return reduce

    def _to_one(self, original: Callable[..., None]) -> Callable[..., None]:
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
                Slice(source=piece, target=piece, owner=rank, output=output)
                for piece, output in zip(
                    small_bucket, _outputs(output_bucket, small_bucket), strict=True
                )
            ]
            self._send(self._errand(slices, communication_data_type, process_group, divide, rank))

        return reduce

    def _bucket(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def reduce(
            bucket: Tensors,
            communication_data_type: torch.dtype,
            rank: int | None = None,
            log: Any = None,
            divide: bool = True,
            process_group: Any = None,
        ) -> torch.Tensor:
            lengths = [piece.numel() for piece in bucket]
            flat = bucket[0].new_empty(sum(lengths), dtype=communication_data_type)
            slices = [
                Slice(source=piece, target=part, owner=rank)
                for piece, part in zip(bucket, flat.split(lengths), strict=True)
            ]
            self._run(self._errand(slices, communication_data_type, process_group, divide, rank))
            return flat

        return reduce

    def _whole(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def reduce(tensor: torch.Tensor, communication_data_type: torch.dtype) -> torch.Tensor:
            if not tensor.numel():
                return tensor
            same = tensor.dtype == communication_data_type
            reduced = tensor if same else torch.empty_like(tensor, dtype=communication_data_type)
            slices = [Slice(source=tensor, target=reduced)]
            self._run(self._errand(slices, communication_data_type, None, divide=True))
            if not same:
                tensor.copy_(reduced)
            return reduced

        return reduce

    def _errand(
        self,
        slices: Sequence[Slice],
        dtype: torch.dtype,
        group: Any,
        divide: bool,
        root: int | None = None,
    ) -> ReductionRequest:
        group = group or self._optimizer.dp_process_group
        averaged = divide and self._optimizer.gradient_average
        return ReductionRequest(
            slices=slices,
            group=group,
            dtype=dtype,
            divisor=float(dist.get_world_size(group=group)) if averaged else 1.0,
            root=root,
        )

    def _send(self, errand: ReductionRequest) -> None:
        """Sum up, or begin to."""
        if self._departures is not None and self._departures.open:
            self._departures.add(InFlightReduction(*self._travel(errand)))
        else:
            self._run(errand)

    def _run(self, errand: ReductionRequest) -> None:
        steps, finish = self._travel(errand)
        run_all(steps)
        finish()

    def _travel(self, errand: ReductionRequest) -> ReductionSteps:
        if self._compressor is None:
            return plain_reduction(errand)
        return compressed(errand, self._compressor, self._places)


def _only(owner: int | frozenset[int]) -> int:
    """Return the one rank that owns a slice; only Muon, which is refused, has several."""
    (only,) = owner if isinstance(owner, frozenset) else (owner,)
    return only


def _outputs(
    given: Sequence[torch.Tensor | None] | None, bucket: Tensors
) -> Sequence[torch.Tensor | None]:
    return [None] * len(bucket) if given is None else given
