"""The detector of shifts of speed: lasting shifts are detected, noise and spikes are not."""

from __future__ import annotations

from math import log

import pytest
from fakes.noisy_steps import Noise, noisy_steps

from zerowatch.runtime.tuner.policy.step_time_observer import MIN_BASELINE_STEPS, Cusum

UNSHIFTED = Noise(drift=0.0, shift=0.0)


def detected_after(seed: int, shift: float, at: int = 300) -> tuple[int, str]:
    """Return after how many steps a shift is detected, and its direction."""
    cusum = Cusum()
    for index, seconds in enumerate(noisy_steps(seed, at + 150, UNSHIFTED)):
        detected = cusum.add(log(seconds * (1 + shift) if index >= at else seconds))
        if detected:
            return index - at + 1, detected
    raise AssertionError("not detected")


@pytest.mark.parametrize(
    ("shift", "within", "detected"),
    [(0.05, 30, "slower"), (-0.05, 30, "faster"), (0.3, 5, "slower"), (-0.3, 5, "faster")],
)
def test_a_lasting_shift_is_detected_soon(shift: float, within: int, detected: str) -> None:
    found = sorted(detected_after(seed, shift) for seed in range(40))

    assert {said for _, said in found} == {detected}
    assert 0 < found[20][0] <= within


def test_a_shift_right_after_the_baseline_is_detected() -> None:
    after, detected = detected_after(seed=1, shift=0.1, at=MIN_BASELINE_STEPS + 10)

    assert (0 < after <= 20, detected) == (True, "slower")


def test_noise_without_a_shift_rarely_raises_an_alarm() -> None:
    alarms = 0
    for seed in range(8):
        cusum = Cusum()
        alarms += sum(
            cusum.add(log(seconds)) is not None for seconds in noisy_steps(seed, 5000, UNSHIFTED)
        )

    assert alarms <= 3  # of 40,000 steps; one in 10,000 is allowed


def test_single_slow_steps_are_not_a_shift() -> None:
    cusum = Cusum()

    detected = [cusum.add(log(10.0) if step % 20 == 19 else 0.0) for step in range(400)]

    assert set(detected) == {None}


def test_after_a_shift_the_new_speed_is_the_baseline() -> None:
    cusum = Cusum()
    for _ in range(100):
        cusum.add(0.0)

    detected = [cusum.add(0.2) for _ in range(300)]

    assert [one for one in detected if one] == ["slower"]
