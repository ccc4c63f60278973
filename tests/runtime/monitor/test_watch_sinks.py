"""Tests of the sinks of a watch: their thread, other ranks, failures, and what scripts log."""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes.clock import FakeClock
from fakes.cuda_streams import FakeCuda
from fakes.scraper import eventually
from fakes.sleeping_collectives import ManualClock
from fakes.steps import step
from scripts.trainer.full_disk import fill_bytes, small_disk

from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.common import device_scalar
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.monitor import watch_sinks as watch_sinks_module
from zerowatch.runtime.monitor.log_file import RETRY_SECONDS, LogFile
from zerowatch.runtime.monitor.watch_sinks import (
    BYTES_AT_ONCE,
    NUM_FREE_NUMBERS,
    NUMBER_BYTES,
    PATIENCE_SECONDS,
    WatchSinks,
)
from zerowatch.runtime.sinks.sink import SinkRun


class ThreadSink:
    """Keeps the names of the threads that call it; raises in each write if a test says so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.threads: set[str] = set()
        self.losses: list[float] = []
        self.failed: bool | None = None
        self._error = error

    def open(self, run: SinkRun) -> None:
        self.threads.add(threading.current_thread().name)

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        self.threads.add(threading.current_thread().name)
        if self._error is not None:
            raise self._error
        self.losses.append(values["zerowatch/loss"])

    def close(self, *, failed: bool) -> None:
        self.threads.add(threading.current_thread().name)
        self.failed = failed


@pytest.fixture
def fail_open() -> FailOpen:
    return FailOpen()


def watch_sinks(
    folder: Path | None, fail_open: FailOpen, rank: int = 0, **clocks: Any
) -> WatchSinks:
    context: Any = SimpleNamespace(
        identity=SimpleNamespace(rank=rank),
        device_index=3,
        fail_open=fail_open,
        recorder=Recorder(),
        settings=load_settings({"sinks": {"interval_seconds": 0}}),
        run_id=lambda: "r",
        folder=lambda: folder,
    )
    return WatchSinks(cast(WatchContext, context), **clocks)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]


def test_a_sink_is_called_on_its_own_thread_only(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks, sink = watch_sinks(tmp_path, fail_open), ThreadSink()

    sinks.add(sink, "one")
    sinks.enqueue(step(1, loss=2.5))
    sinks.enqueue(step(2, loss=1.5))
    sinks.close(failed=True)

    assert sink.losses == [2.5, 1.5]
    assert sink.threads == {"zerowatch-sink"}
    assert sink.failed is True


def test_what_the_script_logs_is_written_while_a_sink_blocks(
    tmp_path: Path, fail_open: FailOpen
) -> None:
    class Blocked(ThreadSink):
        def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
            entered.set()
            release.wait()

    entered, release = threading.Event(), threading.Event()
    sinks = watch_sinks(tmp_path, fail_open)
    sinks.add(Blocked(), "blocked")
    sinks.enqueue(step(1))
    assert entered.wait(60)

    log_and_wait(sinks, range(3))
    during = [step_of(line) for line in lines_of(tmp_path)]
    release.set()
    sinks.close()

    assert during == [0, 1, 2]


def test_the_sinks_and_the_lines_share_the_time_at_the_end(
    tmp_path: Path, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = FakeClock(), []
    sinks = watch_sinks(tmp_path, fail_open, now=clock)

    def wait(name: str) -> Callable[[float], None]:
        def close(seconds: float) -> None:
            waits.append((name, seconds))
            clock.seconds += seconds

        return close

    monkeypatch.setattr(sinks._lines, "close", wait("lines"))
    monkeypatch.setattr(sinks._subscriptions, "close", wait("sinks"))
    sinks.close()
    sinks.close(interrupted=True)

    assert waits == [("lines", 15.0), ("sinks", 15.0), ("lines", 2.5), ("sinks", 2.5)]


def test_lines_that_were_not_written_at_the_end_are_counted(
    tmp_path: Path, fail_open: FailOpen, caplog: pytest.LogCaptureFixture
) -> None:
    sinks, entered, release = watch_sinks(tmp_path, fail_open), threading.Event(), threading.Event()
    sinks._lines.enqueue_call(lambda: (entered.set(), release.wait()))
    assert entered.wait(60)
    sinks.log_values({"loss": 1.0}, 1)

    sinks._lines.close(0.01)
    release.set()

    assert (sinks.dropped_lines, sinks.dropped) == (1, 0)
    assert "writer" in caplog.records[-1].message


class BlockedText:
    """A value whose text is made once `release` is set."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __str__(self) -> str:
        self.entered.set()
        assert self.release.wait(60)
        return "text"


def test_all_lines_of_a_loop_without_other_work_are_written_by_few_writes(
    tmp_path: Path, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks, blocked, writes = watch_sinks(tmp_path, fail_open), BlockedText(), []
    append_all = LogFile.append_all

    def append(log: LogFile, lines: Sequence[bytes]) -> None:
        writes.append(len(lines))
        append_all(log, lines)

    monkeypatch.setattr(LogFile, "append_all", append)
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    for number in range(1, 10_000):
        sinks.log_values({"loss": 0.5}, number)
    blocked.release.set()
    sinks.close()

    assert [line["step"] for line in logged(tmp_path)] == list(range(10_000))
    assert sinks.dropped_lines == 0
    assert len(writes) == 1


def test_lines_that_wait_are_written_before_they_take_much_memory(
    tmp_path: Path, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks, blocked, writes = watch_sinks(tmp_path, fail_open), BlockedText(), []
    monkeypatch.setattr(LogFile, "append_all", lambda _, lines: writes.append(len(lines)))
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    for number in range(4):
        sinks.log_values({"text": "x" * (BYTES_AT_ONCE // 2)}, number)
    blocked.release.set()
    sinks.close()

    assert writes == [3, 2]


def test_lines_beyond_the_limit_are_counted_and_the_reason_is_logged(
    tmp_path: Path,
    fail_open: FailOpen,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watch_sinks_module, "MAX_LINES", 5)
    sinks, blocked = watch_sinks(tmp_path, fail_open), BlockedText()
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    for number in range(1, 9):
        sinks.log_values({"loss": 0.5}, number)
    blocked.release.set()
    sinks.close()

    assert [line["step"] for line in logged(tmp_path)] == list(range(6))
    assert sinks.dropped_lines == 3
    [message] = caplog.messages
    assert "5 records late" in message
    assert "log_values" in message and "run_log.folder" in message


@pytest.mark.parametrize(
    ("value", "num_bytes"), [("x" * 40, 40), ({"samples": "xx"}, 50), (torch.zeros(2), 50)]
)
def test_long_values_may_wait_as_long_as_their_memory_is_limited(
    tmp_path: Path,
    fail_open: FailOpen,
    monkeypatch: pytest.MonkeyPatch,
    value: object,
    num_bytes: int,
) -> None:
    monkeypatch.setattr(watch_sinks_module, "MAX_BYTES", 3 * num_bytes)
    monkeypatch.setattr(watch_sinks_module, "UNKNOWN_BYTES", 50)
    sinks, blocked = watch_sinks(tmp_path, fail_open), BlockedText()
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    for number in range(1, 6):
        sinks.log_values({"value": value}, number)
    sinks.log_values({"loss": 0.5}, 6)
    num_dropped = sinks.dropped_lines
    blocked.release.set()
    wait_for_thread(sinks)
    sinks.log_values({"value": value, "loss": 0.5}, 9)
    sinks.close()

    assert (num_dropped, sinks.dropped_lines) == (2, 2)
    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2, 3, 6, 9]


def test_few_numbers_that_wait_are_limited_by_the_number_of_lines_only(
    tmp_path: Path, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_sinks_module, "MAX_BYTES", 1)
    sinks, blocked = watch_sinks(tmp_path, fail_open), BlockedText()
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    for number in range(1, 4):
        values = {"loss": 0.5, "tensor": torch.tensor(1.0), "best": None, "is_best": True}
        sinks.log_values(values, number)
    blocked.release.set()
    sinks.close()

    assert [line["step"] for line in logged(tmp_path)] == list(range(4))


def test_lines_of_many_numbers_may_wait_as_long_as_their_memory_is_limited(
    tmp_path: Path, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_sinks_module, "MAX_BYTES", 3 * NUMBER_BYTES)
    sinks, blocked = watch_sinks(tmp_path, fail_open), BlockedText()
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    few = {f"layer {layer}": 0.5 for layer in range(NUM_FREE_NUMBERS)}
    for number in range(1, 6):
        sinks.log_values({**few, "loss": 0.5}, number)
    sinks.log_values(few, 6)
    blocked.release.set()
    sinks.close()

    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2, 3, 6]
    assert sinks.dropped_lines == 2


def test_the_lines_of_a_write_that_does_not_return_are_counted(
    tmp_path: Path,
    fail_open: FailOpen,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sinks, entered, release = watch_sinks(tmp_path, fail_open), threading.Event(), threading.Event()
    monkeypatch.setattr(LogFile, "append_all", lambda *_: (entered.set(), release.wait(60)))
    sinks.log_values({"loss": 1.0}, 1)
    assert entered.wait(60)
    for number in (2, 3):
        sinks.log_values({"loss": 1.0}, number)

    sinks._lines.close(0.01)
    release.set()

    assert sinks.dropped_lines == 3
    assert "3 record(s)" in caplog.messages[-1]


def test_only_rank_0_writes(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks, sink = watch_sinks(tmp_path, fail_open, rank=1), ThreadSink()

    sinks.add(sink, "one")
    sinks.enqueue(step(1))
    sinks.log_values({"accuracy": 1.0}, 1)
    sinks.close()

    assert (sink.threads, list(tmp_path.iterdir())) == (set(), [])


def log_in_forked_child(sinks: WatchSinks, values: Mapping[str, object], step: int) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends a child that hangs
        try:
            sinks.continue_after_fork()
            sinks.log_values(values, step)
        finally:
            os._exit(0)  # as multiprocessing does: no thread of the child goes on
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_started", [False, True])
def test_what_a_forked_child_logs_is_written_whether_or_not_the_thread_was_started(
    tmp_path: Path, fail_open: FailOpen, is_started: bool
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)
    if is_started:
        sinks.log_values({"by": "parent"}, 0)
        assert eventually(lambda: (tmp_path / "logged.jsonl").exists() and lines_of(tmp_path) != [])

    log_in_forked_child(sinks, {"by": "child", "loss": torch.tensor(2.5)}, 1)
    sinks.log_values({"by": "parent"}, 2)
    sinks.close()

    expected = [{"by": "parent"}, {"by": "child", "loss": 2.5}, {"by": "parent"}]
    assert [line["values"] for line in logged(tmp_path)] == expected[not is_started :]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_lines_that_wait_in_the_parent_are_not_written_by_a_forked_child(
    tmp_path: Path, fail_open: FailOpen
) -> None:
    sinks, blocked = watch_sinks(tmp_path, fail_open), BlockedText()
    sinks.log_values({"by": "parent"}, 0)
    sinks.log_values({"blocked": blocked}, 1)
    assert blocked.entered.wait(60)

    log_in_forked_child(sinks, {"by": "child"}, 2)
    blocked.release.set()
    sinks.close()

    assert sorted(line["step"] for line in logged(tmp_path)) == [0, 1, 2]


def test_values_after_the_end_of_the_run_are_not_written_which_is_logged_once(
    tmp_path: Path, fail_open: FailOpen, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)
    sinks.log_values({"eval_loss": 2.5}, 1)
    sinks.close()
    for number in (2, 3):
        sinks.log_values({"eval_loss": 2.5}, number)

    assert [line["step"] for line in logged(tmp_path)] == [1]
    [message] = caplog.messages
    assert "log_values" in message and "ended" in message


@pytest.mark.parametrize("error", [ConnectionError("no server"), SystemExit(1)])
def test_a_sink_that_raises_is_counted_and_the_others_go_on(
    tmp_path: Path, fail_open: FailOpen, error: BaseException
) -> None:
    sinks, broken, sink = watch_sinks(tmp_path, fail_open), ThreadSink(error), ThreadSink()

    sinks.add(broken, "broken")
    sinks.add(sink, "one")
    sinks.enqueue(step(1, loss=2.5))
    sinks.close()

    assert sink.losses == [2.5]
    assert fail_open.failures == {"sink broken": 2}  # the last step is tried again at the end


def test_what_the_script_logs_is_in_a_file_with_its_step(
    tmp_path: Path, fail_open: FailOpen
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)

    sinks.log_values({"eval_loss": 2.5, "name": "gpt"}, 10)
    sinks.log_values(
        {"tensor": torch.tensor(0.5), "array": np.float32(0.25), "vector": torch.zeros(2)}, None
    )
    sinks.close()

    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [10, None]
    assert lines[0]["values"] == {"eval_loss": 2.5, "name": "gpt"}
    assert lines[1]["values"]["tensor"] == 0.5
    assert lines[1]["values"]["array"] == 0.25
    assert lines[1]["values"]["vector"] == "tensor([0., 0.])"
    assert lines[0]["unix_seconds"] > 1e9


@dataclass
class Login:
    user: str = "ann"
    password: str = "s3cret"


def test_secrets_in_what_the_script_logs_are_left_out(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks = watch_sinks(tmp_path, fail_open)
    arguments = argparse.Namespace(lr=0.5, hub_token="s3cret")

    sinks.log_values(
        {"lr": 0.1, "hub_token": "hf_s3cret", "args": {"api_key": "s3cret"}, "tokens": {"s3cret"}},
        None,
    )
    sinks.log_values({"arguments": arguments, "login": Login()}, None)
    sinks.close()

    text = (tmp_path / "logged.jsonl").read_text()
    first, second = (json.loads(line)["values"] for line in text.splitlines())
    assert first["lr"] == 0.1
    assert (second["arguments"]["lr"], second["login"]["user"]) == (0.5, "ann")
    assert "s3cret" not in text


def test_what_the_script_logs_without_a_run_folder_is_dropped(fail_open: FailOpen) -> None:
    sinks = watch_sinks(None, fail_open)

    sinks.log_values({"eval_loss": 2.5}, 10)
    sinks.close()

    assert not fail_open.failures


def test_values_that_the_script_logs_after_a_full_disk_are_written(
    tmp_path: Path, fail_open: FailOpen, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    sinks = watch_sinks(tmp_path, fail_open, now=clock)
    fillers = tmp_path / "fillers"
    try:
        with small_disk(tmp_path):
            fillers.mkdir()
            fill_bytes(fillers, 1)
            log_and_wait(sinks, range(100))
            for file in fillers.iterdir():
                file.unlink()
            clock.seconds += RETRY_SECONDS
            log_and_wait(sinks, range(100, 110))
            sinks.close()
            steps = [step for step in map(step_of, lines_of(tmp_path)) if step is not None]
            num_torn = len(lines_of(tmp_path)) - len(steps)
    except PermissionError as error:
        pytest.skip(f"no mounts here: {error}")

    num_before = len(steps) - 10
    assert 0 < num_before < 100
    assert steps == [*range(num_before), *range(100, 110)]
    assert num_torn <= 1
    assert sinks.dropped_lines == 110 - len(steps)
    assert caplog.text.count("cannot write") == len(caplog.records) == 1
    assert not fail_open.failures


def log_and_wait(sinks: WatchSinks, steps: range) -> None:
    """Log a value for each step, and wait until the thread has handled all of them."""
    for number in steps:
        sinks.log_values({"loss": 1.0, "text": "x" * 50}, number)
    wait_for_thread(sinks)


def wait_for_thread(sinks: WatchSinks) -> None:
    """Wait until the thread has handled and written all lines."""
    for _ in range(2):  # between both, nothing waits, so the thread writes
        handled = threading.Event()
        sinks._lines.enqueue_call(handled.set)
        assert handled.wait(60)


def lines_of(folder: Path) -> list[str]:
    return (folder / "logged.jsonl").read_text().splitlines()


def step_of(line: str) -> int | None:
    """Return the step of a line; None if a full disk has cut the line."""
    try:
        return cast(int, json.loads(line)["step"])
    except ValueError:
        return None


def test_the_script_can_log_before_the_run_folder_exists(
    tmp_path: Path, fail_open: FailOpen
) -> None:
    sinks = watch_sinks(tmp_path / "runs" / "night-7", fail_open)

    sinks.log_values({"eval_loss": 2.5}, 10)
    sinks.close()

    assert logged(tmp_path / "runs" / "night-7")[0]["values"] == {"eval_loss": 2.5}


def test_values_that_json_cannot_hold_are_counted_and_logged_once(
    tmp_path: Path, fail_open: FailOpen, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)

    for number in (1, 2, 3):
        sinks.log_values({"too big": 2**70}, number)
    sinks.log_values({"accuracy": 0.5}, 4)
    sinks.close()

    assert [line["step"] for line in logged(tmp_path)] == [4]
    assert fail_open.failures == {"logged values": 3}
    assert len(caplog.records) == 1


def test_the_script_may_change_a_tensor_after_it_has_logged_it(
    tmp_path: Path, fail_open: FailOpen
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)
    values = {
        "running": torch.tensor([2.5]),
        "gradient": torch.tensor(0.5, requires_grad=True),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "array": np.array(3.0),
    }

    sinks.log_values(values, 1)
    with torch.no_grad():
        for value in values.values():
            value *= 0
    sinks.close()

    expected = {"running": 2.5, "gradient": 0.5, "half": 1.5, "count": 7, "array": 3.0}
    assert logged(tmp_path)[0]["values"] == expected


class OnDevice(torch.Tensor):
    """A tensor of the fake device. Reading it would wait."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def item(self) -> Any:
        raise AssertionError("it waits for the device")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    device, empty = FakeCuda(ManualClock()), torch.empty
    device.patch(monkeypatch)
    monkeypatch.setattr(device_scalar, "_slots", {})
    monkeypatch.setattr(device_scalar, "host_value", lambda source: None)
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)
    )
    return device


def test_a_value_on_a_device_is_copied_without_a_wait_and_written_once_it_has_arrived(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    polls: list[float] = []
    synchronized = threading.Event()

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        synchronized.wait(60)

    sinks = watch_sinks(tmp_path, fail_open, sleep=sleep)
    cuda.current.run(20)
    sinks.log_values({"loss": torch.tensor(2.5).as_subclass(OnDevice)}, 1)
    assert eventually(lambda: polls)
    before = list(tmp_path.iterdir())
    cuda.synchronize()
    synchronized.set()
    sinks.close()

    assert before == []
    assert logged(tmp_path)[0]["values"] == {"loss": 2.5}
    assert not fail_open.failures


def test_lines_are_written_before_the_thread_waits_for_a_device_that_may_hang(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    written: list[int] = []

    def sleep(seconds: float) -> None:
        written.append(len(lines_of(tmp_path)))
        cuda.synchronize()

    sinks, blocked = watch_sinks(tmp_path, fail_open, sleep=sleep), BlockedText()
    sinks.log_values({"first": blocked}, 0)
    assert blocked.entered.wait(60)
    cuda.current.run(20)
    sinks.log_values({"lr": 0.1}, 1)
    sinks.log_values({"loss": torch.tensor(2.5).as_subclass(OnDevice)}, 2)
    blocked.release.set()
    sinks.close()

    assert written == [2]
    assert [line["step"] for line in logged(tmp_path)] == [0, 1, 2]


def test_the_thread_is_prepared_for_the_device_before_it_asks_for_a_value_there(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    sinks = watch_sinks(tmp_path, fail_open)
    sinks.log_values({"lr": 0.1}, 1)
    sinks._lines.enqueue_call(lambda: before.append(dict(cuda.prepared)))
    before: list[dict[str, int]] = []

    sinks.log_values({"loss": torch.tensor(2.5).as_subclass(OnDevice)}, 2)
    sinks.close()

    assert before == [{}]
    assert cuda.prepared == {"zerowatch-writer": 3}
    assert logged(tmp_path)[1]["values"] == {"loss": 2.5}


def test_a_thread_that_cannot_be_prepared_leaves_the_values_of_the_device_out(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    cuda.can_prepare = False
    one, two = (torch.ones(size).as_subclass(OnDevice) for size in ([], [2]))
    sinks = watch_sinks(tmp_path, fail_open)

    sinks.log_values({"loss": one, "nested": {"grad": one}, "two": two, "lr": 0.1}, 1)
    sinks.close()

    expected = {"loss": None, "nested": {"grad": None}, "two": None, "lr": 0.1}
    assert logged(tmp_path)[0]["values"] == expected
    assert cuda.queried_by <= {"MainThread"}
    assert not fail_open.failures


def test_values_on_a_device_keep_their_types(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    values = {"tokens": 2**53 + 1, "is_best": True, "root": 1 + 2j, "loss": 2.5}
    sinks = watch_sinks(tmp_path, fail_open)

    sinks.log_values(
        {name: torch.tensor(value).as_subclass(OnDevice) for name, value in values.items()}, 1
    )
    sinks.close()

    written = logged(tmp_path)[0]["values"]
    assert written == values | {"root": "(1+2j)"}
    assert [type(written[name]) for name in ("tokens", "is_best", "loss")] == [int, bool, float]
    assert not fail_open.failures


def test_a_value_that_cannot_be_read_is_null(tmp_path: Path, fail_open: FailOpen) -> None:
    class Broken:
        def item(self) -> float:
            raise RuntimeError("the device has failed")

        size = 1

    sinks = watch_sinks(tmp_path, fail_open)

    sinks.log_values({"loss": Broken(), "lr": 0.1}, 1)
    sinks.close()

    assert logged(tmp_path)[0]["values"] == {"loss": None, "lr": 0.1}
    assert fail_open.failures == {"logged values": 1}


def test_a_value_that_never_arrives_is_null(
    tmp_path: Path, fail_open: FailOpen, cuda: FakeCuda
) -> None:
    polls: list[float] = []
    sinks = watch_sinks(tmp_path, fail_open, sleep=polls.append)
    cuda.current.run(20)

    sinks.log_values({"loss": torch.tensor(2.5).as_subclass(OnDevice), "lr": 0.1}, 1)
    sinks.close()

    assert logged(tmp_path)[0]["values"] == {"loss": None, "lr": 0.1}
    assert sum(polls) >= PATIENCE_SECONDS
    assert not fail_open.failures
