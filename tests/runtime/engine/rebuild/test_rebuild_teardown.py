"""Tests of the teardown of a module for a rebuild, and of the partitions of a tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from zerowatch.runtime.engine.rebuild.optimizer_layout import rank_partition
from zerowatch.runtime.engine.rebuild.teardown import release_memory, strip_module, track_hooks


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_partitions_of_all_ranks_cover_a_tensor_once(length: int, world_size: int) -> None:
    parts = [rank_partition(length, rank, world_size) for rank in range(world_size)]

    assert sum(count for _, count in parts) == length
    assert all(start + count == after for (start, count), (after, _) in pairwise(parts) if count)


def test_a_released_parameter_has_its_shape_and_one_element_of_memory() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 5))

    release_memory(parameter, torch.Size((3, 5)))

    assert parameter.shape == (3, 5)
    assert parameter.untyped_storage().nbytes() == parameter.element_size()


def test_stripping_a_module_keeps_attributes_of_the_script() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.is_special = True
    model.weight.ds_id = 4
    model.weight.partition = print

    strip_module(model)

    assert vars(model.weight) == {"is_special": True}


def test_undoing_tracked_hooks_removes_only_those_added_since() -> None:
    model = torch.nn.Linear(2, 2)
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("old"))
    undo = track_hooks(model)
    model.register_forward_hook(lambda *_: calls.append("new"))
    model.register_forward_pre_hook(lambda *_: calls.append("new"))
    model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("new"))

    undo()
    model(torch.ones(1, 2)).sum().backward()

    assert calls == ["old"]
