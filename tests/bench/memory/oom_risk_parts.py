"""Generates the parts of runs: noise, lengths, blocks, bursts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int_]
BLOCK = float(2 << 20)  # CUDA's caching allocator rounds segments up to 2 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One run, step by step, before it has a limit; bytes.

    Attributes:
        base: What the step began with, of the model and all that stays; no noise.
        rise: What its micro-batch takes; no noise.
        extra: What a burst takes in addition.
        grown: How much of the rest has grown since the start: a leak, fragmentation.
        growth_since: The step at which that set in.
        floor: As read after the step.
        peak: As read.
        unusable: As read.
        fragmented: What it would be without noise.
    """

    flavour: str
    samples: Integers
    lengths: Integers
    base: Array
    rise: Array
    extra: Array
    grown: Array
    growth_since: int
    floor: Array
    peak: Array
    unusable: Array
    fragmented: Array

    @property
    def need(self) -> Array:
        """What each step cannot do without."""
        return self.peak + self.unusable


def cause_of(parts: Parts, end: int, limit: float) -> str:
    """Return the part without which the last step would have fit; the first that applies.

    "sudden": without a burst, or a jump in the 10 steps before. "length": with the largest
    micro-batch of the 50 steps before in its place, if it would not have fit without noise either.
    "growth": without what leaked or crept in the 50 steps before, if it would not have fit for 50
    steps more without noise either. "chance": without noise.
    """
    lately = slice(max(0, end - 50), end)
    need = float(parts.need[end])
    grown = parts.grown[end] - parts.grown[lately][0]
    jumped = parts.base[end] - parts.base[max(0, end - 10)]
    jumped -= parts.grown[end] - parts.grown[max(0, end - 10)]
    if need - parts.extra[end] <= limit or (jumped > 0 and need - jumped <= limit):
        return "sudden"
    larger = parts.rise[end] - float(parts.rise[lately].max())
    expected = parts.base[end] + parts.rise[end] + parts.fragmented[end]
    if larger > 0 and need - larger <= limit < expected:
        return "length"
    if grown > 0 and need - grown <= limit < expected + grown:
        return "growth"
    return (
        "length"
        if expected > limit and parts.rise[end] > np.median(parts.rise[lately])
        else "chance"
    )


def heavy_tailed(steps: int, degrees: int, random: np.random.Generator) -> Array:
    """Return Student's t with so many degrees of freedom, of deviation 1."""
    return random.standard_t(degrees, steps) / np.sqrt(degrees / (degrees - 2))


def correlated(steps: int, deviation: float, memory: float, random: np.random.Generator) -> Array:
    """Return noise that keeps this share of itself from step to step."""
    fresh = random.standard_normal(steps) * deviation * np.sqrt(1 - memory**2)
    noise = np.empty(steps)
    level = deviation * float(random.standard_normal())
    for step in range(steps):
        level = memory * level + fresh[step]
        noise[step] = level
    return noise


def rounded_up(size: Array) -> Array:
    """Return whole blocks."""
    return np.asarray(np.ceil(size / BLOCK) * BLOCK)


def chunks(steps: int, random: np.random.Generator) -> Array:
    """Return growth of 1 a step on average that comes only every so many steps."""
    every = int(random.integers(5, 25))
    grown = np.zeros(steps)
    grown[int(random.integers(0, every)) :: every] = every
    return grown


def bursts(steps: int, states: float, random: np.random.Generator) -> Array:
    """Return the additional bytes of occasional evaluations, log lines and checkpoints."""
    rate = np.exp(random.uniform(np.log(1 / 300), np.log(1 / 20)))
    size = states * random.uniform(0.01, 0.1)
    heavy = random.random() < 0.5
    sizes = random.pareto(3, steps) * 2 if heavy else random.exponential(1, steps)
    return np.where(random.random(steps) < rate, size * sizes, 0.0)


def lengths_of(steps: int, random: np.random.Generator) -> Integers:
    """Draw the padded length of each step's micro-batch."""
    typical = float(2 ** random.uniform(6.5, 10))
    style = random.choice(("lognormal", "bimodal", "sorted", "bucketed", "capped", "lognormal"))
    drawn = typical * np.exp(random.uniform(0.15, 0.5) * random.standard_normal(steps))
    if style == "bimodal":  # such as questions, and now and then an article
        long = random.random(steps) < random.uniform(0.01, 0.2)
        drawn = np.where(long, drawn * random.uniform(2, 4), drawn)
    if style == "sorted":
        drawn = np.sort(drawn)[:: -1 if random.random() < 0.3 else 1]
    if style == "bucketed":
        bucket = typical / 4
        drawn = np.ceil(drawn / bucket) * bucket
    if style == "capped":
        drawn = np.minimum(drawn, typical * random.uniform(1.1, 1.6))
    return np.maximum(8, drawn).astype(int)
