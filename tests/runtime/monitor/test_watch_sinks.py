"""Tests of the sinks of a watch: their thread, other ranks, failures, and what scripts log."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fakes.steps import step

from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.monitor.watch_sinks import WatchSinks
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


def watch_sinks(folder: Path | None, fail_open: FailOpen, rank: int = 0) -> WatchSinks:
    context: Any = SimpleNamespace(
        identity=SimpleNamespace(rank=rank),
        fail_open=fail_open,
        recorder=Recorder(),
        settings=load_settings({"sinks": {"interval_seconds": 0}}),
        run_id=lambda: "r",
        folder=lambda: folder,
    )
    return WatchSinks(cast(WatchContext, context))


def test_a_sink_is_called_on_its_own_thread_only(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks, sink = watch_sinks(tmp_path, fail_open), ThreadSink()

    sinks.add(sink, "one")
    sinks.enqueue(step(1, loss=2.5))
    sinks.enqueue(step(2, loss=1.5))
    sinks.close(failed=True)

    assert sink.losses == [2.5, 1.5]
    assert sink.threads == {"zerowatch-sink"}
    assert sink.failed is True


def test_only_rank_0_writes(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks, sink = watch_sinks(tmp_path, fail_open, rank=1), ThreadSink()

    sinks.add(sink, "one")
    sinks.enqueue(step(1))
    sinks.log_values({"accuracy": 1.0}, 1)
    sinks.close()

    assert (sink.threads, list(tmp_path.iterdir())) == (set(), [])


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

    lines = [json.loads(line) for line in (tmp_path / "logged.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, None]
    assert lines[0]["values"] == {"eval_loss": 2.5, "name": "gpt"}
    assert lines[1]["values"]["tensor"] == 0.5
    assert lines[1]["values"]["array"] == 0.25
    assert lines[1]["values"]["vector"] == "tensor([0., 0.])"
    assert lines[0]["unix_seconds"] > 1e9


def test_secrets_in_what_the_script_logs_are_left_out(tmp_path: Path, fail_open: FailOpen) -> None:
    sinks = watch_sinks(tmp_path, fail_open)

    sinks.log_values({"lr": 0.1, "hub_token": "hf_s3cret", "args": {"api_key": "s3cret"}}, None)
    sinks.close()

    text = (tmp_path / "logged.jsonl").read_text()
    assert json.loads(text)["values"]["lr"] == 0.1
    assert "s3cret" not in text


def test_what_the_script_logs_without_a_run_folder_is_dropped(fail_open: FailOpen) -> None:
    sinks = watch_sinks(None, fail_open)

    sinks.log_values({"eval_loss": 2.5}, 10)
    sinks.close()

    assert not fail_open.failures
