"""A leak is distinguished from a warm-up, a step, noise, a saw-tooth and a plateau."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from zerowatch.runtime.memory.forecast.leak import Leak, find_leak

GIB, MIB = float(1 << 30), float(1 << 20)
STEPS = 400
# RSS after each step, or every 0.25 s, of the GPT of bench/gpt_training.py on one rank, with no
# leak: 4 layers of width 128, and 2 layers of width 64 that warm up for a thousand steps.
CREEPING = ("floors-width-128", "floors-width-64")
REPLAYS = Path(__file__).parents[2] / "support" / "replays"


def noise(size_bytes: float, seed: int, memory: float = 0.0) -> np.ndarray:
    """Return noise of this deviation with this autocorrelation."""
    fresh = np.random.default_rng(seed).standard_normal(STEPS) * size_bytes
    kept = np.zeros(STEPS)
    for step in range(STEPS):
        kept[step] = memory * kept[step - 1] + fresh[step] * (1 - memory**2) ** 0.5
    return kept


def leak_in(sizes: Sequence[float] | np.ndarray) -> Leak | None:
    return find_leak(range(len(sizes)), [float(size) for size in sizes])


def floors_of(name: str) -> tuple[list[int], list[float]]:
    """Return the steps of a recorded run and the bytes in use after each."""
    records = [json.loads(line) for line in (REPLAYS / f"{name}.jsonl").read_text().splitlines()]
    return [record["step"] for record in records], [float(record["floor"]) for record in records]


@pytest.mark.parametrize("memory", (0.0, 0.8))
def test_a_leak_under_noise_is_found_with_its_size(memory: float) -> None:
    sizes = 4 * GIB + 2 * MIB * np.arange(STEPS) + noise(10 * MIB, 1, memory)

    leak = leak_in(sizes)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(2 * MIB, rel=0.1)


def test_a_leak_that_starts_later_is_found_with_its_first_step() -> None:
    began = 200
    sizes = 4 * GIB + 3 * MIB * np.maximum(0, np.arange(STEPS) - began) + noise(4 * MIB, 2)

    leak = leak_in(sizes)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(3 * MIB, rel=0.1)
    assert leak.since_step >= began - 40


def test_a_leak_in_chunks_is_a_leak() -> None:
    sizes = 4 * GIB + 40 * MIB * (np.arange(STEPS) // 20) + noise(2 * MIB, 3)

    leak = leak_in(sizes)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(2 * MIB, rel=0.1)


def test_readings_of_every_few_steps_give_the_growth_of_one_step() -> None:
    sizes = 4 * GIB + 6 * MIB * np.arange(STEPS)

    leak = find_leak(range(0, 3 * STEPS, 3), sizes.tolist())

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(2 * MIB, rel=0.02)


HARMLESS = {
    "a constant": np.full(STEPS, 4 * GIB),
    "optimizer states that appear": np.where(np.arange(STEPS) < 3, 2 * GIB, 6 * GIB),
    "one step": np.where(np.arange(STEPS) < 200, 4 * GIB, 5 * GIB) + noise(4 * MIB, 4),
    "two steps": 4 * GIB + 300 * MIB * (np.arange(STEPS) // 150) + noise(4 * MIB, 5),
    "a saw-tooth": 4 * GIB + 8 * MIB * (np.arange(STEPS) % 90),
    "a slow warm-up": 4 * GIB - 2 * GIB * np.exp(-np.arange(STEPS) / 20),
    "a cache that filled up": 4 * GIB + 4 * MIB * np.minimum(np.arange(STEPS), 200),
    "a series that shrinks": 4 * GIB - 2 * MIB * np.arange(STEPS),
    "growth of almost nothing": 4 * GIB + 1e3 * np.arange(STEPS),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_no_leak_is_found_in(what: str) -> None:
    assert leak_in(HARMLESS[what]) is None


def test_autocorrelated_noise_is_rarely_taken_for_a_leak() -> None:
    taken = [leak_in(4 * GIB + noise(60 * MIB, seed, 0.9)) for seed in range(200)]

    assert sum(leak is not None for leak in taken) <= 1


def test_few_readings_are_not_a_leak() -> None:
    assert find_leak((), ()) is None
    assert leak_in(4 * GIB + 50 * MIB * np.arange(40)) is None


@pytest.mark.parametrize("name", CREEPING)
def test_the_slow_warm_up_of_a_real_run_is_not_a_leak(name: str) -> None:
    steps, floors = floors_of(name)

    found = [find_leak(steps[:end], floors[:end]) for end in range(len(floors) + 1)]

    assert found == [None] * len(found)


@pytest.mark.parametrize("name", CREEPING)
@pytest.mark.parametrize("per_reading", (0.5 * MIB, 2 * MIB, 0.0005 * 500 * MIB))
def test_a_leak_in_a_real_run_is_found_within_two_hundred_readings(
    name: str, per_reading: float
) -> None:
    _, floors = floors_of(name)
    leaking = floors[:200] + per_reading * np.arange(200)

    leak = leak_in(leaking)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(per_reading, rel=0.25)


def test_growing_temporary_memory_is_not_a_leak() -> None:
    is_present = np.random.default_rng(7).random(STEPS) < 0.7
    sizes = 500 * MIB + is_present * MIB * np.arange(STEPS)

    assert leak_in(sizes) is None
