"""Tests of the quantiles of step durations, on a clock that the test sets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog.training import STEP_DURATION_QUANTILE
from zerowatch.runtime.monitor.step_quantiles import QUANTILES, WINDOW_STEPS, StepQuantiles


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def quantiles(clock):
    return StepQuantiles(clock)


def train(quantiles, clock, durations):
    for seconds in durations:
        clock.seconds += seconds
        quantiles.add([seconds])


def test_there_is_no_value_before_the_first_step(quantiles):
    assert quantiles.current() == {}


@pytest.mark.parametrize("seconds", [0.05, 0.34, 5.2, 45.0])
def test_equal_steps_have_equal_quantiles_within_ten_percent(quantiles, clock, seconds, seed):
    jitter = random.Random(seed)
    train(quantiles, clock, [100.0])  # the first step compiles
    train(quantiles, clock, [seconds * jitter.uniform(0.99, 1.01) for _ in range(200)])

    found = quantiles.current()

    assert found["0.5"] == pytest.approx(seconds, rel=0.1)
    assert found["0.99"] == pytest.approx(seconds, rel=0.1)


def test_quantiles_are_exact(quantiles, clock, seed):
    chance = random.Random(seed)
    durations = [chance.expovariate(10) for _ in range(100)]
    train(quantiles, clock, durations)

    expected = {
        label: np.quantile(durations, share, method="inverted_cdf")
        for label, share in QUANTILES.items()
    }
    assert quantiles.current() == expected


def test_steps_leave_the_window_after_a_minute_even_if_training_stalls(quantiles, clock):
    train(quantiles, clock, [0.1] * 300 + [0.2] * WINDOW_STEPS)
    before = quantiles.current()["0.5"]

    clock.seconds += 61

    assert before == 0.1
    assert quantiles.current() == dict.fromkeys(QUANTILES, 0.2)


def test_the_labels_are_those_of_the_catalog():
    assert STEP_DURATION_QUANTILE.labels[0].values == tuple(QUANTILES)


def test_a_quantile_is_the_shortest_duration_that_its_share_did_not_exceed(quantiles):
    quantiles.add([float(seconds) for seconds in range(20, 0, -1)])

    assert quantiles.current() == {"0.5": 10.0, "0.9": 18.0, "0.99": 20.0}


@pytest.mark.parametrize(("later", "longest"), [(60.0, 9.0), (60.1, 0.1)])
def test_a_step_belongs_to_the_window_for_a_minute(quantiles, clock, later, longest):
    quantiles.add([9.0])
    clock.seconds += later
    quantiles.add([0.1] * 20)

    assert quantiles.current()["0.99"] == longest


def test_the_last_20_steps_stay_however_long_ago_they_were(quantiles, clock):
    quantiles.add([9.0])
    quantiles.add([0.1] * 19)
    clock.seconds += 1000

    assert quantiles.current()["0.99"] == 9.0


def test_steps_that_are_added_change_the_quantiles(quantiles):
    quantiles.add([1.0])
    before = quantiles.current()
    quantiles.add([3.0, 5.0])

    assert before == dict.fromkeys(QUANTILES, 1.0)
    assert quantiles.current() == {"0.5": 3.0, "0.9": 5.0, "0.99": 5.0}
