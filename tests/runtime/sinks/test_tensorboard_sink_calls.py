"""Tests of the calls that the sink of TensorBoard makes, with a fake writer; it is an extra."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.tensorboard_sink import TensorboardSink


class FakeWriter:
    """Keeps the calls of all writers, in `calls` of the class."""

    calls: list[tuple[Any, ...]]
    error: OSError | None  # from now on

    def __init__(self, folder: str, flush_secs: int) -> None:
        self.calls.append(("open", folder, flush_secs))
        self._error = FakeWriter.error
        if self._error is not None:
            raise self._error

    def add_scalar(self, name: str, value: float, global_step: int, walltime: float) -> None:
        self.calls.append((name, value, global_step, walltime))
        self._check()

    def close(self) -> None:
        self.calls.append(("close",))
        self._check()

    def _check(self) -> None:
        """Raise the first error again and again, as TensorBoard does."""
        self._error = self._error or FakeWriter.error
        if self._error is not None:
            raise self._error


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    FakeWriter.calls, FakeWriter.error = [], None
    return FakeWriter.calls


def test_each_value_is_written_with_its_step_and_time_and_the_file_is_closed(
    calls: list[tuple[Any, ...]],
) -> None:
    sink = TensorboardSink()

    sink.open(SinkRun(run_id="r", folder=Path("/runs/r")))
    sink.write({"zerowatch/loss": 2.5, "zerowatch/samples": 8.0}, step=3, unix_seconds=1000.5)
    sink.close(failed=False)

    assert calls == [
        ("open", "/runs/r/tensorboard", 10),  # a page of TensorBoard is at most 10 s behind
        ("zerowatch/loss", 2.5, 3, 1000.5),
        ("zerowatch/samples", 8.0, 3, 1000.5),
        ("close",),
    ]


def test_after_a_full_disk_values_are_written_into_another_file(
    calls: list[tuple[Any, ...]],
) -> None:
    sink, opened = TensorboardSink(), ("open", "/runs/r/tensorboard", 10)
    sink.open(SinkRun(run_id="r", folder=Path("/runs/r")))
    FakeWriter.error = OSError(errno.ENOSPC, "No space left on device")

    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            sink.write({"zerowatch/loss": 2.5}, step=step, unix_seconds=1000.0)
    FakeWriter.error = None
    sink.write({"zerowatch/loss": 1.5}, step=3, unix_seconds=1001.0)
    sink.close(failed=False)

    assert calls == [
        opened,
        ("zerowatch/loss", 2.5, 1, 1000.0),
        ("close",),
        opened,  # the disk is still full
        opened,
        ("zerowatch/loss", 1.5, 3, 1001.0),
        ("close",),
    ]


def test_a_sink_whose_file_could_not_be_opened_again_can_be_closed(
    calls: list[tuple[Any, ...]],
) -> None:
    sink = TensorboardSink()
    sink.open(SinkRun(run_id="r", folder=Path("/runs/r")))
    FakeWriter.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        sink.write({"zerowatch/loss": 2.5}, step=1, unix_seconds=1000.0)
    calls.clear()

    sink.close(failed=True)

    assert calls == []


@pytest.mark.parametrize("run_folder", (None, Path("/runs/r")))
def test_a_given_folder_is_used_as_it_was_when_the_sink_was_made(
    calls: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_folder: Path | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = TensorboardSink("logs")
    monkeypatch.chdir("/")

    sink.open(SinkRun(run_id="r", folder=run_folder))

    assert calls == [("open", str(tmp_path / "logs"), 10)]
