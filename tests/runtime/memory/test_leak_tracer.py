"""Tests of the allocation sites of a leak: the Python lines and the tensors that grow."""

from __future__ import annotations

import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zerowatch.runtime.common import accelerator
from zerowatch.runtime.memory import leak_tracer
from zerowatch.runtime.memory.leak_tracer import LeakTracer

MIB = 2**20


def test_the_report_names_the_line_and_the_tensors_that_grow(tmp_path: Path) -> None:
    tracer = LeakTracer(3, lambda: tmp_path)
    tracer.start(on_device=False)
    kept = [torch.zeros(64, 1024) for _ in range(40)]

    tracer.close()

    text = (tmp_path / "memory" / "leak-rank-3.txt").read_text()
    assert "40 x float32[64, 1024] on cpu: 10 MiB" in text
    assert "test_leak_tracer.py" in text
    assert len(kept) == 40


def test_an_uninitialized_parameter_is_ignored(tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(4)
    tracer = LeakTracer(0, lambda: tmp_path)

    tracer.start(on_device=False)
    tracer.close()

    assert (tmp_path / "memory" / "leak-rank-0.txt").exists()
    assert lazy is not None


def test_close_stops_tracing(tmp_path: Path) -> None:
    tracer = LeakTracer(0, lambda: tmp_path)
    tracer.start(on_device=False)

    tracer.close()
    tracer.close()

    assert not tracemalloc.is_tracing()


class Recording:
    """Replaces the device by one that records allocations; `dump` writes them to a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dump: Callable[[str], object]) -> None:
        self.is_on = False
        device = SimpleNamespace(
            kind="cuda",
            start_memory_history=self._start,
            stop_memory_history=self._stop,
            dump_memory_snapshot=dump,
        )
        monkeypatch.setattr(accelerator, "current", device)

    def _start(self, max_entries: int) -> bool:
        self.is_on = True
        return True

    def _stop(self) -> None:
        self.is_on = False


def test_only_its_owner_can_read_the_allocations_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(monkeypatch, lambda path: Path(path).write_text("blocks"))
    snapshot = tmp_path / "memory" / "leak-rank-0.pickle"
    snapshot.parent.mkdir()
    snapshot.write_text("of an earlier attempt")
    tracer = LeakTracer(0, lambda: tmp_path)
    tracer.start(on_device=True)
    while_traced = recording.is_on

    tracer.close()

    assert (while_traced, recording.is_on) == (True, False)
    assert snapshot.read_text() == "blocks"
    assert stat.S_IMODE(snapshot.stat().st_mode) == 0o600


def test_a_full_disk_ends_the_recording_on_the_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(path: str) -> None:
        raise OSError(28, "No space left on device", path)

    recording = Recording(monkeypatch, fill)
    tracer = LeakTracer(0, lambda: tmp_path)
    tracer.start(on_device=True)

    tracer.close()

    assert not recording.is_on
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["leak-rank-0.txt"]
    assert f"{tmp_path}/memory/leak-rank-0.pickle" in caplog.messages[-1]


def test_a_report_that_fails_ends_both_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> str:
        raise MemoryError

    recording = Recording(monkeypatch, lambda path: None)
    monkeypatch.setattr(leak_tracer, "_report_text", fail)
    tracer = LeakTracer(0, lambda: tmp_path)
    tracer.start(on_device=True)

    with pytest.raises(MemoryError):
        tracer.close()

    assert not recording.is_on
    assert not tracemalloc.is_tracing()


def test_a_script_that_uses_tracemalloc_is_not_disturbed(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        tracer = LeakTracer(0, lambda: tmp_path)
        tracer.start(on_device=False)
        tracer.close()

        assert tracemalloc.is_tracing()
        assert not (tmp_path / "memory").exists()
    finally:
        tracemalloc.stop()


def test_nothing_is_written_before_the_trace_is_due(tmp_path: Path) -> None:
    tracer = LeakTracer(0, lambda: tmp_path)
    tracer.start(on_device=False)

    tracer.write_when_due()

    assert not (tmp_path / "memory").exists()
    tracer.close()
