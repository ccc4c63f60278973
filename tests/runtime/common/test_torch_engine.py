"""Tests of the model and optimizer of a script without DeepSpeed, as monitoring sees them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from zerowatch.runtime.common import accelerator
from zerowatch.runtime.common.torch_engine import (
    TorchEngine,
    steps_so_far,
    torch_engine,
    trained_model,
    trains,
    unwrapped,
)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_step(step: object) -> Any:
    """An optimizer whose state has this number of steps."""
    return SimpleNamespace(state={"parameter": {"step": step}})


@pytest.mark.parametrize(
    ("step", "number"),
    [(7, 7), (7.0, 7), (torch.tensor(7.0), 7), (torch.empty((), device="meta"), 0), (None, 0)],
    ids=["int", "float", "tensor", "without a value", "unknown"],
)
def test_the_number_of_steps_is_read_from_the_optimizer_s_state(step: object, number: int) -> None:
    assert steps_so_far(with_step(step)) == number


class OnDevice(torch.Tensor):
    """A number that stands for one on a device, as that of a fused optimizer."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


@pytest.mark.parametrize(("is_capturing", "number"), [(False, 7), (True, 0)])
def test_the_number_of_a_fused_optimizer_is_read_from_its_device_unless_a_graph_is_captured(
    is_capturing: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.tensor(7.0).as_subclass(OnDevice)
    monkeypatch.setattr(accelerator.current, "is_capturing", lambda: is_capturing)

    assert step.device.type == "cuda"
    assert steps_so_far(with_step(step)) == number


def test_an_optimizer_that_has_made_no_step_or_keeps_no_number_is_at_zero() -> None:
    assert steps_so_far(sgd(nn.Linear(1, 1))) == 0
    assert steps_so_far(SimpleNamespace(state={"parameter": 3})) == 0  # type: ignore[arg-type]


def test_an_engine_counts_on_from_the_steps_of_its_optimizer() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    engine = TorchEngine(model, optimizer)

    assert (engine.global_steps, engine.skipped_steps, dict(engine.config)) == (3, 0, {})
    assert (engine.model, engine.module, engine.optimizer) == (model, model, optimizer)
    assert (engine.fp16_enabled(), engine.is_deepcompile_active()) == (False, False)
    assert engine.get_global_grad_norm() is None
    assert engine.zero_optimization_stage() == "none"


def test_an_engine_keeps_neither_its_model_nor_its_optimizer() -> None:
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    engine = TorchEngine(model, optimizer)

    del model, optimizer
    gc.collect()

    assert engine.optimizer is None
    for name in ("model", "module"):
        with pytest.raises(ReferenceError, match="the monitored model was garbage-collected"):
            getattr(engine, name)


def test_a_model_has_one_engine_for_each_optimizer() -> None:
    model = nn.Linear(2, 1)
    first, second = sgd(model), sgd(model)

    engine = torch_engine(model, first)

    assert torch_engine(model, first) is engine
    assert torch_engine(model, second) is not engine
    assert torch_engine(model, second).optimizer is second


def test_an_optimizer_trains_the_models_whose_parameters_it_has() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [other.bias]}, {"params": [model.bias]}], lr=0.1)

    assert trains(optimizer, model)
    assert not trains(optimizer, nn.Linear(2, 1))
    assert not trains(sgd(other), model)


def test_the_trained_model_is_the_one_with_the_most_parameters_of_the_optimizer() -> None:
    large, small = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(2, 1)
    parameters = [*small.parameters(), *large.parameters()]

    assert trained_model(torch.optim.SGD(parameters, lr=0.1)) is large
    assert trained_model(sgd(small)) is small
    assert trained_model(torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)) is None


def test_the_wrappers_of_compile_and_ddp_are_taken_off() -> None:
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    parallel = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(parallel)
    parallel.module = compiled
    holder = nn.Module()
    holder.module = model  # another module's own attribute

    assert unwrapped(model) is model
    assert unwrapped(compiled) is model
    assert unwrapped(parallel) is model
    assert unwrapped(holder) is holder


class Mesh:
    """A device mesh, whose groups are named after their dimension."""

    def __init__(self, *names: str | None) -> None:
        self.ndim = len(names)
        self.mesh_dim_names = None if names[0] is None else names

    def get_group(self, dimension: int) -> str:
        return f"group {dimension}"


class NamedGroup:
    """A process group with a description."""

    def __init__(self, group_desc: str) -> None:
        self.group_desc = group_desc


class Sharded(nn.Parameter):
    device_mesh: Mesh


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        ((None,), ["dp"]),
        ((None, None), ["other", "other"]),
        (("dp_replicate", "dp_shard_cp"), ["dp", "dp"]),
        (("fsdp", "tp"), ["dp", "tp"]),
        (("pp", "ep", "cp"), ["pp", "ep", "sp"]),
        (("pipeline", "expert", "sequence_parallel", "model"), ["pp", "ep", "sp", "tp"]),
        (("mine",), ["other"]),
    ],
    ids=str,
)
def test_the_groups_of_a_mesh_have_the_roles_that_its_dimensions_are_named_for(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str | None, ...], roles: list[str]
) -> None:
    monkeypatch.setattr("torch.distributed.tensor.DTensor", Sharded)
    model, mesh = nn.Linear(2, 1), Mesh(*names)
    for name in ("weight", "bias"):  # both on the same mesh
        parameter = Sharded(torch.ones(1))
        parameter.device_mesh = mesh
        setattr(model, name, parameter)

    found = list(TorchEngine(model, sgd(model)).group_roles())

    assert found == [(f"group {number}", role) for number, role in enumerate(roles)]


def test_the_group_of_ddp_is_data_parallel() -> None:
    parallel = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(parallel)
    parallel.module = nn.Linear(2, 1)
    parallel.process_group = "group"

    assert list(TorchEngine(parallel, sgd(parallel)).group_roles()) == [("group", "dp")]


@pytest.mark.parametrize("has_group", [False, True])
def test_the_group_of_pipeline_stages_has_the_role_pp(
    monkeypatch: pytest.MonkeyPatch, has_group: bool
) -> None:
    from torch.distributed.pipelining import PipelineStage

    model = nn.Linear(2, 1)
    engine = TorchEngine(model, sgd(model))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        group = dist.new_group([0]) if has_group else None
        before = list(engine.group_roles())
        stages = [PipelineStage(model, at, 2, torch.device("cpu"), group=group) for at in (0, 1)]
        found = list(engine.group_roles())
    finally:
        dist.destroy_process_group()

    assert before == []
    assert len(stages) == 2  # of an interleaved schedule
    assert found == [(group if has_group else world, "pp")]
    assert list(engine.group_roles()) == []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_stages_of_another_model_or_of_a_destroyed_group_have_no_role(world: Any) -> None:
    from torch.distributed.pipelining import PipelineStage

    earlier, model = nn.Linear(2, 1), nn.Linear(2, 1)
    old = dist.new_group([0])
    stages = [
        PipelineStage(earlier, 0, 1, torch.device("cpu")),
        PipelineStage(model, 0, 1, torch.device("cpu"), group=old),
    ]
    dist.destroy_process_group(old)

    found = list(TorchEngine(model, sgd(model)).group_roles())

    assert len(stages) == 2
    assert found == []


def test_the_search_for_stages_runs_no_code_of_other_classes(world: Any) -> None:
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        pass

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            ran.append(name)
            return super().__getattribute__(name)

        def __eq__(cls, other: object) -> bool:  # without a hash
            return cls is other

    class Lazy(metaclass=Meta):
        pass

    lazy, ran, model = Lazy(), list[str](), nn.Linear(2, 1)
    lazy.value = [1]
    engine = TorchEngine(model, sgd(model))
    stage = Stage(model, 0, 1, torch.device("cpu"))
    ran.clear()

    found = list(engine.group_roles())

    assert (found, ran) == ([(world, "pp")], [])
    assert stage.submod is model


def test_named_dimensions_of_other_meshes_have_roles_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("mesh_cp", "mesh_default", "mesh_mine", "cp", "default_pg", "mesh_dp_shard")
    groups = {NamedGroup(name): None for name in names}
    monkeypatch.setattr(c10d, "_pg_map", groups)
    model = nn.Linear(2, 1)

    found = list(TorchEngine(model, sgd(model)).group_roles())

    assert [(group.group_desc, role) for group, role in found] == [
        ("mesh_cp", "sp"),
        ("mesh_dp_shard", "dp"),
    ]
