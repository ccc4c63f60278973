"""Split of samples into micro-batches, and the exponent of their weights."""

from __future__ import annotations

import pytest

from zerowatch.runtime.trainer.window.micro_batches import split_sizes, weight_exponent


@pytest.mark.parametrize(
    ("samples", "micro_batch", "sizes"),
    [(8, 8, (8,)), (8, 3, (3, 3, 2)), (8, 1, (1,) * 8), (8, 100, (8,)), (7, 4, (4, 3))],
)
def test_no_micro_batch_is_larger_than_requested_and_all_are_as_even_as_possible(
    samples, micro_batch, sizes
):
    assert split_sizes(samples, -(-samples // micro_batch)) == sizes


def test_a_rank_with_fewer_samples_than_micro_batches_has_empty_ones():
    assert split_sizes(2, 5) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize(("weight", "exponent"), [(8, 0), (16, 1), (8 * 100, 7), (4, -1)])
def test_the_exponent_is_that_of_the_closest_power_of_two(weight, exponent):
    assert weight_exponent(weight, 8) == exponent
