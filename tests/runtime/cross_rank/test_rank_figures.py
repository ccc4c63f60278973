"""Tests of `RankFigures` against the rates of a made-up run, and of what is left out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import communication, devices, memory, overhead, training
from zerowatch.metrics.catalog.across_ranks import STATISTICS
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.rank_figures import (
    LOSS_HASH,
    LOSS_WINDOW,
    MAX_AGE_SECONDS,
    PERIOD_SECONDS,
    RankFigures,
)

EXCHANGE_SECONDS = 5.0


class Run:
    """A rank whose steps all take the same time, read at each exchange."""

    def __init__(self, step_seconds: float = 2.0) -> None:
        self.clock, self.recorder = FakeClock(), Recorder()
        self.step_seconds = step_seconds
        self.exposed_share = 0.1
        self.unix_offset = 1.7e9  # changes if the system clock is set
        self._figures = RankFigures(self.recorder, self.clock, self._unix_time)
        self._next_step = self.clock.seconds + step_seconds

    def train(self, seconds: float) -> dict[str, float]:
        """Train for some time, and return the figures that are known at the end."""
        end = self.clock.seconds + seconds
        known = {}
        while self.clock.seconds < end:
            self.clock.seconds += EXCHANGE_SECONDS
            while self._next_step <= self.clock.seconds:
                self._step()
            known = self.read()
        return known

    def read(self) -> dict[str, float]:
        figures = self._figures.read().tolist()
        named = zip(STATISTICS, figures[: len(STATISTICS)], strict=True)
        return {name: value for name, value in named if not math.isnan(value)}

    def _step(self) -> None:
        seconds, recorder = self.step_seconds, self.recorder
        recorder.add(training.STEPS, 1)
        recorder.add(training.SAMPLES, 8)
        recorder.add(training.FLOPS, 6e12)
        recorder.add(training.PHASE_SECONDS, 0.95 * seconds, "backward")
        recorder.add(training.PHASE_SECONDS, 0.05 * seconds, "data")
        recorder.add(training.PHASE_SECONDS, 100.0, "checkpoint")  # no training time
        recorder.add(communication.COMM_SECONDS, 0.3 * seconds, "dp")
        recorder.add(communication.COMM_SECONDS, 0.2 * seconds, "tp")  # meanwhile
        recorder.add(communication.COMM_UNION_SECONDS, 0.3 * seconds)
        recorder.add(communication.COMM_EXPOSED_SECONDS, self.exposed_share * seconds / 2, "dp")
        recorder.add(communication.COMM_EXPOSED_SECONDS, self.exposed_share * seconds / 2, "tp")
        recorder.add(communication.COMM_WAIT_SECONDS, 0.04 * seconds, "dp")
        recorder.set(training.LAST_STEP_TIMESTAMP, self.unix_offset + self._next_step)
        self._next_step += seconds

    def _unix_time(self) -> float:
        return self.unix_offset + self.clock.seconds


def with_device(run: Run, device: str = "cuda:0") -> Run:
    recorder = run.recorder
    recorder.set(training.PEAK_FLOPS, 10e12, device)
    recorder.set(devices.DEVICE_UTILIZATION, 0.75, device)
    recorder.set(memory.MEMORY_PEAK, 60e9, device, "allocated")
    recorder.set(memory.MEMORY_PEAK, 70e9, device, "reserved")
    recorder.set(memory.MEMORY_LIMIT, 80e9, device)
    recorder.set(memory.OOM_RISK, 0.25, device)
    return run


@pytest.mark.parametrize("step_seconds", [0.05, 2.0, 5.2, 45.0, 200.0])
def test_figures_of_equal_steps_are_those_of_one_step(step_seconds: float) -> None:
    run = with_device(Run(step_seconds))
    run.recorder.set(training.STEP_DURATION_QUANTILE, step_seconds, "0.5")
    run.recorder.set(devices.DEVICE_UTILIZATION, 0.125, "cpu")
    run.recorder.set(memory.MEMORY_LIMIT, 1e12, "cpu")
    run.recorder.set(memory.OOM_RISK, 0.5, "cpu")
    run.recorder.set(devices.DEVICE_TEMPERATURE, 61.0, "cuda:0")

    known = run.train(5 * max(step_seconds, PERIOD_SECONDS))

    assert known == pytest.approx(
        {
            "step_duration": step_seconds,
            "exposed_comm": 0.1,
            "comm_wait": 0.04,
            "data": 0.05,
            "memory_peak": 0.75,
            "oom_risk": 0.5,  # the worst device; the other figures are those of the GPU
            "device_utilization": 0.75,
            "device_temperature": 61.0,
            "mfu": 6e12 / step_seconds / 10e12,
            "samples_per_second": 8 / step_seconds,
        },
        rel=1e-5,
    )


def test_a_rank_without_a_gpu_has_the_figures_of_its_host_and_no_temperature() -> None:
    known = with_device(Run(), "cpu").train(30)

    assert known["device_utilization"] == pytest.approx(0.75)
    assert known["memory_peak"] == pytest.approx(0.75)
    assert "device_temperature" not in known


def test_generation_is_part_of_the_step_but_not_of_the_flops() -> None:
    run = with_device(Run())
    with_generation = with_device(Run())
    with_generation.recorder.start_counters((training.PHASE_SECONDS,))
    expected = run.train(60)

    for _ in range(30):
        with_generation.recorder.add(training.PHASE_SECONDS, 1.0, "generate")
        known = with_generation.train(2.0)

    assert known["mfu"] == pytest.approx(expected["mfu"])
    assert known["data"] < expected["data"]


def test_a_reading_before_the_first_step_delays_the_samples_by_one_exchange_only() -> None:
    run = Run()
    run.read()

    first = run.train(EXCHANGE_SECONDS)
    second = run.train(EXCHANGE_SECONDS)

    assert "data" in first
    assert "samples_per_second" not in first
    assert second["samples_per_second"] == pytest.approx(4.0)


@pytest.mark.parametrize("step_seconds", [0.05, 2.0, 45.0])
@pytest.mark.parametrize("change", [-30.0, 30.0])
def test_a_system_clock_that_is_set_changes_no_throughput(
    step_seconds: float, change: float
) -> None:
    run = Run(step_seconds)
    run.train(300)
    run.unix_offset += change

    known = [run.train(EXCHANGE_SECONDS)["samples_per_second"] for _ in range(40)]

    assert known == pytest.approx([8 / step_seconds] * 40, rel=1e-5)


@pytest.mark.parametrize("change", [-30.0, 30.0])
def test_a_clock_that_is_set_after_the_last_step_moves_it_by_less_than_an_exchange(
    change: float,
) -> None:
    run = Run(0.25)
    run.train(300)
    run.clock.seconds += EXCHANGE_SECONDS
    while run._next_step <= run.clock.seconds - 0.5:
        run._step()
    run.unix_offset += change

    at_once = run.read()["samples_per_second"]
    known = [run.train(EXCHANGE_SECONDS)["samples_per_second"] for _ in range(40)]

    assert [at_once, *known] == pytest.approx([32.0] * 41, rel=0.1)
    assert known[-1] == pytest.approx(32.0)


def test_a_change_is_complete_after_a_minute_and_a_step() -> None:
    run = Run()
    run.train(300)
    run.exposed_share = 0.5

    during = run.train(PERIOD_SECONDS / 2)["exposed_comm"]
    after = run.train(PERIOD_SECONDS / 2 + EXCHANGE_SECONDS)["exposed_comm"]

    assert 0.1 < during < 0.5
    assert after == pytest.approx(0.5)


def test_utilization_is_the_mean_of_a_minute() -> None:
    run = with_device(Run())
    run.train(300)
    run.recorder.set(devices.DEVICE_UTILIZATION, 0.25, "cuda:0")

    during = run.train(PERIOD_SECONDS / 2)["device_utilization"]
    after = run.train(PERIOD_SECONDS / 2 + EXCHANGE_SECONDS)["device_utilization"]

    assert 0.25 < during < 0.75
    assert after == pytest.approx(0.25)


def test_nothing_is_known_before_there_are_steps() -> None:
    assert Run(step_seconds=60).train(30) == {}


def test_while_no_step_ends_the_figures_about_steps_are_left_out() -> None:
    run = with_device(Run())
    run.train(120)
    run.clock.seconds += MAX_AGE_SECONDS - EXCHANGE_SECONDS
    shortly_after = run.read()
    run.clock.seconds += 2 * EXCHANGE_SECONDS

    later = run.read()

    assert {"exposed_comm", "comm_wait", "data", "mfu", "samples_per_second"} <= set(shortly_after)
    assert set(later) == {"memory_peak", "oom_risk", "device_utilization"}


def test_exposed_time_is_unknown_until_calls_were_compared() -> None:
    run = Run()
    run.exposed_share = 0.0

    known = run.train(120)

    assert "exposed_comm" not in known
    assert "comm_wait" not in known
    assert known["data"] == pytest.approx(0.05)


@pytest.mark.parametrize("untimed_calls", [0, 2])
def test_exposed_time_is_zero_without_communication_and_unknown_if_no_call_has_a_duration(
    untimed_calls: int,
) -> None:
    run = Run()
    for seconds in range(0, 120, 5):
        run.clock.seconds += 5
        run.recorder.add(overhead.DROPPED_RECORDS, untimed_calls, "timing")  # as calls of DDP
        run.recorder.add(training.STEPS, 1)
        run.recorder.add(training.PHASE_SECONDS, 5, "forward")
        run.recorder.set(training.LAST_STEP_TIMESTAMP, seconds)
        known = run.read()

    expected = None if untimed_calls else 0.0
    assert (known.get("exposed_comm"), known.get("comm_wait")) == (expected, expected)


def test_exposed_time_is_unknown_if_calls_could_not_be_recorded_at_all() -> None:
    run = Run()
    run.recorder.set(communication.COMM_COVERAGE_RATIO, 0.0)  # DDP without a Flight Recorder
    for seconds in range(0, 120, 5):
        run.clock.seconds += 5
        run.recorder.add(training.STEPS, 1)
        run.recorder.add(training.PHASE_SECONDS, 5, "forward")
        run.recorder.set(training.LAST_STEP_TIMESTAMP, seconds)
        known = run.read()

    assert not {"exposed_comm", "comm_wait"} & known.keys()


def test_a_known_exposed_time_stays_known_if_some_calls_have_no_duration() -> None:
    run = Run()
    run.recorder.set(communication.COMM_COVERAGE_RATIO, 0.5)
    for seconds in range(0, 120, 5):
        run.clock.seconds += 5
        run.recorder.add(overhead.DROPPED_RECORDS, 1, "timing")
        run.recorder.add(training.STEPS, 1)
        run.recorder.add(training.PHASE_SECONDS, 5, "forward")
        run.recorder.add(communication.COMM_UNION_SECONDS, 2)
        run.recorder.add(communication.COMM_EXPOSED_SECONDS, 1, "dp")
        run.recorder.add(communication.COMM_WAIT_SECONDS, 0.5, "dp")
        run.recorder.set(training.LAST_STEP_TIMESTAMP, seconds)
        known = run.read()

    assert known["exposed_comm"] == pytest.approx(0.2)
    assert known["comm_wait"] == pytest.approx(0.1)


def read_after(run: Run, seconds: float) -> dict[str, float]:
    run.clock.seconds += seconds
    return run.read()


@pytest.mark.parametrize(("step_seconds", "max_age"), [(2.0, 60.0), (30.0, 90.0)])
def test_figures_about_steps_are_left_out_after_a_minute_and_three_steps_without_one(
    step_seconds: float, max_age: float
) -> None:
    run = Run(step_seconds)
    for _ in range(4):
        run.clock.seconds += step_seconds
        run._step()
        run.read()

    at_limit, later = read_after(run, max_age), read_after(run, 0.5)

    assert at_limit["data"] == pytest.approx(0.05)
    assert later == {}


def test_the_device_is_the_gpu_also_if_only_its_utilization_or_its_limit_is_known() -> None:
    for spec, value in ((devices.DEVICE_UTILIZATION, 0.5), (memory.MEMORY_LIMIT, 80e9)):
        run = Run()
        run.recorder.set(spec, value, "cuda:3")
        run.recorder.set(memory.MEMORY_LIMIT, 1e12, "cpu")
        run.recorder.set(devices.DEVICE_TEMPERATURE, 61.0, "cuda:3")
        run.recorder.set(devices.DEVICE_TEMPERATURE, 40.0, "cpu")

        assert run.read()["device_temperature"] == 61.0


def test_the_losses_are_the_last_two_figures() -> None:
    figures = RankFigures(Recorder(), FakeClock())
    before = figures.read()
    figures.read_losses = lambda: (3.0, 77.0)

    assert len(before) == len(STATISTICS) + 2
    assert np.isnan(before).all()
    assert figures.read()[-2:].tolist() == [3.0, 77.0]
    assert (len(STATISTICS), len(STATISTICS) + 1) == (LOSS_WINDOW, LOSS_HASH)


def test_a_peak_without_a_limit_and_steps_without_samples_give_no_figures() -> None:
    run = Run()
    run.recorder.set(memory.MEMORY_PEAK, 60e9, "cuda:0", "allocated")
    run.recorder.set(devices.DEVICE_UTILIZATION, 0.5, "cuda:0")
    for _ in range(3):
        run.clock.seconds += 5
        run.recorder.add(training.STEPS, 1)
        run.recorder.add(training.PHASE_SECONDS, 5, "forward")
        known = run.read()

    assert known == {"exposed_comm": 0, "comm_wait": 0, "data": 0, "device_utilization": 0.5}
