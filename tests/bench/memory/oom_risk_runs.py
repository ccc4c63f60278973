"""Generated runs with known ends: what a device's memory would read, and whether it runs out.

Written before the model that is judged by it, from how memory behaves and not from how the model
thinks: allocators round up and keep freed heap, noise is heavy-tailed and has a memory of its own,
leaks come in drops or in chunks and may stop, fragmentation may level off, texts have all kinds of
lengths. Tune on seeds below 1000 only.

A run that is to end out of memory draws its limit until it is first passed at step 60 or later (of
a leak, 100 steps or more after it began). A run that is to end well has by half a limit drawn as
blindly, and by half one that its highest peak misses by 0.2 to 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench.memory.oom_risk_parts import (
    Parts,
    bursts,
    cause_of,
    chunks,
    correlated,
    heavy_tailed,
    lengths_of,
    rounded_up,
)

from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint, Shape

Array = npt.NDArray[np.float64]
GIB = float(1 << 30)
# Of each kind, the share of the runs that end out of memory; together half.
KINDS = {
    "steady": 0.1,
    "lengths": 0.6,
    "leak": 0.65,
    "jump": 0.5,
    "fragmentation": 0.65,
    "bursts": 0.5,
}
FIRST_OOM_STEP, LEAST_GROWTH_STEPS = 60, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Readings of one run, and its outcome.

    Attributes:
        shapes: The micro-batch of each step, that of the fatal one last, if there is one.
        points: The readings, of completed steps only.
        oom_step: The step that did not fit; None if all did.
        cause: Why it did not fit, from `cause_of`; empty if all did.
    """

    kind: str
    flavour: str
    seed: int
    shapes: list[Shape]
    points: list[PeakPoint]
    oom_step: int | None
    cause: str


def generate(num_runs: int, first_seed: int) -> Iterator[Run]:
    """Yield runs of all kinds in turn, with the share of bad ends that each kind has."""
    for number in range(num_runs):
        kind = list(KINDS)[number % len(KINDS)]
        turn = number // len(KINDS)
        share = KINDS[kind]
        ends_badly = int((turn + 1) * share + 0.5) > int(turn * share + 0.5)
        yield generate_run(kind, first_seed + number, ends_badly=ends_badly)


def generate_run(kind: str, seed: int, *, ends_badly: bool) -> Run:
    """Make runs of this kind until one has this end."""
    random = np.random.default_rng(seed)
    while True:
        parts = _parts(kind, random)
        limit = _limit(parts, random, ends_badly)
        if limit is not None:
            return _read(parts, limit, kind, seed, random)


def _parts(kind: str, random: np.random.Generator) -> Parts:
    """Draw everything but the limit."""
    gpu = kind == "fragmentation" or random.random() < 0.5
    steps = int(random.integers(300, 1200))
    states = GIB * float(random.uniform(1, 40) if gpu else random.uniform(0.5, 12))
    varies = kind == "lengths" or (kind != "steady" and random.random() < 0.5)
    samples = np.full(steps, int(2 ** random.integers(0, 5)))
    lengths = lengths_of(steps, random) if varies else np.full(steps, 2 ** random.integers(7, 12))
    base, since, growth = np.full(steps, states), 0, np.zeros(steps)
    if random.random() < 0.7:  # optimizer states appear with the first update
        base[: random.integers(1, 4)] *= random.uniform(0.3, 0.8)
    if kind == "leak":
        growth, since = _growth(steps, random)
        base = base + growth * states
    if kind == "jump":
        base, samples = _jump(base, samples, random)
    unusable = fragmented = np.zeros(steps)
    if gpu:
        unusable, fragmented, since = _unusable(kind, steps, states, random, since)
        growth = growth + (fragmented - fragmented[0]) / states
    rise = _rise(samples, lengths, states, random)
    extra = bursts(steps, states, random) if kind == "bursts" else np.zeros(steps)
    readings = (_gpu_readings if gpu else _cpu_readings)(base, rise, extra, random)
    return Parts(
        flavour="gpu" if gpu else "cpu",
        samples=samples,
        lengths=lengths,
        base=base,
        rise=rise,
        extra=extra,
        grown=growth * states,
        growth_since=since,
        floor=readings[0],
        peak=readings[1],
        unusable=unusable,
        fragmented=fragmented,
    )


def _growth(steps: int, random: np.random.Generator) -> tuple[Array, int]:
    """Draw a leak as a share of the states, and when it began; some caches fill up and stop."""
    since = int(random.integers(0, steps // 3)) if random.random() < 0.5 else 0
    per_step = np.exp(random.uniform(np.log(5e-5), np.log(2e-3)))
    drops = chunks(steps, random) if random.random() < 0.3 else random.gamma(2, 0.5, steps)
    drops[:since] = 0
    grown = per_step * np.cumsum(drops)
    if random.random() < 0.3:
        grown = np.minimum(grown, grown[-1] * random.uniform(0.2, 0.7))
    return grown, since


def _jump(
    base: Array, samples: npt.NDArray[np.int_], random: np.random.Generator
) -> tuple[Array, npt.NDArray[np.int_]]:
    """Let something appear or go, once or twice, or have somebody change the micro-batch."""
    base, samples = base.copy(), samples.copy()
    for _ in range(random.integers(1, 3)):
        at = int(random.integers(40, len(base)))
        if random.random() < 0.3:
            samples[at:] = np.maximum(1, samples[at:] * (2 if random.random() < 0.6 else 0.5))
        else:
            base[at:] *= 1 + random.choice((1, 1, -0.5)) * random.uniform(0.01, 0.25)
    return base, samples


def _unusable(
    kind: str, steps: int, states: float, random: np.random.Generator, since: int
) -> tuple[Array, Array, int]:
    """Draw what fragmentation takes: a noisy share, in runs of that kind one that creeps up.

    Return it, the same without noise, and since when it creeps.
    """
    share = random.uniform(0.002, 0.03)
    noise = np.exp(correlated(steps, 0.15, 0.9, random))
    if kind != "fragmentation":
        return share * states * noise, np.full(steps, share * states), since
    since = int(random.integers(0, steps // 3)) if random.random() < 0.5 else 0
    per_step = np.exp(random.uniform(np.log(1e-4), np.log(1e-3)))
    drops = random.gamma(0.5, 2, steps)
    drops[:since] = 0
    creep = per_step * np.cumsum(drops)
    if random.random() < 0.3:  # most allocators find a layout in the end
        level = creep[-1] * random.uniform(0.2, 0.7)
        creep = level * (1 - np.exp(-creep / level))
    wobble = np.exp(correlated(steps, random.uniform(0.02, 0.1), 0.8, random))
    return states * (share * noise + creep * wobble), states * (share + creep), since


def _rise(
    samples: npt.NDArray[np.int_],
    lengths: npt.NDArray[np.int_],
    states: float,
    random: np.random.Generator,
) -> Array:
    """Draw what activations take: some per micro-batch, per token, and at times per score."""
    tokens = samples * lengths.astype(float)
    scores = tokens * lengths
    typical = states * np.exp(random.uniform(np.log(0.1), np.log(1.5)))
    of_scores = random.choice((0.0, 0.0, random.uniform(0.1, 0.6)))
    fixed = random.uniform(0, 0.2)
    first = slice(0, 40)
    linear = tokens / np.median(tokens[first])
    square = scores / np.median(scores[first])
    return typical * (fixed + (1 - fixed - of_scores * 0.8) * linear + of_scores * 0.8 * square)


def _gpu_readings(
    base: Array, rise: Array, extra: Array, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return floor and peak: exact but for blocks, and workspaces that come and go."""
    steps = len(base)
    workspace = rise * np.where(random.random(steps) < 0.02, random.exponential(0.01, steps), 0)
    noise = rise * 2e-4 * heavy_tailed(steps, 3, random)
    floor = rounded_up(base + base * 1e-4 * np.abs(random.standard_normal(steps)))
    before = np.concatenate((floor[:1], floor[:-1]))
    before = before + np.maximum(0, base - np.concatenate((base[:1], base[:-1])))
    return floor, rounded_up(before + np.maximum(rise + noise, 0) + workspace) + extra


def _cpu_readings(
    base: Array, rise: Array, extra: Array, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return floor and peak of RSS: noise that lasts, and freed heap that is kept for a while."""
    steps = len(base)
    noise = 1 + random.uniform(0.002, 0.012) * heavy_tailed(steps, 4, random)
    lasting = base * correlated(steps, random.uniform(5e-4, 4e-3), 0.8, random)
    kept, decay = random.choice((0.0, random.uniform(0.05, 0.4))), random.uniform(0.8, 0.995)
    used, held, holding = base + lasting, 0.0, np.zeros(steps)
    needed = np.maximum(rise * noise, 0)
    for step in range(steps):
        held = max(held * decay, kept * needed[step])
        holding[step] = held
    before = np.concatenate(([0.0], holding[:-1]))
    page = 4096.0
    floor = np.ceil((used + holding) / page) * page
    return floor, np.ceil((used + np.maximum(needed, before)) / page) * page + extra


def _limit(parts: Parts, random: np.random.Generator, ends_badly: bool) -> float | None:
    """Draw limits until one gives the run this end; None if it does not seem to come."""
    highest = np.maximum.accumulate(parts.need)
    usual = float(np.median(parts.need[10:FIRST_OOM_STEP]))
    if not ends_badly and random.random() < 0.5:
        return float(highest[-1] * (1 + random.uniform(0.002, 0.03)))
    first = max(FIRST_OOM_STEP, parts.growth_since + LEAST_GROWTH_STEPS * bool(parts.grown[-1]))
    for _ in range(100):
        limit = usual * (1 + float(np.exp(random.uniform(np.log(0.003), np.log(0.8)))))
        passed = int(np.searchsorted(highest, limit, side="right"))
        if (passed == len(highest)) if not ends_badly else (first <= passed < len(highest)):
            return limit
    return None


def _read(parts: Parts, limit: float, kind: str, seed: int, random: np.random.Generator) -> Run:
    """Cut the run where it ends, and read it as a watch would: each step, or every few."""
    passed = np.flatnonzero(parts.need > limit)
    end = int(passed[0]) if len(passed) else len(parts.need)
    shapes = [
        Shape(int(samples), int(length))
        for samples, length in zip(parts.samples, parts.lengths, strict=True)
    ]
    every = 1 if random.random() < 0.7 else int(random.integers(2, 5))
    points, reserved, retries = [], 0.0, 0
    slack = 1 + random.uniform(0, 0.3)  # what the allocator caches beyond need
    for first in range(0, end - every + 1, every):
        steps = slice(first, first + every)
        needed = float(parts.need[steps].max())
        retries += reserved < limit <= slack * needed
        reserved = min(max(reserved, slack * needed), limit)
        points.append(
            PeakPoint(
                step=first + every - 1,
                peak_bytes=float(parts.peak[steps].max()),
                between_steps_bytes=float(parts.floor[first + every - 1]),
                limit_bytes=limit,
                reserved_bytes=reserved if parts.flavour == "gpu" else needed,
                fragmented_bytes=float(parts.unusable[first + every - 1]),
                retries=float(retries) if parts.flavour == "gpu" else 0.0,
                shapes=tuple(dict.fromkeys(shapes[steps])),
            )
        )
    return Run(
        kind=kind,
        flavour=parts.flavour,
        seed=seed,
        shapes=shapes[: end + 1],
        points=points,
        oom_step=end if end < len(parts.need) else None,
        cause=cause_of(parts, end, limit) if end < len(parts.need) else "",
    )
