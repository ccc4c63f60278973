"""Buckets of ZeRO 1 and 2 whose sums travel while backward fills the next one.

DeepSpeed reduces a bucket and then takes its sums over, in one method. Here the first half runs as
the bucket fills up, and the second when its sums have arrived: a bucket's state is put aside, and
put back for DeepSpeed's own method, in which the reduction then does nothing. All of a backward has
arrived before DeepSpeed looks at its sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .collective_steps import InFlightReduction
from .reduction_patch import PatchSet

# Each that is under way holds the memory of a bucket, however little is in it: a gradient that fits
# no more sends off what is there.
MOST_UNDER_WAY = 4


@dataclass(slots=True, kw_only=True)
class InFlightBucket:
    """A bucket between the halves of its reduction.

    Attributes:
        num_behind: How many gradients have left after it. After a bucketful its first shot is
            awaited, after two its sums.
    """

    dtype: torch.dtype
    params: list[Any]
    gradients: list[torch.Tensor]
    num_elements: int
    buffer: torch.Tensor
    large: Any
    num_behind: int = 0
    travelling: list[InFlightReduction] = field(default_factory=list)


class AsyncBucketReducer:
    """The buckets under way, in the order in which they left.

    Attributes:
        open: Whether a bucket is leaving, so that its sums are to be added.
    """

    def __init__(
        self, optimizer: Any, wraps: PatchSet, note: Callable[[Iterable[torch.dtype]], None]
    ) -> None:
        """Take the place of the optimizer's own method.

        Args:
            optimizer: DeepSpeed's, of ZeRO 1 or 2.
            wraps: Of that optimizer.
            note: Called with the dtype of a bucket that is about to be reduced.
        """
        self.open = False
        self._optimizer = optimizer
        self._note = note
        self._under_way: deque[InFlightBucket] = deque()
        self._leaving: list[InFlightReduction] = []
        self._spare: list[torch.Tensor] = []
        self._arriving = False
        wraps.replace("average_tensor", self._average)
        wraps.replace("reduce_ipg_grads", self._reduce)

    def add(self, departed: InFlightReduction) -> None:
        """Take along sums of the bucket that is leaving."""
        self._leaving.append(departed)

    def drop(self) -> None:
        """Forget all buckets under way, once what travels has arrived."""
        for departed in [
            *self._leaving,
            *(d for aside in self._under_way for d in aside.travelling),
        ]:
            departed.drop()
        self._under_way.clear()
        self._leaving, self._spare = [], []
        self.open = self._arriving = False

    def _average(self, original: Callable[..., None]) -> Callable[..., None]:
        def average(tensor: torch.Tensor, communication_data_type: torch.dtype) -> None:
            if not self._arriving:
                original(tensor, communication_data_type)

        return average

    def _reduce(self, original: Callable[..., None]) -> Callable[..., None]:
        def reduce(comm_dtype: torch.dtype | None = None) -> None:
            buckets = self._optimizer.ipg_buckets
            for dtype in list(buckets) if comm_dtype is None else [comm_dtype]:
                if buckets[dtype].params:
                    self._launch(dtype)
            while self._under_way and (comm_dtype is None or self._must_complete()):
                oldest = self._under_way[0].dtype
                if buckets[oldest].params:  # of several dtypes, another than the one that is full
                    self._launch(oldest)
                self._complete(self._under_way.popleft(), original)
            if comm_dtype is None:  # the end of a backward
                self._spare.clear()

        return reduce

    def _launch(self, dtype: torch.dtype) -> None:
        """Start the sums of a bucket, put it aside, and leave an empty one."""
        optimizer, bucket = self._optimizer, self._optimizer.ipg_buckets[dtype]
        self._note([dtype])
        aside = InFlightBucket(
            dtype=dtype,
            params=list(bucket.params),
            gradients=list(bucket.grads),
            num_elements=bucket.elements,
            buffer=bucket.buffer[bucket.index],
            large=optimizer.extra_large_param_to_reduce.pop(dtype, None),
        )
        filled = aside.buffer.narrow(0, 0, 0 if aside.large is not None else bucket.elements)
        if aside.large is not None:
            filled = optimizer.get_gradient_for_reduction(aside.large).view(-1)
        self.open = True
        optimizer.average_tensor(filled, dtype)
        self.open = False
        aside.travelling, self._leaving = self._leaving, []
        bucket.clear()
        if aside.large is None:
            bucket.buffer[bucket.index] = self._empty_like(aside.buffer)
        for earlier in self._under_way:
            self._age(earlier, aside.num_elements)
        self._under_way.append(aside)

    def _age(self, earlier: InFlightBucket, num_elements: int) -> None:
        """Note what has left after a bucket, and let its second shot go when it is time."""
        before, bucketful = earlier.num_behind, self._optimizer.reduce_bucket_size
        earlier.num_behind += num_elements
        if before < bucketful <= earlier.num_behind:
            for departed in earlier.travelling:
                departed.advance()

    def _must_complete(self) -> bool:
        """Whether the oldest bucket must arrive now; the same on all ranks."""
        oldest = self._under_way[0]
        return (
            len(self._under_way) > MOST_UNDER_WAY
            or oldest.num_behind >= 2 * self._optimizer.reduce_bucket_size
        )

    def _empty_like(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._spare.pop() if self._spare else torch.empty_like(buffer)

    def _complete(self, aside: InFlightBucket, original: Callable[..., None]) -> None:
        """Wait for a bucket's sums, and let DeepSpeed take them over."""
        for departed in aside.travelling:
            departed.arrive()
        bucket = self._optimizer.ipg_buckets[aside.dtype]
        bucket.params.extend(aside.params)
        bucket.grads.extend(aside.gradients)
        bucket.elements = aside.num_elements
        if aside.large is not None:
            self._optimizer.extra_large_param_to_reduce[aside.dtype] = aside.large
        self._arriving = True
        original(aside.dtype)
        self._arriving = False
        if aside.large is None:
            self._spare.append(aside.buffer)
