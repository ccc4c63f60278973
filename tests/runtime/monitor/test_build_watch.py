"""Tests of a whole watch of a torch model in this process, without a server."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock
from torch import nn, optim

from zerowatch.metrics.catalog import communication, overhead, training
from zerowatch.metrics.settings import load_settings
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.collectives.instrument import CollectiveInstrumentation
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.common.torch_engine import TorchEngine
from zerowatch.runtime.monitor import build_watch as build_watch_module
from zerowatch.runtime.monitor.build_watch import build_watch, time_device_phases
from zerowatch.runtime.monitor.watch import Watch


class Job:
    """A model that is watched, and trained by the test."""

    def __init__(
        self, folder: Path, collectives: CollectiveInstrumentation | None = None, **settings: Any
    ) -> None:
        self.model = nn.Linear(5, 3)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.125)
        self.engine = TorchEngine(self.model, self.optimizer)
        self.fail_open = FailOpen()
        self.collectives = collectives or CollectiveInstrumentation(self.fail_open)
        self.folder = folder / "night-7"
        given = {
            "run_id": "night-7",
            "run_log": {"folder": folder},
            "serve": {"enabled": False},
            "flops": {"peak_per_second": 7e12},
            "console": "off",
        }
        self.watch: Watch = build_watch(
            self.engine, self.collectives, self.fail_open, load_settings(given | settings), 0
        )

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(2, 5)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path)
    yield made
    made.watch.close()


def test_the_steps_of_a_run_are_published_logged_and_passed_on(job: Job) -> None:
    records: list[StepRecord] = []
    job.watch.subscribe(records.append)

    job.train(3)
    job.watch.close()

    found = job.watch.snapshot()
    assert found.value(training.STEPS) == 3
    assert found.value(training.SKIPPED_STEPS) == 0  # counters begin at zero
    assert found.value(training.LEARNING_RATE) == 0.125
    assert found.value(training.WORLD_SIZE) == 1
    assert found.value(training.PEAK_FLOPS, "cpu") == 7e12
    assert found.value(training.RUN_ACTIVE) == 0
    assert found.value(training.RUN_END_INFO, "completed") == 1
    assert [record.step for record in records] == [1, 2, 3]
    lines = (job.folder / "rank-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert {"metrics-0.jsonl", "settings.json", "attempts.jsonl"} <= {
        path.name for path in job.folder.iterdir()
    }
    assert not job.fail_open.failures


def test_a_watch_is_open_until_it_is_closed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = (dist.all_reduce, set(threading.enumerate()))
    job = Job(tmp_path)
    during = (dist.all_reduce, job.watch.is_open, job.watch.watches(job.engine))
    active = job.watch.snapshot().value(training.RUN_ACTIVE)

    job.watch.close()

    assert during[0] is not before[0]
    assert (during[1:], active, job.watch.is_open) == ((True, True), 1, False)
    assert dist.all_reduce is before[0]
    ours = {thread for thread in set(threading.enumerate()) - before[1] if thread.is_alive()}
    assert not [thread.name for thread in ours if thread.name.startswith("zerowatch")]


def test_the_cost_of_each_part_is_published(job: Job) -> None:
    job.train(1)
    job.watch.close()

    seconds = job.watch.snapshot().values[overhead.WATCH_SECONDS]
    assert set(seconds) == {
        ("hooks",),
        ("collectives",),
        ("watch_thread",),
        ("cross_rank_thread",),
    }


def test_a_watch_that_serves_nothing_has_no_address(job: Job) -> None:
    assert (job.watch.address, job.watch.live_page_url) == (None, None)
    assert (job.watch.run_id, job.watch.run_folder) == ("night-7", job.folder)


@pytest.mark.parametrize(("console", "is_shown"), [("lines", True), ("off", False)])
def test_figures_are_printed_if_the_settings_ask_for_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], console: str, is_shown: bool
) -> None:
    job = Job(tmp_path, console=console)
    job.train(1)

    job.watch.close()

    assert ("zerowatch: step 1, " in capfd.readouterr().err) is is_shown


CLOSED_LAST_FIRST = [
    ("EngineInstrumentation", "restore"),
    ("ComparisonMonitor", "close_hooks"),
    ("CollectiveInstrumentation", "close"),
    ("WatchThread", "stop"),
    ("RunFolder", "close"),
    ("WatchSinks", "close"),
    ("Subscriptions", "close"),
    ("OtelExporter", "close"),
    ("MemoryMonitor", "close"),
    ("MetricsLog", "close"),
    ("MetricsServer", "close"),
    ("RunFolder", "close"),
]


def test_a_watch_that_cannot_be_built_closes_the_parts_built_before_last_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = dist.all_reduce
    closed: list[tuple[str, str]] = []

    def noting(kind: str, name: str, close: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            closed.append((kind, name))
            return close(*args, **kwargs)

        return call

    for kind, name in dict.fromkeys(CLOSED_LAST_FIRST):
        owner = getattr(build_watch_module, kind)
        monkeypatch.setattr(owner, name, noting(kind, name, getattr(owner, name)))

    def fail(**parts: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(build_watch_module, "Watch", fail)
    with pytest.raises(MemoryError):
        Job(tmp_path)

    # A part that closes others does so within its own close.
    assert list(dict.fromkeys(closed)) == list(dict.fromkeys(CLOSED_LAST_FIRST))
    assert closed.count(("RunFolder", "close")) == 2
    assert dist.all_reduce is original


def test_calls_before_the_watch_are_counted_and_belong_to_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fail_open = FailOpen()
        collectives = CollectiveInstrumentation(fail_open)
        collectives.open()
        dist.all_reduce(torch.ones(3))
        job = Job(tmp_path, collectives=collectives)
        dist.all_reduce(torch.ones(5))
        job.train(1)
        job.watch.close()
    finally:
        dist.destroy_process_group()

    found = job.watch.snapshot()
    assert found.total(communication.COLLECTIVE_CALLS) == 2
    assert found.total(communication.COLLECTIVE_BYTES) == 4 * (3 + 5)
    assert found.value(communication.COMM_COVERAGE_RATIO) == 1.0
    [line] = (job.folder / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(line)["collectives"]["all_reduce"]["calls"] == 1


def test_a_model_on_another_device_than_the_current_has_no_events_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    calls, timer = CallRecorder(), PhaseTimer()

    other = time_device_phases(1, calls, timer, FailOpen())

    assert other is None
    assert (timer.on_interval_end, device.used_devices) == (None, set())
    [record] = caplog.records
    assert all(name in record.getMessage() for name in ("cuda:1", "cuda:0", "cuda.set_device"))
    assert time_device_phases(0, calls, timer, FailOpen()) is not None


def test_a_probe_that_cannot_be_made_leaves_out_its_readings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, device_index: int | None) -> None:
        raise AttributeError("module 'pynvml' has no attribute")

    monkeypatch.setattr(build_watch_module, "device_probes", fail)

    job = Job(tmp_path)
    job.train(1)
    job.watch.close()

    assert job.watch.snapshot().value(training.STEPS) == 1
    assert job.fail_open.failures == {"devices": 1}


def test_the_threads_of_a_watch_get_the_index_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, int | None] = {}

    def noting(name: str, make: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            given[name] = options["device_index"]
            return make(*args, **options | {"device_index": None})

        return call

    monkeypatch.setattr(build_watch_module, "device_of", lambda engine: 3)
    monkeypatch.setattr(build_watch_module, "time_device_phases", lambda *parts: None)
    names = ("WatchContext", "WatchThread", "device_probes", "memory_probes", "publish_peak")
    for name in names:
        monkeypatch.setattr(
            build_watch_module, name, noting(name, getattr(build_watch_module, name))
        )

    job = Job(tmp_path)
    job.watch.close()

    assert given == dict.fromkeys(names, 3)


def test_the_device_of_a_watch_is_that_of_its_torch_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[nn.Module | None] = []
    monkeypatch.setattr(build_watch_module, "training_device_index", modules.append)

    job = Job(tmp_path)
    job.watch.close()

    assert modules == [job.model]
