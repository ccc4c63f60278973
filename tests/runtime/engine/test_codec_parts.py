"""Who sums what, whose gradient a piece of memory is, and errors kept by window."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from zerowatch.runtime.common.deepspeed_internals import INTERNALS
from zerowatch.runtime.engine.compression.collective_steps import InFlightReduction, run_all
from zerowatch.runtime.engine.compression.compression_error import CompressionError
from zerowatch.runtime.engine.compression.formats import BLOCK
from zerowatch.runtime.engine.compression.gradient_compressor import GradientCompressor
from zerowatch.runtime.engine.compression.parameter_index import GradientSpan, ParameterIndex
from zerowatch.runtime.engine.compression.residuals import Residuals
from zerowatch.runtime.engine.compression.shards import chunks, direct_is_cheaper, even_sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_values", [1, 255, 256, 1000, 99_999])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_even_shares_are_whole_blocks_and_add_up(num_values: int, num_ranks: int) -> None:
    sizes = even_sizes(num_values, num_ranks)

    assert sum(sizes) == num_values
    assert sum(size % BLOCK > 0 for size in sizes) <= 1  # the last that has any
    assert max(sizes) - num_values / num_ranks <= BLOCK


@pytest.mark.parametrize("most", [None, 100, 1000])
def test_pieces_cover_each_ranks_values_once_and_in_order(most: int | None) -> None:
    sizes = [250, 0, 999, 1]

    cut = list(chunks(sizes, most))

    for rank, size in enumerate(sizes):
        start = sum(sizes[:rank])
        covered = [at for spans in cut for at in range(spans[rank][0], sum(spans[rank]))]
        assert covered == list(range(start, start + size))
    assert all(size <= (most or 999) for spans in cut for _, size in spans)


def test_values_go_straight_to_their_owners_unless_one_rank_owns_most_of_them() -> None:
    assert direct_is_cheaper([10, 10, 10, 10])
    assert not direct_is_cheaper([40, 0, 0, 0])
    assert direct_is_cheaper([20, 0])  # of two ranks both ways move the same bytes


def test_a_piece_of_a_bucket_is_found_across_the_borders_of_parameters() -> None:
    bucket = torch.zeros(100)
    places = ParameterIndex([("b", bucket[30:70]), ("a", bucket[:30]), ("empty", bucket[:0])])

    assert places.of(bucket[20:50]) == [GradientSpan("a", 30, 20, 10), GradientSpan("b", 40, 0, 20)]


def test_memory_that_is_no_gradient_is_an_error() -> None:
    bucket = torch.zeros(100)
    places = ParameterIndex([("a", bucket[:30])])

    with pytest.raises(LookupError):
        places.of(bucket[20:40])


def test_an_aborted_window_leaves_residuals_as_they_were() -> None:
    residuals = Residuals(torch.float32)
    residuals.of("a", 3, CPU).fill_(1.0)
    residuals.commit()

    residuals.of("a", 3, CPU).fill_(7.0)
    residuals.drop()

    assert residuals.of("a", 3, CPU).tolist() == [1.0, 1.0, 1.0]


def test_residuals_take_two_copies_and_no_more_over_many_windows() -> None:
    residuals = Residuals(torch.bfloat16)

    for _ in range(5):
        residuals.of("a", 100, CPU).add_(1.0)
        residuals.commit()

    assert residuals.num_bytes() == 2 * 100 * 2
    assert residuals.state_dict()["a"].tolist() == [5.0] * 100


def test_loaded_residuals_go_on_where_saved_ones_stood() -> None:
    residuals, restarted = Residuals(torch.float32), Residuals(torch.float32)
    residuals.of("a", 2, CPU).copy_(torch.tensor([0.1, 0.2]))
    residuals.commit()

    restarted.load_state_dict(residuals.state_dict())

    assert torch.equal(restarted.of("a", 2, CPU), residuals.of("a", 2, CPU))


def test_the_error_ratio_is_that_of_the_norms() -> None:
    tally = CompressionError()

    for sent, lost in ((3.0, 0.03), (4.0, 0.04)):
        tally.will_send(torch.tensor([sent]))
        tally.lost(torch.tensor([lost]))
    tally.close()

    assert tally.ratio() == pytest.approx(0.01)


def test_gradients_that_are_not_finite_have_no_error_ratio() -> None:
    tally = CompressionError()

    tally.will_send(torch.tensor([float("inf")]))
    tally.lost(torch.tensor([float("nan")]))
    tally.close()

    assert tally.ratio() is None


class Work:
    """A collective that notes when it was waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def two_shots(log: list[str], name: str):
    for shot in "12":
        log.append(f"start {name}{shot}")
        yield Work(log, f"{name}{shot}")
    log.append(f"end {name}")


def test_the_next_exchange_starts_before_the_last_is_waited_for() -> None:
    log: list[str] = []

    run_all(two_shots(log, name) for name in "abc")

    assert log.index("start b1") < log.index("wait a1")
    assert log.index("start c1") < log.index("wait b1")
    assert Counter(line.split()[0] for line in log) == {"start": 6, "wait": 6, "end": 3}


def test_dropped_exchanges_are_waited_for_and_come_to_nothing() -> None:
    log: list[str] = []
    departed = InFlightReduction([two_shots(log, "a")], finish=lambda: log.append("finish"))

    departed.drop()

    assert log == ["start a1", "wait a1"]


def test_a_codec_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"'int4'; it can be plain, fp32, bf16"):
        GradientCompressor("int4")


def test_private_names_are_listed_once_and_in_order() -> None:
    for names in INTERNALS["engine/compression"].values():
        assert list(names) == sorted(set(names))
