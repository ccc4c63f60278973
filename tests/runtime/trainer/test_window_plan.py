"""How samples are cut into micro-batches."""

from __future__ import annotations

import pytest

from zerowatch.runtime.trainer.window.gradients import weight_exponent
from zerowatch.runtime.trainer.window.plan import num_micro_batches, sizes


@pytest.mark.parametrize(
    ("samples", "micro_batch", "cut"),
    [(8, 8, (8,)), (8, 3, (3, 3, 2)), (8, 1, (1,) * 8), (8, 100, (8,)), (7, 4, (4, 3))],
)
def test_no_micro_batch_is_larger_than_asked_and_all_are_as_even_as_can_be(
    samples, micro_batch, cut
):
    assert sizes(samples, num_micro_batches(samples, micro_batch)) == cut


def test_a_rank_with_fewer_samples_than_micro_batches_has_empty_ones():
    assert sizes(2, 5) == (1, 1, 0, 0, 0)


@pytest.mark.parametrize(("weight", "exponent"), [(8, 0), (16, 1), (8 * 100, 7), (4, -1)])
def test_the_exponent_is_that_of_the_closest_power_of_two(weight, exponent):
    assert weight_exponent(weight, 8) == exponent
