"""Tests of profiled steps: the split of their time, and the script's own profiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.steps import step
from torch._C._autograd import DeviceType
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.instrumentation.profiled_steps import (
    MARK,
    MAX_UNREAD,
    ProfiledSteps,
    read_overlap,
    split_step,
)

MS = 1_000_000


class FakeEvent:
    """A Kineto event; times in milliseconds."""

    def __init__(
        self, name: str, start: int, end: int, *, device: bool = False, annotation: bool = False
    ) -> None:
        self._values = (name, start, end, device, annotation)

    def name(self) -> str:
        return self._values[0]

    def start_ns(self) -> int:
        return self._values[1] * MS

    def duration_ns(self) -> int:
        return (self._values[2] - self._values[1]) * MS

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self._values[3] else DeviceType.CPU

    def is_user_annotation(self) -> bool:
        return self._values[4]

    def start_thread_id(self) -> int:
        return 2 if self.name().startswith("other ") else 1


class FakeResults:
    def __init__(self, *events: FakeEvent) -> None:
        self._events = events

    def events(self) -> tuple[FakeEvent, ...]:
        return self._events


@pytest.fixture
def profiled() -> Iterator[ProfiledSteps]:
    made = ProfiledSteps(2, Recorder(), on_device=False)
    yield made
    made.close()


def work() -> None:
    matrix = torch.ones(400, 400)
    for _ in range(10):
        matrix @ matrix


def names(finished: profile) -> set[str]:
    return {average.key for average in finished.key_averages()}


@pytest.mark.parametrize(
    ("compute", "comm", "expected"),
    [
        ([], [], (0, 0, 0, 100)),
        ([(0, 60)], [(60, 80)], (60, 20, 0, 20)),
        ([(0, 60)], [(50, 80)], (50, 20, 10, 20)),
        ([(0, 60)], [(10, 20), (15, 30)], (40, 0, 20, 40)),
        ([(0, 50), (10, 20), (40, 60)], [(55, 100)], (55, 40, 5, 0)),
        ([(-20, 10)], [(90, 130), (200, 300)], (10, 10, 0, 80)),
        ([(0, 10), (20, 30), (40, 50)], [(5, 45)], (10, 20, 20, 50)),
    ],
)
def test_a_step_is_split_into_compute_comm_overlap_and_idle(compute, comm, expected) -> None:
    overlap = split_step((0, 100), compute, comm)

    assert [overlap.compute, overlap.comm, overlap.overlap, overlap.idle] == pytest.approx(
        [part / 1e9 for part in expected]
    )


def test_on_cpu_operators_of_the_training_thread_compute_and_gloo_communicates() -> None:
    events = [
        FakeEvent(MARK, 0, 100),
        FakeEvent("autograd::engine::evaluate_function: AddmmBackward0", 0, 100),
        FakeEvent("aten::addmm", 0, 40),
        FakeEvent("c10d::allreduce_", 40, 60),
        FakeEvent("other aten::mm", 60, 90),
        FakeEvent("gloo:all_reduce", 30, 60),
    ]

    overlap = read_overlap(events, on_device=False)

    assert overlap is not None
    assert overlap.ratios() == pytest.approx(
        {"compute": 0.3, "comm": 0.2, "overlap": 0.1, "idle": 0.4}
    )


def test_on_a_device_kernels_count_and_those_of_nccl_communicate() -> None:
    events = [
        FakeEvent(MARK, 0, 100),
        FakeEvent(MARK, 20, 90, device=True, annotation=True),
        FakeEvent("aten::mm", 0, 90),
        FakeEvent("ampere_sgemm_128x64", 10, 50, device=True),
        FakeEvent("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 70, device=True),
        FakeEvent("nccl:all_reduce", 40, 70, device=True, annotation=True),
    ]

    overlap = read_overlap(events, on_device=True)

    assert overlap is not None
    assert overlap.ratios() == pytest.approx(
        {"compute": 0.3, "comm": 0.2, "overlap": 0.1, "idle": 0.4}
    )


def test_the_error_is_the_difference_to_the_profiler_over_the_step() -> None:
    recorder = Recorder()
    profiled = ProfiledSteps(2, recorder, on_device=False)
    results = FakeResults(FakeEvent(MARK, 0, 200), FakeEvent("gloo:all_reduce", 50, 100))
    profiled._finished.append((4, results))

    profiled.compare(step(4, comm=0.040))

    assert recorder.snapshot().value(communication.COMM_EXPOSED_ERROR_RATIO) == pytest.approx(0.05)
    assert recorder.snapshot().value(communication.STEP_TIME_RATIO, "comm") == pytest.approx(0.25)


def test_only_each_second_step_is_profiled(profiled: ProfiledSteps) -> None:
    running = []

    for number in range(1, 6):
        profiled.on_step_end(number)
        running.append(autograd_profiler._is_profiler_enabled)

    assert running == [True, False, True, False, True]


def test_a_profiled_steps_ratios_are_published_with_its_record(profiled: ProfiledSteps) -> None:
    profiled.on_step_end(1)
    work()
    profiled.on_step_end(2)

    profiled.compare(step(1))
    before = profiled._recorder.snapshot().values.get(communication.STEP_TIME_RATIO)
    profiled.compare(step(2))

    overlap: Any = profiled._recorder.snapshot().values[communication.STEP_TIME_RATIO]
    assert not before
    assert sum(overlap.values()) == pytest.approx(1.0)
    assert profiled._recorder.snapshot().value(communication.STEP_TIME_RATIO, "compute") > 0.5


def test_all_profiles_since_the_last_second_are_read(profiled: ProfiledSteps) -> None:
    saved: list[int] = []
    profiled._traces = SimpleNamespace(save=lambda step, results: saved.append(step))  # type: ignore[assignment]
    for number in range(1, 8):
        profiled.on_step_end(number)
        work()
    profiled.close()
    shares = []
    for number in (1, 2, 3, 5, 6):  # the record of step 4 is lost
        profiled.compare(step(number))
        shares.append(profiled._recorder.snapshot().value(communication.STEP_TIME_RATIO, "compute"))

    assert saved == [2, 4, 6]
    assert shares[0] is None and shares[1] == shares[2] == shares[3] != shares[4]


def test_a_profile_from_before_a_checkpoint_was_loaded_holds_up_no_later_one(
    profiled: ProfiledSteps,
) -> None:
    saved: list[int] = []
    profiled._traces = SimpleNamespace(save=lambda step, results: saved.append(step))  # type: ignore[assignment]
    for number in (999, 1000, 501, 502, 503, 504):
        profiled.on_step_end(number)
        work()
    for number in (501, 502, 503, 504):
        profiled.compare(step(number))

    assert saved == [1000, 502, 504]


def test_profiles_that_nobody_reads_are_limited(profiled: ProfiledSteps) -> None:
    for number in range(1, 2 * MAX_UNREAD + 4):
        profiled.on_step_end(number)

    assert [step for step, _ in profiled._finished] == list(range(2, 2 * MAX_UNREAD + 1, 2))
    assert not autograd_profiler._is_profiler_enabled


def test_a_profile_of_the_script_prevents_ours(profiled: ProfiledSteps) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        profiled.on_step_end(1)
        work()
        profiled.on_step_end(2)

    assert "aten::mm" in names(theirs)
    assert not profiled._finished


def test_a_profile_started_inside_ours_is_complete(profiled: ProfiledSteps) -> None:
    profiled.on_step_end(1)

    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        work()
    profiled.on_step_end(2)

    assert "aten::mm" in names(theirs)
    assert not profiled._finished


def test_the_profilers_functions_are_restored(profiled: ProfiledSteps) -> None:
    before = dict(vars(autograd_profiler.profile))
    profiled.on_step_end(1)
    during = dict(vars(autograd_profiler.profile))

    profiled.on_step_end(2)

    assert during != before
    assert dict(vars(autograd_profiler.profile)) == before


def test_a_script_that_ends_in_a_profiled_step_ends_well() -> None:
    script = """
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.instrumentation.profiled_steps import ProfiledSteps
ProfiledSteps(2, Recorder(), on_device=False).on_step_end(1)
"""

    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600
    )

    assert finished.returncode == 0, finished.stderr
