"""Asynchronous reduction of the gradient buckets of ZeRO 1 and 2, overlapped with backward.

DeepSpeed reduces a bucket and uses its sums in one method. The reducer of this module starts the
reduction as soon as the bucket is full, and saves the state of the bucket. When the sums have
arrived, it restores the state and calls DeepSpeed's own method, which then uses the sums without
another reduction. All buckets of a backward pass are complete before DeepSpeed reads the sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...common.patching import MethodPatches
from .compressed_all_reduce import InFlightReduction

# A bucket in flight takes the memory of a full bucket even if it is nearly empty: if the next
# gradient does not fit into the rest of the bucket, the reduction of the bucket is launched early.
MAX_IN_FLIGHT = 4


class GradientIndex(Protocol):
    """Finds the gradients that are about to be reduced."""

    def update(self, dtypes: Iterable[torch.dtype]) -> None:
        """Index the present gradients of the buckets of these dtypes."""


@dataclass(slots=True, kw_only=True)
class InFlightBucket:
    """State of a bucket whose reduction has been started but not yet used by DeepSpeed.

    Attributes:
        num_behind: Elements whose reduction was started after this bucket's reduction. When these
            make one full bucket, the first phase of this bucket's reduction is completed. When they
            make two full buckets, the whole reduction is completed.
    """

    dtype: torch.dtype
    params: list[Any]
    gradients: list[torch.Tensor]
    num_elements: int
    buffer: torch.Tensor
    extra_large_param: Any
    num_behind: int = 0
    reductions: list[InFlightReduction] = field(default_factory=list)


class AsyncBucketReducer:
    """Starts the reduction of full buckets, and completes them in the same order.

    Attributes:
        is_launching: Whether a bucket's reductions are being started and passed to `add`.
    """

    def __init__(self, optimizer: Any, patches: MethodPatches, index: GradientIndex) -> None:
        """Replace the optimizer's own reduction.

        Args:
            optimizer: DeepSpeed's optimizer of ZeRO 1 or 2.
            patches: Patches of the methods of that optimizer.
            index: Index of gradients, updated before each launch.
        """
        self.is_launching = False
        self._optimizer = optimizer
        self._index = index
        self._in_flight: deque[InFlightBucket] = deque()
        self._launched: list[InFlightReduction] = []
        self._spare_buffers: list[torch.Tensor] = []
        self._is_completing = False
        patches.replace("average_tensor", self._average_tensor)
        patches.replace("reduce_ipg_grads", self._reduce_ipg_grads)

    def add(self, reduction: InFlightReduction) -> None:
        """Add a reduction of the bucket whose reductions are being started."""
        self._launched.append(reduction)

    def discard(self) -> None:
        """Discard all buckets in flight, after waiting for their collectives."""
        of_buckets = (each for bucket in self._in_flight for each in bucket.reductions)
        for reduction in [*self._launched, *of_buckets]:
            reduction.discard()
        self._in_flight.clear()
        self._launched, self._spare_buffers = [], []
        self.is_launching = self._is_completing = False

    def _average_tensor(self, original: Callable[..., None]) -> Callable[..., None]:
        def average(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
            if not self._is_completing:
                original(tensor, communication_data_type)

        return average

    def _reduce_ipg_grads(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(comm_dtype: torch.dtype | None = None) -> None:
            buckets = self._optimizer.ipg_buckets
            for dtype in list(buckets) if comm_dtype is None else [comm_dtype]:
                if buckets[dtype].params:
                    self._launch(dtype)
            while self._in_flight and (comm_dtype is None or self._must_complete()):
                oldest = self._in_flight[0].dtype
                if buckets[oldest].params:  # of several dtypes, another than the full one
                    self._launch(oldest)
                self._complete(self._in_flight.popleft(), original)
            if comm_dtype is None:  # the end of a backward
                self._spare_buffers.clear()

        return reduce

    def _launch(self, dtype: torch.dtype) -> None:
        """Start the reduction of a bucket, save its state, and leave an empty bucket."""
        optimizer, bucket = self._optimizer, self._optimizer.ipg_buckets[dtype]
        self._index.update([dtype])
        launched = InFlightBucket(
            dtype=dtype,
            params=list(bucket.params),
            gradients=list(bucket.grads),
            num_elements=bucket.elements,
            buffer=bucket.buffer[bucket.index],
            extra_large_param=optimizer.extra_large_param_to_reduce.pop(dtype, None),
        )
        is_extra_large = launched.extra_large_param is not None
        filled = launched.buffer.narrow(0, 0, 0 if is_extra_large else bucket.elements)
        if is_extra_large:
            filled = optimizer.get_gradient_for_reduction(launched.extra_large_param).view(-1)
        self.is_launching = True
        optimizer.average_tensor(filled, dtype)
        self.is_launching = False
        launched.reductions, self._launched = self._launched, []
        bucket.clear()
        if not is_extra_large:
            bucket.buffer[bucket.index] = self._empty_like(launched.buffer)
        for earlier in self._in_flight:
            self._age(earlier, launched.num_elements)
        self._in_flight.append(launched)

    def _age(self, earlier: InFlightBucket, num_elements: int) -> None:
        """Count elements launched after a bucket, and start its second phase when that is due."""
        before, bucketful = earlier.num_behind, self._optimizer.reduce_bucket_size
        earlier.num_behind += num_elements
        if before < bucketful <= earlier.num_behind:
            for reduction in earlier.reductions:
                reduction.advance()

    def _must_complete(self) -> bool:
        """Whether the oldest bucket must be completed now; the same on all ranks."""
        oldest = self._in_flight[0]
        return (
            len(self._in_flight) > MAX_IN_FLIGHT
            or oldest.num_behind >= 2 * self._optimizer.reduce_bucket_size
        )

    def _empty_like(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._spare_buffers.pop() if self._spare_buffers else torch.empty_like(buffer)

    def _complete(self, launched: InFlightBucket, original: Callable[..., None]) -> None:
        """Wait for a bucket's sums, and let DeepSpeed use them."""
        for reduction in launched.reductions:
            reduction.complete()
        bucket = self._optimizer.ipg_buckets[launched.dtype]
        bucket.params.extend(launched.params)
        bucket.grads.extend(launched.gradients)
        bucket.elements = launched.num_elements
        is_extra_large = launched.extra_large_param is not None
        if is_extra_large:
            extra_large = self._optimizer.extra_large_param_to_reduce
            extra_large[launched.dtype] = launched.extra_large_param
        self._is_completing = True
        original(launched.dtype)
        self._is_completing = False
        if not is_extra_large:
            self._spare_buffers.append(launched.buffer)
