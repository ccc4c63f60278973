"""Tests of the allocation sites of a leak: the Python lines and the tensors that grow."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

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
