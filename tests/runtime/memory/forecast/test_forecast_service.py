"""Tests of forecasts during a run: metrics, warnings, and data for out-of-memory reports."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fakes.clock import FakeClock, set_clock

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory.forecast import forecast_service as module
from zerowatch.runtime.memory.forecast.forecast_service import MemoryForecasts
from zerowatch.runtime.memory.forecast.forecaster import MemoryForecast
from zerowatch.runtime.memory.forecast.peak_model import PeakModel
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, PeakPrediction, Shape
from zerowatch.runtime.memory.forecast.risk import fit_tail

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


class CountingForecast:
    """Notes the shapes that a forecast assesses."""

    def __init__(self, forecast: MemoryForecast) -> None:
        self._forecast = forecast
        self.limit_bytes = forecast.limit_bytes
        self.assessed: list[Shape] = []

    def batch_risk(self, shape: Shape) -> float:
        self.assessed.append(shape)
        return self._forecast.batch_risk(shape)

    def predict_peak(self, shape: Shape) -> float:
        return self._forecast.predict_peak(shape)


SHORT, LONG = range(64, 512, 64), range(64, 2048, 64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock()
    set_clock(monkeypatch, module, monotonic=fake)
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


def test_a_shape_is_assessed_once_by_each_forecast_unless_its_risk_is_high(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)
    forecast = run.forecasts.forecasts["cuda:0"]
    by_risk = {
        forecast.batch_risk(shape): shape for shape in (Shape(4, n) for n in range(64, 2048, 2))
    }
    low, high = min(by_risk), max(by_risk)
    middle = min(by_risk, key=lambda risk: abs(risk - 0.2))
    counting = CountingForecast(forecast)
    run.forecasts.forecasts = {"cuda:0": counting}  # type: ignore[dict-item]
    run.forecasts.take_batch_risks()

    taken = []
    for risk in (low, middle, middle, high, high):
        run.forecasts.assess_batch(by_risk[risk])
        assert run.forecasts.batch_risk("cuda:0") == risk
    taken.append(run.forecasts.take_batch_risks()["cuda:0"])
    for _ in range(2):
        run.forecasts.assess_batch(by_risk[middle])
    taken.append(run.forecasts.take_batch_risks()["cuda:0"])

    assert low < 0.01 < middle < module.OOM_RISK_HIGH <= high
    assert counting.assessed == [by_risk[each] for each in (low, middle, high, high, middle)]
    assert taken == [high, middle]


def test_a_new_engine_is_assessed_by_its_own_readings_only(clock: FakeClock, seed: int) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, lengths=SHORT)

    run.forecasts.assess_batch(Shape(4, 64))
    run.forecasts.reset()
    run.forecasts.assess_batch(Shape(4, 64))

    assert (run.forecasts.forecasts, run.forecasts.risks) == ({}, {})
    assert run.forecasts.batch_risk("cuda:0") is None
    run.train(1, lengths=SHORT)
    assert run.forecasts.forecasts == {}


def test_the_risk_is_unknown_after_a_restart_until_there_are_new_readings(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, growth_bytes=11 * MIB, lengths=SHORT)
    before = run.value(memory.OOM_RISK)

    run.forecasts.restart(after_step=run.step, use=1)
    run.forecasts.assess_batch(Shape(4, 64))

    assert before >= module.OOM_RISK_HIGH
    assert (run.forecasts.forecasts, run.forecasts.risks) == ({}, {})
    assert run.forecasts.batch_risk("cuda:0") is None
    run.between_steps_bytes -= GIB
    run.train(4, lengths=SHORT)
    values = run.recorder.snapshot().values
    assert not any(values.get(spec) for spec in module._GAUGES)
    run.train(2, lengths=SHORT)
    assert run.value(memory.OOM_RISK) == run.forecasts.risks["cuda:0"] < 0.3


def test_a_restart_ignores_readings_of_earlier_steps_that_come_late(
    clock: FakeClock, seed: int
) -> None:
    run = Run(clock, seed, limit_bytes=4 * GIB)
    run.train(80, growth_bytes=11 * MIB, lengths=SHORT)

    run.forecasts.restart(after_step=run.step + 10, use=1)
    run.train(10, growth_bytes=11 * MIB, lengths=SHORT)

    assert run.forecasts.risks == {}
    assert run.forecasts.last_peaks("cuda:0")[-1].step == run.step, "errors still report them"
    run.between_steps_bytes -= GIB
    run.train(6, lengths=SHORT)
    assert run.forecasts.risks["cuda:0"] < 0.3
    run.step -= 50  # the script loads a checkpoint: these steps are new ones
    run.train(20, lengths=SHORT)
    assert run.forecasts.forecasts["cuda:0"].step == run.step


def test_a_run_that_alternates_between_two_uses_of_memory_is_warned_in_time(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """A trial has blocks of a few steps, fewer than a forecast needs."""
    run = Run(clock, seed, limit_bytes=6 * GIB)
    risks = []

    with caplog.at_level(logging.WARNING):
        for block in range(20):
            run.forecasts.restart(after_step=run.step, use="AB"[block % 2])
            run.train(4, growth_bytes=30 * MIB, lengths=SHORT)
            risks.append(run.forecasts.risks)

    assert all(risks[4:])
    assert any("likely to run out within 50 steps" in each.message for each in caplog.records)
    assert run.value(memory.OOM_RISK) >= module.OOM_RISK_HIGH


@pytest.mark.parametrize("is_late", [False, True])
def test_each_use_of_memory_is_forecast_by_its_own_readings(
    clock: FakeClock, seed: int, is_late: bool
) -> None:
    """Readings may come late: some steps after the use has changed again."""
    run = Run(clock, seed)
    needs = {"A": 2.0 * GIB, "B": 5.0 * GIB}
    late = 6 if is_late else 0
    uses = ["AB"[step // 4 % 2] for step in range(120)]
    for step in range(120):
        use = uses[step]
        if step == 0 or use != uses[step - 1]:
            run.forecasts.restart(after_step=step, use=use)
        if step >= late:
            run.between_steps_bytes = needs[uses[step - late]]
            run.train(1, lengths=SHORT)
            forecast = run.forecasts.forecasts.get("cuda:0")
            if step >= 40:
                assert forecast is not None
                assert abs(forecast.between_steps_bytes - needs[use]) < MIB

    run.forecasts.restart(after_step=120, use="C")
    assert run.forecasts.forecasts == {}
    run.forecasts.restart(after_step=120, use="A")
    assert run.forecasts.forecasts["cuda:0"].between_steps_bytes == needs["A"]
    run.forecasts.restart(after_step=900, use="A")
    assert run.forecasts.forecasts == {}, "these readings are too old"


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


TAIL = fit_tail([], expected=10.0 * MIB, min_width=1.0)


def forecast(
    step: int = 7, *, risk: float = 0.0, eta: float = math.inf, headroom: float = 5.0 * GIB
) -> MemoryForecast:
    """Return a forecast of a peak of 3 GiB, a limit of 8 GiB, and 1 MiB a token above 2 GiB."""
    return MemoryForecast(
        step=step,
        predicted_peak_bytes=3.0 * GIB,
        headroom_bytes=headroom,
        risk_ratio=risk,
        eta_steps=eta,
        error_ratio=0.125,
        limit_bytes=8.0 * GIB,
        model=PeakModel(
            min_rise=0.0,
            constant=0.0,
            per_sample=0.0,
            per_token=1.0 * MIB,
            per_token_pair=0.0,
            reused_ratio=0.0,
            typical_need=0.0,
        ),
        between_steps_bytes=2.0 * GIB,
        fragmented_bytes=0.0,
        tail=TAIL,
    )


class Scripted:
    """Forecasts that a test sets, instead of those of a forecaster."""

    next: MemoryForecast | None = None

    def add(self, point: PeakPoint) -> None: ...

    def forecast(self) -> MemoryForecast | None:
        return Scripted.next


@pytest.fixture
def scripted(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose forecasts a test sets by `show`."""
    monkeypatch.setattr(module, "Forecaster", Scripted)
    return Run(clock, 0)


def show(run: Run, found: MemoryForecast | None, *, peak: float = 3.0 * GIB) -> None:
    """Add a reading and update with this forecast."""
    Scripted.next = found
    point = PeakPoint(
        step=7,
        peak_bytes=peak,
        between_steps_bytes=2.0 * GIB,
        limit_bytes=8.0 * GIB,
        reserved_bytes=peak,
    )
    run.forecasts.add({"cuda:0": point})
    run.forecasts.update()


def test_each_figure_of_a_forecast_has_its_metric(scripted: Run) -> None:
    show(scripted, forecast(risk=0.25, eta=90.0, headroom=5.0))

    values = scripted.recorder.snapshot().values
    assert {spec.name: series for spec, series in values.items()} == {
        spec.name: {("cuda:0",): value}
        for spec, value in (
            (memory.MEMORY_PREDICTED_PEAK, 3.0 * GIB),
            (memory.MEMORY_PREDICTION_ERROR, 0.125),
            (memory.OOM_RISK, 0.25),
            (memory.OOM_ETA_STEPS, 90.0),
            (memory.MEMORY_HEADROOM, 5.0),
            (memory.OOM_NEXT_BATCH_RISK, 0.0),
        )
    }
    assert scripted.forecasts.risks == {"cuda:0": 0.25}


def test_a_warning_has_the_figures_of_the_forecast(
    scripted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    show(scripted, forecast(risk=0.625, eta=37.4))

    assert [record.message for record in caplog.records] == [
        "memory of cuda:0 is likely to run out within 50 steps (62 %): predicted peak 3.00 GiB, "
        "limit 8.00 GiB, about 37 steps left. Use a smaller micro-batch, or more sharding or "
        "offload."
    ]
    assert scripted.forecasts.alarm_steps == {"cuda:0": 7}


@pytest.mark.parametrize(
    ("eta", "is_told"), [(0.0, False), (0.99, False), (1.0, True), (math.inf, False)]
)
def test_steps_left_are_told_if_there_is_at_least_one(
    scripted: Run, caplog: pytest.LogCaptureFixture, eta: float, is_told: bool
) -> None:
    show(scripted, forecast(risk=0.75, eta=eta))

    assert ("about 1 steps left" in caplog.text) == is_told
    assert ("steps left" in caplog.text) == is_told


def test_a_warning_comes_again_only_after_the_risk_was_below_30_percent(
    scripted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    counts, alarms = [], []
    for step, risk in enumerate((0.49, 0.5, 0.87, 0.3, 0.6, 0.29, 0.49, 0.5)):
        scripted.clock.seconds += 10
        show(scripted, forecast(step, risk=risk))
        counts.append(len(caplog.records))
        alarms.append(scripted.forecasts.alarm_steps.get("cuda:0"))

    assert counts == [0, 1, 1, 1, 1, 1, 1, 2]
    assert alarms == [None, 1, 1, 1, 1, None, None, 7]


@pytest.mark.parametrize(("peak", "risk"), [(8.0 * GIB, 0.25), (8.0 * GIB + 1, 1.0)])
def test_a_peak_above_the_limit_is_a_certain_risk(scripted: Run, peak: float, risk: float) -> None:
    show(scripted, forecast(risk=0.25), peak=peak)

    assert scripted.forecasts.risks == {"cuda:0": risk}


@pytest.mark.parametrize(
    ("eta", "headroom", "seconds"),
    [
        (math.inf, 0.3 * 8 * GIB, 5),
        (500, 0.3 * 8 * GIB, 5),
        (499, 5.0 * GIB, 1),
        (math.inf, 0.3 * 8 * GIB - 1, 1),
    ],
)
def test_far_from_the_limit_an_update_is_due_after_five_seconds(
    scripted: Run, eta: float, headroom: float, seconds: int
) -> None:
    show(scripted, forecast(0, eta=eta, headroom=headroom))
    steps = []
    for step in range(1, 7):
        scripted.clock.seconds += 1
        show(scripted, forecast(step, eta=eta, headroom=headroom))
        steps.append(scripted.forecasts.forecasts["cuda:0"].step)

    assert steps == ([1, 2, 3, 4, 5, 6] if seconds == 1 else [0, 0, 0, 0, 5, 5])


@pytest.mark.parametrize(
    ("eta", "headroom", "peak", "seconds"),
    [
        (math.inf, 0.6 * 8 * GIB, 3.2 * GIB, 15),
        (5000, 0.6 * 8 * GIB, 3.2 * GIB, 15),
        (4999, 0.6 * 8 * GIB, 3.2 * GIB, 5),
        (math.inf, 0.6 * 8 * GIB - 1, 3.2 * GIB, 5),
        (math.inf, 0.6 * 8 * GIB, 3.2 * GIB + 1, 5),
    ],
)
def test_very_far_from_the_limit_an_update_is_due_after_fifteen_seconds_unless_a_peak_rises(
    scripted: Run, eta: float, headroom: float, peak: float, seconds: int
) -> None:
    show(scripted, forecast(0, eta=eta, headroom=headroom))
    steps = []
    for step in range(1, 17):
        scripted.clock.seconds += 1
        show(scripted, forecast(step, eta=eta, headroom=headroom), peak=peak)
        steps.append(scripted.forecasts.forecasts["cuda:0"].step)

    assert steps == [step - step % seconds for step in range(1, 17)]


@pytest.mark.parametrize(
    ("eta", "headroom", "risk", "is_far"),
    [
        (math.inf, 0.6 * 8 * GIB, 0.0, True),
        (5000, 0.6 * 8 * GIB, 0.0099, True),
        (4999, 0.6 * 8 * GIB, 0.0, False),
        (math.inf, 0.6 * 8 * GIB - 1, 0.0, False),
        (math.inf, 0.6 * 8 * GIB, 0.01, False),
    ],
)
def test_forecasts_are_very_far_until_a_reading_is_nearer_and_after_a_reset(
    scripted: Run, eta: float, headroom: float, risk: float, is_far: bool
) -> None:
    forecasts = scripted.forecasts
    assert not forecasts.are_very_far  # nothing is known

    show(scripted, forecast(0, eta=eta, headroom=headroom, risk=risk))
    copy = MemoryForecasts(Recorder())
    copy.restore(forecasts.state())
    found = [forecasts.are_very_far, copy.are_very_far]
    show(scripted, forecast(1), peak=3.2 * GIB + 1)
    found_nearer = forecasts.are_very_far
    copy.reset()

    assert found == [is_far, is_far]
    assert not found_nearer
    assert not copy.are_very_far


def test_without_new_readings_nothing_is_published(scripted: Run) -> None:
    scripted.forecasts.update()
    show(scripted, None)

    assert scripted.recorder.snapshot().values == {}
    assert scripted.forecasts.forecasts == {}


def test_a_batch_warning_names_the_batch_its_risk_and_its_peak(
    scripted: Run, caplog: pytest.LogCaptureFixture
) -> None:
    show(scripted, forecast())

    scripted.forecasts.assess_batch(Shape(3, 2048))  # 2 GiB and 6 GiB: just at the limit

    margin = 0.0  # the median
    risk = TAIL.exceedance(margin)
    assert scripted.forecasts.batch_risk("cuda:0") == risk == 0.5
    assert [record.message for record in caplog.records] == [
        "this micro-batch (3 x 2048) is likely not to fit into the memory of cuda:0 (50 %): "
        "predicted peak 8.00 GiB, limit 8.00 GiB. Split it, or limit the sequence length."
    ]


def test_the_prediction_of_a_step_is_that_of_its_largest_micro_batch(scripted: Run) -> None:
    show(scripted, forecast(risk=0.25))
    point = scripted.forecasts.last_peaks("cuda:0")[0]
    shapes = (Shape(1, 512), Shape(2, 1024), Shape(4, 64))

    scripted.forecasts.add({"cuda:0": replace(point, step=8, shapes=shapes)})

    assert scripted.forecasts.predict_peak("cuda:0", Shape(1, 512)) == 2.5 * GIB
    assert scripted.forecasts.predict_peak("cpu", Shape(1, 512)) is None
    assert scripted.forecasts.last_predictions("cuda:0") == [
        PeakPrediction(step=7, predicted_bytes=None, risk_ratio=None),
        PeakPrediction(step=8, predicted_bytes=4.0 * GIB, risk_ratio=0.25),
    ]
    assert (scripted.forecasts.last_peaks("cpu"), scripted.forecasts.last_predictions("cpu")) == (
        [],
        [],
    )
