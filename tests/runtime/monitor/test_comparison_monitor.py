"""Tests of how one watch compares itself with other ranks: what runs, and what it is given."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist
from fakes.steps import step
from fakes.watch_contexts import PlainEngine, watch_context
from torch import nn, optim

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.across_ranks import STATISTICS
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.common.torch_engine import TorchEngine
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.monitor import comparison_monitor
from zerowatch.runtime.monitor.comparison_monitor import ComparisonMonitor, hang_context


class Thread(SimpleNamespace):
    """A comparison thread that keeps what it is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__(
            given=given,
            calls=[],
            cpu_seconds=7.0,
            volume_ratio=None,
            step_times=SimpleNamespace(add=lambda *times: self.calls.append(("times", *times))),
            rank_figures={},
            stragglers=[],
            peers={},
            others_hang=False,
            account_if_stuck=lambda: None,
        )
        threads.append(self)

    def compare_losses(self) -> None:
        self.calls.append(("compare_losses",))

    def on_step(self, record: Any) -> None:
        self.calls.append(("on_step", record))

    def announce_hang(self, hangs: bool) -> None:
        self.calls.append(("announce_hang", hangs))

    def start(self) -> None:
        self.calls.append(("start",))

    def stop(self) -> None:
        self.calls.append(("stop",))


class Volume:
    """A check of the volume whose ratio is the number of the last step."""

    def __init__(self, engine: Any, recorder: Any, fail_open: Any, *, logs_differences: bool):
        self.engines, self.logs_differences = [engine], logs_differences
        self.last = 0.0
        volumes.append(self)

    def rebind_engine(self, engine: Any) -> None:
        self.engines.append(engine)

    def add(self, *records: Any) -> None:
        self.last = records[-1].step

    def ratio(self) -> float:
        return self.last


threads: list[Thread] = []
volumes: list[Volume] = []


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(comparison_monitor, "ComparisonThread", Thread)
    monkeypatch.setattr(comparison_monitor, "WireVolumeCheck", Volume)
    monkeypatch.setattr(comparison_monitor, "is_data_parallel", lambda engine: engine.is_parallel)
    threads.clear()
    volumes.clear()
    yield


def engine(*, training: bool = True, is_parallel: bool = True) -> PlainEngine:
    return PlainEngine(module=SimpleNamespace(training=training), is_parallel=is_parallel)


def monitor(context: WatchContext | None = None) -> tuple[ComparisonMonitor, Thread]:
    made = ComparisonMonitor(context or watch_context(engine()))
    return made, threads[-1]


def test_the_thread_has_the_settings_and_the_place_of_its_rank() -> None:
    settings = {"cross_rank": {"interval_seconds": 3.0}, "hang": {"timeout_seconds": 120.0}}
    context = watch_context(engine(), rank=2, settings=settings)

    _, thread = monitor(context)

    given = thread.given
    assert (given["rank"], given["world_size"], given["host"]) == (2, 3, "here")
    assert (given["interval_seconds"], given["stuck_seconds"]) == (3.0, 60.0)
    assert given["clients"] is not None
    assert given["groups"] is context.call_recorder.groups
    assert given["phase_timer"] is context.phase_timer


@pytest.mark.parametrize(
    ("world_size", "enabled", "compares"), [(2, True, True), (1, True, False), (2, False, False)]
)
def test_ranks_are_compared_if_there_are_several_and_it_is_on(
    world_size: int, enabled: bool, compares: bool
) -> None:
    settings = {"cross_rank": {"enabled": enabled}}

    _, thread = monitor(watch_context(engine(), world_size=world_size, settings=settings))

    assert (thread.given["clients"] is not None) is compares


@pytest.mark.parametrize("is_parallel", [True, False])
def test_losses_are_compared_if_each_rank_has_samples_of_its_own(is_parallel: bool) -> None:
    _, thread = monitor(watch_context(engine(is_parallel=is_parallel)))

    assert (("compare_losses",) in thread.calls) is is_parallel


class Mesh(TorchEngine):
    """A torch model on groups of two ranks, in a job of as many."""

    roles: tuple[tuple[str, int], ...] = ()

    def group_roles(self) -> Any:
        return iter([(SimpleNamespace(size=lambda n=n: n), role) for role, n in self.roles])


@pytest.mark.parametrize(
    ("roles", "compares"),
    [
        ((("dp", 4),), True),
        ((("dp", 2), ("dp", 2)), False),  # a part of the ranks
        ((("dp", 4), ("tp", 4)), False),
        ((), False),
    ],
)
def test_losses_of_a_torch_model_are_compared_under_data_parallelism_alone(
    monkeypatch: pytest.MonkeyPatch, roles: tuple[tuple[str, int], ...], compares: bool
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    model = nn.Linear(2, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    mesh = Mesh(model, optimizer)
    mesh.roles = roles

    _, thread = monitor(watch_context(mesh))

    assert (("compare_losses",) in thread.calls) is compares


def test_each_step_is_compared_and_its_volume_is_reported_to_the_other_ranks() -> None:
    made, thread = monitor()
    record = step(11)

    for listener in made.listeners:
        listener([record])

    assert ("on_step", record) in thread.calls
    assert thread.volume_ratio == 11
    assert len(made.listeners) == 3


@pytest.mark.parametrize(("rank", "logs"), [(0, True), (1, False)])
def test_rank_0_logs_differences_of_the_volume(rank: int, logs: bool) -> None:
    monitor(watch_context(engine(), rank=rank))

    assert volumes[-1].logs_differences is logs


def test_the_volume_of_another_engine_is_checked_after_a_rebuild() -> None:
    watched, other = engine(), engine()
    made, _ = monitor(watch_context(watched))

    made.rebind_engine(other)

    assert volumes[-1].engines == [watched, other]


def test_the_times_of_a_step_and_the_cpu_time_are_those_of_the_thread() -> None:
    made, thread = monitor()

    made.add_step_times([3, 5], [1, 2])
    made.start()
    made.stop()

    assert thread.calls[-3:-1] == [("times", [3, 5], [1, 2]), ("start",)]
    assert made.cpu_seconds == 7.0


def test_the_figures_of_a_rank_are_named_and_unknown_ones_left_out() -> None:
    made, thread = monitor()
    known = np.arange(1.0, len(STATISTICS) + 3)  # and figures that are no statistics
    unknown = known.copy()
    unknown[1] = math.nan
    thread.rank_figures = {0: known, 2: unknown}

    figures = made.rank_figures()

    named = {name: float(place) for place, name in enumerate(STATISTICS, 1)}
    assert figures[0] == named
    assert figures[2] == {name: value for name, value in named.items() if value != 2.0}


def test_the_phases_in_which_ranks_are_slow_are_grouped_by_rank() -> None:
    made, thread = monitor()
    thread.stragglers = [
        SimpleNamespace(rank=2, phase="forward", score=3.5),
        SimpleNamespace(rank=1, phase="data", score=4.5),
        SimpleNamespace(rank=2, phase="data", score=5.5),
    ]

    assert made.slow_phases() == {2: {"forward": 3.5, "data": 5.5}, 1: {"data": 4.5}}


def test_the_end_reports_to_the_other_ranks_and_ends_a_hang() -> None:
    context = watch_context(engine())
    made, thread = monitor(context)
    context.recorder.set(communication.HANG_ACTIVE, 1)

    made.stop()

    assert thread.calls[-1] == ("stop",)
    assert context.recorder.snapshot().value(communication.HANG_ACTIVE) == 0


@pytest.mark.parametrize("is_ending", [False, True])
def test_an_ending_watch_looks_for_hangs_no_more(is_ending: bool) -> None:
    phase_timer = PhaseTimer(lambda: 1)  # no progress since the clock began
    made, thread = monitor(watch_context(engine(), phase_timer=phase_timer))
    for listener in made.listeners:
        listener([step(number) for number in (1, 2, 3)])
    if is_ending:
        made.close_hooks()

    made.periodic_tasks["hang"]()

    assert (("announce_hang", True) in thread.calls) is not is_ending


@pytest.mark.parametrize(
    ("watched", "is_training"),
    [(engine(training=True), True), (engine(training=False), False), (None, True)],
)
def test_a_model_in_evaluation_is_no_training(watched: Any, is_training: bool) -> None:
    made = hang_context(watch_context(watched), cast(Any, Thread()))

    assert made.is_training() is is_training


def test_a_model_that_is_released_meanwhile_counts_as_training() -> None:
    model = nn.Linear(2, 2)
    watched = TorchEngine(model, optim.SGD(model.parameters()))
    made = hang_context(watch_context(watched), cast(Any, Thread()))
    del model
    gc.collect()

    assert made.is_training() is True


def test_no_step_is_profiled_unless_the_settings_ask_for_it() -> None:
    made, _ = monitor()

    assert made.profiler is None
    made.close_hooks()
    made.forget_hooks()


def test_every_nth_step_is_profiled_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiled: list[Any] = []

    class Profiler:
        def __init__(self, every: int, recorder: Any, *, on_device: bool, traces: Any) -> None:
            profiled.append((every, on_device))

        def compare(self, record: Any) -> None:
            profiled.append(record)

        def close(self) -> None:
            profiled.append("closed")

        def close_after_fork(self) -> None:
            profiled.append("forgotten")

    monkeypatch.setattr(comparison_monitor, "ProfiledSteps", Profiler)
    settings = {"profile": {"every_steps": 50}}
    made, _ = monitor(watch_context(engine(), folder=tmp_path, settings=settings))
    record = step(3)

    for listener in made.listeners:
        listener([record])
    made.forget_hooks()
    made.close_hooks()

    assert profiled == [(50, False), record, "forgotten", "closed"]


def test_a_hang_is_checked_each_second_and_traced() -> None:
    made, _ = monitor()

    assert list(made.periodic_tasks) == ["hang", "cross_rank"]
