"""Tests of forecasts during a run: metrics, warnings, and data for out-of-memory reports."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory.forecast import forecast_service as module
from zerowatch.runtime.memory.forecast.forecast_service import MemoryForecasts
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, Shape

MIB = 2**20
GIB = 2**30


class Run:
    """A device whose peaks depend on the lengths of its batches, on a fake clock."""

    def __init__(self, clock: FakeClock, seed: int, limit_bytes: float = 8 * GIB) -> None:
        self.clock = clock
        self.limit_bytes = limit_bytes
        self.recorder = Recorder()
        self.forecasts = MemoryForecasts(self.recorder)
        self.between_steps_bytes = 2.0 * GIB
        self.step = 0
        self._noise = random.Random(seed)

    def train(self, num_steps: int, *, growth_bytes: float = 0.0, lengths: range) -> None:
        for _ in range(num_steps):
            self.step += 1
            shape = Shape(4, self._noise.choice(lengths))
            self.forecasts.assess_batch(shape)
            peak = self.between_steps_bytes + shape.length * 2 * MIB + self._noise.gauss(0, 2 * MIB)
            self.between_steps_bytes += growth_bytes
            self.forecasts.add(
                {
                    "cuda:0": PeakPoint(
                        step=self.step,
                        peak_bytes=peak,
                        between_steps_bytes=self.between_steps_bytes,
                        limit_bytes=self.limit_bytes,
                        reserved_bytes=peak,
                        shapes=(shape,),
                    )
                }
            )
            self.clock.seconds += 2.0
            self.forecasts.update()

    def value(self, spec: object) -> float:
        return self.recorder.snapshot().values[spec]["cuda:0",]  # type: ignore[index]


SHORT, LONG = range(64, 512, 64), range(64, 2048, 64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock()
    monkeypatch.setattr(module.time, "monotonic", fake)
    return fake


def test_a_run_far_below_its_limit_has_almost_no_risk(clock: FakeClock, seed: int) -> None:
    run = Run(clock, seed)

    run.train(80, lengths=SHORT)

    assert run.value(memory.OOM_RISK) < 0.01
    assert run.value(memory.OOM_ETA_STEPS) == float("inf")
    assert run.value(memory.MEMORY_HEADROOM) == pytest.approx(8 * GIB - 3 * GIB, rel=0.1)
    assert run.value(memory.MEMORY_PREDICTION_ERROR) < 0.02


def test_a_growing_run_is_warned_about_once_and_early(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=6 * GIB)

    with caplog.at_level(logging.WARNING):
        run.train(80, growth_bytes=30 * MIB, lengths=SHORT)

    (line,) = (record.message for record in caplog.records)
    assert "memory of cuda:0 is likely to run out within 50 steps" in line
    assert "steps left" in line
    assert "limit 6.00 GiB" in line
    alarm = run.forecasts.alarm_steps["cuda:0"]
    fatal = next(step for step in range(200) if 2 * GIB + step * 30 * MIB + 0.9 * GIB > 6 * GIB)
    assert alarm is not None and alarm <= fatal - 20


def test_an_exceeded_budget_is_logged_with_risk_1(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    run = Run(clock, seed)
    run.train(80, lengths=SHORT)

    run.limit_bytes = 2.1 * GIB
    with caplog.at_level(logging.WARNING):
        run.train(5, lengths=range(448, 449))

    (line,) = (r.message for r in caplog.records if "micro-batch (" not in r.message)
    assert "memory of cuda:0 has exceeded its limit" in line
    assert "steps left" not in line
    assert run.value(memory.OOM_RISK) == 1.0


def test_a_batch_too_long_is_warned_about_as_it_begins(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)

    with caplog.at_level(logging.WARNING):
        run.forecasts.assess_batch(Shape(4, 1800))

    (line,) = (record.message for record in caplog.records)
    assert line.startswith("this micro-batch (4 x 1800) is likely not to fit into the memory of")
    assert run.forecasts.batch_risk("cuda:0") > 0.5


def test_batches_too_long_are_warned_about_once_per_minute(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)
    num_warnings = []

    for seconds in (0, module.BATCH_ALARM_SECONDS - 1, 2):
        clock.seconds += seconds
        run.forecasts.assess_batch(Shape(4, 1800))
        num_warnings.append(len(caplog.records))

    assert num_warnings == [1, 1, 2]


def test_a_new_engine_is_assessed_by_its_own_readings_only(clock: FakeClock, seed: int) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)

    run.forecasts.assess_batch(Shape(4, 64))  # a harmless batch is not assessed twice
    run.forecasts.reset()
    run.forecasts.assess_batch(Shape(4, 64))

    assert (run.forecasts.forecasts, run.forecasts.risks) == ({}, {})
    assert run.forecasts.batch_risk("cuda:0") is None
    run.train(1, lengths=SHORT)
    assert run.forecasts.forecasts == {}


def test_the_highest_batch_risk_since_the_last_update_is_published(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)

    run.forecasts.assess_batch(Shape(4, 1800))
    run.train(1, lengths=SHORT)

    assert run.value(memory.OOM_NEXT_BATCH_RISK) > 0.5
    run.train(1, lengths=SHORT)
    assert run.value(memory.OOM_NEXT_BATCH_RISK) < 0.1


def test_the_last_peaks_and_their_predictions_are_available_to_reports(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed)

    run.train(80, lengths=LONG)

    peaks = run.forecasts.last_peaks("cuda:0")
    predictions = run.forecasts.last_predictions("cuda:0")
    assert [peak.step for peak in peaks] == [each.step for each in predictions] == [*range(61, 81)]
    assert predictions[-1].predicted_bytes == pytest.approx(peaks[-1].peak_bytes, rel=0.05)


def test_a_device_without_a_limit_has_neither_risk_nor_headroom(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=float("inf"))

    run.train(40, lengths=SHORT)

    assert run.value(memory.OOM_RISK) == 0.0
    assert memory.MEMORY_HEADROOM not in run.recorder.snapshot().values


@pytest.mark.parametrize(("limit_bytes", "is_updated"), [(100 * GIB, False), (3.2 * GIB, True)])
def test_forecasts_are_updated_every_second_only_close_to_the_limit(
    clock: FakeClock, limit_bytes: float, is_updated: bool, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes)
    run.train(80, lengths=SHORT)
    clock.seconds += 10
    run.train(1, lengths=SHORT)
    before = run.forecasts.forecasts["cuda:0"]

    run.train(1, lengths=SHORT)

    assert (run.forecasts.forecasts["cuda:0"] is not before) == is_updated
