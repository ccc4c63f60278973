"""Tests of the roles of process groups, on stand-ins for DeepSpeed's and Megatron's registries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn, optim

from zerowatch.runtime.collectives import group_roles
from zerowatch.runtime.collectives.group_roles import p2p_role, role_of, set_roles
from zerowatch.runtime.common.host_group import GROUP_DESCRIPTION
from zerowatch.runtime.common.torch_engine import TorchEngine


def group_of(*ranks: int, description: str = "") -> Any:
    return SimpleNamespace(ranks=ranks, group_desc=description, size=lambda: len(ranks))


WORLD = group_of(0, 1, 2, 3)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    held = SimpleNamespace(mpu=None, mesh_device=None)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", held)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "deepspeed.runtime.sequence_parallel.parallel_state_sp", False)
    fake = SimpleNamespace(
        group=SimpleNamespace(WORLD=WORLD), get_process_group_ranks=lambda group: group.ranks
    )
    monkeypatch.setattr(group_roles, "dist", fake)
    return held


def getter(group: Any) -> Callable[[], Any]:
    return lambda: group


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("_MODEL_PARALLEL_GROUP", "tp"),
        ("_EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("_DATA_PARALLEL_GROUP", "dp"),
        ("_ZERO_PARAM_INTRA_PARALLEL_GROUP", "dp"),
        ("_WORLD_GROUP", "dp"),
    ],
)
def test_a_group_of_deepspeeds_registry_has_its_role(
    registry: SimpleNamespace, name: str, role: str
) -> None:
    group = group_of(0, 1)
    setattr(registry, name, group)

    assert role_of(group) == role
    assert role_of(group_of(0, 1)) == "other"  # another group of the same ranks


@pytest.mark.parametrize(
    ("name", "role"),
    [("_EXPERT_PARALLEL_GROUP", "ep"), ("_EXPERT_DATA_PARALLEL_GROUP", "dp")],
)
def test_groups_that_the_registry_holds_by_name_are_found(
    registry: SimpleNamespace, name: str, role: str
) -> None:
    group = group_of(0, 1)
    setattr(registry, name, {"ep_size_1": group_of(0), "ep_size_2": group})

    assert role_of(group) == role


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("get_tensor_model_parallel_group", "tp"),
        ("get_slice_parallel_group", "tp"),
        ("get_expert_model_parallel_group", "ep"),
        ("get_sequence_parallel_group", "sp"),
        ("get_context_parallel_group", "sp"),
        ("get_pipe_parallel_group", "pp"),
        ("get_pipeline_model_parallel_group", "pp"),
        ("get_data_parallel_group", "dp"),
        ("get_sequence_data_parallel_group", "dp"),
    ],
)
def test_a_group_of_an_mpu_has_its_role(registry: SimpleNamespace, method: str, role: str) -> None:
    group = group_of(0, 1)
    registry.mpu = SimpleNamespace(**{method: getter(group)})

    assert role_of(group) == role


def test_the_sequence_group_of_deepspeeds_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(0, 1)
    state: Any = SimpleNamespace(get_sequence_parallel_group=getter(group))
    name = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
    monkeypatch.setitem(sys.modules, name, state)

    assert role_of(group) == "sp"


@pytest.mark.parametrize(
    ("dimension", "role"), [("sequence_parallel", "sp"), ("data_parallel", "dp")]
)
def test_a_dimension_of_the_mesh_has_its_role(
    registry: SimpleNamespace, dimension: str, role: str
) -> None:
    group = group_of(0, 1)
    registry.mesh_device = SimpleNamespace(
        mesh_dim_names=(dimension,), get_group=lambda mesh_dim: {dimension: group}[mesh_dim]
    )

    assert role_of(group) == role


@pytest.mark.parametrize("error", [AssertionError, KeyError, RuntimeError, TypeError, ValueError])
def test_a_group_that_an_mpu_has_not_made_is_passed_over(
    registry: SimpleNamespace, error: type[Exception]
) -> None:
    def fail() -> None:
        raise error

    group = group_of(0, 1)
    registry.mpu = SimpleNamespace(
        get_tensor_model_parallel_group=fail, get_data_parallel_group=getter(group)
    )

    assert role_of(group) == "dp"


def test_the_first_role_that_holds_a_group_is_used(registry: SimpleNamespace) -> None:
    group = group_of(0, 1)
    registry.mpu = SimpleNamespace(
        get_data_parallel_group=getter(group),
        get_pipe_parallel_group=getter(group),
        get_sequence_parallel_group=getter(group),
    )

    assert role_of(group) == "sp"


def test_the_world_group_and_zerowatchs_own_have_their_names() -> None:
    assert role_of(WORLD) == "world"
    assert role_of(group_of(0, 1, description=GROUP_DESCRIPTION)) == "zerowatch"


def test_groups_without_deepspeed_have_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.utils.groups")

    assert (role_of(group_of(0, 1)), role_of(WORLD)) == ("other", "world")


@pytest.mark.parametrize(
    ("stages", "role"), [(group_of(0, 2), "pp"), (group_of(0), "tp"), (None, "tp")]
)
def test_the_model_parallel_group_spans_stages_or_slices(
    registry: SimpleNamespace, stages: Any, role: str
) -> None:
    group = group_of(0, 1, 2, 3)
    registry.mpu = SimpleNamespace(
        get_model_parallel_group=getter(group), get_pipe_parallel_group=getter(stages)
    )

    assert role_of(group) == role


@pytest.mark.parametrize("method", ["get_pipe_parallel_group", "get_pipeline_model_parallel_group"])
@pytest.mark.parametrize(("ranks", "role"), [((0, 4), "pp"), ((0, 1), "other")])
def test_a_group_within_the_stages_is_of_the_pipeline(
    registry: SimpleNamespace, method: str, ranks: tuple[int, ...], role: str
) -> None:
    registry.mpu = SimpleNamespace(**{method: getter(group_of(0, 2, 4))})

    assert role_of(group_of(*ranks)) == role  # such as of tied weights


@pytest.mark.parametrize(
    ("stages", "group", "role"),
    [
        (group_of(0, 2), WORLD, "pp"),
        (group_of(0), WORLD, "world"),
        (None, WORLD, "world"),
        (group_of(0, 2), group_of(0, 1), "other"),
    ],
)
def test_messages_over_the_world_group_are_of_the_pipeline_if_there_is_one(
    registry: SimpleNamespace, stages: Any, group: Any, role: str
) -> None:
    registry.mpu = SimpleNamespace(get_pipe_parallel_group=getter(stages))

    assert p2p_role(group) == role


def test_an_engine_of_deepspeed_has_the_roles_of_its_registry() -> None:
    given: list[Any] = []
    groups: Any = SimpleNamespace(set_roles=lambda *roles: given.extend(roles))

    set_roles(groups, SimpleNamespace())

    assert given == [role_of, p2p_role]


class Model(TorchEngine):
    """A torch model with groups of a mesh."""

    roles: tuple[tuple[Any, str], ...] = ()

    def group_roles(self) -> Any:
        return iter(self.roles)


def test_a_torch_model_has_the_roles_of_its_mesh() -> None:
    given: list[Any] = []
    groups: Any = SimpleNamespace(set_roles=lambda *roles: given.extend(roles))
    module = nn.Linear(2, 3)
    model = Model(module, optim.SGD(module.parameters(), lr=0.1))
    sharded, own = group_of(0, 1), group_of(0, 1, description=GROUP_DESCRIPTION)
    model.roles = ((sharded, "dp"), (own, "dp"), (WORLD, "other"))

    set_roles(groups, model)

    collective, message = given
    assert [collective(group) for group in (sharded, own, WORLD)] == ["dp", "zerowatch", "world"]
    assert [message(group) for group in (sharded, own, WORLD)] == ["dp", "zerowatch", "world"]
