"""Tests of the memory of one watch: what is sampled, published, counted and closed.

The samples are analysed in `memory_analysis.py`.
"""

from __future__ import annotations

import json
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock, set_clock
from fakes.watch_contexts import watch_context
from torch import nn, optim

from zerowatch.metrics.backoff import Backoff
from zerowatch.metrics.catalog import memory
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.common.torch_engine import TorchEngine
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.memory import leak_monitor, memory_reader
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.oom import oom_finder
from zerowatch.runtime.memory.oom.killed_ranks import KilledRank
from zerowatch.runtime.memory.oom.oom_finder import WINDOW_SECONDS, OomFinder
from zerowatch.runtime.memory.step_sample import DetailedSample, StepMemorySample
from zerowatch.runtime.monitor import memory_monitor
from zerowatch.runtime.monitor.memory_monitor import MemoryMonitor

MIB = 2**20
OOM = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "


class Probe:
    """A probe of one device, whose states the test sets."""

    def __init__(self, device: str, *, own_peaks: bool = True, **states: float) -> None:
        self.device, self.own_peaks = device, own_peaks
        self.states = states or {"allocated": 300.0, "peak_allocated": 500.0, "limit": 900.0}
        self.num_reads = self.num_closed = 0

    def read(self) -> dict[str, float]:
        self.num_reads += 1
        return dict(self.states)

    def close(self) -> None:
        self.num_closed += 1


class Job:
    """The memory monitor of a torch model on two devices, by a clock that the test sets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, context: WatchContext, *probes: Probe
    ) -> None:
        self.clock, self.context = FakeClock(), context
        for module in (leak_monitor, memory_reader):
            set_clock(monkeypatch, module, monotonic=self.clock)
        monkeypatch.setattr(memory_monitor, "free_heap_bytes", lambda: 40)
        monkeypatch.setattr(memory_monitor, "Backoff", partial(Backoff, now=self.clock))
        self.model = nn.Linear(5, 3, bias=False)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1)
        self.engine = TorchEngine(self.model, self.optimizer)
        self.probes = probes or (Probe("cpu"), Probe("cuda:0"))
        self.monitor = MemoryMonitor(context, self.engine, self.probes)

    def add(self, number: int, **fields: Any) -> dict[str, float]:
        readings = {probe.device: dict(probe.states) for probe in self.probes}
        sample = StepMemorySample(
            readings=fields.pop("readings", readings), shapes=(Shape(2, 7),), **fields
        )
        return dict(self.monitor.analysis.add_step(step(number, sample)))

    def value(self, spec: Any, *labels: str) -> float | None:
        return self.context.recorder.snapshot().value(spec, *labels)

    def labels(self, spec: Any) -> list[tuple[str, ...]]:
        return sorted(self.context.recorder.snapshot().values.get(spec, {}))


def step(number: int, sample: StepMemorySample | None) -> RawStep:
    return RawStep(
        step=number,
        ended_at=0.0,
        phase_ns=[],
        intervals=(),
        counts=StepCounts(),
        coverage=None,
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        trace=None,
        memory=sample,
        batch=CallBatch([]),
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch, watch_context())


def test_the_baseline_is_what_the_host_holds_besides_the_engine_and_its_free_heap(
    job: Job,
) -> None:
    parameters = 5 * 3 * 4

    assert job.value(memory.MEMORY_BASELINE, "cpu") == 300 - 40 - parameters
    assert job.value(memory.MEMORY_BASELINE, "cuda:0") == 0


def test_samples_of_steps_are_published_together_in_order(job: Job) -> None:
    job.add(1, readings={"cpu": {"allocated": 110.0, "peak_allocated": 700.0}})
    job.add(2, readings={"cpu": {"allocated": 130.0, "peak_allocated": 600.0}})
    before = job.value(memory.MEMORY_BYTES, "cpu", "allocated")

    job.monitor.publish()

    assert before is None
    assert job.value(memory.MEMORY_BYTES, "cpu", "allocated") == 130
    assert job.value(memory.MEMORY_PEAK, "cpu", "allocated") == 700


def test_a_step_without_a_sample_adds_none(job: Job) -> None:
    assert job.monitor.analysis.add_step(step(1, None)) == {}

    job.monitor.publish()

    assert job.value(memory.MEMORY_BYTES, "cpu", "allocated") is None


def test_memory_is_read_while_no_step_ends_once_the_last_reading_is_five_seconds_old(
    job: Job,
) -> None:
    job.clock.seconds += 5.0
    job.monitor.publish()
    reads_before = job.probes[0].num_reads
    early = job.value(memory.MEMORY_BYTES, "cpu", "allocated")
    job.clock.seconds += 0.1

    job.monitor.publish()

    assert early is None
    assert job.probes[0].num_reads == reads_before + 1
    assert job.value(memory.MEMORY_BYTES, "cpu", "allocated") == 300


@pytest.mark.parametrize(("is_cell_over", "num_reads"), [(False, 0), (True, 1)])
def test_only_the_host_is_read_while_training_is_in_a_call_that_may_hold_the_allocator(
    job: Job, is_cell_over: bool, num_reads: int
) -> None:
    host, device = job.probes
    before = host.num_reads, device.num_reads
    returns = threading.Event()
    training = threading.Thread(target=returns.wait)  # stands for cudaFree
    training.start()
    job.context.phase_timer.training_thread = training.ident or 0
    if is_cell_over:  # of a notebook, which waits for the next one
        job.context.phase_timer.stop()
    job.clock.seconds += 6.0
    try:
        job.monitor.publish()
    finally:
        returns.set()
        training.join()

    assert (host.num_reads - before[0], device.num_reads - before[1]) == (1, num_reads)


def test_a_device_that_was_not_read_is_tried_again_a_second_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter((False, False, True))
    monkeypatch.setattr(memory_monitor, "runs_python", lambda thread: next(answers))
    num_before = job.probes[1].num_reads
    job.clock.seconds += 5.0

    num_reads = []
    for _ in range(5):  # in the last two, the device has just been read
        job.clock.seconds += 1.0
        job.monitor.publish()
        num_reads.append(job.probes[1].num_reads - num_before)

    assert num_reads == [0, 0, 1, 1, 1]


def test_without_a_device_the_training_thread_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Probe("cpu")
    job = Job(monkeypatch, watch_context(), host)
    looks: list[int] = []
    monkeypatch.setattr(memory_monitor, "runs_python", looks.append)
    num_before = host.num_reads
    job.clock.seconds += 6.0

    job.monitor.publish()

    assert (host.num_reads - num_before, looks) == (1, [])


def test_steps_of_training_alone_give_forecasts_of_devices_with_peaks_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Probe("cuda:0", own_peaks=False)
    job = Job(monkeypatch, watch_context(), Probe("cpu"), shared)
    for number in range(1, 60):
        job.add(number)

    job.monitor.publish()

    assert job.labels(memory.OOM_RISK) == [("cpu",)]


def test_a_step_with_an_evaluation_and_one_without_peaks_give_no_forecast(job: Job) -> None:
    for number in range(1, 60):
        job.add(number, trained_only=False)
        job.add(number, readings={"cuda:0": {"allocated": 300.0, "limit": 900.0}})

    job.monitor.publish()

    assert job.labels(memory.OOM_RISK) == []


def test_the_risk_of_each_device_is_returned_with_the_step(job: Job) -> None:
    job.probes[0].states["peak_allocated"] = 1000.0  # above the limit of 900
    for number in range(1, 60):
        job.add(number)
    job.monitor.publish()

    risks = job.add(60)

    assert risks["cpu"] == 1.0
    assert risks["cuda:0"] < 0.5


def test_an_engine_that_replaces_another_has_no_forecast_of_the_old_one(job: Job) -> None:
    for number in range(1, 60):
        job.add(number)
    job.monitor.publish()

    job.monitor.rebind_engine(job.engine)
    before = job.add(60)
    job.monitor.publish()

    assert set(before) == {"cpu", "cuda:0"}
    assert job.add(61) == {}


def grow(job: Job, steps: int) -> None:
    for number in range(1, steps + 1):
        size = 1000.0 * MIB + number * MIB
        held = {"cpu": {"parameters": 60, "optimizer": number * MIB}}
        detail = DetailedSample(
            phase_peaks={"cpu": {"forward": size}},
            held_before=held,
            held_after=held,
            heap_free_bytes=0,
        )
        readings = {"cpu": {"allocated": size, "peak_allocated": size}}
        job.add(number, readings=readings, detail=detail)
        job.monitor.publish()


def test_memory_that_grows_is_a_leak_of_the_category_that_grows(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    grow(job, 200)
    job.clock.seconds += 10.0

    job.monitor.publish()

    assert job.labels(memory.MEMORY_LEAK) == [("cpu", "optimizer")]
    assert job.value(memory.MEMORY_LEAK, "cpu", "optimizer") == pytest.approx(MIB, rel=0.01)
    assert "possible memory leak on cpu: +1 MiB per step" in caplog.text


def test_readings_of_a_replaced_engine_are_no_leak(job: Job) -> None:
    grow(job, 200)
    job.monitor.rebind_engine(job.engine)
    job.clock.seconds += 10.0

    job.monitor.publish()

    assert job.labels(memory.MEMORY_LEAK) == []


def test_errors_are_counted_from_zero_on_each_device(job: Job) -> None:
    assert {labels[0] for labels in job.labels(memory.OOMS)} == {"cpu", "cuda:0"}
    assert job.context.recorder.snapshot().total(memory.OOMS) == 0


def test_an_error_that_passes_through_the_engine_is_counted_and_traced_once(
    job: Job,
) -> None:
    error = RuntimeError(OOM + "you tried to allocate 1024 bytes.")

    def forward() -> None:
        try:
            raise error
        except RuntimeError:
            job.monitor.hooks.on_exception(error)
            raise

    try:
        forward()
    except RuntimeError:
        job.monitor.hooks.on_exception(error)

    assert job.value(memory.OOMS, "cpu", "raised") == 1
    assert job.value(memory.OOMS, "cpu", "fatal") == 0
    [traced] = job.context.step_errors.take(0, 2**63)
    assert (traced.kind, traced.type_name) == ("out_of_memory", "RuntimeError")


def test_another_error_is_neither_counted_nor_traced(job: Job) -> None:
    job.monitor.hooks.on_exception(RuntimeError("shapes differ"))
    job.monitor.on_run_error(RuntimeError("shapes differ"))
    job.monitor.on_run_error(None)

    assert job.context.recorder.snapshot().total(memory.OOMS) == 0
    assert job.context.step_errors.take(0, 2**63) == []


def test_the_error_that_ends_the_run_is_fatal_on_its_device(job: Job) -> None:
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 3.00 GiB")
    job.monitor.hooks.on_exception(error)

    job.monitor.on_run_error(error)

    assert job.value(memory.OOMS, "cuda:0", "raised") == 1
    assert job.value(memory.OOMS, "cuda:0", "fatal") == 1
    assert job.value(memory.OOMS, "cpu", "fatal") == 0


def test_an_error_from_outside_the_engine_is_reported_when_it_ends_the_run(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.monitor.on_run_error(RuntimeError(OOM + "you tried to allocate 1024 bytes."))

    assert job.value(memory.OOMS, "cpu", "raised") == 1
    assert job.value(memory.OOMS, "cpu", "fatal") == 1
    assert "out of memory" in caplog.text


@pytest.mark.parametrize(("kills", "is_oom"), [(1, True), (0, False)])
def test_a_killed_worker_of_the_data_loader_is_out_of_memory_if_the_kernel_counts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int, is_oom: bool
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    monkeypatch.setattr(memory_monitor, "OomFinder", lambda: OomFinder(tmp_path))
    job = Job(monkeypatch, watch_context())
    (tmp_path / "proc/vmstat").write_text(f"oom_kill {5 + kills}\n")
    error = RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")

    job.monitor.on_run_error(error)

    assert job.monitor.is_caused_by_oom(error) == is_oom
    assert job.value(memory.OOMS, "cpu", "raised") == is_oom
    assert job.value(memory.OOMS, "cpu", "fatal") == is_oom


@pytest.mark.parametrize("enabled", [True, False])
def test_a_kill_of_long_ago_does_not_explain_a_killed_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: bool
) -> None:
    clock = FakeClock()
    set_clock(monkeypatch, oom_finder, monotonic=clock)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    monkeypatch.setattr(memory_monitor, "OomFinder", lambda: OomFinder(tmp_path))
    job = Job(monkeypatch, watch_context(settings={"memory": {"enabled": enabled}}))
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    error = RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed. ")
    assert job.monitor.is_caused_by_oom(error)

    for _ in range(2):
        clock.seconds += WINDOW_SECONDS
        job.monitor.publish()

    assert not job.monitor.is_caused_by_oom(error)


def test_memory_that_is_off_is_still_published_without_forecasts_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = watch_context(folder=tmp_path, settings={"memory": {"enabled": False}})
    job = Job(monkeypatch, context)
    error = RuntimeError(OOM + "you tried to allocate 1024 bytes.")
    for number in range(1, 60):
        job.add(number)
    job.monitor.publish()
    job.monitor.hooks.on_exception(error)
    job.monitor.on_run_error(error)

    assert job.value(memory.MEMORY_BYTES, "cpu", "allocated") == 300
    assert job.labels(memory.OOM_RISK) == job.labels(memory.OOMS) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("budget", "limits"),
    [
        ({"host_limit_bytes": 700}, {"cpu": 700, "cuda:0": 900}),
        ({"device_limit_bytes": 600}, {"cpu": 900, "cuda:0": 600}),
        ({"host_limit_bytes": 950}, {"cpu": 900, "cuda:0": 900}),  # more than there is
    ],
)
def test_a_budget_lowers_the_limit_of_its_device(
    monkeypatch: pytest.MonkeyPatch, budget: dict[str, int], limits: dict[str, float]
) -> None:
    job = Job(monkeypatch, watch_context(settings={"memory": budget}))

    assert {device: job.monitor.limit_bytes(device) for device in limits} == limits


def test_the_limit_of_an_unknown_device_is_unknown(job: Job) -> None:
    assert job.monitor.limit_bytes("cuda:5") is None


@pytest.mark.parametrize(("enabled", "num_lines"), [(True, 1), (False, 0)])
def test_devices_without_peaks_of_their_own_are_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    enabled: bool,
    num_lines: int,
) -> None:
    caplog.set_level(logging.INFO, logger="zerowatch.runtime.monitor.memory_monitor")
    context = watch_context(settings={"memory": {"enabled": enabled}})

    Job(
        monkeypatch,
        context,
        Probe("cpu", own_peaks=False),
        Probe("cuda:0"),
        Probe("cuda:1", own_peaks=False),
    )

    lines = [line for line in caplog.messages if line.startswith("memory forecast disabled")]
    assert len(lines) == num_lines
    assert all("for cpu and cuda:1:" in line for line in lines)


def test_a_rank_writes_its_liveness_file_and_removes_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, watch_context(rank=2, folder=tmp_path / "night-7"))
    marker = tmp_path / "night-7" / "rank-2.alive.json"
    job.monitor.publish()
    written = json.loads(marker.read_text())

    job.monitor.close()
    job.monitor.publish()

    assert (written["rank"], written["host"]) == (2, "here")
    assert not marker.exists()


def test_the_liveness_file_has_the_start_of_the_watch_and_not_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # On a busy machine the file is written after many steps, which belong to this process.
    set_clock(monkeypatch, memory_monitor, time=lambda: 5000.25)
    job = Job(monkeypatch, watch_context(folder=tmp_path / "night-7"))

    job.monitor.publish()

    marker = json.loads((tmp_path / "night-7" / "rank-0.alive.json").read_text())
    assert marker["started_at_unix_seconds"] == 5000.25


def test_a_liveness_file_that_cannot_be_written_is_tried_again_after_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "night-7"
    folder.write_text("a file where the folder should be")
    job = Job(monkeypatch, watch_context(folder=folder))
    marker = folder / "rank-0.alive.json"
    job.monitor.publish()
    job.monitor.publish()  # fails again, and begins the delay
    folder.unlink()
    job.clock.seconds += 9.0
    job.monitor.publish()
    early = marker.exists()
    job.clock.seconds += 1.5

    job.monitor.publish()

    assert (early, marker.exists()) == (False, True)
    job.monitor.close()


def test_ranks_that_the_kernel_killed_are_counted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    killed: Any = [
        type("Killed", (), {"by_oom_killer": by_oom_killer})()
        for by_oom_killer in (True, False, True, True)
    ]
    searched: list[tuple[Path, str]] = []

    def detect(runs: Path, host: str, *, before_unix_seconds: float) -> list[KilledRank]:
        searched.append((runs, host))
        return killed

    monkeypatch.setattr(memory_monitor, "detect_killed_ranks", detect)
    job = Job(monkeypatch, watch_context(folder=tmp_path / "night-7"))

    job.monitor.publish()
    job.monitor.publish()

    assert job.value(memory.OOMS, "cpu", "killed") == 3
    assert searched == [(tmp_path, "here")]
    job.monitor.close()


def test_probes_are_closed(job: Job) -> None:
    job.monitor.close()

    assert [probe.num_closed for probe in job.probes] == [1, 1]


def test_a_torch_model_has_no_traffic_of_offloading(job: Job) -> None:
    job.monitor.publish()

    assert job.monitor.cost_ns == 0
    assert job.labels(memory.OFFLOAD_BYTES) == []
    assert not job.context.fail_open.failures
