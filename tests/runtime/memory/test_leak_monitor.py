"""Leaks are distinguished from other growth, and published with size and growing category."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes.clock import FakeClock, set_clock

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory import leak_monitor as module
from zerowatch.runtime.memory import leak_tracer
from zerowatch.runtime.memory.forecast.peak_readings import PeakPoint
from zerowatch.runtime.memory.leak_monitor import Leak, LeakMonitor, find_leak

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
def test_a_leak_under_noise_is_found_with_its_size(memory: float, seed: int) -> None:
    sizes = 4 * GIB + 2 * MIB * np.arange(STEPS) + noise(10 * MIB, seed, memory)

    leak = leak_in(sizes)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(2 * MIB, rel=0.1)


def test_a_leak_that_starts_later_is_found_with_its_first_step(seed: int) -> None:
    began = 200
    sizes = 4 * GIB + 3 * MIB * np.maximum(0, np.arange(STEPS) - began) + noise(4 * MIB, seed)

    leak = leak_in(sizes)

    assert leak is not None
    assert leak.bytes_per_step == pytest.approx(3 * MIB, rel=0.1)
    assert leak.since_step >= began - 40


def test_a_leak_in_chunks_is_a_leak(seed: int) -> None:
    sizes = 4 * GIB + 40 * MIB * (np.arange(STEPS) // 20) + noise(2 * MIB, seed)

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
    "one step": np.where(np.arange(STEPS) < 200, 4 * GIB, 5 * GIB),
    "two steps": 4 * GIB + 300 * MIB * (np.arange(STEPS) // 150),
    "a saw-tooth": 4 * GIB + 8 * MIB * (np.arange(STEPS) % 90),
    "a slow warm-up": 4 * GIB - 2 * GIB * np.exp(-np.arange(STEPS) / 20),
    "a cache that filled up": 4 * GIB + 4 * MIB * np.minimum(np.arange(STEPS), 200),
    "a series that shrinks": 4 * GIB - 2 * MIB * np.arange(STEPS),
    "growth of almost nothing": 4 * GIB + 1e3 * np.arange(STEPS),
}


@pytest.mark.parametrize("deviation", (0.0, 4 * MIB))
@pytest.mark.parametrize("what", HARMLESS)
def test_no_leak_is_found_in(what: str, deviation: float, seed: int) -> None:
    assert leak_in(HARMLESS[what] + noise(deviation, seed)) is None


def test_autocorrelated_noise_is_rarely_taken_for_a_leak(seed: int) -> None:
    taken = [leak_in(4 * GIB + noise(60 * MIB, seed + each, 0.9)) for each in range(200)]

    assert sum(leak is not None for leak in taken) <= 1


def test_too_few_readings_give_no_leak() -> None:
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


def test_growing_temporary_memory_is_not_a_leak(seed: int) -> None:
    is_present = np.random.default_rng(seed).random(STEPS) < 0.7
    sizes = 500 * MIB + is_present * MIB * np.arange(STEPS)

    assert leak_in(sizes) is None


class Run:
    """A run whose memory in use grows with each step."""

    def __init__(
        self, clock: FakeClock, folder: Path, seed: int, *, trace_sites: bool = False
    ) -> None:
        self.clock = clock
        self.recorder = Recorder()
        self.monitor = LeakMonitor(self.recorder, 0, lambda: folder, trace_sites=trace_sites)
        self.step = 0
        self.between_steps_bytes = 1000.0 * MIB
        self.sizes = {"gradients": 50.0 * MIB, "other": 100.0 * MIB, "activations": 0.0}
        self._noise = random.Random(seed)

    def train(self, num_steps: int, *, growth_bytes: float, category: str = "other") -> None:
        for _ in range(num_steps):
            self.step += 1
            self.between_steps_bytes += growth_bytes
            self.sizes[category] += growth_bytes
            self.sizes["activations"] = self._noise.uniform(0, 500) * MIB
            floor = self.between_steps_bytes + self._noise.gauss(0, MIB / 4)
            point = PeakPoint(
                step=self.step,
                peak_bytes=floor + 100 * MIB,
                between_steps_bytes=floor,
                limit_bytes=1e12,
                reserved_bytes=floor,
            )
            self.monitor.add({"cpu": point})
            if self.step % 10 == 0:
                self.monitor.add_categories(self.step, {"cpu": dict(self.sizes)})
            self.clock.seconds += 1.0
            self.monitor.check()

    def leaks(self) -> dict[tuple[str, ...], float]:
        return dict(self.recorder.snapshot().values.get(memory.MEMORY_LEAK, {}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock()
    set_clock(monkeypatch, leak_tracer, monotonic=fake)
    set_clock(monkeypatch, module, monotonic=fake)
    return fake


@pytest.mark.parametrize("category", ["gradients", "other"])
def test_a_leak_is_published_with_the_category_that_grows(
    clock: FakeClock, tmp_path: Path, category: str, seed: int
) -> None:
    run = Run(clock, tmp_path, seed)

    run.train(200, growth_bytes=2 * MIB, category=category)

    assert run.leaks() == {("cpu", category): pytest.approx(2 * MIB, rel=0.05)}
    assert run.monitor.growth_bytes_per_step("cpu") == pytest.approx(2 * MIB, rel=0.05)


def test_a_run_that_does_not_grow_publishes_no_leak(
    clock: FakeClock, tmp_path: Path, seed: int
) -> None:
    run = Run(clock, tmp_path, seed)

    run.train(300, growth_bytes=0.0)

    assert run.leaks() == {}
    assert run.monitor.growth_bytes_per_step("cpu") is None


def test_the_metric_is_removed_when_the_leak_ends(
    clock: FakeClock, tmp_path: Path, seed: int
) -> None:
    run = Run(clock, tmp_path, seed)
    run.train(200, growth_bytes=2 * MIB)

    run.train(600, growth_bytes=0.0)

    assert run.leaks() == {}


@pytest.mark.parametrize("back_to", [0, 100, 149])
def test_after_a_rollback_to_a_checkpoint_a_leak_has_the_readings_since(
    clock: FakeClock, tmp_path: Path, back_to: int, seed: int
) -> None:
    run = Run(clock, tmp_path, seed)
    run.train(150, growth_bytes=2 * MIB)
    run.step = back_to

    run.train(140, growth_bytes=2 * MIB, category="gradients")
    too_early = run.leaks()
    run.train(40, growth_bytes=2 * MIB, category="gradients")

    assert too_early == {}
    assert run.leaks() == {("cpu", "gradients"): pytest.approx(2 * MIB, rel=0.05)}


def test_a_leak_is_logged_once_with_the_setting_that_traces_it(
    clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    run = Run(clock, tmp_path, seed)

    with caplog.at_level(logging.WARNING):
        run.train(300, growth_bytes=2 * MIB)

    (line,) = (record.message for record in caplog.records)
    assert "leak on cpu: +2" in line
    assert "category other" in line
    assert "memory.trace_leaks" in line


def test_with_leak_sites_the_allocations_are_traced_and_written(
    clock: FakeClock, tmp_path: Path, seed: int
) -> None:
    run = Run(clock, tmp_path, seed, trace_sites=True)

    run.train(250, growth_bytes=2 * MIB)
    run.monitor.close()

    text = (tmp_path / "memory" / "leak-rank-0.txt").read_text()
    assert "Python lines" in text
