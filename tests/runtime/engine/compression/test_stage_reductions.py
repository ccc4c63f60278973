"""Tests of the reductions that replace DeepSpeed's, on two ranks that are threads.

Covers `stage_0_reduction.py`, `stage_1_and_2_reduction.py` and `stage_3_reduction.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.runtime.engine.compression import (
    compressed_all_reduce,
    stage_0_reduction,
    stage_1_and_2_reduction,
    stage_3_reduction,
)
from zerowatch.runtime.engine.compression.bucket_compressor import BucketCompressor
from zerowatch.runtime.engine.compression.encoding import FORMATS
from zerowatch.runtime.engine.compression.error_feedback import CompressionError
from zerowatch.runtime.engine.compression.stage_0_reduction import Stage0Reduction
from zerowatch.runtime.engine.compression.stage_1_and_2_reduction import Stage1And2Reduction
from zerowatch.runtime.engine.compression.stage_3_reduction import Stage3Reduction

FP32 = torch.float32


class DoneWork:
    """The handle of a collective that has ended."""

    def wait(self) -> None: ...


class TwoRanks:
    """Replaces deepspeed.comm: two threads, each a rank, meet in each collective."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._barrier = threading.Barrier(2, timeout=60)
        self._given: list[Any] = [None, None]
        self.calls: list[str] = []

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call the function on both ranks, and return what each returns."""
        results: list[Any] = [None, None]
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            self._own.rank = rank
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def _exchange(self, name: str, given: Any) -> list[Any]:
        rank = self._own.rank
        self._given[rank] = given
        self._barrier.wait()
        both = list(self._given)
        self._barrier.wait()
        if rank == 0:
            self.calls.append(name)
        return both

    def get_rank(self, group: object) -> int:
        return int(self._own.rank)

    def get_world_size(self, group: object) -> int:
        return {"dp": 2, "alone": 1}[str(group)]

    def get_global_rank(self, group: object, rank: int) -> int:
        return 10 + rank

    def all_to_all_single(self, received: Any, sent: Any, **options: Any) -> DoneWork:
        both = self._exchange("all_to_all", sent.split(options["input_split_sizes"]))
        received.copy_(torch.cat([parts[self._own.rank] for parts in both]))
        return DoneWork()

    def all_gather_into_tensor(self, gathered: Any, own: Any, **_: Any) -> DoneWork:
        gathered.copy_(torch.cat(self._exchange("all_gather", own.clone())))
        return DoneWork()

    def all_reduce(self, flat: Any, **_: Any) -> DoneWork:
        flat.copy_(sum(self._exchange("all_reduce", flat.clone())))
        return DoneWork()

    def reduce(self, flat: Any, root: int, **_: Any) -> DoneWork:
        both = self._exchange(f"reduce to {root}", flat.clone())
        if root == 10 + self._own.rank:
            flat.copy_(sum(both))
        return DoneWork()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    both = TwoRanks()
    for module in (
        compressed_all_reduce,
        stage_0_reduction,
        stage_1_and_2_reduction,
        stage_3_reduction,
    ):
        monkeypatch.setattr(module, "dist", both)
    return both


def compressor() -> BucketCompressor:
    """Without error: float32."""
    return BucketCompressor(FORMATS["fp32"], None, CompressionError())


def gradient(rank: int, numbers: list[float]) -> torch.Tensor:
    """The second rank has ten times the gradient of the first."""
    return torch.tensor(numbers, dtype=FP32) * (1, 10)[rank]


class Optimizer:
    """ZeRO's optimizer of stages 1 and 2 with one bucket of three gradients."""

    gradient_average = True
    dp_process_group = "dp"

    def __init__(self, rank: int) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (3, 2, 2)])
        self.bit16_groups = [list(self.model)]
        self.buffer = gradient(rank, [1, 2, 3, 4, 5, 6, 7])
        self.grads = list(self.buffer.split([3, 2, 2]))
        bucket = SimpleNamespace(params=[(0, index, None) for index in range(3)], grads=self.grads)
        self.ipg_buckets = {FP32: bucket}
        self.originals: list[str] = []

    def reduce_ipg_grads(self, comm_dtype: Any = None) -> None:
        self.originals.append("reduce_ipg_grads")

    def allreduce_and_copy_with_multiple_ranks(self, *args: Any, **kwargs: Any) -> None:
        self.originals.append("allreduce_and_copy_with_multiple_ranks")

    def allreduce_bucket(self, *args: Any, **kwargs: Any) -> None:
        self.originals.append("allreduce_bucket")

    def gradient_reduction_w_predivide(self, *args: Any, **kwargs: Any) -> None:
        self.originals.append("gradient_reduction_w_predivide")

    def names(self) -> dict[int, str]:
        return {id(parameter): str(index) for index, parameter in enumerate(self.model)}


def patched(rank: int, is_compressed: bool) -> tuple[Optimizer, Stage1And2Reduction]:
    optimizer = Optimizer(rank)
    patch = Stage1And2Reduction(
        optimizer,
        compressor() if is_compressed else None,
        optimizer.names(),
        asynchronous=False,
    )
    optimizer.reduce_ipg_grads(FP32)
    return optimizer, patch


def mean(*numbers: float) -> list[float]:
    return [11 * number / 2 for number in numbers]


@pytest.mark.parametrize("is_compressed", [True, False])
def test_each_owner_gets_the_averages_of_its_slices(ranks: TwoRanks, is_compressed: bool) -> None:
    def body(rank: int) -> list[float]:
        optimizer, _ = patched(rank, is_compressed)
        first, second, third = optimizer.grads
        optimizer.allreduce_and_copy_with_multiple_ranks(
            [first, second, third], FP32, bucket_ranks=[1, 0, frozenset({0})]
        )
        return optimizer.buffer.tolist()

    first, second = ranks.run(body)

    assert first == [1, 2, 3, *mean(4, 5, 6, 7)]
    assert second == [*mean(1, 2, 3), 40, 50, 60, 70]
    assert ranks.calls == (["all_to_all"] if is_compressed else ["all_reduce"])


def test_a_slice_that_all_ranks_need_makes_the_bucket_go_to_all(ranks: TwoRanks) -> None:
    def body(rank: int) -> list[float]:
        optimizer, _ = patched(rank, True)
        optimizer.allreduce_and_copy_with_multiple_ranks(
            optimizer.grads, FP32, divide=False, bucket_ranks=[None, 1, 1]
        )
        return optimizer.buffer.tolist()

    first, second = ranks.run(body)

    assert first == [11, 22, 33, 4, 5, 6, 7]
    assert second == [11, 22, 33, 44, 55, 66, 77]
    assert ranks.calls == ["all_to_all", "all_gather"]


@pytest.mark.parametrize(("average", "divide"), [(True, False), (False, True)])
def test_gradients_that_are_divided_already_are_summed(
    ranks: TwoRanks, average: bool, divide: bool
) -> None:
    def body(rank: int) -> list[float]:
        optimizer, _ = patched(rank, True)
        optimizer.gradient_average = average
        flat: Any = optimizer.allreduce_bucket(optimizer.grads[:2], FP32, divide=divide)
        return flat.tolist()

    assert ranks.run(body) == [[11, 22, 33, 44, 55]] * 2


def test_a_bucket_that_is_reduced_to_one_rank_has_its_sums_there(ranks: TwoRanks) -> None:
    def body(rank: int) -> list[float]:
        optimizer, _ = patched(rank, True)
        flat: Any = optimizer.allreduce_bucket(optimizer.grads[1:], FP32, rank=1)
        return flat.tolist()

    assert ranks.run(body)[1] == mean(4, 5, 6, 7)


def test_sums_are_added_to_the_gradients_that_deepspeed_accumulates(ranks: TwoRanks) -> None:
    def body(rank: int) -> list[float]:
        optimizer, _ = patched(rank, True)
        output = torch.full((3,), 100.0, dtype=torch.float64)
        optimizer.allreduce_and_copy_with_multiple_ranks(
            optimizer.grads, FP32, bucket_ranks=[0, 1, 1], output_bucket=[output, None, None]
        )
        return output.tolist()

    first, second = ranks.run(body)

    assert (first, second) == ([100 + each for each in mean(1, 2, 3)], [100.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_tensor_is_averaged_and_rounded(ranks: TwoRanks, dtype: torch.dtype) -> None:
    def body(rank: int) -> Any:
        optimizer, _ = patched(rank, True)
        reduced: Any = optimizer.gradient_reduction_w_predivide(optimizer.grads[0], dtype)
        empty = optimizer.gradient_reduction_w_predivide(torch.zeros(0), dtype)
        return reduced.dtype, reduced.tolist(), optimizer.grads[0].tolist(), empty.numel()

    assert ranks.run(body) == [(dtype, mean(1, 2, 3), mean(1, 2, 3), 0)] * 2


def test_deepspeeds_own_methods_are_restored() -> None:
    optimizer, patch = patched(0, True)

    patch.close()
    patch.discard()
    optimizer.allreduce_bucket()
    optimizer.gradient_reduction_w_predivide()
    optimizer.allreduce_and_copy_with_multiple_ranks()
    optimizer.reduce_ipg_grads()

    assert optimizer.originals == [
        "reduce_ipg_grads",
        "allreduce_bucket",
        "gradient_reduction_w_predivide",
        "allreduce_and_copy_with_multiple_ranks",
        "reduce_ipg_grads",
    ]


class Engine:
    """An engine of stage 0 with a frozen parameter between two others."""

    gradient_average = True

    def __init__(self, rank: int) -> None:
        self.module = nn.Linear(2, 1)
        self.module.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.optimizer: Any = SimpleNamespace()
        self.gradients = [gradient(rank, [1, 2]).view(1, 2), gradient(rank, [3])]
        self.originals: list[Any] = []

    def _reduce_non_expert_gradients(self, gradients: Any, elements: int) -> None:
        self.originals.append(elements)

    def allreduce_bucket(self, bucket: Any, dp_group: Any, dp_world_size: Any = None) -> Any:
        return "original"


@pytest.mark.parametrize(("average", "expected"), [(True, mean(1, 2, 3)), (False, [11, 22, 33])])
def test_whole_gradients_of_stage_0_are_summed_on_every_rank(
    ranks: TwoRanks, average: bool, expected: list[float]
) -> None:
    def body(rank: int) -> Any:
        engine = Engine(rank)
        engine.gradient_average = average
        names = {id(each): name for name, each in engine.module.named_parameters()}
        patch = Stage0Reduction(engine, compressor(), names)
        engine._reduce_non_expert_gradients(engine.gradients, 500)
        reduced = engine.allreduce_bucket(engine.gradients, "dp")
        alone = engine.allreduce_bucket(engine.gradients, "alone")
        patch.discard()
        patch.close()
        return reduced.tolist(), alone, engine.allreduce_bucket([], "dp"), engine.originals

    assert ranks.run(body) == [(expected, "original", "original", [500])] * 2


def test_flat_gradients_of_bf16_have_padding(ranks: TwoRanks) -> None:
    def body(rank: int) -> list[float]:
        engine = Engine(rank)
        flat = gradient(rank, [1, 2, 3, 4])
        weight, bias = engine.module.weight, engine.module.bias
        engine.optimizer = SimpleNamespace(
            fp32_groups_gradients_flat=[flat],
            bf16_groups=[[weight, bias]],
            fp32_groups_gradients=[[flat[:2], flat[2:3]]],
        )
        patch = Stage0Reduction(engine, compressor(), {id(weight): "weight", id(bias): "bias"})
        engine._reduce_non_expert_gradients([flat], 500)
        reduced: list[float] = engine.allreduce_bucket([flat], "dp").tolist()
        patch.close()
        return reduced

    assert ranks.run(body) == [mean(1, 2, 3, 4)] * 2


SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
SCATTER_BUCKET = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class Zero3:
    """ZeRO's optimizer of stage 3 with parameters of five and three elements."""

    gradient_accumulation_dtype = torch.float64

    def __init__(self, rank: int) -> None:
        self.parameters = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3))]
        for parameter, numbers in zip(self.parameters, ([1, 2, 3, 4, 5], [6, 7, 8]), strict=True):
            parameter.grad = gradient(rank, numbers)
            half = (parameter.numel() + 1) // 2
            parameter.partition_numel = lambda half=half: half
        self.group = "dp"
        self.ipg_buckets = {FP32: SimpleNamespace(params=self.parameters, process_group="dp")}

    def _get_param_partition_group(self, parameter: Any) -> str:
        return self.group

    def scatter(self, *args: Any) -> str:
        return "original"


setattr(Zero3, SCATTER, Zero3.scatter)
setattr(Zero3, SCATTER_BUCKET, Zero3.scatter)


def test_each_rank_of_stage_3_gets_the_averages_of_its_partitions(ranks: TwoRanks) -> None:
    def body(rank: int) -> Any:
        optimizer = Zero3(rank)
        names = {id(each): str(index) for index, each in enumerate(optimizer.parameters)}
        patch = Stage3Reduction(optimizer, compressor(), names)
        parts = getattr(optimizer, SCATTER)(optimizer.parameters, FP32)
        padded = getattr(optimizer, SCATTER_BUCKET)(None, FP32)
        dtypes = {part.dtype for part in parts}
        optimizer.group = optimizer.ipg_buckets[FP32].process_group = "alone"
        alone = [
            getattr(optimizer, SCATTER)(optimizer.parameters, FP32),
            getattr(optimizer, SCATTER_BUCKET)(None, FP32),
        ]
        patch.discard()
        patch.close()
        assert alone == ["original"] * 2
        assert dtypes == {torch.float64}
        return [part.tolist() for part in parts], [part.tolist() for part in padded]

    first, second = ranks.run(body)

    assert first == ([mean(1, 2, 3), mean(6, 7)], [mean(1, 2, 3), mean(6, 7)])
    assert second == ([mean(4, 5), mean(8)], [[*mean(4, 5), 0], [*mean(8), 0]])
