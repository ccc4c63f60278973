"""Tests of the lines of figures that the setting `console` asks for."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from fakes.steps import step as plain_step
from recorded_runs import step_record

from zerowatch.errors import SettingsError
from zerowatch.metrics.catalog import training
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import Settings, load_settings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.monitor.build_watch import _print_progress
from zerowatch.runtime.monitor.progress import (
    LINE_SECONDS,
    REDRAW_SECONDS,
    Progress,
    progress_line,
)
from zerowatch.runtime.monitor.subscriptions import Subscriptions


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def progress(
    stream: io.StringIO, clock: Clock, *, is_bar: bool, total_steps: int | None = None
) -> Progress:
    recorder = Recorder()
    recorder.set(training.MFU, 0.31)
    return Progress(stream, is_bar=is_bar, total_steps=total_steps, recorder=recorder, now=clock)


def test_lines_come_at_intervals_and_once_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, is_bar=False)

    for step in range(1, 42):  # ten seconds have 20 steps
        shown.on_step(step_record(step))
        clock.seconds += LINE_SECONDS / 20
    shown.on_end()

    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"zerowatch: step {step}" for step in (1, 21, 41)
    ]


def test_a_line_has_the_figures_of_the_steps_since_the_last_line() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, is_bar=False, total_steps=500)
    shown.on_step(step_record(1))
    shown.on_step(step_record(2, seconds=0.2, phase_seconds={}, comm_exposed_seconds=0.02))
    shown.on_step(step_record(3, seconds=0.4, phase_seconds={}, comm_exposed_seconds=0.1))
    shown.on_end()

    line = stream.getvalue().splitlines()[-1]

    assert line.startswith("zerowatch: step 3/500, loss 1.667, ")
    for figure in ("300 ms/step", "3,413 tokens/s", "comm wait 20%", "620 MiB", "MFU 31%"):
        assert figure in line


def test_communication_of_evaluation_is_no_wait_of_training() -> None:
    stream = io.StringIO()
    shown = progress(stream, Clock(), is_bar=False, total_steps=None)
    shown.on_step(
        step_record(
            1,
            seconds=2.0,
            phase_seconds={"backward": 0.4, "eval": 1.6},
            comm_exposed_seconds=1.0,
            comm_exposed_phase_seconds={"eval": 0.9, "backward": 0.1},
        )
    )

    assert "comm wait 25%" in stream.getvalue()


def test_unknown_figures_are_left_out() -> None:
    stream = io.StringIO()
    shown = Progress(stream, is_bar=False, total_steps=None, recorder=Recorder(), now=Clock())

    shown.on_step(
        step_record(
            1,
            loss=None,
            tokens=None,
            samples=None,
            gradient_norm=None,
            comm_exposed_seconds=None,
            memory_bytes={},
        )
    )

    assert stream.getvalue() == "zerowatch: step 1, 500 ms/step\n"


def test_a_bar_without_a_terminal_prints_lines_without_carriage_returns() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, is_bar=True, total_steps=3)

    for step in (1, 2, 3):
        shown.on_step(step_record(step))
        clock.seconds += LINE_SECONDS
    shown.on_end()

    assert not {"\r", "\x1b"} & set(stream.getvalue())
    assert stream.getvalue().count("\n") == 3


def test_a_bar_redraws_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream, clock = Terminal(), Clock()
    shown = progress(stream, clock, is_bar=True, total_steps=4)

    for step in (1, 2, 3, 4):
        shown.on_step(step_record(step))
        clock.seconds += REDRAW_SECONDS
    shown.on_end()

    assert stream.getvalue().count("\x1b[2K") == 4
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")
    assert " step 4/4" in stream.getvalue()


@pytest.mark.parametrize("width", [8, 30, 45, 60, 80, 200])
def test_a_bar_shows_no_part_of_a_figure(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    plain, wide = Terminal(), io.StringIO()
    for stream in (plain, wide):
        shown = progress(stream, Clock(), is_bar=True)
        shown.on_step(step_record(120))

    line = plain.getvalue().rpartition("\x1b[2K")[2].rstrip("\r")
    whole = wide.getvalue().strip().removeprefix("zerowatch: ")
    figures = [figure for figure in line.split(", ") if figure]
    assert len(line) < width
    assert figures == whole.split(", ")[: len(figures)]


def test_a_closed_stream_does_not_raise() -> None:
    stream = io.StringIO()
    shown = progress(stream, Clock(), is_bar=False)
    stream.close()

    shown.on_step(step_record(1))
    shown.on_end()


def test_the_environment_chooses_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().console == "summary"
    monkeypatch.setenv("ZEROWATCH_CONSOLE", "bar")
    assert load_settings().console == "bar"
    monkeypatch.setenv("ZEROWATCH_CONSOLE", "loud")
    with pytest.raises(SettingsError, match="'summary', 'bar', 'lines' or 'off'"):
        load_settings()


@pytest.mark.parametrize("stream", [None, "closed"])
def test_without_standard_error_no_progress_is_printed_and_monitoring_goes_on(
    monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed if stream else None)
    subscriptions = Subscriptions(FailOpen())

    _print_progress(subscriptions, Recorder(), Settings(console="bar"))

    assert not subscriptions.has_listeners


MIB = 2**20


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ([{"seconds": 1.5, "loss": 2.5}], "loss 2.5, 1,500 ms/step"),
        ([{"loss": 0.000123456}], "loss 0.0001235, 1,000 ms/step"),
        ([{"gradient_norm": 12.3456}], "grad norm 12.3, 1,000 ms/step"),
        ([{"seconds": 3.0, "tokens": 6000}], "3,000 ms/step, 2,000 tokens/s per rank"),
        ([{"seconds": 4.0, "samples": 6}], "4,000 ms/step, 2 samples/s per rank"),
        ([{"tokens": 7, "samples": 5}], "1,000 ms/step, 7 tokens/s per rank"),
        (
            [{"tokens": None, "samples": 5}, {"tokens": 7, "samples": 5}],
            "1,000 ms/step, 5 samples/s per rank",
        ),
        ([{"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 6.0}], "3,000 ms/step"),
        (
            [{"seconds": 1.0, "exposed": 0.5}, {"seconds": 3.0, "exposed": None}],
            "2,000 ms/step, comm wait 50%",
        ),
        (
            [{"peak": 300 * MIB}, {"peak": 500 * MIB}, {"peak": 400 * MIB}],
            "1,000 ms/step, memory 500 MiB",
        ),
        (
            [{"memory": {"cpu": {"peak_allocated": 900 * MIB}, "cuda:0": {"allocated": 70 * MIB}}}],
            "1,000 ms/step, memory 70 MiB",
        ),
    ],
)
def test_figures_of_several_steps_are_means_sums_and_maxima(
    changes: list[dict[str, Any]], figures: str
) -> None:
    steps = []
    for fields in changes:
        memory = (
            {} if fields.get("peak") is None else {"cuda:0": {"peak_allocated": fields["peak"]}}
        )
        made = plain_step(
            7,
            seconds=fields.get("seconds", 1.0),
            loss=fields.get("loss"),
            samples=fields.get("samples"),
        )
        steps.append(
            replace(
                made,
                tokens=fields.get("tokens"),
                gradient_norm=fields.get("gradient_norm"),
                comm_exposed_seconds=fields.get("exposed"),
                memory_bytes=fields.get("memory", memory),
            )
        )

    assert progress_line(steps, None, None) == f"step 7, {figures}"


def test_a_line_ends_with_the_mfu_and_begins_with_the_share_of_the_training() -> None:
    made = replace(plain_step(7, loss=None, samples=None, peak=None), comm_exposed_seconds=None)

    assert progress_line([made], 500, 0.3149) == "step 7/500, 1,000 ms/step, MFU 31%"


@pytest.mark.parametrize(("seconds", "num_lines"), [(9.9, 1), (10.0, 2)])
def test_a_line_comes_after_ten_seconds(seconds: float, num_lines: int) -> None:
    stream, clock = io.StringIO(), Clock()
    shown = progress(stream, clock, is_bar=False)
    shown.on_step(step_record(1))
    clock.seconds += seconds

    shown.on_step(step_record(2))

    assert len(stream.getvalue().splitlines()) == num_lines


@pytest.mark.parametrize(("console", "is_bar"), [("bar", True), ("lines", False)])
def test_the_setting_chooses_lines_or_a_bar_of_the_steps_of_the_tuner(
    monkeypatch: pytest.MonkeyPatch, console: Any, is_bar: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    subscriptions = Subscriptions(FailOpen())

    settings = load_settings({"console": console, "tuner": {"total_steps": 40}})
    _print_progress(subscriptions, Recorder(), settings)
    subscriptions.enqueue(step_record(3))
    subscriptions.close()

    assert "step 3/40, " in terminal.getvalue()
    assert ("\x1b[2K" in terminal.getvalue()) is is_bar
