"""A lasting change of speed is told; noise and spikes are none."""

from __future__ import annotations

from math import log

import pytest
from fakes.noisy_steps import Noise, noisy_steps

from zerowatch.runtime.tuner.policy.step_time_observer import MIN_BASELINE_STEPS, Cusum

UNSHIFTED = Noise(drift=0.0, shift=0.0)


def told_after(seed: int, shift: float, at: int = 300) -> tuple[int, str]:
    """Return after how many steps a shift is told, and as what."""
    cusum = Cusum()
    for index, seconds in enumerate(noisy_steps(seed, at + 150, UNSHIFTED)):
        told = cusum.add(log(seconds * (1 + shift) if index >= at else seconds))
        if told:
            return index - at + 1, told
    raise AssertionError("not told")


@pytest.mark.parametrize(
    ("shift", "within", "told"),
    [(0.05, 30, "slower"), (-0.05, 30, "faster"), (0.3, 5, "slower"), (-0.3, 5, "faster")],
)
def test_a_lasting_shift_is_told_soon(shift: float, within: int, told: str) -> None:
    found = sorted(told_after(seed, shift) for seed in range(40))

    assert {said for _, said in found} == {told}
    assert 0 < found[20][0] <= within


def test_a_shift_right_after_the_baseline_is_told_too() -> None:
    after, told = told_after(seed=1, shift=0.1, at=MIN_BASELINE_STEPS + 10)

    assert (0 < after <= 20, told) == (True, "slower")


def test_steps_without_a_shift_are_hardly_ever_called_one() -> None:
    alarms = 0
    for seed in range(8):
        cusum = Cusum()
        alarms += sum(
            cusum.add(log(seconds)) is not None for seconds in noisy_steps(seed, 5000, UNSHIFTED)
        )

    assert alarms <= 3  # of 40,000 steps; one in 10,000 is allowed


def test_spikes_are_no_shift() -> None:
    cusum = Cusum()

    told = [cusum.add(log(10.0) if step % 20 == 19 else 0.0) for step in range(400)]

    assert set(told) == {None}


def test_after_a_shift_the_new_speed_is_the_baseline() -> None:
    cusum = Cusum()
    for _ in range(100):
        cusum.add(0.0)

    told = [cusum.add(0.2) for _ in range(300)]

    assert [one for one in told if one] == ["slower"]
