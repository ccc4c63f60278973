"""Tests of the hooks of one watch: installed, moved to another engine, and removed."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.sleeping_collectives import ManualClock
from fakes.watch_contexts import PlainEngine, watch_context

from zerowatch.metrics.catalog import generation
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.common.phase_timer import CHECKPOINT, FORWARD, PhaseTimer
from zerowatch.runtime.instrumentation import engine_instrumentation
from zerowatch.runtime.instrumentation.engine_instrumentation import EngineInstrumentation

calls: list[Any] = []


class Hooks:
    """Hooks that write down what they are made from and called with."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.cost_ns, self.generated_ns = 3, 5
        calls.append((type(self).__name__, *given[:1]))

    def restore(self) -> None:
        calls.append((type(self).__name__, "restore"))

    def take_generated(self) -> str:
        return "generated before"

    def discard_window(self) -> None:
        calls.append("discard_window")


class EngineHooks(Hooks): ...


class DataLoaderHooks(Hooks): ...


class FrameworkHooks(Hooks): ...


class NotebookCells(Hooks): ...


class Job:
    """The hooks of an engine, by a clock that the test sets."""

    def __init__(self, engine: Any | None = None, **changes: Any) -> None:
        self.clock = ManualClock()
        self.engine = engine or PlainEngine()
        self.context = watch_context(self.engine, phase_timer=PhaseTimer(self.clock))
        self.enqueued: list[Any] = []
        memory: Any = SimpleNamespace(rebind_engine=lambda engine: calls.append(("memory", engine)))
        calls.clear()
        self.hooks = EngineInstrumentation(
            self.context, self.engine, memory, self.enqueued.append, None
        )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (EngineHooks, DataLoaderHooks, FrameworkHooks, NotebookCells):
        monkeypatch.setattr(engine_instrumentation, kind.__name__, kind)
    monkeypatch.setattr(
        engine_instrumentation, "StepCollector", lambda *given: ("collector", *given)
    )
    monkeypatch.setattr(
        engine_instrumentation, "set_roles", lambda groups, engine: calls.append(("roles", engine))
    )


def test_the_hooks_of_engine_data_and_frameworks_work_together() -> None:
    job = Job()
    hooks: Any = job.hooks

    engine_hooks = hooks._engine_hooks
    assert engine_hooks.given[:2] == (job.engine, job.context.phase_timer)
    assert engine_hooks.given[5:] == (job.hooks.checkpoints, None)
    assert hooks._dataloader_hooks.given[2] is engine_hooks
    assert hooks._framework_hooks.given[2] is engine_hooks
    assert generation.GENERATE_CALLS not in job.context.recorder.snapshot().values


class HybridEngine(PlainEngine):
    """An engine that generates."""

    def generate(self) -> None: ...


def test_counters_of_generation_start_with_an_engine_that_generates() -> None:
    job = Job(HybridEngine())

    assert job.context.recorder.snapshot().value(generation.GENERATE_CALLS) == 0


def test_another_engine_takes_the_hooks_over_and_calls_between_belong_to_no_step() -> None:
    job, other = Job(), PlainEngine()
    calls.clear()

    job.hooks.rebind_engine(other)

    assert calls == [
        ("EngineHooks", "restore"),
        ("memory", other),
        ("roles", other),
        ("EngineHooks", other),
    ]
    hooks: Any = job.hooks
    assert hooks._engine_hooks.given[6] == "generated before"
    assert hooks._dataloader_hooks.engine_hooks is hooks._engine_hooks
    assert hooks._framework_hooks.engine_hooks is hooks._engine_hooks
    assert [type(item) for item in job.enqueued] == [CallBatch]


def test_the_cost_of_earlier_engines_is_kept() -> None:
    job = Job()

    job.hooks.rebind_engine(PlainEngine())
    job.hooks.rebind_engine(PlainEngine())

    assert (job.hooks.cost_ns, job.hooks.generated_ns) == (3 * 3, 3 * 5)


def test_a_discarded_window_is_traced() -> None:
    job = Job()

    job.hooks.discard_window()

    [error] = job.context.step_errors.take(0, 2**63)
    assert (error.kind, error.type_name) == ("window_discarded", "zerowatch.WindowDiscarded")
    assert calls[-1] == "discard_window"


def test_time_within_a_checkpoint_is_that_of_a_checkpoint_even_if_it_raises() -> None:
    job = Job()

    with pytest.raises(OSError, match="disk"), job.hooks.checkpoint_phase():
        job.clock.elapse(7_000)
        raise OSError("disk full")
    job.context.phase_timer.enter(FORWARD)
    job.clock.elapse(2_000)
    job.context.phase_timer.leave()

    assert job.hooks.forward_only_ns == 2_000_000_000
    assert job.context.phase_timer.drain()[CHECKPOINT] == 7_000_000_000


def test_a_checkpoint_on_another_thread_does_not_change_the_phase_of_training() -> None:
    job = Job()
    phases = []

    def save() -> None:
        with job.hooks.checkpoint_phase():
            phases.append(job.context.phase_timer.current)

    job.context.phase_timer.enter(FORWARD)
    thread = Thread(target=save)
    thread.start()
    thread.join()

    assert [*phases, job.context.phase_timer.current] == [FORWARD, FORWARD]


def test_all_hooks_are_removed() -> None:
    job = Job()
    calls.clear()

    job.hooks.restore()

    assert sorted(calls) == [
        ("DataLoaderHooks", "restore"),
        ("EngineHooks", "restore"),
        ("FrameworkHooks", "restore"),
        ("NotebookCells", "restore"),
    ]
