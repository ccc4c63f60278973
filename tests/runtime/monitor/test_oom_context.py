"""Tests of what an out-of-memory report reads from the parts of a memory monitor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from fakes.watch_contexts import PlainEngine, watch_context
from torch import nn, optim

from zerowatch.runtime.common.phase_timer import BACKWARD
from zerowatch.runtime.common.torch_engine import TorchEngine
from zerowatch.runtime.engine.live_settings.activation_checkpointing import ActivationCheckpointing
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.memory_reader import MemoryReader
from zerowatch.runtime.memory.oom.evidence import Limit, TrainingSetup
from zerowatch.runtime.memory.oom.predicted_savings import Layout
from zerowatch.runtime.monitor import oom_context
from zerowatch.runtime.monitor.oom_context import EngineOomContext, MemoryParts, training_setup


def parts_of(**budgets: float) -> MemoryParts:
    parts: dict[str, Any] = {
        "reader": MemoryReader({"cpu": lambda: {"allocated": 3.0, "limit": 900.0}}, budgets),
        "hooks": SimpleNamespace(micro_batch=5, shape=Shape(3, 11)),
        "metrics": SimpleNamespace(categories={"cpu": {"parameters": 7.0}}),
        "forecasts": SimpleNamespace(
            batch_risk={"cpu": 0.25}.get,
            predict_peak=lambda device, shape: len(device) * 100.0 + shape.samples,
            last_peaks=lambda device: [f"peak of {device}"],
            last_predictions=lambda device: [f"prediction of {device}"],
            alarm_steps={"cpu": 13},
        ),
        "leaks": SimpleNamespace(growth_bytes_per_step={"cpu": 17.0}.get),
    }
    return MemoryParts(**parts)


def test_a_report_reads_each_fact_from_its_part(tmp_path: Path) -> None:
    engine = PlainEngine(global_steps=23)
    context = watch_context(engine, folder=tmp_path)
    context.phase_timer.enter(BACKWARD)

    oom = EngineOomContext(context, parts_of())

    assert (oom.folder(), oom.step(), oom.phase()) == (tmp_path, 23, "backward")
    assert oom.readings() == {"cpu": {"allocated": 3.0, "limit": 900.0}}
    assert (oom.micro_batch(), oom.shape()) == (5, Shape(3, 11))
    assert (oom.batch_risk("cpu"), oom.batch_risk("cuda:0")) == (0.25, None)
    assert oom.categories("cpu") == {"parameters": 7.0}
    assert oom.categories("cuda:0") is None
    assert oom.peaks("cpu") == ["peak of cpu"]
    assert oom.predictions("cpu") == ["prediction of cpu"]
    assert (oom.alarm_step("cpu"), oom.alarm_step("cuda:0")) == (13, None)
    assert oom.growth_bytes_per_step("cpu") == 17.0
    assert oom.predict_peak("cpu", Shape(19, 1)) == 319.0


def test_a_report_reads_the_host_s_memory_and_the_allocator_s_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(oom_context, "available_rank_bytes", lambda: 29.0)
    current = oom_context.accelerator.current
    monkeypatch.setattr(type(current), "has_expandable_segments", lambda self: True)

    oom = EngineOomContext(watch_context(), parts_of())

    assert (oom.available_rank_bytes(), oom.has_expandable_segments()) == (29.0, True)


def test_an_engine_that_is_gone_has_no_step_no_setup_and_no_layouts() -> None:
    oom = EngineOomContext(watch_context(None), parts_of())

    assert (oom.step(), oom.setup(), oom.estimated_layouts()) == (None, None, None)


def test_a_torch_model_has_a_step_and_neither_setup_nor_layouts() -> None:
    model = nn.Linear(2, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    context = watch_context(TorchEngine(model, optimizer))

    oom = EngineOomContext(context, parts_of())

    assert (oom.step(), oom.setup(), oom.estimated_layouts()) == (0, None, None)
    assert not context.fail_open.failures


def test_the_layouts_of_an_engine_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom_context, "estimated_layouts", lambda engine: {"of": engine})
    engine = PlainEngine()

    assert EngineOomContext(watch_context(engine), parts_of()).estimated_layouts() == {"of": engine}


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ({"cpu": 700.0}, Limit(num_bytes=700.0, name="memory.host_limit_bytes")),
        ({"cpu": 950.0}, None),  # the device has less
        ({}, None),
    ],
)
def test_a_configured_limit_is_named_while_it_is_in_effect(
    budgets: dict[str, float], expected: Limit | None
) -> None:
    assert EngineOomContext(watch_context(), parts_of(**budgets)).limit("cpu") == expected


def test_the_configured_limit_of_a_device_has_another_name() -> None:
    parts = parts_of()
    reader = MemoryReader({"cuda:0": lambda: {"limit": 900.0}}, {"cuda:0": 600.0})
    context = EngineOomContext(
        watch_context(),
        MemoryParts(
            reader=reader,
            hooks=parts.hooks,
            metrics=parts.metrics,
            forecasts=parts.forecasts,
            leaks=parts.leaks,
        ),
    )

    assert context.limit("cuda:0") == Limit(num_bytes=600.0, name="memory.device_limit_bytes")
    assert context.limit("cuda:1") is None


def test_a_snapshot_is_written_for_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[str, Path]] = []

    def dump(device: str, path: Path) -> bool:
        written.append((device, path))
        return True

    monkeypatch.setattr(oom_context, "dump_snapshot", dump)

    assert EngineOomContext(watch_context(), parts_of()).dump_snapshot("cuda:0", tmp_path)
    assert written == [("cuda:0", tmp_path)]


def engine_of(config: dict[str, Any]) -> PlainEngine:
    return PlainEngine(
        module=nn.Sequential(nn.Linear(2, 3)),
        optimizer=None,
        config=config,
        _config=SimpleNamespace(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=5),
        optimizer_name=lambda: None,
        seq_data_parallel_group="dp",
    )


@pytest.mark.parametrize(
    ("config", "layout", "dtype", "recomputes"),
    [
        ({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}, Layout(1), "bf16", None),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "nvme"},
                },
                "activation_checkpointing": {},  # checkpoints nothing by itself
            },
            Layout(3, "cpu", "nvme"),
            "fp32",
            None,
        ),
    ],
)
def test_the_setup_of_an_engine_is_its_config(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    layout: Layout,
    dtype: str,
    recomputes: bool | None,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", {"dp": 7}.__getitem__)

    assert training_setup(engine_of(config)) == TrainingSetup(
        layout=layout,
        world_size=7,
        dtype=dtype,
        samples=3,
        accumulation=5,
        activation_checkpointing=recomputes,
    )


@pytest.mark.parametrize("by", ["the run", "the model's switch"])
def test_activations_are_recomputed_by_the_run_or_the_model(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(dist, "get_world_size", {"dp": 7}.__getitem__)
    engine = engine_of({})
    if by == "the run":
        ActivationCheckpointing("Linear").attach(engine)
    else:
        engine.module.gradient_checkpointing = True

    setup = training_setup(engine)

    assert setup is not None and setup.activation_checkpointing is True


def test_a_config_that_cannot_be_read_has_no_setup() -> None:
    assert training_setup(engine_of({"zero_optimization": {"stage": 9}})) is None
