"""Tests of `StepCollector`: which steps sample their collectives, and the coverage of a step."""

from __future__ import annotations

import math
from threading import Thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.metrics.settings import SamplingSettings
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.instrumentation import step_collector
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.instrumentation.step_collector import StepCollector


class Engine:
    def __init__(self) -> None:
        self.global_steps = 0
        self.is_compiled_by_deepspeed = False
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])

    def fp16_enabled(self) -> bool:
        return False

    def get_global_grad_norm(self) -> float:
        return 1.0

    def is_deepcompile_active(self) -> bool:
        return self.is_compiled_by_deepspeed


class Rank:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, sampled_steps: int = 16) -> None:
        self.engine, self.recorder = Engine(), CallRecorder()
        self.fail_open, self.steps = FailOpen(), list[RawStep]()
        context = SimpleNamespace(
            fail_open=self.fail_open,
            phase_timer=PhaseTimer(),
            call_recorder=self.recorder,
            device_phases=SimpleNamespace(end_step=lambda: None),
            settings=SimpleNamespace(
                sampling=SamplingSettings(exact_collectives_steps=sampled_steps)
            ),
        )
        monkeypatch.setattr(self.recorder.groups, "drain_coverage", lambda: 1.0)
        monkeypatch.setattr("zerowatch.runtime.instrumentation.step_collector.COVERAGE_SECONDS", 0)
        self.timer = context.phase_timer
        sample: Any = object()
        self.memory = SimpleNamespace(on_step_end=lambda: sample, reading_due=0.0)
        self.collector = StepCollector(context, self.engine, self.memory, self.steps.append, None)

    def end_step(self) -> RawStep:
        self.engine.global_steps += 1
        self.collector.on_step_end(self.engine, StepCounts())
        assert not self.fail_open.failures
        return self.steps[-1]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_collectives_follow_training_to_another_thread(rank: Rank) -> None:
    followed = []

    def train() -> None:
        rank.timer.training_thread = get_ident()
        rank.end_step()
        followed.append(rank.recorder.stream_waits.training_thread == get_ident())

    thread = Thread(target=train)
    thread.start()
    thread.join()

    assert followed == [True]


def test_the_number_of_a_step_decides_whether_its_calls_are_sampled(rank: Rank) -> None:
    sampled_steps = []
    for step in range(1, 60):
        if rank.recorder.is_sampled:
            sampled_steps.append(step)
        rank.end_step()

    assert sampled_steps == [1, 13, 34, 47]  # the first precedes any number


def test_no_step_is_sampled_if_the_setting_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, sampled_steps=0)

    sampled = []
    for _ in range(20):
        sampled.append(rank.recorder.is_sampled)
        rank.end_step()

    assert not any(sampled)


@pytest.mark.parametrize(("connections", "expected"), [("1", [False]), ("8", [True, False])])
def test_no_step_is_sampled_if_all_streams_share_one_queue_which_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    connections: str,
    expected: list[bool],
) -> None:
    step_collector._waits_would_block_compute.cache_clear()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    caplog.set_level("INFO")

    sampled = []
    for rank in (Rank(monkeypatch), Rank(monkeypatch)):
        for _ in range(20):
            sampled.append(rank.recorder.is_sampled)
            rank.end_step()
    step_collector._waits_would_block_compute.cache_clear()

    messages = [entry.message for entry in caplog.records if "MAX_CONNECTIONS" in entry.message]
    assert sorted(set(sampled), reverse=True) == expected
    assert len(messages) == (connections == "1")


def test_collectives_of_deepcompile_make_the_coverage_0_and_are_logged_once(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    before = rank.end_step().coverage
    rank.engine.is_compiled_by_deepspeed = True

    compiled = [rank.end_step().coverage for _ in range(3)]

    assert (before, compiled) == (1.0, [0.0] * 3)
    assert ["DeepCompile" in entry.message for entry in caplog.records] == [True]


def test_memory_is_read_when_it_is_due_and_in_a_detailed_sample(rank: Rank) -> None:
    due = rank.end_step().memory
    rank.memory.reading_due = math.inf
    early = rank.end_step().memory
    rank.timer.on_change = lambda phase: None
    detailed = rank.end_step().memory

    assert due is not None
    assert early is None
    assert detailed is due
