"""Simulates the detection of a lasting change of speed: delay and false alarms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log
from statistics import median

from bench.result_table import Row
from fakes.noisy_steps import USUAL, Noise, noisy_steps

from zerowatch.runtime.tuner.policy.step_time_observer import Cusum

SEED = 72_000_000
SHIFT_AT, SHIFT_STEPS, WATCHED_STEPS = 300, 150, 10_000
SHIFTS = ((0.05, 30), (-0.05, 30), (0.3, 5), (-0.3, 5))  # and the steps within which to detect it
UNSHIFTED = Noise(drift=0.0, shift=0.0)
NOISY = Noise(deviation=0.1, drift=0.0, shift=0.0)  # an overloaded machine
NOISY_SHIFT_STEPS = 1000
SLOW_SHARES = (0.08, 0.12, 0.16, 0.2)  # of random steps that take 1.3 to 2 times as long


def shifts(num: int) -> Iterator[Row]:
    """Yield the delay and the false alarms, over many simulated runs."""
    detected = _detected_in_each(UNSHIFTED, num)
    yield Row(
        what=f"shifts detected in {WATCHED_STEPS:,} steps without one",
        measured=f"{detected:.2f}",
        goal="below 1",
        met=detected < 1,
    )
    for what, noise in (
        ("noise of 10 %", NOISY),
        ("slow waves of 3 %", Noise(shift=0.0)),
        ("waves and shifts", USUAL),
        *(
            (f"noise, {share:.0%} of them slow", replace(UNSHIFTED, spike_share=share))
            for share in SLOW_SHARES
        ),
    ):
        detected = _detected_in_each(noise, num)
        yield Row(
            what=f"shifts detected in {WATCHED_STEPS:,} steps of {what}", measured=f"{detected:.0f}"
        )
    for shift, within in SHIFTS:
        delays = sorted(
            _detected_after(SEED + index, shift, UNSHIFTED, SHIFT_STEPS) for index in range(num)
        )
        yield Row(
            what=f"a shift of {100 * shift:+.0f} % is detected after",
            measured=f"{median(delays):.0f} steps",
            spread=f"95 of 100 within {delays[int(0.95 * num)]}",
            goal=f"about {within}",
            met=median(delays) <= within,
        )
    for deviation in (0.04, 0.06, 0.1):
        noise = replace(NOISY, deviation=deviation)
        delays = sorted(
            _detected_after(SEED + index, 0.05, noise, NOISY_SHIFT_STEPS)
            for index in range(max(1, num // 5))
        )
        yield Row(
            what=f"a shift of +5 % is detected with noise of {100 * deviation:.0f} % after",
            measured=f"{median(delays):.0f} steps",
        )


def _detected_in_each(noise: Noise, num: int) -> float:
    """Return the mean number of detected shifts; of fewer runs, because they are long."""
    runs = max(1, num // 20)
    detected = 0
    for index in range(runs):
        cusum = Cusum()
        steps = noisy_steps(SEED + index, WATCHED_STEPS, noise)
        detected += sum(cusum.add(log(seconds)) is not None for seconds in steps)
    return detected / runs


def _detected_after(seed: int, shift: float, noise: Noise, shift_steps: int) -> int:
    """Return after how many steps a shift is detected; at most those simulated."""
    cusum = Cusum()
    for index, seconds in enumerate(noisy_steps(seed, SHIFT_AT + shift_steps, noise)):
        shifted = index >= SHIFT_AT
        detected = cusum.add(log(seconds * (1 + shift) if shifted else seconds))
        if detected and shifted:
            return index - SHIFT_AT + 1
    return shift_steps
