"""Step times of an unchanged job: correlated noise, drift, spikes, level shifts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from zerowatch.runtime.tuner.policy.ab_comparison import AbComparison, TrialDesign, TrialResult

BURN_IN = 500  # so that a run may begin within a shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Disturbances of the steps, as ratios of a step's time.

    Attributes:
        deviation: Of the noise, which carries on from step to step by `carried`.
        drift: Amplitude of a slow wave of `drift_steps`.
        shift: Levels, up or down, that last `shift_steps`.
        shifts_every: Steps between two of them, on average.
        spike_share: Of steps that take 1.3 to 2 times as long.
    """

    deviation: float = 0.02
    carried: float = 0.7
    drift: float = 0.03
    drift_steps: int = 400
    shift: float = 0.08
    shift_steps: int = 100
    shifts_every: int = 300
    spike_share: float = 0.02


USUAL = Noise()


def noisy_steps(seed: int, num: int, noise: Noise = USUAL) -> list[float]:
    """Return the times of `num` steps; 1 is usual."""
    chance = random.Random(seed)
    fresh = noise.deviation * math.sqrt(1 - noise.carried**2)
    wave, carried = chance.uniform(0, 2 * math.pi), chance.gauss(0, noise.deviation)
    level, left = 0.0, 0
    steps = []
    for index in range(-BURN_IN, num):
        if left == 0 and chance.random() < 1 / noise.shifts_every:
            level, left = chance.choice((-noise.shift, noise.shift)), noise.shift_steps
        shifted, left = (level, left - 1) if left else (0.0, 0)
        if index < 0:
            continue
        carried = noise.carried * carried + chance.gauss(0, fresh)
        drift = noise.drift * math.sin(2 * math.pi * index / noise.drift_steps + wave)
        spike = chance.uniform(1.3, 2.0) if chance.random() < noise.spike_share else 1.0
        steps.append((1 + carried + drift + shifted) * spike)
    return steps


def tried(design: TrialDesign, gain: float, steps: Sequence[float]) -> TrialResult:
    """Return the result of a trial of a setting with that gain."""
    trial = AbComparison(design)
    for seconds in steps:
        trial.add(seconds / (1 + gain) if trial.variant == "B" else seconds)
        if trial.result:
            return trial.result
    raise AssertionError(f"no verdict in {len(steps)} steps")
