"""Tests of forecasts of synthetic series with a known answer.

Covers `trend.py`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from scripts.memory.peaks import REPLAYS, read_series

from zerowatch.runtime.memory.forecast.forecaster import (
    Forecaster,
    MemoryForecast,
    PredictionErrors,
    add_records,
    extrapolate,
    predict_recent,
)
from zerowatch.runtime.memory.forecast.peak_model import PeakModel, heap_floor
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, Shape
from zerowatch.runtime.memory.forecast.risk import fit_tail
from zerowatch.runtime.memory.forecast.trend import Trend
from zerowatch.runtime.memory.step_sample import StepMemorySample

GIB, MIB = float(1 << 30), float(1 << 20)
FLOOR, PER_TOKEN = 8 * GIB, 2 * MIB
LONG, USUAL = Shape(4, 512), Shape(4, 128)


def point(
    step: int,
    shape: Shape = USUAL,
    *,
    floor: float = FLOOR,
    per_token: float = PER_TOKEN,
    limit: float = 16 * GIB,
    fragmented: float = 0.0,
    reserved: float = 12 * GIB,
    retries: float = 0.0,
) -> PeakPoint:
    return PeakPoint(
        step=step,
        peak_bytes=floor + per_token * shape.samples * shape.length,
        between_steps_bytes=floor,
        limit_bytes=limit,
        reserved_bytes=reserved,
        fragmented_bytes=fragmented,
        retries=retries,
        shapes=(shape,),
    )


def varied(step: int) -> Shape:
    return Shape(4, 64 + 16 * (step * 7 % 11))


def forecast_after(
    points: Iterable[PeakPoint], forecaster: Forecaster | None = None
) -> MemoryForecast:
    """Return the forecast after these readings, updated every fourth as on the watch thread."""
    forecaster = forecaster or Forecaster()
    found = None
    for number, each in enumerate(points):
        forecaster.add(each)
        if number % 4 == 3:
            found = forecaster.forecast()
    found = forecaster.forecast()
    assert found is not None
    return found


def test_there_is_no_forecast_before_enough_readings() -> None:
    forecaster = Forecaster()

    assert forecaster.forecast() is None
    for step in range(3):
        forecaster.add(point(step))
    assert forecaster.forecast() is None


def test_a_steady_run_far_from_its_limit_has_no_risk() -> None:
    forecast = forecast_after(point(step) for step in range(100))

    assert forecast.step == 99
    assert forecast.predicted_peak_bytes == pytest.approx(point(0).peak_bytes, rel=1e-3)
    assert forecast.headroom_bytes == pytest.approx(7 * GIB, rel=1e-2)
    assert forecast.risk_ratio < 1e-3
    assert forecast.eta_steps == math.inf
    assert forecast.error_ratio < 1e-6


def test_a_batch_longer_than_any_before_is_predicted_not_to_fit() -> None:
    forecast = forecast_after(point(step, varied(step), limit=11 * GIB) for step in range(100))

    assert forecast.predict_peak(LONG) == pytest.approx(FLOOR + PER_TOKEN * 4 * 512, rel=1e-2)
    assert forecast.batch_risk(LONG) > 0.9
    assert forecast.batch_risk(USUAL) < 0.01


# Additional need of a batch twice as large, in MiB: 110 in the same job with an allocator that
# returns memory. A heap that keeps freed memory shows part of it.
@pytest.mark.parametrize(
    ("allocator", "least", "most"), [("gives-back", 105, 115), ("default", 60, 115)]
)
def test_after_equal_batches_one_twice_as_large_is_predicted_not_to_fit(
    allocator: str, least: float, most: float
) -> None:
    readings = read_series(REPLAYS / f"peaks-fixed-{allocator}.jsonl")
    (usual,) = readings[-1].shapes
    highest = max(reading.peak_bytes for reading in readings[3:])
    limit = highest + 0.25 * least * MIB
    large = Shape(2 * usual.samples, usual.length)

    forecast = forecast_after(replace(reading, limit_bytes=limit) for reading in readings)

    more = forecast.predict_peak(large) - forecast.predict_peak(usual)
    assert least * MIB < more < most * MIB
    assert forecast.predicted_peak_bytes == pytest.approx(readings[-1].peak_bytes, rel=0.03)
    assert forecast.batch_risk(large) > 0.5
    assert forecast.batch_risk(usual) < 0.05


def test_memory_freed_for_good_or_leaked_does_not_count_as_need_of_a_step() -> None:
    freed = np.where(np.arange(60) < 30, 900.0, 500.0) * MIB
    leaking = (500.0 + 10 * np.arange(60)) * MIB

    assert heap_floor(freed, freed) == 0.0
    assert heap_floor(leaking, leaking + 3 * MIB) <= 3 * MIB
    assert heap_floor(freed[:1], freed[:1]) == 0.0


def test_memory_released_and_allocated_again_counts_as_need_of_a_step() -> None:
    floors = (600.0 - 80 * (np.arange(60) % 10 == 5)) * MIB
    peaks = np.full(60, 610.0 * MIB)

    assert heap_floor(floors, peaks) == 90 * MIB


def test_the_step_at_which_a_leak_exceeds_the_limit_is_predicted() -> None:
    slope = 8 * MIB
    limit = FLOOR + PER_TOKEN * 512 + 230 * slope

    forecast = forecast_after(
        point(step, floor=FLOOR + slope * step, limit=limit) for step in range(201)
    )

    assert forecast.eta_steps == pytest.approx(30, abs=3)
    assert forecast.risk_ratio > 0.6


def test_a_leak_far_from_the_limit_has_a_low_risk() -> None:
    slope = 8 * MIB
    limit = FLOOR + PER_TOKEN * 512 + 400 * slope

    forecast = forecast_after(
        point(step, floor=FLOOR + slope * step, limit=limit) for step in range(201)
    )

    assert forecast.eta_steps == pytest.approx(200, rel=0.05)
    assert forecast.risk_ratio < 0.05


def test_growing_fragmentation_counts_like_a_leak() -> None:
    slope = 8 * MIB
    limit = FLOOR + PER_TOKEN * 512 + 230 * slope

    forecast = forecast_after(
        point(step, fragmented=slope * step, limit=limit) for step in range(201)
    )

    assert forecast.eta_steps == pytest.approx(30, abs=3)
    assert forecast.risk_ratio > 0.6


def test_activations_that_reuse_the_free_pieces_of_segments_are_no_risk() -> None:
    """Segments of 20 MiB of which 2 MiB stay in use, and 12 MiB come and go in each step."""
    states = {
        "allocated": 4 * GIB,
        "peak_allocated": 28 * GIB,
        "reserved": 40 * GIB,
        "peak_reserved": 40 * GIB,
        "unusable": 36 * GIB,
        "limit": 48 * GIB,
    }
    sample = StepMemorySample(readings={"cuda:0": states}, shapes=(USUAL,))

    forecast = forecast_after(sample.points(step)["cuda:0"] for step in range(300))

    assert forecast.risk_ratio < 0.01
    assert forecast.headroom_bytes == pytest.approx(8 * GIB, rel=0.01)


def test_fragmentation_that_vanished_is_no_risk_any_more() -> None:
    slope = 8 * MIB
    limit = FLOOR + PER_TOKEN * 512 + 230 * slope
    growing = [point(step, fragmented=slope * step, limit=limit) for step in range(201)]

    forecast = forecast_after(growing + [point(step, limit=limit) for step in range(201, 240)])

    assert (forecast.risk_ratio, forecast.eta_steps) == (pytest.approx(0, abs=0.01), math.inf)


def test_single_readings_without_fragmentation_do_not_hide_its_growth() -> None:
    slope = 8 * MIB
    limit = FLOOR + PER_TOKEN * 512 + 230 * slope
    readings = [
        point(step, fragmented=slope * step if step % 10 else 0.0, limit=limit)
        for step in range(201)
    ]

    forecast = forecast_after(readings)

    assert readings[-1].fragmented_bytes == 0
    assert forecast.risk_ratio > 0.4


@pytest.mark.parametrize("back_to", [100, 350, 399])
def test_a_leak_after_a_rollback_to_a_checkpoint_is_predicted(back_to: int) -> None:
    slope, leaking = 12 * MIB, 150
    limit = FLOOR + PER_TOKEN * 512 + (leaking + 30) * slope
    before = [point(step, limit=limit) for step in range(400)]
    after = [
        point(back_to + number, floor=FLOOR + slope * number, limit=limit)
        for number in range(leaking)
    ]

    forecast = forecast_after(before + after)

    assert forecast.step == back_to + leaking - 1
    assert forecast.eta_steps == pytest.approx(30, abs=4)
    assert forecast.risk_ratio > 0.5


def test_a_rollback_to_a_checkpoint_keeps_the_model_and_drops_the_risks() -> None:
    before = [point(step, varied(step)) for step in range(150)]
    before += [point(step, varied(step), limit=0.9 * FLOOR) for step in range(150, 200)]
    forecaster = Forecaster()
    alarm = forecast_after(before, forecaster)

    forecaster.add(point(100))
    forecast = forecaster.forecast()

    assert forecast is not None
    assert (alarm.risk_ratio > 0.8, forecast.risk_ratio < 0.01) == (True, True)
    assert forecast.predict_peak(LONG) == pytest.approx(FLOOR + PER_TOKEN * 4 * 512, rel=1e-2)


def test_texts_sorted_by_length_are_expected_to_keep_growing() -> None:
    shapes = [Shape(4, 100 + step) for step in range(201)]
    limit = FLOOR + PER_TOKEN * 4 * 325

    forecast = forecast_after(point(step, shape, limit=limit) for step, shape in enumerate(shapes))

    assert forecast.risk_ratio > 0.6


def test_without_a_limit_there_is_no_risk() -> None:
    forecast = forecast_after(point(step, varied(step), limit=math.inf) for step in range(50))

    assert forecast.risk_ratio == 0.0
    assert forecast.headroom_bytes == math.inf
    assert forecast.batch_risk(Shape(1000, 100_000)) == 0.0


def test_the_limit_of_the_last_reading_is_used() -> None:
    before = [point(step) for step in range(150)]
    after = [point(step, limit=9.01 * GIB) for step in range(150, 170)]

    forecast = forecast_after(before + after)

    assert forecast.limit_bytes == 9.01 * GIB
    assert forecast.headroom_bytes < 0.02 * GIB


def test_an_allocator_retry_bounds_the_limit_by_what_is_reserved() -> None:
    before = [point(step, reserved=9.5 * GIB) for step in range(50)]
    refused = [point(50, reserved=9.6 * GIB, retries=1.0)]

    forecast = forecast_after(before + refused)

    assert forecast.limit_bytes == 9.6 * GIB


def test_a_changed_need_per_token_is_learned_within_a_few_readings() -> None:
    before = [point(step, varied(step)) for step in range(200)]
    after = [point(step, varied(step), per_token=2 * PER_TOKEN) for step in range(200, 216)]

    forecast = forecast_after(before + after)

    expected = FLOOR + 2 * PER_TOKEN * 512
    assert forecast.predict_peak(USUAL) == pytest.approx(expected, rel=0.02)


def test_a_jump_of_the_floor_is_not_a_trend() -> None:
    before = [point(step) for step in range(100)]
    after = [point(step, floor=FLOOR + 2 * GIB) for step in range(100, 140)]

    forecast = forecast_after(before + after)

    assert forecast.eta_steps == math.inf
    assert forecast.risk_ratio < 0.01
    assert forecast.predicted_peak_bytes == pytest.approx(after[-1].peak_bytes, rel=1e-3)


def test_readings_without_shapes_are_predicted_by_their_level() -> None:
    readings = [
        PeakPoint(
            step=step,
            peak_bytes=10 * GIB,
            between_steps_bytes=FLOOR,
            limit_bytes=16 * GIB,
            reserved_bytes=10 * GIB,
        )
        for step in range(60)
    ]

    forecast = forecast_after(readings)

    assert forecast.predicted_peak_bytes == pytest.approx(10 * GIB, rel=1e-2)


def test_all_figures_stay_finite_on_wild_readings(seed: int) -> None:
    random = np.random.default_rng(seed)
    forecaster = Forecaster()
    for step in range(400):
        floor = float(random.pareto(1) * GIB)
        shape = Shape(int(random.integers(1, 64)), int(random.integers(1, 1 << 17)))
        forecaster.add(
            point(step, shape, floor=floor, limit=float(random.pareto(1) * 10 * GIB) + 1.0)
        )
        forecast = forecaster.forecast()
        if forecast is None:
            continue
        shown = (forecast.predicted_peak_bytes, forecast.headroom_bytes, forecast.error_ratio)
        assert all(map(math.isfinite, shown))
        assert 0.0 <= forecast.risk_ratio < 1.0
        assert 0.0 < forecast.batch_risk(shape) < 1.0
        assert forecast.eta_steps >= 0


# 10 bytes in any step; 5, 3 per sample and 2 per token by micro-batch; reuses nothing.
MODEL = PeakModel(
    min_rise=10.0,
    constant=5.0,
    per_sample=3.0,
    per_token=2.0,
    per_token_pair=0.0,
    reused_ratio=0.0,
    typical_need=40.0,
)


def small_point(peak: float, floor: float, *shapes: Shape, fragmented: float = 0.0) -> PeakPoint:
    return PeakPoint(
        step=0,
        peak_bytes=peak,
        between_steps_bytes=floor,
        limit_bytes=1000.0,
        reserved_bytes=peak,
        fragmented_bytes=fragmented,
        shapes=shapes,
    )


@pytest.mark.parametrize(
    ("limit", "margin"),
    [
        (500.0, 500 - 30 - (100 + 5 + 2 * 3 + 2 * 14)),  # no larger than the predicted peak
        (math.inf, math.inf),
    ],
)
def test_the_risk_of_a_batch_is_that_of_an_error_beyond_its_margin(
    limit: float, margin: float
) -> None:
    tail = fit_tail([], expected=90.0, min_width=1.0)
    forecast = MemoryForecast(
        step=1,
        predicted_peak_bytes=150.0,
        headroom_bytes=0.0,
        risk_ratio=0.0,
        eta_steps=0.0,
        error_ratio=0.0,
        limit_bytes=limit,
        model=MODEL,
        between_steps_bytes=100.0,
        fragmented_bytes=30.0,
        tail=tail,
    )

    risk = forecast.batch_risk(Shape(2, 7))

    assert forecast.predict_peak(Shape(2, 7)) == 100 + 5 + 2 * 3 + 2 * 14
    assert risk == (0.0 if limit == math.inf else tail.exceedance(margin))
    if limit < math.inf:  # 189 bytes beyond 150 add 5 % of 39 bytes to an error of 90
        larger = forecast.batch_risk(Shape(12, 2))
        peak = 100 + 5 + 12 * 3 + 2 * 24
        assert larger == tail.exceedance((470 - peak) * 90 / (90 + 0.05 * (peak - 150)))


def test_an_error_is_the_peak_minus_its_prediction_from_the_floor_before() -> None:
    readings = [
        small_point(100, 100),
        small_point(190, 100, Shape(1, 20)),  # 100 + 48 was predicted
        small_point(130, 90, Shape(1, 20), fragmented=7.0),
        small_point(139, 90, Shape(1, 20), fragmented=4.0),  # 90 + 48
    ]

    errors = PredictionErrors(MODEL, readings)

    assert list(errors.errors) == [42, -18 + 7, 1 - 3]
    # The limit minus the predicted peak minus what was fragmented before.
    assert list(errors.margins) == [1000 - 148, 1000 - 148, 1000 - 138 - 7]


@pytest.mark.parametrize(
    ("peak", "floor", "error"),
    [
        (190, 110, 190 - 110 - 48),  # 10 bytes stayed: the floor grew
        (155, 150, 0),
        (140, 150, 140 - 148),
        (190, 100, 42),
    ],
)
def test_memory_that_stayed_is_growth_and_not_an_error(
    peak: float, floor: float, error: float
) -> None:
    errors = PredictionErrors(MODEL, [])

    predicted = errors.add(small_point(0, 100), small_point(peak, floor, Shape(1, 20)))

    assert (predicted, list(errors.errors)) == (148, [error])


def test_each_recent_batch_is_predicted_at_the_current_floor() -> None:
    readings = [
        small_point(0, 0, Shape(1, 20)),
        small_point(0, 500),
        small_point(0, 0, Shape(4, 10), Shape(1, 2)),
        small_point(0, 0, Shape(1, 20)),
    ]

    recent = predict_recent(MODEL, readings, 100.0)

    assert recent.peaks.tolist() == [148, 140, 197, 148]
    assert recent.largest == (Shape(4, 10), Shape(1, 2))


def test_peaks_on_a_trend_are_moved_to_the_last_step() -> None:
    steps, peaks = np.array([1.0, 3, 5, 10]), np.array([900.0, 40, 50, 60])

    moved = extrapolate(steps, peaks, Trend(level=0.0, slope=3.0, points=3))

    assert moved.tolist() == [40 + 21, 50 + 15, 60]


def test_a_larger_peak_than_all_before_has_the_probability_of_a_record() -> None:
    peaks = np.array([100.0, 100, 120, 130, 140, 150, 160, 170, 180, 200])

    values, shares = add_records(peaks, 0.0)

    # The upper tenth is the last of the ten, 18 bytes above its quantile of 182.
    assert values.tolist() == [100, 120, 130, 140, 150, 160, 170, 180, 200, 204.5, 213.5, 231.5]
    kept = 0.1 * 10 / 11
    assert shares == pytest.approx([2 * kept, *[kept] * 8, *[1 / 33] * 3])


@pytest.mark.parametrize(
    ("peaks", "record"),
    [
        ([100, 110, 120, 200, 200], 1 / 10 / 6),
        ([100, 110, 120, 200, 199.91], 1 / 10 / 6),  # a thousandth of the rise over the floor
        ([100, 110, 120, 200, 199.89], 1 / 6),
        ([100, 110, 120, 200, 200, 200], 1 / 100 / 7),
        ([100, 110, 120, 200, 200, 200, 200], 0),  # capped
        ([100, 110, 200], 0),  # three lengths
    ],
)
def test_a_repeated_largest_peak_makes_a_record_less_likely(
    peaks: list[float], record: float
) -> None:
    _, shares = add_records(np.array(peaks), 100.0)

    assert sum(shares) == pytest.approx(1)
    assert sum(shares[len(set(peaks)) :]) == pytest.approx(record)


def test_reserved_bytes_above_those_of_a_retry_raise_the_limit_again() -> None:
    readings = [point(step, reserved=9.5 * GIB) for step in range(50)]
    readings += [point(50, reserved=9.6 * GIB, retries=1.0)]
    readings += [point(51, reserved=9.7 * GIB, retries=1.0)]
    readings += [point(step, reserved=9.2 * GIB, retries=1.0) for step in range(52, 60)]

    assert forecast_after(readings).limit_bytes == 9.7 * GIB


@pytest.mark.parametrize(("readings_since", "limit_gib"), [(512, 9.6), (513, 16)])
def test_a_retry_is_forgotten_after_512_readings(readings_since: int, limit_gib: float) -> None:
    forecaster = Forecaster()
    for step in range(20):
        forecaster.add(point(step, reserved=9.5 * GIB))
    for step in range(20, 21 + readings_since):
        forecaster.add(point(step, reserved=9.6 * GIB, retries=1.0))

    forecast = forecaster.forecast()

    assert forecast is not None
    assert forecast.limit_bytes == limit_gib * GIB


def test_the_first_three_readings_are_not_used() -> None:
    strange = [point(step, floor=3 * FLOOR) for step in range(3)]

    forecast = forecast_after([*strange, *(point(step) for step in range(3, 9))])

    assert forecast.predicted_peak_bytes == pytest.approx(point(9).peak_bytes, rel=1e-3)


def test_the_forecast_needs_five_readings_after_the_first_three() -> None:
    forecaster, known = Forecaster(), []
    for step in range(10):
        forecaster.add(point(step))
        known.append(forecaster.forecast() is not None)

    assert known == [False] * 7 + [True] * 3


def test_the_figures_of_a_forecast_are_those_of_its_last_reading() -> None:
    readings = [point(step, fragmented=0.25 * GIB, limit=12 * GIB) for step in range(40)]

    forecast = forecast_after(readings)

    assert (forecast.between_steps_bytes, forecast.fragmented_bytes) == (FLOOR, 0.25 * GIB)
    assert forecast.limit_bytes == 12 * GIB
    predicted = forecast.predicted_peak_bytes
    assert forecast.headroom_bytes == 12 * GIB - predicted - 0.25 * GIB
    assert forecast.tail.width == pytest.approx(2e-4 * (9.25 * GIB))


def test_no_headroom_means_no_steps_left() -> None:
    forecast = forecast_after(point(step, limit=8.5 * GIB) for step in range(40))

    assert forecast.headroom_bytes < 0
    assert forecast.eta_steps == 0


def test_the_error_is_the_median_of_the_relative_errors() -> None:
    # One third of the readings is 10 % higher, another third 10 % lower.
    factors = [1.0, 1.1, 0.9]
    readings = [
        replace(point(step), peak_bytes=point(step).peak_bytes * factors[step % 3])
        for step in range(63)
    ]

    assert forecast_after(readings).error_ratio == pytest.approx(0.09, abs=0.02)


def test_the_risk_is_the_mean_of_the_last_twenty_steps() -> None:
    forecaster = Forecaster()
    for step in range(160):
        forecaster.add(point(step))
    first = forecaster.forecast()
    risks = []
    for step in range(160, 200, 5):
        forecaster.add(point(step, limit=0.9 * FLOOR))
        forecast = forecaster.forecast()
        assert forecast is not None
        risks.append(forecast.risk_ratio)

    assert first is not None and first.risk_ratio < 1e-3
    # The low risk of step 159 is in the mean until step 175; each later mean has four risks.
    assert risks == pytest.approx(
        [0.87 * part for part in (1 / 2, 2 / 3, 3 / 4, 4 / 5, 1, 1, 1, 1)]
    )


def test_a_successor_does_not_expect_micro_batches_that_no_longer_exist() -> None:
    def leaking(step: int, samples: int) -> PeakPoint:
        return point(step, Shape(samples, 512), floor=FLOOR + step * 20 * MIB)

    kept = Forecaster()
    forecast_after((leaking(step, 4) for step in range(180)), kept)
    successor = kept.successor()

    assert successor.forecast() is None
    late = [leaking(step, 2) for step in range(180, 187)]
    assert forecast_after(late, kept).risk_ratio > 0.5
    forecast = forecast_after(late, successor)
    assert forecast.risk_ratio < 0.1
    assert forecast.predicted_peak_bytes == pytest.approx(late[-1].peak_bytes, rel=0.01)


def test_a_forecast_imports_no_module_during_training() -> None:
    """An import on the watch thread took 0.2 s, as it may set off a collection of garbage."""
    script = """
import sys
from zerowatch.runtime.memory.forecast.forecaster import Forecaster
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, Shape
before, forecaster = set(sys.modules), Forecaster()
for step in range(40):
    forecaster.add(PeakPoint(
        step=step, peak_bytes=2e9 + step % 7, between_steps_bytes=1e9, limit_bytes=4e9,
        reserved_bytes=2e9, fragmented_bytes=0.0, retries=0.0, shapes=(Shape(4, 16 + step % 5),),
    ))
assert forecaster.forecast() is not None
print(*set(sys.modules) - before)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert (found.stdout.split(), found.stderr) == ([], "")
