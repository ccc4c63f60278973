"""Tests of the traces of profiled steps."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from fakes.steps import step

from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.instrumentation.profiled_steps import MARK, ProfiledSteps
from zerowatch.runtime.instrumentation.trace_files import FOLDER, MAX_RANKS, TraceFiles


def profile_steps(traces: TraceFiles, last: int) -> None:
    """Profile every second step, as the training and the watch thread do."""
    profiled = ProfiledSteps(2, Recorder(), on_device=False, traces=traces)
    for number in range(1, last + 1):
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiled.on_step_end(number)
        profiled.compare(step(number))
    profiled.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / FOLDER).glob("*"))


def test_the_trace_of_a_profiled_step_is_in_the_run_folder(tmp_path: Path) -> None:
    profile_steps(TraceFiles(lambda: tmp_path, rank=1, max_files=3), last=3)

    assert names(tmp_path) == ["rank-1-step-2.pt.trace.json"]
    events = json.loads((tmp_path / FOLDER / names(tmp_path)[0]).read_text())["traceEvents"]
    assert {MARK, "aten::mm"} <= {event["name"] for event in events}


def test_only_the_newest_traces_are_kept(tmp_path: Path) -> None:
    profile_steps(TraceFiles(lambda: tmp_path, rank=0, max_files=2), last=7)

    assert names(tmp_path) == ["rank-0-step-4.pt.trace.json", "rank-0-step-6.pt.trace.json"]


def test_a_repeated_step_replaces_its_trace_and_is_the_newest(tmp_path: Path) -> None:
    class Results:
        def save(self, path: str) -> None:
            Path(path).write_text("{}")

    traces = TraceFiles(lambda: tmp_path, rank=0, max_files=2)
    for number in (2, 4, 2, 6):
        traces.save(number, Results())

    assert names(tmp_path) == ["rank-0-step-2.pt.trace.json", "rank-0-step-6.pt.trace.json"]


def test_traces_of_earlier_attempts_count(tmp_path: Path) -> None:
    for _ in range(3):
        profile_steps(TraceFiles(lambda: tmp_path, rank=0, max_files=2), last=5)
    profile_steps(TraceFiles(lambda: tmp_path, rank=0, max_files=2), last=7)

    assert names(tmp_path) == ["rank-0-step-4.pt.trace.json", "rank-0-step-6.pt.trace.json"]


def test_nothing_is_written_without_a_folder_or_on_a_late_rank_or_if_off(tmp_path: Path) -> None:
    for traces in (
        TraceFiles(lambda: None, rank=0, max_files=3),
        TraceFiles(lambda: tmp_path, rank=MAX_RANKS, max_files=3),
        TraceFiles(lambda: tmp_path, rank=0, max_files=0),
    ):
        profile_steps(traces, last=3)

    assert names(tmp_path) == []
