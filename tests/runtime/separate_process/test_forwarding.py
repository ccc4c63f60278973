"""Tests of what remains in the training process, without a monitoring process."""

from __future__ import annotations

import inspect
import itertools
import pickle
import re
import threading
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.nvml_library import HEALTHY, NvmlLibrary
from fakes.scraper import eventually
from torch import nn, optim

from zerowatch.metrics.catalog import communication, memory, training
from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.groups import CollectiveCall, Group, Groups, RankSet
from zerowatch.runtime.common import process_info
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.launcher_link import receive_run_folder
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.common.torch_engine import TorchEngine
from zerowatch.runtime.cross_rank.hang import hang_monitor
from zerowatch.runtime.devices.cpu import CpuDevice
from zerowatch.runtime.devices.nvml_probe import nvml_device
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.monitor import step_ring, watch
from zerowatch.runtime.monitor.step_ring import StepRing
from zerowatch.runtime.separate_process import build
from zerowatch.runtime.separate_process.build import HangDetection, why_not_separate
from zerowatch.runtime.separate_process.forwarding import (
    MAX_PEERS_AGE_SECONDS,
    EngineChanges,
    ForwardedComparison,
    ForwardedRecorder,
    ForwardedRunFolder,
    ForwardedServer,
    Forwarder,
    MonitoringProcess,
)
from zerowatch.runtime.separate_process.messages import OpenedRun, Peers, StoreAddress
from zerowatch.runtime.separate_process.wire import GroupSender


class Process:
    """A monitoring process that notes the questions and has one answer."""

    def __init__(self, answer: object = None) -> None:
        self.answer, self.asked = answer, list[str]()
        self.last_snapshot: Any = None
        self.run: OpenedRun | None = None
        self.on_run: Any = None
        self.has_ended = True

    def ask(self, name: str) -> object:
        self.asked.append(name)
        return self.answer

    def end(self) -> bool:
        return self.has_ended


def test_a_watch_can_close_the_server_of_the_other_process() -> None:
    called = set(re.findall(r"self\._server\.(\w+)", inspect.getsource(watch)))

    assert "wait_for_next_scrape" in called
    assert [name for name in called if not hasattr(ForwardedServer, name)] == []


def test_a_run_that_failed_by_a_fault_of_its_gpu_waits_for_the_next_scrape() -> None:
    calls: list[object] = []
    process: Any = SimpleNamespace(
        send=lambda *message: calls.append(message), wait_for_exit=calls.append
    )

    ForwardedServer(process, linger_seconds=30.0).wait_for_next_scrape()

    assert calls == [("next scrape", None), 40.0]


def test_the_other_process_is_informed_whether_the_script_waits_for_the_last_scrape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    process = object.__new__(MonitoringProcess)
    monkeypatch.setattr(process, "send", lambda *message: calls.append(message))
    monkeypatch.setattr(process, "wait_for_exit", calls.append)
    server = ForwardedServer(process, linger_seconds=30.0)

    server.close_after_final_scrape(lambda: None)
    server.wait_for_final_scrape(interrupted=True)

    assert calls == [("linger", (False, False)), ("linger", (True, True)), 40.0]


def test_counters_are_sent_as_increments_and_ended_series_once() -> None:
    recorder = ForwardedRecorder(Process())  # type: ignore[arg-type]
    recorder.add(memory.OOMS, 2, "cpu", "raised")
    recorder.set(training.RUN_ACTIVE, 1)
    first = recorder.changes()
    recorder.add(memory.OOMS, 3, "cpu", "raised")
    recorder.remove(training.RUN_ACTIVE)
    second, third = recorder.changes(), recorder.changes()

    ooms, active = (memory.OOMS.name, ("cpu", "raised")), (training.RUN_ACTIVE.name, ())
    assert first == ([(ooms, 2.0), (active, 1.0)], [])
    assert second == ([(ooms, 3.0)], [active])
    assert third == ([], [])


def test_a_snapshot_is_that_of_the_process_then_its_last_one_and_else_what_is_known_here() -> None:
    process = Process()
    recorder = ForwardedRecorder(process)  # type: ignore[arg-type]
    recorder.set(training.RUN_ACTIVE, 1)
    without = recorder.snapshot()
    process.answer = answer = ForwardedRecorder(process)  # type: ignore[arg-type]
    answered = recorder.snapshot()
    process.last_snapshot = last = object()

    assert without.value(training.RUN_ACTIVE) == 1
    assert answered is answer
    assert recorder.snapshot() is last
    assert process.asked == ["snapshot", "snapshot"]


class Sender(Process):
    """A monitoring process that notes what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, Any]] = []
        self.is_alive = True

    def send(self, name: str, value: Any) -> bool:
        self.sent.append((name, value))
        return self.is_alive


def forwarder_to(
    process: Sender, groups: Any = None
) -> tuple[Forwarder, list[tuple[int, float]], FailOpen]:
    steps: list[tuple[int, float]] = []
    fail_open = FailOpen()
    groups = Groups() if groups is None else groups
    one = Forwarder(
        process,  # type: ignore[arg-type]
        fail_open,
        GroupSender(),
        groups,
        lambda number, seconds: steps.append((number, seconds)),
    )
    return one, steps, fail_open


def raw_step(number: int) -> RawStep:
    phase_ns = [0] * len(PHASES)
    phase_ns[PHASES.index("forward")], phase_ns[PHASES.index("eval")] = 2 * 10**9, 5 * 10**9
    return RawStep(
        step=number,
        ended_at=1e9,
        phase_ns=phase_ns,
        intervals=(),
        counts=StepCounts(),
        coverage=None,
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        trace=None,
        memory=None,
        batch=CallBatch([]),
    )


def test_a_state_that_cannot_be_read_loses_no_step(caplog: pytest.LogCaptureFixture) -> None:
    process = Sender()
    forwarder, steps, fail_open = forwarder_to(process)
    forwarder.state = fail_open.wrap("state", lambda: 1 / 0, is_kept=True)  # type: ignore[arg-type, return-value]
    for number in (1, 2):
        forwarder.add_step(raw_step(number))
        forwarder.publish()

    sent = [[pickle.loads(item)[1][0] for item in items] for _, (_, items, _) in process.sent]
    assert sent == [[1], [2]]
    assert steps == [(1, 2.0), (2, 2.0)]  # without evaluation
    assert fail_open.failures == {"state": 2}
    assert (forwarder.num_lost, forwarder.has_unwritten) == (0, False)


def test_without_progress_calls_in_flight_are_sent_but_none_from_before_the_watch() -> None:
    rank_set = RankSet((0, 1))
    group = Group.of_other_process("dp", 2, "gloo", rank_set, on_device=False)
    groups = SimpleNamespace(known=lambda: [group], rank_sets=lambda: [rank_set])

    def issue(number: int) -> None:
        call = CollectiveCall(0, group, 4, None, 0)
        call.sequence = rank_set.issued = number
        rank_set.recent.append(call)

    issue(1)
    process = Sender()
    forwarder, _, _ = forwarder_to(process, groups)
    forwarder.state = lambda: SimpleNamespace(since_ns=0)  # type: ignore[assignment,return-value]
    forwarder.publish()
    issue(2)
    forwarder.publish()

    rows = [value[1] for name, value in process.sent if name == "in flight"]
    assert [[sequence for _, sequence, *_ in each] for each in rows] == [[], [2]]


def test_steps_that_cannot_be_sent_are_counted() -> None:
    process = Sender()
    forwarder, _, _ = forwarder_to(process)
    process.is_alive = False
    for number in (1, 2):
        forwarder.add_step(raw_step(number))
    forwarder.write_log()
    forwarder.write_log()

    assert (forwarder.num_lost, forwarder.has_unwritten) == (2, True)
    assert len(process.sent) == 1


@pytest.mark.parametrize(
    ("is_alive", "age_seconds", "is_known"),
    [(True, 0.0, True), (True, MAX_PEERS_AGE_SECONDS, False), (False, 0.0, False)],
)
def test_other_ranks_are_unknown_if_the_process_has_said_nothing_for_long_or_has_ended(
    is_alive: bool, age_seconds: float, is_known: bool
) -> None:
    process: Any = Sender()
    process.is_alive, process.peers_at = is_alive, monotonic() - age_seconds
    process.peers = Peers(heartbeats={1: "beat"}, divergence="rank 1", others_hang=True)
    comparison = ForwardedComparison(process)

    assert comparison.peers == ({1: "beat"} if is_known else {})
    assert comparison.others_hang is is_known
    assert comparison.divergence == "rank 1"


class StartingProcess(Sender):
    """A monitoring process that does not know the other ranks yet. Counts who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.peers, self.peers_at = Peers(), 0.0
        self.is_ready, self.num_asked = False, 0

    @property
    def knows_peers(self) -> bool:
        self.num_asked += 1
        return self.is_ready


def test_a_hang_is_found_though_the_watch_thread_is_blocked_once_other_ranks_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_monitor, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hang_monitor, "CHECK_SECONDS", 0.001)
    process: Any = StartingProcess()
    context: Any = SimpleNamespace(
        identity=SimpleNamespace(rank=1),
        device_index=None,
        settings=load_settings({}),
        phase_timer=PhaseTimer(),
        recorder=Recorder(),
        fail_open=FailOpen(),
        call_recorder=SimpleNamespace(groups=Groups()),
        folder=lambda: tmp_path,
        engine=lambda: None,
    )
    detection = HangDetection(context, process)
    for number in (1, 2, 3):
        detection.monitor.add_step(number, 0.1)
    seconds = itertools.count(context.phase_timer.since_ns, 10**9)
    detection.monitor._now_ns = lambda: next(seconds)

    def num_hangs() -> float | None:
        return context.recorder.snapshot().value(communication.HANGS)

    detection.start()
    is_asked = eventually(lambda: process.num_asked > 100)
    num_before = num_hangs()
    process.is_ready = True
    is_found = eventually(lambda: num_hangs() == 1)
    detection.stop()

    assert (is_asked, num_before, is_found) == (True, 0, True)
    assert not any(thread.name == "zerowatch-hang-checks" for thread in threading.enumerate())


def test_the_risk_is_that_of_the_last_forecast() -> None:
    forwarder, _, _ = forwarder_to(Sender())
    risks = [{}, {"cpu": 0.1, "cuda:0": 0.9}]
    found = []
    for risk in risks:
        forwarder.risks = lambda risk=risk: risk  # type: ignore[misc]
        found.append(forwarder.is_risky)

    assert found == [False, True]


@pytest.mark.parametrize(
    ("is_complete", "has_ended", "num_left"), [(True, True, 0), (False, True, 1), (True, False, 1)]
)
def test_the_ring_remains_unless_the_process_has_written_all_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_complete: bool,
    has_ended: bool,
    num_left: int,
) -> None:
    monkeypatch.setattr(step_ring, "SHARED_MEMORY", tmp_path)
    process: Any = Process()
    process.has_ended = has_ended
    folder = ForwardedRunFolder(process, rank=1, is_logged=True, ring=StepRing.create())
    before = folder.path
    process.run = OpenedRun(
        run_id="r", folder=str(tmp_path / "r"), log=str(tmp_path / "r" / "rank-1.jsonl")
    )
    process.on_run(process.run)
    folder.close(is_complete=is_complete)

    assert (before, folder.path, folder.run_id) == (None, tmp_path / "r", "r")
    assert len(list(tmp_path.glob("zerowatch-steps-*"))) == num_left


@pytest.mark.parametrize(("local_rank", "is_named"), [(0, True), (1, False)])
def test_local_rank_0_names_the_folder_of_the_monitoring_process_to_the_launcher(
    tmp_path: Path, local_rank: int, is_named: bool
) -> None:
    process: Any = Process()
    ForwardedRunFolder(process, rank=2, is_logged=True, ring=None)
    folder = str(tmp_path / "shared" / "r")

    with receive_run_folder(tmp_path / "runs") as receiver:
        process.on_run(OpenedRun(run_id="r", folder=folder, identity={"local_rank": local_rank}))

        assert (tmp_path / "shared" in receiver.runs()) is is_named
        assert receiver.folders() == []


def test_the_changes_of_an_engine_are_counted() -> None:
    engine = SimpleNamespace(global_steps=1, config={}, optimizer=None)
    changes = EngineChanges(lambda: engine)
    counts = []
    for config in (engine.config, engine.config, {}, {}):
        engine.config = config
        changes.look()
        counts.append(changes.count)

    assert counts == [0, 0, 1, 2]
    assert not changes.is_patched


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"profile": {"every_steps": 10}}, "profile.every_steps is set"),
        ({"memory": {"trace_leaks": True}}, "memory.trace_leaks is set"),
        ({"otel": {"endpoint": "http://localhost:4318"}}, "OTLP is configured"),
    ],
)
def test_what_needs_the_training_process_is_named(
    settings: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)

    assert why_not_separate(object(), load_settings(settings)) == reason


def test_a_script_without_deepspeed_and_ranks_without_a_store_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(2, 1)
    engine = TorchEngine(model, optim.SGD(model.parameters(), lr=0.1))
    two = process_info.ProcessInfo(rank=0, local_rank=0, world_size=2, host="here", attempt=0)
    monkeypatch.setattr(build, "this_process", lambda: two)

    assert why_not_separate(engine, load_settings()) == "the script trains without DeepSpeed"
    assert why_not_separate(object(), load_settings()) == (
        "the ranks share no store that another process can reach"
    )


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_another_process_finds_the_store_of_the_job(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = torch._C._distributed_c10d
    store: Any = (
        distributed.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
        if kind == "tcp"
        else distributed.FileStore(str(tmp_path / "store"), 1)
    )
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.setattr(
        "zerowatch.runtime.common.rank_store._get_default_store",
        lambda: distributed.PrefixStore("a", distributed.PrefixStore("b", store)),
    )
    store.set("k", "v")

    address = StoreAddress.of_job()
    assert address is not None
    assert address.open().get("k") == b"v"


def test_gpus_are_left_to_the_monitoring_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = NvmlLibrary(monkeypatch, tmp_path / "nvml.txt")
    gpu, cpu = nvml_device(0), CpuDevice()
    assert gpu is not None

    assert build._split([cpu, gpu]) == ([cpu], {"cuda:0": HEALTHY["0.uuid"]})
    assert library.left_open == (0, 0)
