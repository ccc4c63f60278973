"""Tests of what is constant in a run: its labels and start, and the line that names its pages."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.clock import FakeClock
from fakes.watch_contexts import PlainEngine, watch_context

import zerowatch
from zerowatch.metrics.backoff import Backoff
from zerowatch.metrics.catalog import training
from zerowatch.metrics.recorder import Snapshot
from zerowatch.runtime.common.retried_files import RetriedFiles
from zerowatch.runtime.instrumentation.watch_context import WatchContext
from zerowatch.runtime.monitor import run_info
from zerowatch.runtime.monitor.run_attempts import RunStart
from zerowatch.runtime.monitor.run_info import (
    RunInfoPublisher,
    engine_info,
    publish_thresholds,
    warn_of_comms_logger,
)


class Texts(dict[str, str]):
    """A store of which the other rank writes at once."""

    def put(self, key: str, text: str) -> None:
        self[key] = text


def engine(stage: int = 3) -> PlainEngine:
    return PlainEngine(zero_optimization_stage=lambda: stage, config={"train_batch_size": 6})


def publisher(
    context: WatchContext,
    store: Texts | None = None,
    address: str | None = "here:9464",
    **given: Any,
) -> RunInfoPublisher:
    folder: Any = SimpleNamespace(path=context.folder(), poll=lambda: None, files=RetriedFiles())
    texts: Any = Texts() if store is None else store
    return RunInfoPublisher(context, texts, folder, address, **given)


def info_of(snapshot: Snapshot) -> list[tuple[str, ...]]:
    return list(snapshot.values.get(training.RUN_INFO, ()))


def test_the_world_size_is_published_before_the_run_has_an_id() -> None:
    context = watch_context(engine(), run_id=None, world_size=3)

    publisher(context).poll()

    snapshot = context.recorder.snapshot()
    assert snapshot.value(training.WORLD_SIZE) == 3
    assert info_of(snapshot) == []
    assert snapshot.value(training.RUN_START_TIMESTAMP) is None


def test_the_labels_of_a_run_have_the_order_of_the_metric() -> None:
    import deepspeed

    labels = ("night-7", *engine_info(engine(stage=2), 3))

    assert dict(zip((label.name for label in training.RUN_INFO.labels), labels, strict=True)) == {
        "run_id": "night-7",
        "version": zerowatch.__version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "backend": "none",
        "accelerator": "cpu",
        "zero_stage": "2",
        "world_size": "3",
    }


def test_a_script_without_deepspeed_has_no_version_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)

    assert engine_info(engine(), 3)[2] == "none"


def test_the_info_is_published_once_and_again_for_another_engine(tmp_path: Path) -> None:
    context = watch_context(watched := engine(), folder=tmp_path)
    info = publisher(context)
    info.poll()
    first = info_of(context.recorder.snapshot())
    watched.zero_optimization_stage = lambda: 1
    info.poll()
    same = info_of(context.recorder.snapshot())

    info.rebind_engine()
    info.poll()

    assert [labels[6] for labels in first] == ["3"]
    assert same == first
    assert [labels[6] for labels in info_of(context.recorder.snapshot())] == ["1"]


def test_a_run_is_not_active_while_it_has_no_engine(tmp_path: Path) -> None:
    context = watch_context(None, folder=tmp_path)
    info = publisher(context)
    context.recorder.set(training.RUN_ACTIVE, 1)
    info.poll()
    without = context.recorder.snapshot()

    info.rebind_engine()

    assert without.value(training.RUN_ACTIVE) == 0
    assert info_of(without) == []
    assert context.recorder.snapshot().value(training.RUN_ACTIVE) == 1


def test_an_engine_that_is_alive_leaves_the_run_active(tmp_path: Path) -> None:
    context = watch_context(engine(), folder=tmp_path)
    context.recorder.set(training.RUN_ACTIVE, 1)

    publisher(context).poll()

    assert context.recorder.snapshot().value(training.RUN_ACTIVE) == 1


def test_rank_0_counts_the_attempt_and_shares_the_start(tmp_path: Path) -> None:
    started = {"started_at_unix_seconds": 1_790_000_000.0}
    (tmp_path / "attempts.jsonl").write_text(2 * (json.dumps(started) + "\n"))
    context, store = watch_context(engine(), folder=tmp_path, attempt=1), Texts()

    publisher(context, store).poll()

    snapshot = context.recorder.snapshot()
    assert snapshot.value(training.RUN_START_TIMESTAMP) == 1_790_000_000.0
    assert snapshot.value(training.RUN_ATTEMPT) == 2
    start = RunStart(unix_seconds=1_790_000_000.0, earlier_attempts=2)
    assert store == {"run_start": start.to_text()}


def test_an_attempt_is_counted_once(tmp_path: Path) -> None:
    info = publisher(watch_context(engine(), folder=tmp_path))

    info.poll()
    info.poll()

    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 1


def test_without_a_run_folder_the_attempt_is_the_restarts_of_the_launcher() -> None:
    context = watch_context(engine(), attempt=4)

    publisher(context).poll()

    assert context.recorder.snapshot().value(training.RUN_ATTEMPT) == 4


def test_another_rank_reads_the_start_that_rank_0_shares_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, store = FakeClock(), Texts()
    monkeypatch.setattr(run_info, "Backoff", partial(Backoff, now=clock))
    context = watch_context(engine(), rank=2, folder=tmp_path)
    info = publisher(context, store)
    info.poll()
    store["run_start"] = "1790000000.0 5"
    info.poll()
    too_early = context.recorder.snapshot().value(training.RUN_ATTEMPT)
    clock.seconds += 1.1

    info.poll()

    snapshot = context.recorder.snapshot()
    assert too_early is None
    assert snapshot.value(training.RUN_START_TIMESTAMP) == 1_790_000_000.0
    assert snapshot.value(training.RUN_ATTEMPT) == 5
    assert list(tmp_path.iterdir()) == []


def test_rank_0_writes_the_ds_config_of_the_first_engine_only(tmp_path: Path) -> None:
    context = watch_context(watched := engine(), folder=tmp_path)
    info = publisher(context)
    info.poll()
    watched.config = {"train_batch_size": 12}
    info.rebind_engine()
    info.poll()

    written = json.loads((tmp_path / "ds_config.json").read_text())

    assert written == {"train_batch_size": 6}


@pytest.mark.parametrize(
    ("address", "serve", "pages"),
    [
        ("here:9464", {}, "live page http://here:9464/, metrics http://here:9464/metrics"),
        ("here:9464", {"live_page": False}, "metrics http://here:9464/metrics"),
        (None, {}, "metrics not served"),
    ],
)
def test_rank_0_logs_once_where_metrics_and_logs_are(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    address: str | None,
    serve: dict[str, Any],
    pages: str,
) -> None:
    caplog.set_level(logging.INFO)
    context = watch_context(engine(), folder=tmp_path, settings={"serve": serve})
    info = publisher(context, address=address)

    info.poll()
    info.rebind_engine()
    info.poll()

    assert caplog.messages == [f"watching 3 rank(s); {pages}; run log {tmp_path}"]


def test_pages_that_are_not_served_yet_are_not_named_as_if_they_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    publisher(watch_context(engine()), is_listening=lambda: False).poll()

    [message] = caplog.messages
    assert "http://here:9464/metrics, not before port 9464 is free; run log" in message


def test_a_run_without_a_folder_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    publisher(watch_context(engine()), address=None).poll()

    assert caplog.messages == ["watching 3 rank(s); metrics not served; run log not written"]


def test_another_rank_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    publisher(watch_context(engine(), rank=1, folder=tmp_path)).poll()

    assert caplog.messages == []


@pytest.mark.parametrize(("rank", "expected"), [(0, {("exposed_comm_ratio_high",): 0.25}), (1, {})])
def test_rank_0_publishes_the_thresholds_that_the_settings_replace(
    rank: int, expected: dict[tuple[str, ...], float]
) -> None:
    context = watch_context(
        rank=rank, settings={"alerts": {"thresholds": {"exposed_comm_ratio_high": 0.25}}}
    )

    publish_thresholds(context)

    assert context.recorder.snapshot().values.get(training.ALERT_THRESHOLD, {}) == expected


@pytest.mark.parametrize(("enabled", "num_lines"), [(True, 1), (False, 0)])
def test_a_comms_logger_that_is_on_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    enabled: bool,
    num_lines: int,
) -> None:
    comm: Any = SimpleNamespace(comms_logger=SimpleNamespace(enabled=enabled))
    monkeypatch.setitem(sys.modules, "deepspeed.comm.comm", comm)

    warn_of_comms_logger()

    assert [record.levelname for record in caplog.records] == ["WARNING"] * num_lines
    assert "comms_logger is on" in caplog.text or not enabled


def test_a_script_without_deepspeed_has_no_comms_logger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed.comm.comm", raising=False)

    warn_of_comms_logger()

    assert caplog.records == []
