"""Tests of the split of samples into micro-batches, and of the exponent of their weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerowatch.runtime.trainer.window.micro_batches import (
    LossSums,
    _LossAccumulator,
    evaluate_micro_batches,
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


class SeenOperations(TorchDispatchMode):
    """Collects the names of the operations on tensors, and of those between two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.transfers: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.transfers.append(str(func))
        return result


# Torch shows a mode no copy of a number to a device, but the kernel that makes it there.
@pytest.mark.parametrize(
    ("weight", "kernel"),
    [
        (3, "aten.full.default"),
        (np.float32(3), "aten.full.default"),
        (torch.tensor(3.0), "aten.full.default"),
        (torch.tensor(3.0, device="meta"), "aten._to_copy.default"),
    ],
)
def test_the_weight_of_a_micro_batch_is_not_copied_from_the_host_to_the_device(
    monkeypatch, weight, kernel
):
    monkeypatch.setattr(_LossAccumulator, "read", lambda self: LossSums(1.0, 1.0))
    module = torch.nn.Identity()
    engine = SimpleNamespace(module=module, eval=module.eval, device=torch.device("meta"))
    mean = torch.ones((), device="meta")
    with SeenOperations() as seen:
        evaluate_micro_batches(
            engine, lambda *_: (mean, weight), torch.ones(4, 2, device="meta"), (2, 2)
        )

    assert seen.names.count(kernel) >= 2
    assert not seen.transfers
