"""The observer of steps: lasting shifts of speed, and shares of training time."""

from __future__ import annotations

from math import log

import pytest
from fakes.noisy_steps import Noise, noisy_steps

from zerowatch.metrics.catalog import communication, overhead, training
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.tuner.policy.policy_types import StepTime
from zerowatch.runtime.tuner.policy.step_time_observer import (
    MIN_BASELINE_STEPS,
    Cusum,
    SnapshotIntervals,
    StepTimeObserver,
)

UNSHIFTED = Noise(drift=0.0, shift=0.0)


def detected_after(seed: int, shift: float, at: int = 300) -> tuple[int, str]:
    """Return after how many steps a shift is detected, and its direction."""
    cusum = Cusum()
    for index, seconds in enumerate(noisy_steps(seed, at + 150, UNSHIFTED)):
        detected = cusum.add(log(seconds * (1 + shift) if index >= at else seconds))
        if detected:
            return index - at + 1, detected
    raise AssertionError(f"not detected with seed {seed}")


@pytest.mark.parametrize(
    ("shift", "within", "detected"),
    [(0.05, 30, "slower"), (-0.05, 30, "faster"), (0.3, 5, "slower"), (-0.3, 5, "faster")],
)
def test_a_lasting_shift_is_detected_soon(
    shift: float, within: int, detected: str, seed: int
) -> None:
    found = sorted(detected_after(each, shift) for each in range(seed, seed + 40))

    assert {said for _, said in found} == {detected}
    assert 0 < found[20][0] <= within


def test_a_shift_right_after_the_baseline_is_detected(seed: int) -> None:
    after, detected = detected_after(seed, shift=0.1, at=MIN_BASELINE_STEPS + 10)

    assert (0 < after <= 20, detected) == (True, "slower")


def test_noise_without_a_shift_rarely_raises_an_alarm(seed: int) -> None:
    alarms = 0
    for each in range(seed, seed + 8):
        cusum = Cusum()
        alarms += sum(
            cusum.add(log(seconds)) is not None for seconds in noisy_steps(each, 5000, UNSHIFTED)
        )

    assert alarms <= 3  # of 40,000 steps; one in 10,000 is allowed


@pytest.mark.parametrize("deviation", [0.04, 0.1, 0.2])
def test_noise_of_an_overloaded_machine_rarely_raises_an_alarm(seed: int, deviation: float) -> None:
    alarms = 0
    for each in range(seed, seed + 8):
        cusum = Cusum()
        noise = Noise(deviation=deviation, drift=0.0, shift=0.0)
        steps = noisy_steps(each, 5000, noise)
        alarms += sum(cusum.add(log(max(0.1, seconds))) is not None for seconds in steps)

    assert alarms <= 12  # of 40,000 steps; about one in 10,000 is allowed


@pytest.mark.parametrize(("shift", "detected"), [(0.3, "slower"), (-0.3, "faster")])
def test_a_large_shift_of_a_noisy_machine_is_detected(
    seed: int, shift: float, detected: str
) -> None:
    cusum = Cusum()
    steps = noisy_steps(seed, 400, Noise(deviation=0.06, drift=0.0, shift=0.0, spike_share=0.0))

    found = [cusum.add(log(each * (1 + shift * (at >= 300)))) for at, each in enumerate(steps)]

    assert [one for one in found if one] == [detected]


@pytest.mark.parametrize("shift", [0.05, -0.05])
def test_a_small_shift_of_a_noisy_machine_is_detected(seed: int, shift: float) -> None:
    num_detected = 0
    for each in range(seed, seed + 20):
        noise = Noise(deviation=0.05, carried=0.0, drift=0.0, shift=0.0, spike_share=0.0)
        steps = noisy_steps(each, 800, noise)
        cusum = Cusum()
        found = [cusum.add(log(step * (1 + shift * (at >= 300)))) for at, step in enumerate(steps)]
        num_detected += any(found[300:])

    assert num_detected >= 16


def test_single_slow_steps_are_not_a_shift() -> None:
    cusum = Cusum()

    detected = [cusum.add(log(10.0) if step % 20 == 19 else 0.0) for step in range(400)]

    assert set(detected) == {None}


@pytest.mark.parametrize("share", [0.08, 0.12, 0.16])
@pytest.mark.parametrize("deviation", [0.01, 0.02])
def test_random_slow_steps_rarely_raise_an_alarm(seed: int, share: float, deviation: float) -> None:
    alarms = 0
    for each in range(seed, seed + 4):
        cusum = Cusum()
        noise = Noise(deviation=deviation, drift=0.0, shift=0.0, spike_share=share)
        alarms += sum(
            cusum.add(log(seconds)) is not None for seconds in noisy_steps(each, 5000, noise)
        )

    assert alarms <= 6  # of 20,000 steps; about one in 10,000 is allowed


def test_a_shift_beside_random_slow_steps_is_detected(seed: int) -> None:
    found = []
    for each in range(seed, seed + 20):
        cusum = Cusum()
        noise = Noise(drift=0.0, shift=0.0, spike_share=0.12)
        steps = noisy_steps(each, 500, noise)
        shifts = [cusum.add(log(step * (1 + 0.1 * (at >= 300)))) for at, step in enumerate(steps)]
        found.append(next((at for at, shift in enumerate(shifts[300:]) if shift), 200))

    assert sorted(found)[10] <= 30


@pytest.mark.parametrize("every", [7, 10])
def test_rare_steps_that_take_longer_rarely_raise_an_alarm(every: int, seed: int) -> None:
    alarms = 0
    for each in range(seed, seed + 4):
        cusum = Cusum()
        steps = noisy_steps(each, 5000, Noise(drift=0.0, shift=0.0, spike_share=0.0))
        for index, seconds in enumerate(steps):
            slow = 1.3 if index % every == 0 else 1.0
            alarms += cusum.add(log(slow * seconds)) is not None

    assert alarms <= 2  # of 20,000 steps; one in 10,000 is allowed


@pytest.mark.parametrize("every", [2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_steps_that_take_longer_at_regular_times_are_not_a_shift(every: int, seed: int) -> None:
    cusum = Cusum()
    steps = noisy_steps(seed, 3000, Noise(deviation=0.01, drift=0.0, shift=0.0, spike_share=0.0))

    shifts = [
        cusum.add(log(1.3 * seconds if index % every == 0 else seconds))
        for index, seconds in enumerate(steps)
    ]

    assert not any(shifts)


def test_a_shift_of_steps_that_take_longer_at_regular_times_is_detected(seed: int) -> None:
    cusum = Cusum()
    steps = noisy_steps(seed, 1000, Noise(deviation=0.01, drift=0.0, shift=0.0, spike_share=0.0))

    shifts = [
        cusum.add(log((1.3 if index % 4 == 0 else 1.0) * (1.1 if index >= 300 else 1.0) * seconds))
        for index, seconds in enumerate(steps)
    ]

    assert [each for each in shifts if each] == ["slower"]


@pytest.mark.parametrize("num_slow", [1, 3, 5, 9])
@pytest.mark.parametrize("ratio", [1.25, 10.0])
def test_slow_first_steps_are_not_a_shift(num_slow: int, ratio: float, seed: int) -> None:
    cusum = Cusum()
    steps = noisy_steps(seed, 1000, Noise(deviation=0.01, drift=0.0, shift=0.0, spike_share=0.0))

    shifts = [
        cusum.add(log(ratio * seconds if index < num_slow else seconds))
        for index, seconds in enumerate(steps)
    ]

    assert not any(shifts)


def test_after_a_shift_the_new_speed_is_the_baseline() -> None:
    cusum = Cusum()
    for _ in range(100):
        cusum.add(0.0)

    detected = [cusum.add(0.2) for _ in range(300)]

    assert [one for one in detected if one] == ["slower"]


class LateCommunication:
    """Metrics of a job that waits 35 % of its time, which is published every 5 s, 6 s late."""

    RATIO, EVERY, LATE = 0.35, 5.0, 6.0

    def __init__(self, every: float = EVERY) -> None:
        self.EVERY = every
        self.recorder, self.seconds, self._published = Recorder(), 0.0, 0.0

    def train(self, seconds: float) -> None:
        self.seconds += seconds
        self.recorder.add(training.PHASE_SECONDS, seconds, "backward")
        self.recorder.add(communication.COMM_SECONDS, self.RATIO * seconds, "dp")
        self.recorder.set(overhead.WATCH_LAST_UPDATE_TIMESTAMP, self.seconds)
        covered = self.seconds // self.EVERY * self.EVERY - self.LATE
        if covered > self._published:
            waited = self.RATIO * (covered - self._published)
            self._published = covered
            self.recorder.add(communication.COMM_EXPOSED_SECONDS, waited, "dp")
            self.recorder.add(communication.COMM_CAUSE_SECONDS, waited, "latency")


@pytest.mark.parametrize("min_seconds", [0.5, 2.0, 7.0, 20.0])
def test_shares_of_communication_are_right_over_any_interval(min_seconds: float) -> None:
    metrics = LateCommunication()
    observer = StepTimeObserver(metrics.recorder, min_seconds)
    found = []
    for number in range(2000):
        metrics.train(0.1)
        reading = observer.add(StepTime(number=number, seconds=0.1, samples=1))
        if reading is not None:
            found.append(reading)

    assert len(found) >= 5
    for reading in found[1:]:
        assert reading.exposed_ratio == pytest.approx(metrics.RATIO, rel=0.15)
        assert sum(reading.cause_ratios.values()) == pytest.approx(reading.exposed_ratio)
    assert all(0 <= reading.exposed_ratio <= 1 for reading in found)


@pytest.mark.parametrize(
    ("every", "exchange_seconds"), [(20.0, 20.0), (30.0, 30.0), (60.0, 60.0), (20.0, 5.0)]
)
@pytest.mark.parametrize("step_seconds", [0.1, 1.3])
def test_shares_of_communication_are_right_if_the_ranks_are_compared_rarely(
    every: float, exchange_seconds: float, step_seconds: float
) -> None:
    metrics = LateCommunication(every)
    observer = StepTimeObserver(metrics.recorder, 20.0, exchange_seconds)
    intervals = SnapshotIntervals(metrics.recorder, exchange_seconds, now=lambda: metrics.seconds)
    since, readings, others = 0.0, [], []
    intervals.start()
    for number in range(int(2000 / step_seconds)):
        metrics.train(step_seconds)
        reading = observer.add(StepTime(number=number, seconds=step_seconds, samples=1))
        if reading is not None:
            readings.append(reading.exposed_ratio)
        if metrics.seconds - since >= 30:
            other = intervals.end()
            if not intervals.is_waiting:
                since = metrics.seconds
                others.append(None if other is None else other.exposed_ratio)

    # The first ones may begin before the first publication.
    for found in (readings[2:], others[2:]):
        assert len(found) >= 5
        assert found == [pytest.approx(metrics.RATIO, rel=0.15)] * len(found)


def test_ranks_that_are_compared_late_for_the_first_time_are_waited_for_then() -> None:
    metrics = LateCommunication(every=100.0)
    observer = StepTimeObserver(metrics.recorder, 2.0)
    found = []
    for number in range(6000):
        if number == 1500:
            metrics.EVERY = 5.0
        metrics.train(0.1)
        reading = observer.add(StepTime(number=number, seconds=0.1, samples=1))
        if reading is not None:
            found.append((number, reading.exposed_ratio))

    late = [ratio for number, ratio in found if number > 1700]
    assert len(late) >= 20
    assert late == [pytest.approx(metrics.RATIO, rel=0.15)] * len(late)


def test_ranks_that_are_not_compared_are_not_waited_for_again() -> None:
    metrics = LateCommunication()
    metrics.EVERY = 1e9
    observer = StepTimeObserver(metrics.recorder, 2.0)
    found = []
    for number in range(1000):
        metrics.train(0.1)
        if observer.add(StepTime(number=number, seconds=0.1, samples=1)) is not None:
            found.append(number)

    assert found[0] < 400
    assert found[2] - found[1] < 30
