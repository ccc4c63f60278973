"""Tests of the split of samples into micro-batches, and of the exponent of their weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zerowatch.runtime.trainer.window.micro_batches import (
    loss_and_weight,
    split_sizes,
    weight_exponent,
)


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


@pytest.mark.parametrize("weight", ["4", None, [4], 1j, torch.ones(2), torch.ones(1) * 1j])
def test_a_weight_that_is_no_number_is_an_error_that_names_it(weight):
    with pytest.raises(TypeError) as caught:
        loss_and_weight((torch.ones((), requires_grad=True), weight), 3)

    assert "weight" in str(caught.value)
    assert "number" in str(caught.value)
    assert (str(tuple(weight.shape)) if isinstance(weight, torch.Tensor) else repr(weight)) in str(
        caught.value
    )


@pytest.mark.parametrize("weight", [4, 4.0, np.float32(4), np.int64(4), torch.tensor([4])])
def test_a_number_of_any_kind_is_a_weight(weight):
    _, found = loss_and_weight((torch.ones((), requires_grad=True), weight), 3)

    assert found == 4
