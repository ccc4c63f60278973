"""The leak metric during a run: present while the leak lasts, with the category that grows."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.series import Recorder
from zerowatch.runtime.memory import leak_monitor as module
from zerowatch.runtime.memory.forecast.series import PeakPoint
from zerowatch.runtime.memory.leak_monitor import LeakMonitor

MIB = 2**20


class Run:
    """Steps after each of which more memory is in use."""

    def __init__(self, clock: FakeClock, folder: Path, *, trace_sites: bool = False) -> None:
        self.clock = clock
        self.recorder = Recorder()
        self.monitor = LeakMonitor(self.recorder, 0, lambda: folder, trace_sites=trace_sites)
        self.step = 0
        self.floor_bytes = 1000.0 * MIB
        self.sizes = {"gradients": 50.0 * MIB, "other": 100.0 * MIB, "activations": 0.0}
        self._noise = random.Random(3)

    def train(self, num_steps: int, *, growth_bytes: float, category: str = "other") -> None:
        for _ in range(num_steps):
            self.step += 1
            self.floor_bytes += growth_bytes
            self.sizes[category] += growth_bytes
            self.sizes["activations"] = self._noise.uniform(0, 500) * MIB
            floor = self.floor_bytes + self._noise.gauss(0, MIB / 4)
            point = PeakPoint(
                step=self.step,
                peak_bytes=floor + 100 * MIB,
                floor_bytes=floor,
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
    monkeypatch.setattr(module.time, "monotonic", fake)
    return fake


@pytest.mark.parametrize("category", ["gradients", "other"])
def test_a_leak_is_published_with_the_category_that_grows(
    clock: FakeClock, tmp_path: Path, category: str
) -> None:
    run = Run(clock, tmp_path)

    run.train(200, growth_bytes=2 * MIB, category=category)

    assert run.leaks() == {("cpu", category): pytest.approx(2 * MIB, rel=0.05)}
    assert run.monitor.growth_bytes_per_step("cpu") == pytest.approx(2 * MIB, rel=0.05)


def test_a_run_that_does_not_grow_publishes_no_leak(clock: FakeClock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path)

    run.train(300, growth_bytes=0.0)

    assert run.leaks() == {}
    assert run.monitor.growth_bytes_per_step("cpu") is None


def test_the_metric_is_removed_when_the_leak_ends(clock: FakeClock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path)
    run.train(200, growth_bytes=2 * MIB)

    run.train(600, growth_bytes=0.0)

    assert run.leaks() == {}


def test_a_leak_is_logged_once_with_the_setting_that_traces_it(
    clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(clock, tmp_path)

    with caplog.at_level(logging.WARNING):
        run.train(300, growth_bytes=2 * MIB)

    (line,) = (record.message for record in caplog.records)
    assert "leak on cpu: +2" in line
    assert "category other" in line
    assert "memory.leak_sites" in line


def test_with_leak_sites_the_allocations_are_traced_and_written(
    clock: FakeClock, tmp_path: Path
) -> None:
    run = Run(clock, tmp_path, trace_sites=True)

    run.train(250, growth_bytes=2 * MIB)
    run.monitor.close()

    text = (tmp_path / "memory" / "leak-rank-0.txt").read_text()
    assert "Python lines" in text
