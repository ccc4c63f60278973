"""Tests of gradient compression in one process: sizes, index, residuals, overlap."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from zerowatch.runtime.common.deepspeed_internals import INTERNALS
from zerowatch.runtime.engine.compression.bucket_compressor import GradientSpan, ParameterIndex
from zerowatch.runtime.engine.compression.compressed_all_reduce import (
    InFlightReduction,
    chunks,
    direct_is_cheaper,
    even_sizes,
    run_collective_steps,
)
from zerowatch.runtime.engine.compression.encoding import BLOCK
from zerowatch.runtime.engine.compression.error_feedback import CompressionError, Residuals
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_values", [1, 255, 256, 1000, 99_999])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_even_sizes_are_whole_blocks_and_add_up(num_values: int, num_ranks: int) -> None:
    sizes = even_sizes(num_values, num_ranks)

    assert sum(sizes) == num_values
    assert sum(size % BLOCK > 0 for size in sizes) <= 1  # the last that has any
    assert max(sizes) - num_values / num_ranks <= BLOCK


@pytest.mark.parametrize("chunk_values", [None, 100, 1000])
def test_chunks_cover_each_ranks_values_once_and_in_order(chunk_values: int | None) -> None:
    sizes = [250, 0, 999, 1]

    messages = list(chunks(sizes, chunk_values))

    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        covered = [at for spans in messages for at in range(spans[rank][0], sum(spans[rank]))]
        assert covered == list(range(start, start + size))
    assert all(size <= (chunk_values or 999) for spans in messages for _, size in spans)


def test_sums_go_directly_to_their_owners_unless_one_rank_owns_most_of_them() -> None:
    assert direct_is_cheaper([10, 10, 10, 10])
    assert not direct_is_cheaper([40, 0, 0, 0])
    assert direct_is_cheaper([20, 0])  # with two ranks both move the same bytes


def test_a_part_of_a_bucket_is_found_across_the_borders_of_parameters() -> None:
    bucket = torch.zeros(100)
    index = ParameterIndex([("b", bucket[30:70]), ("a", bucket[:30]), ("empty", bucket[:0])])

    spans = index.spans_of(bucket[20:50])

    assert spans == [GradientSpan("a", 30, 20, 10), GradientSpan("b", 40, 0, 20)]


def test_memory_outside_all_gradients_is_an_error() -> None:
    bucket = torch.zeros(100)
    index = ParameterIndex([("a", bucket[:30])])

    with pytest.raises(LookupError):
        index.spans_of(bucket[20:40])


def test_an_aborted_window_leaves_residuals_as_they_were() -> None:
    residuals = Residuals(torch.float32)
    residuals.of("a", 3, CPU).fill_(1.0)
    residuals.commit()

    residuals.of("a", 3, CPU).fill_(7.0)
    residuals.discard()

    assert residuals.of("a", 3, CPU).tolist() == [1.0, 1.0, 1.0]


def test_residuals_take_two_copies_and_no_more_over_many_windows() -> None:
    residuals = Residuals(torch.bfloat16)

    for _ in range(5):
        residuals.of("a", 100, CPU).add_(1.0)
        residuals.commit()

    copies = [*residuals._committed.values(), *residuals._window.values()]
    copies += residuals._spare.values()
    assert sum(copy.nbytes for copy in copies) == 2 * 100 * 2
    assert residuals.state_dict()["a"].tolist() == [5.0] * 100


def test_loaded_residuals_equal_the_saved_ones() -> None:
    residuals, restarted = Residuals(torch.float32), Residuals(torch.float32)
    residuals.of("a", 2, CPU).copy_(torch.tensor([0.1, 0.2]))
    residuals.commit()

    restarted.load_state_dict(residuals.state_dict())

    assert torch.equal(restarted.of("a", 2, CPU), residuals.of("a", 2, CPU))


def test_the_error_ratio_is_that_of_the_norms() -> None:
    error = CompressionError()

    for value, its_error in ((3.0, 0.03), (4.0, 0.04)):
        error.add_values(torch.tensor([value]))
        error.add_errors(torch.tensor([its_error]))
    error.close()

    assert error.ratio() == pytest.approx(0.01)


def test_gradients_that_are_not_finite_have_no_error_ratio() -> None:
    error = CompressionError()

    error.add_values(torch.tensor([float("inf")]))
    error.add_errors(torch.tensor([float("nan")]))
    error.close()

    assert error.ratio() is None


class Work:
    """A collective that logs when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def two_phases(log: list[str], name: str):
    for phase in "12":
        log.append(f"start {name}{phase}")
        yield Work(log, f"{name}{phase}")
    log.append(f"end {name}")


def test_the_next_exchange_starts_before_the_last_is_waited_for() -> None:
    log: list[str] = []

    run_collective_steps(two_phases(log, name) for name in "abc")

    assert log.index("start b1") < log.index("wait a1")
    assert log.index("start c1") < log.index("wait b1")
    assert Counter(line.split()[0] for line in log) == {"start": 6, "wait": 6, "end": 3}


def test_discarded_exchanges_are_waited_for_and_not_finished() -> None:
    log: list[str] = []

    class Reduction:
        def exchanges(self):
            return [two_phases(log, "a")]

        def finish(self) -> None:
            log.append("finish")

    InFlightReduction(Reduction()).discard()

    assert log == ["start a1", "wait a1"]


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"plain, fp32, bf16, fp16, int8, fp8, got 'int4'"):
        GradientCompressor("int4")


def test_private_names_are_listed_once_and_in_order() -> None:
    for names in INTERNALS["engine/compression"].values():
        assert list(names) == sorted(set(names))
