"""Tests of the teardown of a module for a rebuild, and of the partitions of a tensor."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.utils import groups

from zerowatch.runtime.engine.rebuild import teardown as removal
from zerowatch.runtime.engine.rebuild.optimizer_layout import rank_partition
from zerowatch.runtime.engine.rebuild.teardown import (
    forget_module,
    release_memory,
    release_tensors,
    strip_module,
    teardown,
    track_hooks,
)


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


class ZeroOptimizer:
    """An optimizer of DeepSpeed around one of torch."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.optimizer, self.flat = base, torch.ones(7)


def test_a_removed_engine_has_neither_hooks_nor_tensors() -> None:
    model = torch.nn.Linear(2, 3)
    base = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    base.step()
    zero, order = ZeroOptimizer(base), list[str]()
    engine: Any = SimpleNamespace(
        module=model,
        optimizer=zero,
        basic_optimizer=base,
        lr_scheduler=object(),
        global_steps=7,
        destroy=lambda: order.append("destroy"),
        module_forward_pre_hook=SimpleNamespace(remove=lambda: order.append("before")),
        module_forward_post_hook=SimpleNamespace(remove=lambda: order.append("after")),
    )

    teardown(engine)

    assert order == ["destroy", "before", "after"]
    assert (engine.optimizer, engine.basic_optimizer, engine.lr_scheduler) == (None, None, None)
    assert (engine.module, engine.global_steps) == (model, 7)
    assert vars(zero) == {}
    assert (dict(base.state), [group["params"] for group in base.param_groups]) == ({}, [[]])


def test_an_engine_whose_removal_is_interrupted_has_no_optimizer() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    base = torch.optim.SGD(torch.nn.Linear(2, 3).parameters())
    engine: Any = SimpleNamespace(module=None, optimizer=base, destroy=interrupt)

    with pytest.raises(KeyboardInterrupt):
        teardown(engine)

    assert engine.optimizer is None


def test_an_object_that_is_no_optimizer_of_torch_is_left_alone() -> None:
    other = SimpleNamespace(state={"a": 1}, param_groups=[{"params": [1]}])

    release_tensors(other)

    assert vars(other) == {"state": {"a": 1}, "param_groups": [{"params": [1]}]}


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let torch's linear be that of stage 3, and return torch's own."""
    kind, own = partition_parameters.InsertPostInitMethodToModuleSubClasses, object()
    monkeypatch.setattr(kind, "linear_bk", own, raising=False)
    wrapped = partition_parameters.zero3_linear_wrap
    monkeypatch.setattr(torch.nn.functional, "linear", wrapped)
    return own


def test_the_last_engine_of_stage_3_gives_torchs_linear_back(
    monkeypatch: pytest.MonkeyPatch, linear: Any
) -> None:
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(3, 5)
    stack = [model, other, model]
    monkeypatch.setattr(parameter_offload, "FWD_MODULE_STACK", stack)

    forget_module(model)
    with_another = (list(stack), torch.nn.functional.linear is linear)
    forget_module(other)

    assert with_another == ([other], False)
    assert (stack, torch.nn.functional.linear is linear) == ([], True)


@pytest.mark.parametrize("is_world", [True, False])
def test_the_group_of_secondary_partitions_is_destroyed_unless_it_is_the_world(
    monkeypatch: pytest.MonkeyPatch, is_world: bool
) -> None:
    destroyed: list[Any] = []
    dist = SimpleNamespace(
        group=SimpleNamespace(WORLD="world"), destroy_process_group=destroyed.append
    )
    monkeypatch.setattr(removal, "dist", dist)
    monkeypatch.setattr(
        groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "world" if is_world else "secondary"
    )

    forget_module(torch.nn.Linear(2, 3))

    assert destroyed == ([] if is_world else ["secondary"])
    assert groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is None


def test_a_partitioned_parameter_gets_its_shape_back_without_memory() -> None:
    model = torch.nn.Linear(2, 3)
    weight: Any = model.weight
    weight.ds_shape, weight.data = torch.Size((3, 2)), torch.empty(0)
    weight.grad = None
    model.bias.grad = torch.ones(3)

    strip_module(model)

    assert (model.weight.shape, vars(model.weight)) == ((3, 2), {})
    assert model.weight.untyped_storage().nbytes() == 4
    assert model.bias.grad is None
    assert model.bias.untyped_storage().nbytes() == 3 * 4


def test_attributes_of_deepspeed_leave_a_module_and_parameters_come_back() -> None:
    model: Any = torch.nn.Linear(2, 3)
    original, own = model._parameters, vars(model)
    own["_original_parameters"] = original
    own["_parameters"] = {"weight": model.weight, "added": model.bias}
    own["ds_id"] = 3
    own["_external_params"], own["ds_external_parameters"] = {}, [1]
    external: Any = torch.nn.Linear(1, 1)
    vars(external)["_external_params"] = {"of": "another module"}

    strip_module(model)
    strip_module(external)

    assert model._parameters is original
    assert list(original) == ["weight", "added"]
    left = {"_original_parameters", "ds_id", "_external_params", "ds_external_parameters"}
    assert not left & own.keys()
    assert external._external_params == {"of": "another module"}
