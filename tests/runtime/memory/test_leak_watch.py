"""A leak on a run: the metric is there while it lasts, under the category that grows."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import memory
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.memory import leak_monitor as module
from zerowatch.runtime.memory.forecast.series import PeakPoint
from zerowatch.runtime.memory.leak_monitor import LeakMonitor

MIB = 2**20


class Run:
    """Steps that end with more in use than the one before."""

    def __init__(self, clock: FakeClock, folder: Path, *, trace_sites: bool = False) -> None:
        self.clock = clock
        self.recorder = Recorder()
        self.watch = LeakMonitor(self.recorder, 0, lambda: folder, trace_sites=trace_sites)
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
            self.watch.add({"cpu": point})
            if self.step % 10 == 0:
                self.watch.add_look(self.step, {"cpu": dict(self.sizes)})
            self.clock.seconds += 1.0
            self.watch.look()

    def leaks(self) -> dict[tuple[str, ...], float]:
        return dict(self.recorder.snapshot().values.get(memory.MEMORY_LEAK, {}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    turned = FakeClock()
    monkeypatch.setattr(module.time, "monotonic", turned)
    return turned


@pytest.mark.parametrize("category", ["gradients", "other"])
def test_a_leak_is_published_under_what_grows(
    clock: FakeClock, tmp_path: Path, category: str
) -> None:
    run = Run(clock, tmp_path)

    run.train(200, growth_bytes=2 * MIB, category=category)

    assert run.leaks() == {("cpu", category): pytest.approx(2 * MIB, rel=0.05)}
    assert run.watch.growth("cpu") == pytest.approx(2 * MIB, rel=0.05)


def test_nothing_is_published_of_a_run_that_does_not_grow(clock: FakeClock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path)

    run.train(300, growth_bytes=0.0)

    assert run.leaks() == {}
    assert run.watch.growth("cpu") is None


def test_the_series_ends_with_the_leak(clock: FakeClock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path)
    run.train(200, growth_bytes=2 * MIB)

    run.train(600, growth_bytes=0.0)

    assert run.leaks() == {}


def test_a_leak_is_told_once_and_how_to_find_it(
    clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(clock, tmp_path)

    with caplog.at_level(logging.WARNING):
        run.train(300, growth_bytes=2 * MIB)

    (line,) = (record.message for record in caplog.records)
    assert "memory of cpu grows by 2" in line
    assert "counted as other. Set memory.leak_sites" in line


def test_on_request_its_sites_are_traced_and_written(clock: FakeClock, tmp_path: Path) -> None:
    run = Run(clock, tmp_path, trace_sites=True)

    run.train(250, growth_bytes=2 * MIB)
    run.watch.close()

    assert (
        "Lines of Python that hold more objects"
        in (tmp_path / "memory" / "leak-rank-0.txt").read_text()
    )
