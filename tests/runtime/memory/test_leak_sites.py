"""Where a leak is allocated: the lines of Python and the tensors that there are more of."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

from zerowatch.runtime.memory.leak_tracer import LeakTracer

MIB = 2**20


def test_the_report_names_the_line_and_the_tensors_that_grow(tmp_path: Path) -> None:
    sites = LeakTracer(3, lambda: tmp_path)
    sites.start(on_cuda=False)
    kept = [torch.zeros(64, 1024) for _ in range(40)]

    sites.close()

    text = (tmp_path / "memory" / "leak-rank-3.txt").read_text()
    assert "40 x float32[64, 1024] on cpu: 10 MiB" in text
    assert "test_leak_sites.py" in text
    assert len(kept) == 40


def test_a_parameter_that_has_no_shape_yet_is_passed_over(tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(4)
    sites = LeakTracer(0, lambda: tmp_path)

    sites.start(on_cuda=False)
    sites.close()

    assert (tmp_path / "memory" / "leak-rank-0.txt").exists()
    assert lazy is not None


def test_tracing_ends_and_leaves_nothing_running(tmp_path: Path) -> None:
    sites = LeakTracer(0, lambda: tmp_path)
    sites.start(on_cuda=False)

    sites.close()
    sites.close()

    assert not tracemalloc.is_tracing()


def test_a_script_that_traces_itself_is_left_alone(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        sites = LeakTracer(0, lambda: tmp_path)
        sites.start(on_cuda=False)
        sites.close()

        assert tracemalloc.is_tracing()
        assert not (tmp_path / "memory").exists()
    finally:
        tracemalloc.stop()


def test_nothing_is_written_before_it_had_time_to_show(tmp_path: Path) -> None:
    sites = LeakTracer(0, lambda: tmp_path)
    sites.start(on_cuda=False)

    sites.write_when_due()

    assert not (tmp_path / "memory").exists()
    sites.close()
