"""Tests of which part of which parameter each of DeepSpeed's optimizers has on a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerowatch.runtime.engine.rebuild import optimizer_layout
from zerowatch.runtime.engine.rebuild.optimizer_layout import (
    base_optimizer,
    group_members,
    layout_of,
    parameter_names,
    rank_partition,
)


class Model(nn.Module):
    """Three parameters of 6, 4 and 5 elements, the last of which is frozen; one name is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.b = nn.Parameter(torch.arange(4.0))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.tied = self.a


def engine_of(kind: str, base: Any, **fields: Any) -> tuple[SimpleNamespace, Model]:
    """An engine whose optimizer has the name of a class of DeepSpeed."""
    model = fields.pop("model", None) or Model()
    optimizer = type(kind, (), {})()
    vars(optimizer).update(fields | ({} if base is None else {"optimizer": base}))
    return SimpleNamespace(optimizer=optimizer, module=model), model


def slices(engine: Any) -> list[list[tuple[str, int, int, int]]]:
    return [
        [(piece.name, piece.start, piece.length, piece.offset) for piece in tensor.pieces]
        for tensor in layout_of(engine)
    ]


@pytest.fixture(autouse=True)
def rank_of_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank in a group is the group itself."""
    monkeypatch.setattr(optimizer_layout.dist, "get_rank", lambda group: group)


def test_a_tied_parameter_has_its_first_name() -> None:
    assert sorted(parameter_names(Model()).values()) == ["a", "b", "frozen"]


def test_torchs_own_optimizer_updates_whole_parameters() -> None:
    model = Model()
    optimizer = torch.optim.SGD([{"params": [model.b]}, {"params": [model.frozen, model.a]}], lr=1)
    engine = SimpleNamespace(optimizer=optimizer, module=model)

    layout = layout_of(engine)

    assert slices(engine) == [[("b", 0, 4, 0)], [("a", 0, 6, 0)]]
    assert [(each.group, each.members, each.replicated) for each in layout] == [
        (0, ("b",), True),
        (1, ("a",), True),
    ]
    assert [each.tensor for each in layout] == [model.b, model.a]
    assert all(each.state is optimizer.state for each in layout)
    assert group_members(engine) == [("b",), ("frozen", "a")]
    assert base_optimizer(optimizer) is optimizer


def test_an_unfused_optimizer_has_a_copy_of_each_parameter() -> None:
    model = Model()
    masters = [torch.zeros(2, 3), torch.zeros(4)]
    base = SimpleNamespace(state={}, param_groups=[{}])
    engine, _ = engine_of(
        "FP16_UnfusedOptimizer",
        base,
        model=model,
        fp16_groups=[[model.a, model.b]],
        fp32_groups=[masters],
    )

    layout = layout_of(engine)

    assert [each.tensor for each in layout] == masters
    assert slices(engine) == [[("a", 0, 6, 0)], [("b", 0, 4, 0)]]
    assert all(each.replicated and each.state is base.state for each in layout)
    assert group_members(engine) == [("a", "b")]


def test_a_fused_optimizer_has_one_copy_of_each_group_on_every_rank() -> None:
    model = Model()
    base = SimpleNamespace(state={}, param_groups=[{}, {}])
    engine, _ = engine_of(
        "FP16_Optimizer",
        base,
        model=model,
        fp16_groups=[[model.frozen], [model.a, model.b]],
        fp32_groups_flat=[torch.zeros(5), torch.zeros(10)],
    )

    assert slices(engine) == [[("frozen", 0, 5, 0)], [("a", 0, 6, 0), ("b", 0, 4, 6)]]
    assert [(each.group, each.replicated) for each in layout_of(engine)] == [(0, True), (1, True)]


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [[("b", 0, 4, 0)]]),
        (1, [[("a", 0, 4, 0)]]),
        (2, [[("a", 4, 2, 0)]]),  # and two elements of padding
    ],
)
def test_stages_1_and_2_have_a_partition_of_each_group_in_their_own_order(
    rank: int, expected: list[Any]
) -> None:
    model = Model()
    engine, _ = engine_of(
        "DeepSpeedZeroOptimizer",
        SimpleNamespace(state={}),
        model=model,
        single_partition_of_fp32_groups=[torch.zeros(4)],
        real_dp_process_group=[rank],
        partition_size=[4],
        round_robin_bit16_groups=[[model.b, model.a]],
        round_robin_bit16_offsets=[[0, 4]],
    )

    [tensor] = layout_of(engine)

    assert slices(engine) == expected
    assert (tensor.members, tensor.replicated) == (("b", "a"), False)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, [[("a", 0, 5, 0)]]), (1, [[("a", 5, 1, 0), ("b", 0, 4, 1)]])],
)
def test_bf16_has_a_partition_of_each_group(rank: int, expected: list[Any]) -> None:
    model = Model()
    engine, _ = engine_of(
        "BF16_Optimizer",
        SimpleNamespace(state={}),
        model=model,
        fp32_groups_flat_partition=[torch.zeros(5)],
        real_dp_process_group=[rank],
        bf16_groups=[[model.a, model.b]],
    )

    assert slices(engine) == expected


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [[("a", 0, 4, 0)], [("b", 0, 3, 0), ("frozen", 0, 3, 3)]]),
        (1, [[("a", 4, 2, 0)], [("b", 3, 1, 0), ("frozen", 3, 2, 3)]]),
        (2, [[], []]),  # all of it is padding
    ],
)
def test_stage_3_has_a_partition_of_each_parameter_of_a_sub_group(
    rank: int, expected: list[Any]
) -> None:
    model = Model()
    for parameter, size in ((model.a, 4), (model.b, 3), (model.frozen, 3)):
        parameter.ds_numel = parameter.numel()
        parameter.partition_numel = lambda size=size: size
    host, device = SimpleNamespace(state={"of": "host"}), SimpleNamespace(state={"of": "device"})
    engine, _ = engine_of(
        "DeepSpeedZeroOptimizer_Stage3",
        host,
        model=model,
        fp16_groups=[[model.a], [model.b, model.frozen]],
        fp32_partitioned_groups_flat=[torch.zeros(4), torch.zeros(6)],
        sub_group_to_group_id={0: 1, 1: 0},
        _get_param_partition_rank=lambda parameter: rank,
        subgroup_to_device={0: "cpu", 1: "cuda"},
        backup_optimizer=device,
    )

    layout = layout_of(engine)

    assert slices(engine) == expected
    assert [each.group for each in layout] == [1, 0]
    assert [each.members for each in layout] == [("a",), ("b", "frozen")]
    assert [each.state["of"] for each in layout] == ["host", "device"]
    assert not any(each.replicated for each in layout)


def test_an_unknown_optimizer_is_named() -> None:
    engine, _ = engine_of("Muon", None)

    with pytest.raises(LookupError, match="Muon"):
        layout_of(engine)


@pytest.mark.parametrize(
    ("length", "rank", "expected"),
    [(7, 0, (0, 3)), (7, 1, (3, 3)), (7, 2, (6, 1)), (2, 2, (2, 0)), (6, 1, (2, 2))],
)
def test_a_tensor_is_divided_among_three_ranks(
    length: int, rank: int, expected: tuple[int, int]
) -> None:
    assert rank_partition(length, rank, 3) == expected
