"""Tests of the model shape and the layouts that `engine_estimate.py` reads from an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from zerowatch.runtime.estimator import engine_estimate
from zerowatch.runtime.estimator.engine_estimate import (
    engine_shape,
    estimate_of_engine,
    estimated_layouts,
)
from zerowatch.runtime.estimator.estimate_step import UnsupportedStageError

ROOT, FIRST, SECOND = "", "0", "1"
BACKWARD = [ROOT, SECOND, FIRST]


def engine_with(visits: list[str]) -> SimpleNamespace:
    """Return an engine whose coordinator has traced these visits, forward and backward."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    modules = dict(module.named_modules())
    coordinator = SimpleNamespace(
        is_complete_trace=lambda: True,
        _PartitionedParameterCoordinator__submodule_order=[modules[name] for name in visits],
    )
    offload = SimpleNamespace(get_param_coordinator=lambda: coordinator)
    optimizer = SimpleNamespace(parameter_offload=offload, param_groups=[])
    return SimpleNamespace(module=module, optimizer=optimizer)


@pytest.mark.parametrize(
    ("visits", "recomputes", "runs_again"),
    [
        ([ROOT, FIRST, SECOND, *BACKWARD], False, False),
        # The second is recomputed before its backward.
        ([ROOT, FIRST, SECOND, ROOT, SECOND, SECOND, FIRST], True, False),
        ([ROOT, FIRST, SECOND, SECOND, ROOT, SECOND, SECOND, FIRST], False, True),
        ([ROOT, FIRST, SECOND, SECOND, ROOT, *[SECOND] * 4, FIRST], True, True),
        # Without a backward of the root, what runs again looks like what is recomputed.
        ([ROOT, FIRST, SECOND, SECOND, FIRST], False, False),
        ([ROOT, FIRST, SECOND, SECOND, SECOND, FIRST], True, False),
    ],
)
def test_a_trace_tells_recomputation_from_a_module_that_runs_again(
    visits: list[str], recomputes: bool, runs_again: bool
) -> None:
    shape = engine_shape(engine_with(visits))

    assert shape.recomputes is recomputes
    assert bool(shape.unmodeled_in_stage_3) is runs_again
    assert [child.name for child in shape.root.children] == [FIRST, SECOND]


class PipelineOfOne(PipelineModule):
    """Has the class of DeepSpeed's module, without its groups of ranks."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(20, 30)


def engine_at(stage: int, module: nn.Module, *, has_moe_layers: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        module=module,
        optimizer=SimpleNamespace(param_groups=[]),
        config={"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
        _config=SimpleNamespace(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=1),
        optimizer_name=lambda: None,
        seq_data_parallel_group="dp",
        has_moe_layers=has_moe_layers,
        zero_optimization_stage=lambda: stage,
    )


@pytest.mark.parametrize(
    ("engine", "stages"),
    [
        (engine_at(1, nn.Linear(20, 30)), {0, 1, 2, 3}),
        (engine_at(0, PipelineOfOne()), {0, 1}),
        (engine_at(1, nn.Linear(20, 30), has_moe_layers=True), {0, 1, 2}),
        (engine_at(3, nn.Linear(20, 30), has_moe_layers=True), {0, 1, 2, 3}),
    ],
)
def test_layouts_are_estimated_for_the_stages_that_the_engine_supports(
    monkeypatch: pytest.MonkeyPatch, engine: SimpleNamespace, stages: set[int]
) -> None:
    monkeypatch.setattr(dist, "get_world_size", {"dp": 2}.__getitem__)
    monkeypatch.setattr(engine_estimate, "backend_name", lambda: "gloo")

    planned = estimated_layouts(engine)

    assert {layout.stage for layout in planned} == stages


@pytest.mark.parametrize("optimizer_type", [torch.optim.Adam, torch.optim.AdamW])
def test_an_engine_with_the_adam_of_torch_is_estimated_at_stage_0_with_offload(
    monkeypatch: pytest.MonkeyPatch, optimizer_type: type[torch.optim.Adam]
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(engine_estimate, "backend_name", lambda: "nccl")
    engine = engine_at(0, nn.Linear(20, 30))
    engine.config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine.optimizer_name = lambda: "adamw"
    engine.basic_optimizer = optimizer_type(engine.module.parameters())

    assert estimate_of_engine(engine).stage == 0


def test_an_engine_with_the_adam_for_the_cpu_is_not_estimated_at_stage_0_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(engine_estimate, "backend_name", lambda: "nccl")
    engine = engine_at(0, nn.Linear(20, 30))
    engine.config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine.optimizer_name = lambda: "adamw"
    engine.basic_optimizer = SimpleNamespace(defaults={})

    with pytest.raises(UnsupportedStageError, match="CPU optimizer"):
        estimate_of_engine(engine)
