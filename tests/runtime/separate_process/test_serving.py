"""Tests of the monitoring process: the same steps give the same records and metrics as without it.

The process runs on a thread here, at the other end of a connection.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.nvml_library import HEALTHY, NvmlLibrary
from fakes.scraper import eventually
from torch.distributed import TCPStore

from zerowatch.metrics.catalog import communication, devices, memory, overhead, training
from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.metrics.recorder import Recorder, Snapshot
from zerowatch.metrics.settings import load_settings
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.groups import CollectiveCall, Group, RankSet
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.common.rank_store import StoreClientFactory
from zerowatch.runtime.cross_rank.comparison_thread import ComparisonThread
from zerowatch.runtime.cross_rank.exchange import store_log
from zerowatch.runtime.cross_rank.exchange.rank_messages import Heartbeat
from zerowatch.runtime.instrumentation.flops import FlopsCounter, FlopsTerms
from zerowatch.runtime.instrumentation.generated_tokens import GenerationCounts
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts
from zerowatch.runtime.memory.forecast.forecast_service import MemoryForecasts
from zerowatch.runtime.memory.forecast.peak_readings import Shape
from zerowatch.runtime.memory.step_sample import StepMemorySample
from zerowatch.runtime.monitor.step_analysis import StepAnalysis
from zerowatch.runtime.monitor.step_metrics import StepMetrics
from zerowatch.runtime.separate_process import serving
from zerowatch.runtime.separate_process.connection import Connection, pickled
from zerowatch.runtime.separate_process.messages import Setup, State, StoreAddress
from zerowatch.runtime.separate_process.serving import Monitor
from zerowatch.runtime.separate_process.wire import (
    GroupSender,
    send_calls,
    send_in_flight,
    send_step,
)

ALL_REDUCE, ALL_GATHER = OPS.index("all_reduce"), OPS.index("all_gather")
READINGS = {"cpu": {"utilization_ratio": 0.25}}
PASSED = SimpleNamespace(query=lambda: True)


class Rank:
    """The measurements of a rank with one process group."""

    def __init__(self) -> None:
        rank_set = RankSet((0,))
        rank_set.roles = ["dp"]
        self.group = Group.of_other_process("dp", 1, "gloo", rank_set, on_device=False)
        self.groups: Any = SimpleNamespace(known=lambda: [self.group], rank_sets=lambda: [rank_set])

    def call(self, number: int, op: int = ALL_REDUCE, **fields: Any) -> CollectiveCall:
        call = CollectiveCall(op, self.group, 4096, torch.float32, PHASES.index("backward"))
        call.sequence = self.group.rank_set.issued = number
        call.start_ns = 1_000_000 * number
        call.issued_ns = call.end_ns = call.start_ns + 400_000
        for name, value in fields.items():
            setattr(call, name, value)
        return call

    def step(self, number: int, **fields: Any) -> RawStep:
        calls = [
            self.call(3 * number - 2),
            self.call(3 * number - 1, ALL_GATHER, wait_ns=3_000_000 * number, wait_phase=3),
            self.call(3 * number, timed=False, is_lost=number == 2),
        ]
        counts: Any = {"micro_batches": 2, "samples": 4, "tokens": 64, "sequence_length": 16}
        generation = GenerationCounts(calls=1, sequences=2, tokens=[7.0]) if number == 3 else None
        values: dict[str, Any] = {
            "step": number,
            "ended_at": 1e9 + number,
            "phase_ns": [1_000_000 * (place + number) for place in range(len(PHASES))],
            "intervals": (),
            "counts": StepCounts(**counts, losses=[0.5, 1.5 * number], generation=generation),
            "coverage": 1.0,
            "gradient_norm": float("nan") if number == 2 else 0.1 * number,
            "learning_rate": 1e-3,
            "loss_scale": None,
            "trace": None,
            "memory": StepMemorySample(
                readings={"cpu": {"allocated": 100.0 + number, "peak_allocated": 200.0}},
                shapes=(Shape(2, 16),),
            ),
            "batch": CallBatch(calls, is_complete=number != 1),
        }
        return RawStep(**values | fields)


def setup(folder: Path, rank: Rank, groups: GroupSender, gpus: Mapping[str, str]) -> Setup:
    return Setup(
        settings=load_settings({"serve": {"port": 0}, "run_log": {"folder": folder}}),
        process=ProcessInfo(rank=0, local_rank=0, world_size=1, host="here", attempt=0),
        watch_index=0,
        store=None,
        on_device=False,
        flops=FlopsCounter(FlopsTerms(6, 0)),
        peak_flops=1e9,
        baseline_bytes={"cpu": 50.0},
        devices_with_step_peaks=frozenset({"cpu"}),
        gpus=gpus,
        info=("0.1", "2.13", "0.19", "gloo", "cpu", "2", "1"),
        ds_config={"zero_optimization": {"stage": 2}},
        each_rank_has_own_data=False,
        groups=groups.changes(rank.groups),
        calls_before_start=send_calls(CallBatch([]), groups),
    )


def state(**fields: Any) -> State:
    values: dict[str, Any] = {
        "values": [],
        "removed": [],
        "store": None,
        "since_ns": 0,
        "issued": {},
        "pause": None,
        "hangs": False,
        "device_readings": READINGS,
        "idle_readings": None,
        "has_engine": True,
        "variant": 0,
        "is_patched": False,
        "step": 3,
        "seconds": {"hooks": 0.5},
        "dropped": {"steps": 0},
        "failures": {},
        "num_dead_threads": 0,
        "wants_records": False,
        "batch_risks": {},
    }
    return State(**values | fields)


class Served:
    """A monitoring process on a thread, and what it has answered."""

    def __init__(
        self,
        folder: Path,
        gpus: Mapping[str, str] | None = None,
        rank: Rank | None = None,
        **changes: Any,
    ) -> None:
        self.rank, self.groups = rank or Rank(), GroupSender()
        self.connection, self._theirs = Connection.pair()
        self.answers: list[tuple[str, Any]] = []
        given = replace(setup(folder, self.rank, self.groups, gpus or {}), **changes)
        self.monitor: Any = None
        self._threads = [
            threading.Thread(target=lambda: self._serve(given)),
            threading.Thread(target=lambda: self.answers.extend(self.connection.receive())),
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, given: Setup) -> None:
        self.monitor = Monitor(given, self._theirs)
        self.monitor.run()

    def send(self, *steps: RawStep, **fields: Any) -> None:
        """Send steps, and the state with these fields."""
        items: list[bytes] = []
        for step in steps:
            items.append(pickled(("calls", send_calls(step.batch, self.groups))))
            items.append(pickled(("step", send_step(step))))
        groups = self.groups.changes(self.rank.groups)
        self.connection.send(("second", (groups, items, state(**fields))))

    def ask(self, what: str = "snapshot") -> Any:
        num_before = len(self.named("answer"))
        self.connection.send(("ask", (1, what)))
        assert eventually(lambda: len(self.named("answer")) > num_before, 60)
        return self.named("answer")[-1][1]

    def named(self, name: str) -> list[Any]:
        return [value for found, value in self.answers if found == name]

    def end(self) -> Snapshot:
        """End the watch in good order, and return the last values."""
        self.connection.send(("end", None))
        self.connection.send(("linger", (False, True)))
        self.join()
        [last] = self.named("ended")
        return last

    def close(self) -> None:
        self.connection.close()
        self.join()
        for end in (self.connection, self._theirs):
            end.close_here()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path)
    yield one
    one.close()


def records_here(steps: Sequence[RawStep]) -> tuple[list[StepRecord], Snapshot]:
    """Return the records and metrics of steps that are analysed without another process."""
    recorder, records = Recorder(), list[StepRecord]()
    nothing: Any = SimpleNamespace(
        add_step=lambda raw: {},
        add_step_times=lambda *times: None,
        append=lambda new: None,
        makes_traces=False,
        device_readings=READINGS,
    )
    analysis = StepAnalysis(
        step_metrics=StepMetrics(recorder, FlopsCounter(FlopsTerms(6, 0)), 1e9),
        sampler=nothing,
        memory=nothing,
        comparison=nothing,
        folder=nothing,
        otel=nothing,
        fail_open=FailOpen(),
        listeners=[records.extend],
        on_device=False,
    )
    for step in steps:
        analysis.add_calls(step.batch)
        analysis.add_step(step)
    analysis.publish()
    return records, recorder.snapshot()


def test_records_and_metrics_are_those_of_an_analysis_in_the_same_process(served: Served) -> None:
    served.send(wants_records=True)  # the readings of the devices
    served.send(*map(served.rank.step, (1, 2, 3)), wants_records=True)
    found = served.ask()

    expected, metrics = records_here([*map(Rank().step, (1, 2, 3))])
    # nan is unlike itself.
    assert [list(map(repr, received)) for received in served.named("records")] == [
        list(map(repr, expected))
    ]
    for spec, series in metrics.values.items():
        assert repr(found.values[spec]) == repr(series), spec.name
    for spec, distributions in metrics.distributions.items():
        assert found.distributions[spec] == distributions, spec.name


def test_a_device_keeps_its_exposed_time_and_anchors(served: Served) -> None:
    def steps(rank: Rank) -> list[RawStep]:
        call = rank.call(1, start_event=PASSED, end_event=PASSED, wait_ns=1_200_000, wait_phase=2)
        late = rank.call(2, timed=False, is_bound=True, start_event=PASSED)
        return [rank.step(1, batch=CallBatch([call, late], anchor=PASSED))]

    served.send(wants_records=True)
    served.send(*steps(served.rank), wants_records=True)
    served.ask()

    expected, _ = records_here(steps(Rank()))
    assert [repr(each) for each in served.named("records")[0]] == [repr(each) for each in expected]


def test_gpus_are_read_by_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = NvmlLibrary(monkeypatch, tmp_path / "nvml.txt")
    served = Served(tmp_path, {"cuda:0": str(HEALTHY["0.uuid"]), "cuda:1": "GPU-unknown"})
    try:
        served.send(wants_records=True)
        assert eventually(lambda: "cuda:0" in getattr(served.monitor, "device_readings", ()), 60)
        served.send(served.rank.step(1), wants_records=True)
        snapshot = served.end()
    finally:
        served.close()

    assert snapshot.value(devices.DEVICE_UTILIZATION, "cuda:0") == 0.97
    assert snapshot.value(devices.DEVICE_LOST, "cuda:0") == 0
    assert {labels[0] for labels in snapshot.values[devices.DEVICE_POWER]} == {"cuda:0"}
    [[record]] = served.named("records")
    assert record.device_readings["cuda:0"]["power_watts"] == 650
    assert record.device_readings["cpu"] == READINGS["cpu"]  # which the training process reads
    assert library.left_open == (0, 0)


def test_the_run_folder_and_the_metrics_contain_everything(served: Served, tmp_path: Path) -> None:
    served.send(
        served.rank.step(1),
        values=[
            ((training.RUN_ACTIVE.name, ()), 1.0),
            ((memory.OOMS.name, ("cpu", "raised")), 2.0),
        ],
        failures={"memory": 1},
    )
    served.send(
        served.rank.step(2),
        values=[
            ((memory.OOMS.name, ("cpu", "raised")), 1.0),
            ((training.PEAK_FLOPS.name, ("cpu",)), 9.0),
        ],
        removed=[(training.RUN_ACTIVE.name, ())],
        dropped={"run_log": 2},
    )
    snapshot = served.end()

    [run] = served.named("run")
    assert Path(run.folder).parent == tmp_path
    lines = Path(run.log).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert {json.loads(line)["host"] for line in lines} == {"here"}
    assert json.loads((Path(run.folder) / "ds_config.json").read_text()) == {
        "zero_optimization": {"stage": 2}
    }
    assert snapshot.value(memory.OOMS, "cpu", "raised") == 3  # counters are sent as increments
    assert snapshot.value(training.PEAK_FLOPS, "cpu") == 9
    assert snapshot.value(training.RUN_ACTIVE) is None
    assert snapshot.value(training.STEPS) == 2
    assert snapshot.value(overhead.HOOK_FAILURES, "watch thread") == 0
    assert snapshot.value(overhead.WATCH_SECONDS, "hooks") == 0.5
    assert snapshot.value(overhead.DROPPED_RECORDS, "run_log") == 2
    spent = snapshot.value(overhead.WATCH_SECONDS, "monitoring_process") or 0.0
    assert 0 < spent < time.process_time() - served.monitor._first_cpu_seconds  # without imports
    assert snapshot.values[training.RUN_INFO] == {
        (run.run_id, "0.1", "2.13", "0.19", "gloo", "cpu", "2", "1"): 1.0
    }


def test_calls_after_those_before_the_watch_are_counted_once_and_none_is_missed(
    served: Served,
) -> None:
    served.send(*map(served.rank.step, (1, 2)))
    snapshot = served.end()

    calls = snapshot.values[communication.COLLECTIVE_CALLS]
    assert sum(calls.values()) == 6
    assert snapshot.value(communication.EXCHANGE_FAILURES, "unmatched") == 0


def test_a_call_in_flight_is_known_and_settles_later(served: Served) -> None:
    first = served.rank.step(1)
    served.send(first)
    rank_set = served.rank.group.rank_set
    rank_set.recent.extend(first.batch.calls)
    second = served.rank.step(2)
    rank_set.recent.extend(second.batch.calls)
    for _ in range(2):  # each second of a hang
        rows = send_in_flight(served.rank.groups, served.groups, {rank_set: 3})
        served.connection.send(("in flight", ([], rows)))
    served.send(second)
    snapshot = served.end()

    assert [row[1] for row in rows] == [4, 5, 6]
    assert sum(snapshot.values[communication.COLLECTIVE_CALLS].values()) == 6
    assert snapshot.value(communication.EXCHANGE_FAILURES, "unmatched") == 0


def test_calls_in_flight_are_known_before_they_settle(served: Served) -> None:
    rank_set = served.rank.group.rank_set
    rank_set.recent.extend(served.rank.step(1).batch.calls)
    rows = send_in_flight(served.rank.groups, served.groups, {rank_set: 1})
    served.send(issued={rank_set.key: 3})  # as each second: the state has all issued calls
    served.connection.send(("in flight", ([], rows)))
    served.ask()

    [received] = served.monitor._groups.rank_sets()
    assert [(call.sequence, call.op) for call in received.recent] == [(2, ALL_GATHER), (3, 0)]
    assert not any(call.settled for call in received.recent)


def test_a_state_arrives_as_it_was_sent() -> None:
    sent = state(pause="eval", device_readings={"cpu": {"utilization_ratio": 0.5}})

    assert pickle.loads(pickled(sent)) == sent


def test_a_call_that_was_left_out_is_known_as_settled(served: Served) -> None:
    rank_set = served.rank.group.rank_set
    in_flight, left_out = served.rank.call(1), served.rank.call(2)
    in_flight.settled = False
    left_out.timed = False
    left_out.settle()
    rank_set.recent.extend([in_flight, left_out])
    served.connection.send(
        ("in flight", ([], send_in_flight(served.rank.groups, served.groups, {})))
    )
    served.ask()

    [received] = served.monitor._groups.rank_sets()
    assert [(call.sequence, call.settled) for call in received.recent] == [(1, False), (2, True)]


def test_calls_in_flight_that_were_received_already_or_belong_to_the_setup_are_no_news(
    tmp_path: Path,
) -> None:
    rank = Rank()
    rank_set = rank.group.rank_set
    rank_set.recent.extend(map(rank.call, (1, 2, 3)))  # issued before the watch
    served = Served(tmp_path, rank=rank)
    second, third = rank.step(2), rank.step(3)
    rank_set.recent.extend([*second.batch.calls, *third.batch.calls])
    rows = send_in_flight(rank.groups, served.groups, {})
    served.send(second)
    served.connection.send(("in flight", ([], rows)))  # collected before the step was sent
    served.send(third)
    snapshot = served.end()
    served.close()

    assert [row[1] for row in rows] == list(range(1, 10))
    assert sum(snapshot.values[communication.COLLECTIVE_CALLS].values()) == 6
    assert snapshot.value(communication.EXCHANGE_FAILURES, "unmatched") == 0


def test_forecasts_are_sent_back_and_risks_of_micro_batches_are_published(served: Served) -> None:
    served.send(*map(served.rank.step, range(1, 41)), batch_risks={"cpu": 0.25})
    snapshot = served.ask()

    [state] = served.named("forecasts")
    here = MemoryForecasts(Recorder())
    here.restore(state)
    assert here.predict_peak("cpu", Shape(2, 16)) == pytest.approx(200, rel=0.2)
    assert len(here.last_peaks("cpu")) == 20
    assert snapshot.value(memory.OOM_NEXT_BATCH_RISK, "cpu") == 0.25


def test_scrapes_are_refused_while_the_training_process_is_silent(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scrape() -> str:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
                return str(response.status)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    served.send(served.rank.step(1))
    served.ask()
    [(address, _)] = served.named("serving")
    answered = scrape()
    monkeypatch.setattr(serving, "MAX_SILENT_SECONDS", 0.0)
    refused = scrape()
    monkeypatch.undo()
    stopped = SimpleNamespace(status=lambda: "stopped")
    monkeypatch.setattr(served.monitor, "_training_process", stopped)
    assert scrape() == "503 The training process of this rank is stopped.\n"
    monkeypatch.undo()

    assert answered == "200"
    assert refused.startswith("503 The training process of this rank has sent nothing for ")
    assert scrape() == "200"


def test_other_ranks_hear_nothing_while_the_training_process_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    address = StoreAddress(host="127.0.0.1", port=server.port)
    settings = {
        "serve": {"enabled": False},
        "run_log": {"folder": tmp_path},
        "cross_rank": {"interval_seconds": 0.1},
    }
    served = Served(
        tmp_path,
        store=address,
        settings=load_settings(settings),
        process=ProcessInfo(rank=0, local_rank=0, world_size=2, host="here", attempt=0),
    )
    beats = StoreClientFactory(0, 0, 0, address.open).connect()

    def count() -> int:
        return int(json.loads(beats.get("beat/0"))["count"]) if beats.check(["beat/0"]) else 0

    def goes_on() -> bool:
        before = count()
        return eventually(lambda: count() > before, 60)

    seen: list[int] = []

    def note(found: Any) -> Any:
        seen.append(count())
        return found

    try:
        served.send(pause="eval")
        served.ask()
        assert goes_on()

        stopped = SimpleNamespace(status=lambda: note("stopped"))
        with monkeypatch.context() as changed:
            changed.setattr(served.monitor, "_training_process", stopped)
            assert eventually(lambda: len(seen) > 4, 60)
            assert len(set(seen)) == 1
        assert goes_on()

        seen.clear()
        silent = property(lambda self: note(serving.MAX_SILENT_SECONDS))
        with monkeypatch.context() as changed:
            changed.setattr(Connection, "silent_seconds", silent)
            assert eventually(lambda: len(seen) > 4, 60)
            assert len(set(seen)) == 1
        assert goes_on()

        seen.clear()
        running = SimpleNamespace(status=lambda: note("running"))
        with monkeypatch.context() as changed:  # nothing of what it has sent is handled
            changed.setattr(served.monitor, "_handled_at", -serving.MAX_SILENT_SECONDS)
            changed.setattr(served.monitor, "_training_process", running)
            assert eventually(lambda: len(seen) > 4, 60)
            assert len(set(seen[1:])) == 1
        assert goes_on()
    finally:
        served.close()


def test_ranks_are_compared_over_the_store_of_another_process_group_once_the_earlier_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_log, "FIRST_RETRY_SECONDS", 0.05)
    servers = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(2)]
    first, second = (StoreAddress(host="127.0.0.1", port=server.port) for server in servers)
    settings = {
        "serve": {"enabled": False},
        "run_log": {"folder": tmp_path},
        "cross_rank": {"interval_seconds": 0.1},
    }
    served = Served(
        tmp_path,
        store=first,
        settings=load_settings(settings),
        process=ProcessInfo(rank=0, local_rank=0, world_size=2, host="here", attempt=0),
    )

    def sends_to(address: StoreAddress) -> bool:
        store = StoreClientFactory(0, 0, 0, address.open).connect()
        return eventually(lambda: store.check(["beat/0"]), 60)

    try:
        served.send(store=first)
        served.ask()
        assert sends_to(first)

        served.send(store=None)  # between the two groups
        served.send(store=second)
        served.ask()
        del servers[0]

        assert sends_to(second)
    finally:
        served.close()


@pytest.mark.parametrize(("seconds", "is_again"), [(0.0, True), (1e9, False)])
def test_what_is_known_of_other_ranks_is_sent_again_before_it_is_too_old(
    served: Served, monkeypatch: pytest.MonkeyPatch, seconds: float, is_again: bool
) -> None:
    beat = Heartbeat(rank=1, host="there", age_seconds=0.0, issued={})
    monkeypatch.setattr(serving, "PEERS_SECONDS", seconds)
    served.ask()
    monkeypatch.setattr(ComparisonThread, "peers", {1: beat})
    for _ in range(2):
        served.send()
    served.ask()
    monkeypatch.undo()

    sent = served.named("peers")
    assert sent[0].heartbeats == {1: beat}
    assert (len(sent) > 1) is is_again


def test_a_fault_of_a_gpu_that_ended_the_run_is_served_until_the_next_scrape(
    served: Served,
) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    [(address, _)] = served.named("serving")
    waits = threading.Event()
    wait_for_next_scrape = served.monitor._server.wait_for_next_scrape

    def noted() -> None:
        waits.set()
        wait_for_next_scrape()

    served.monitor._server.wait_for_next_scrape = noted
    for _ in range(2):  # a regular scraper, whose interval is that between these
        urllib.request.urlopen(f"http://{address}/metrics", timeout=60).close()
    served.send(values=[((devices.DEVICE_XID_ERRORS.name, ("cuda:0", "79")), 1.0)])
    served.connection.send(("end", None))
    served.connection.send(("next scrape", None))
    served.join()

    assert waits.is_set()
    [last] = served.named("ended")
    assert last.value(devices.DEVICE_XID_ERRORS, "cuda:0", "79") == 1


@pytest.mark.parametrize("is_exit", [False, True])
def test_the_wait_for_the_last_scrape_is_announced_only_if_the_script_waits_for_it(
    served: Served, is_exit: bool
) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    waits: list[dict[str, bool]] = []
    served.monitor._server.wait_for_final_scrape = lambda **how: waits.append(how)

    served.connection.send(("end", None))
    served.connection.send(("linger", (False, is_exit)))
    served.join()

    assert waits == [{"interrupted": False, "announces": is_exit}]


def test_the_wait_of_an_earlier_close_is_announced_once_the_script_ends(served: Served) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    waits, server_closed = list[dict[str, bool]](), threading.Event()
    server, close = served.monitor._server, served.monitor._server.close

    def wait(**how: bool) -> None:
        waits.append(how)
        if not how["announces"]:
            assert server_closed.wait(60)

    server.wait_for_final_scrape = wait
    server.close = lambda: (server_closed.set(), close())
    served.connection.send(("end", None))
    served.connection.send(("linger", (False, False)))
    assert eventually(lambda: waits != [], 60)
    served.connection.send(("linger", (True, True)))
    served.join()

    assert waits == [
        {"interrupted": False, "announces": False},
        {"interrupted": True, "announces": True},
    ]


def test_the_process_ends_after_the_targets_of_an_earlier_close_are_withdrawn(
    served: Served,
) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    began, closed, may_go_on = threading.Event(), threading.Event(), threading.Event()
    server, close = served.monitor._server, served.monitor._server.close

    def withdraw() -> None:
        if threading.current_thread().name == "zerowatch-linger":
            began.set()
            may_go_on.wait(60)

    served.monitor._folder.withdraw_targets = withdraw
    server.close = lambda: (close(), closed.set())
    served.connection.send(("end", None))
    served.connection.send(("linger", (False, False)))
    assert began.wait(60)
    served.connection.send(("linger", (False, True)))
    assert closed.wait(60)
    monitoring = served._threads[0]
    monitoring.join(0.1)
    was_running = monitoring.is_alive()
    may_go_on.set()
    served.join()

    assert was_running


def test_a_second_close_starts_no_second_wait_for_the_last_scrape(served: Served) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    waits, was_read = list[bool](), threading.Event()
    served.monitor._server.wait_for_final_scrape = lambda *, announces, **_: (
        waits.append(announces),
        announces or was_read.wait(60),
    )
    served.monitor._server.close = was_read.set
    served.connection.send(("end", None))
    for is_exit in (False, False, True):
        served.connection.send(("linger", (False, is_exit)))
    served.join()

    assert waits.count(False) == 1


def test_targets_that_cannot_be_withdrawn_do_not_keep_the_process(served: Served) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)

    def fail() -> None:
        raise OSError

    served.monitor._folder.withdraw_targets = fail
    served.connection.send(("end", None))
    served.connection.send(("linger", (False, False)))
    served.join()


def test_a_script_that_ends_without_a_message_does_not_end_the_wait_for_the_last_scrape(
    served: Served,
) -> None:
    assert eventually(lambda: served.monitor is not None and served.named("serving") != [], 60)
    began, was_read, closed = threading.Event(), threading.Event(), list[bool]()
    server, close = served.monitor._server, served.monitor._server.close
    server.wait_for_final_scrape = lambda **_: (began.set(), was_read.wait(60))
    server.close = lambda: (closed.append(was_read.is_set()), close())
    served.connection.send(("end", None))
    served.connection.send(("linger", (False, False)))
    assert began.wait(60)
    served.connection.close()
    time.sleep(0.05)
    was_read.set()
    served.join()

    assert closed == [True]


def test_after_a_kill_what_was_sent_is_in_the_run_folder(served: Served) -> None:
    served.send(*map(served.rank.step, (1, 2)))
    served.ask()
    served.connection.close()
    served.join()

    [run] = served.named("run")
    assert len(Path(run.log).read_text().splitlines()) == 2
    assert served.named("ended") == []


def test_a_message_that_cannot_be_handled_loses_only_itself(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.connection.send(("second", None))
    served.send(served.rank.step(1))

    assert served.end().value(training.STEPS) == 1
    assert "hook 'message' failed" in caplog.text
