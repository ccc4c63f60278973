"""Checks rebuilds that fail or are refused, on one rank or on all, and one with monitoring."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from rebuild_cases import CPU, PLAIN, Case, Engine
from rebuild_training import EPSILON, Run

from zerowatch.errors import RebuildError
from zerowatch.metrics.catalog import CATALOG, communication, overhead, training
from zerowatch.runtime.common.host_group import HostGroup
from zerowatch.runtime.engine.rebuild import engine_replacement
from zerowatch.runtime.engine.rebuild.engine_replacement import UndoneRebuildError, rebuild
from zerowatch.runtime.entry_points import watch
from zerowatch.runtime.instrumentation import step_collector

BEFORE, AFTER = 2, 2


class Failing:
    """Engine factory that fails once on the last rank, before or after initialization."""

    def __init__(self, run: Run, *, after: bool) -> None:
        self._run = run
        self._after = after
        self._calls = 0

    def __call__(self, model: torch.nn.Module, config: dict[str, Any]) -> Any:
        self._calls += 1
        fails = self._calls == 1 and dist.get_rank() == dist.get_world_size() - 1
        if fails and not self._after:
            raise RuntimeError("not here")
        engine = self._run.make_engine(model, config)
        if fails:
            raise MemoryError
        return engine


def failing_factory() -> Callable[[list[torch.nn.Parameter]], Any]:
    """Return an optimizer factory that fails on the last rank when it is called again."""
    calls = []

    def make(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise torch.OutOfMemoryError("in the middle")
        return torch.optim.AdamW(parameters, lr=0.01, eps=EPSILON)

    return make


def fail(case: Case, host_group: HostGroup, *, when: str) -> dict[str, Any]:
    """Let a rebuild fail; return whether training continued unchanged."""
    expected_run = Run(case)
    expected = expected_run.steps(BEFORE + AFTER), expected_run.weights()
    expected_run.stop()
    run = Run(case, optimizer=failing_factory() if when == "within" else None)
    losses = run.steps(BEFORE)
    old = weakref.ref(run.engine)
    make = run.make_engine if when == "within" else Failing(run, after=when == "after")
    try:
        rebuild(run.engine, run.config_of(case.new), make_engine=make, host_group=host_group)
    except UndoneRebuildError as error:
        run.engine, text = error.engine, str(error)
        del error
    gc.collect()
    stage, is_gone = run.engine.zero_optimization_stage(), old() is None
    losses += run.steps(AFTER)
    actual = run.weights()
    same = all(torch.equal(actual[key], expected[1][key]) for key in expected[1])
    run.stop()
    return {"equal": losses == expected[0] and same, "stage": stage, "gone": is_gone, "text": text}


NVME = {"device": "nvme", "nvme_path": "/tmp"}
REFUSED: dict[str, tuple[Engine, dict[str, Any]]] = {
    "NVMe": (Engine(stage=3, zero={"offload_optimizer": NVME}), {}),
    "bf16": (PLAIN[2], {"bf16": {"enabled": True}}),
    "offload_param needs": (Engine(stage=2, zero={"offload_param": CPU}), {}),
    "offload_optimizer needs": (Engine(stage=0, zero={"offload_optimizer": CPU}), {}),
    "did you mean 'gradient_clipping'": (PLAIN[2], {"gradient_cliping": 1.0}),
    "DeepSpeed refuses it": (Engine(stage=2, zero={"reduce_buket_size": 1}), {}),
    "must divide": (Engine(stage=3, zero={"zero_hpz_partition_size": 3}), {}),
    "DeepCompile": (PLAIN[3], {"compile": {"deepcompile": True}}),
    "refuses to offload AdamW": (
        Engine(stage=2, zero={"offload_optimizer": CPU}),
        {"zero_force_ds_cpu_optimizer": True},
    ),
    "needs DeepSpeedCPUAdam": (
        Engine(stage=3, zero={"offload_optimizer": {**CPU, "ratio": 0.5}}),
        {},
    ),
    "needs stage 2 or 3": (Engine(stage=1, zero={"overlap_comm": True}), {}),
}


def refuse(host_group: HostGroup) -> dict[str, Any]:
    """Request unsupported rebuilds; return the errors, and whether training continued unchanged."""
    case = Case(old=PLAIN[1], new=PLAIN[1])
    expected_run = Run(case)
    expected = expected_run.steps(BEFORE + AFTER)
    expected_run.stop()
    run = Run(case)
    losses = run.steps(BEFORE)
    errors = {
        words: _error_of(run, {**case.ds_config(engine), **more}, host_group)
        for words, (engine, more) in REFUSED.items()
    }
    unsupported = Engine(stage=3, zero={"offload_optimizer": NVME})
    alone = _error_of(run, case.ds_config(unsupported if dist.get_rank() else PLAIN[3]), host_group)
    available = 1024.0 if dist.get_rank() else math.inf
    with mock.patch.object(engine_replacement, "available_rank_bytes", lambda: available):
        no_memory = _error_of(run, case.ds_config(PLAIN[3]), host_group)
    losses += run.steps(AFTER)
    run.engine.backward(run.engine(torch.zeros(2, 5, dtype=torch.long)))
    errors["under way"] = _error_of(run, case.ds_config(PLAIN[2]), host_group)
    run.stop()
    return {
        "errors": errors,
        "alone": alone,
        "no memory": no_memory,
        "equal": losses == expected,
    }


def _error_of(run: Run, config: dict[str, Any], host_group: HostGroup) -> str:
    try:
        rebuild(run.engine, config, make_engine=run.make_engine, host_group=host_group)
    except RebuildError as error:
        return str(error)
    return "nothing"


def watched(host_group: HostGroup) -> dict[str, Any]:
    """Rebuild a monitored engine; return the change of its counters."""
    case = Case(old=PLAIN[1], new=PLAIN[3])
    run = Run(case)
    step_collector.COVERAGE_SECONDS = 0.0  # of each step
    opened = watch(run.engine, {"serve": {"enabled": False}})
    run.steps(BEFORE)
    before = _settled(opened, BEFORE)
    old = weakref.ref(run.engine)
    with opened.checkpoint_phase():
        run.engine = rebuild(
            run.engine, run.config_of(case.new), make_engine=run.make_engine, host_group=host_group
        )
    dist.group.WORLD.allreduce([torch.zeros(1)])  # between the engines, and not recorded
    opened.rebind_engine(run.engine)
    gc.collect()
    gone = old() is None
    run.steps(1)
    coverage = _settled(opened, BEFORE + 1).value(communication.COMM_COVERAGE_RATIO)
    run.steps(AFTER - 1)
    after = _settled(opened, BEFORE + AFTER)
    infos = _infos(opened, stage="3")
    found = {
        "same": run.engine.watch is opened and watch(run.engine) is opened,
        "gone": gone,
        "steps": after.value(training.STEPS),
        "active": after.value(training.RUN_ACTIVE),
        "info": [list(labels) for labels in infos],
        "decreased": _decreased(before, after),
        "failures": {
            key[0]: n for key, n in after.values.get(overhead.HOOK_FAILURES, {}).items() if n
        },
        "seconds": after.distribution(training.STEP_DURATION).count,
        "coverage": coverage,
    }
    opened.close()
    run.stop()
    return found


def _settled(opened: Any, steps: int) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        snapshot = opened.snapshot()
        if snapshot.value(training.STEPS) == steps:
            return snapshot
        time.sleep(0.05)
    raise TimeoutError(f"{steps} steps were not counted")


def _infos(opened: Any, stage: str) -> list[tuple[str, ...]]:
    """Return the series of run_info, which is published once a second, once one has the stage."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        infos = list(opened.snapshot().values[training.RUN_INFO])
        if any(labels[-2] == stage for labels in infos):
            break
        time.sleep(0.05)
    return infos


def _decreased(before: Any, after: Any) -> list[str]:
    """Return the counters that have decreased."""
    return [
        f"{spec.name}{labels}"
        for spec in CATALOG
        if spec.kind == "counter"
        for labels, value in before.values.get(spec, {}).items()
        if after.values[spec].get(labels, 0) < value
    ]


def check_faults(host_group: HostGroup) -> dict[str, Any]:
    """Run all cases."""
    assert deepspeed.comm.is_initialized()
    return {
        "before, stage 1 to 3": fail(Case(old=PLAIN[1], new=PLAIN[3]), host_group, when="before"),
        "after, stage 3 to 0": fail(Case(old=PLAIN[3], new=PLAIN[0]), host_group, when="after"),
        "after, stage 0 to 3": fail(Case(old=PLAIN[0], new=PLAIN[3]), host_group, when="after"),
        "within, stage 2 to 3": fail(
            Case(old=PLAIN[2], new=PLAIN[3], optimizer="factory"), host_group, when="within"
        ),
        "refused": refuse(host_group),
        "watched": watched(host_group),
    }
