"""Tests of buckets whose reduction overlaps with backward: when each is advanced and completed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from zerowatch.runtime.common.patching import MethodPatches
from zerowatch.runtime.engine.compression.async_reducer import AsyncBucketReducer

FP32, BF16 = torch.float32, torch.bfloat16


class Bucket:
    """DeepSpeed's bucket of gradients, with one buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.buffer, self.index = [torch.zeros(10, dtype=dtype)], 0
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        self.params: list[Any] = []
        self.grads: list[Any] = []
        self.elements = 0


class Reduction:
    """A reduction that notes what happens to it."""

    def __init__(self, log: list[Any], name: int) -> None:
        self._log, self._name = log, name

    def advance(self) -> None:
        self._log.append(("advance", self._name))

    def complete(self) -> None:
        self._log.append(("complete", self._name))

    def discard(self) -> None:
        self._log.append(("discard", self._name))


class Optimizer:
    """ZeRO's optimizer with buckets of ten elements, whose reductions are numbered."""

    reduce_bucket_size = 10

    def __init__(self) -> None:
        self.ipg_buckets = {FP32: Bucket(FP32), BF16: Bucket(BF16)}
        self.extra_large_param_to_reduce: dict[Any, Any] = {}
        self.log: list[Any] = []
        self.num_launched = 0
        index: Any = self
        self.reducer = AsyncBucketReducer(self, MethodPatches(self), index)

    def update(self, dtypes: Iterable[torch.dtype]) -> None:
        """Note that the gradients are indexed."""
        self.log.append(("index", list(dtypes)))

    def average_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Start to reduce a tensor."""
        assert self.reducer.is_launching
        self.num_launched += 1
        self.log.append(("launch", self.num_launched, tensor.numel()))
        self.reducer.add(Reduction(self.log, self.num_launched))  # type: ignore[arg-type]

    def get_gradient_for_reduction(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return parameter

    def reduce_ipg_grads(self, comm_dtype: Any = None) -> None:
        """Use the sums of a bucket, whose reduction must not run again."""
        bucket = self.ipg_buckets[comm_dtype]
        self.average_tensor(torch.zeros(99), comm_dtype)
        extra = self.extra_large_param_to_reduce.pop(comm_dtype, None)
        large = None if extra is None else extra.numel()
        self.log.append(("use", *bucket.params, *bucket.grads, bucket.elements, large))
        bucket.clear()

    def fill(self, name: str, elements: int, dtype: torch.dtype = FP32) -> None:
        """Fill a bucket, and let it be reduced."""
        self.put(name, elements, dtype)
        self.reduce_ipg_grads(dtype)

    def put(self, name: str, elements: int, dtype: torch.dtype = FP32) -> None:
        """Fill a bucket."""
        bucket = self.ipg_buckets[dtype]
        bucket.params, bucket.grads, bucket.elements = [name], [f"gradient of {name}"], elements

    def happened(self) -> list[Any]:
        """Return what has happened since the last call, without the indexing."""
        events = [event for event in self.log if event[0] != "index"]
        self.log.clear()
        return events


@pytest.fixture
def optimizer() -> Optimizer:
    return Optimizer()


def use(name: str, elements: int, large: int | None = None) -> tuple[Any, ...]:
    return ("use", name, f"gradient of {name}", elements, large)


def test_a_bucket_is_advanced_after_one_bucketful_and_used_after_two(optimizer: Optimizer) -> None:
    happened = []
    for name, elements in (("a", 3), ("b", 9), ("c", 1), ("d", 9), ("e", 1)):
        optimizer.fill(name, elements)
        happened.append(optimizer.happened())

    assert happened == [
        [("launch", 1, 3)],
        [("launch", 2, 9)],
        [("launch", 3, 1), ("advance", 1)],  # ten elements behind it
        [("launch", 4, 9), ("advance", 2)],
        [("launch", 5, 1), ("advance", 3), ("complete", 1), use("a", 3)],  # twenty behind it
    ]


def test_at_most_four_buckets_are_in_flight(optimizer: Optimizer) -> None:
    for name in "abcd":
        optimizer.fill(name, 1)
    before = optimizer.happened()

    optimizer.fill("e", 1)

    assert [event[0] for event in before] == ["launch"] * 4
    assert optimizer.happened() == [("launch", 5, 1), ("complete", 1), use("a", 1)]


def test_the_end_of_backward_completes_all_buckets_in_their_order(optimizer: Optimizer) -> None:
    optimizer.fill("a", 3)
    optimizer.put("b", 5)
    optimizer.put("c", 7, BF16)
    optimizer.happened()

    optimizer.reduce_ipg_grads()
    optimizer.reduce_ipg_grads()

    assert optimizer.happened() == [
        ("launch", 2, 5),
        ("launch", 3, 7),
        ("advance", 1),
        ("complete", 1),
        use("a", 3),
        ("complete", 2),
        use("b", 5),
        ("complete", 3),
        use("c", 7),
    ]


def test_gradients_are_indexed_before_their_bucket_is_launched(optimizer: Optimizer) -> None:
    optimizer.fill("a", 3, BF16)

    assert optimizer.log == [("index", [BF16]), ("launch", 1, 3)]


def test_a_bucket_that_is_filled_while_an_older_one_is_completed_is_launched_first(
    optimizer: Optimizer,
) -> None:
    optimizer.fill("a", 3, BF16)
    optimizer.put("b", 5, BF16)
    optimizer.fill("c", 10)
    optimizer.fill("d", 10)

    events = optimizer.happened()
    assert events.index(("launch", 4, 5)) < events.index(use("a", 3))
    assert ("complete", 4) not in events


def test_a_full_bucket_leaves_an_empty_buffer_and_completed_ones_are_used_again(
    optimizer: Optimizer,
) -> None:
    bucket = optimizer.ipg_buckets[FP32]
    buffers = [bucket.buffer[0]]
    for name in "abcd":
        optimizer.fill(name, 10)
        buffers.append(bucket.buffer[0])

    # The first is used once "c" is launched, so that "d" leaves its buffer.
    places = [next(place for place, one in enumerate(buffers) if one is each) for each in buffers]
    assert places == [0, 1, 2, 3, 0]
    assert all(each.shape == (10,) for each in buffers)


def test_a_gradient_larger_than_a_bucket_is_reduced_itself(optimizer: Optimizer) -> None:
    large, buffer = torch.zeros(5, 9), optimizer.ipg_buckets[FP32].buffer[0]
    optimizer.extra_large_param_to_reduce[FP32] = large
    optimizer.fill("large", 45)
    launched = optimizer.happened()

    optimizer.reduce_ipg_grads()

    assert launched == [("launch", 1, 45)]
    assert optimizer.happened() == [("complete", 1), use("large", 45, large=45)]
    assert optimizer.ipg_buckets[FP32].buffer[0] is buffer


def test_discarded_buckets_are_not_used(optimizer: Optimizer) -> None:
    optimizer.fill("a", 3)
    optimizer.fill("b", 5)
    optimizer.happened()

    optimizer.reducer.discard()
    optimizer.reduce_ipg_grads()

    assert optimizer.happened() == [("discard", 1), ("discard", 2)]
