"""Tests of when a sink is called and what it gets, also after errors (`runtime/sinks/sink.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.clock import FakeClock
from fakes.steps import step

from zerowatch.metrics.catalog.training import STEPS
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import SinksSettings
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.sink_runner import FIRST_RETRY_SECONDS, SinkRunner
from zerowatch.runtime.sinks.step_values import step_values

METRIC = "zerowatch/metrics/steps_total"


class RecordingSink:
    """Keeps what it gets; raises in the calls that a test names."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.written: dict[int, Mapping[str, float]] = {}
        self.error: Exception | None = None

    def open(self, run: SinkRun) -> None:
        self.calls.append(f"open {run.run_id}")
        self._maybe_raise()

    def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
        self.calls.append(f"write {step}")
        self._maybe_raise()
        self.written[step] = values

    def close(self, *, failed: bool) -> None:
        self.calls.append(f"close {failed}")

    def _maybe_raise(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def runner(sink: RecordingSink, clock: FakeClock) -> SinkRunner:
    recorder = Recorder()
    recorder.set(STEPS, 9)
    run = SinkRun(run_id="r", folder=Path("runs/r"))
    return SinkRunner(sink, lambda: run, recorder.snapshot, SinksSettings(), now=clock)


def record(number: int, ended_at: float) -> StepRecord:
    return replace(step(number), ended_at_unix_seconds=ended_at)


def test_steps_are_written_once_per_interval_and_the_last_one_always(
    runner: SinkRunner, sink: RecordingSink
) -> None:
    for number in range(1, 9):
        runner.on_step(record(number, 100 + 0.4 * number))
    runner.close(failed=False)

    # The interval is a second.
    assert sink.calls == ["open r", "write 1", "write 4", "write 7", "write 8", "close False"]


def test_metrics_come_with_the_first_step_then_once_per_interval_and_at_the_end(
    runner: SinkRunner, sink: RecordingSink
) -> None:
    for number in range(1, 11):
        runner.on_step(record(number, 5.0 * number))
    runner.on_step(record(11, 50.1))
    runner.close(failed=True)

    with_metrics = [number for number, values in sink.written.items() if METRIC in values]
    assert with_metrics == [1, 4, 7, 10, 11]
    assert sink.calls[-1] == "close True"


def test_a_last_step_without_metrics_gets_them_at_the_end_and_nothing_twice(
    runner: SinkRunner, sink: RecordingSink
) -> None:
    runner.on_step(record(1, ended_at=1.0))
    runner.on_step(record(2, ended_at=9.0))
    runner.close(failed=False)

    assert sink.calls == ["open r", "write 1", "write 2", "write 2", "close False"]
    assert list(sink.written[2]) == [METRIC]


def test_a_sink_that_raised_is_called_again_after_a_delay(
    runner: SinkRunner, sink: RecordingSink, clock: FakeClock
) -> None:
    sink.error = ConnectionError("no server")
    with pytest.raises(ConnectionError):
        runner.on_step(record(1, 1))
    sink.error = None
    runner.on_step(record(2, 10))
    clock.seconds += 1.01 * FIRST_RETRY_SECONDS
    runner.on_step(record(3, 20))

    assert sink.calls == ["open r", "open r", "write 3"]


def test_the_delay_after_an_error_is_the_first_one_again_once_a_step_was_written(
    runner: SinkRunner, sink: RecordingSink, clock: FakeClock
) -> None:
    for number in (1, 2, 3):
        sink.error = ConnectionError("no server")
        with pytest.raises(ConnectionError):
            runner.on_step(record(number, 10 * number))
        sink.error = None
        clock.seconds += 1.01 * FIRST_RETRY_SECONDS
        runner.on_step(record(number, 10 * number))

    assert list(sink.written) == [1, 2, 3]


def test_a_sink_that_never_opened_is_not_closed(runner: SinkRunner, sink: RecordingSink) -> None:
    runner.close(failed=False)

    assert sink.calls == []


@pytest.mark.parametrize(
    ("after_seconds", "num_written", "with_metrics"),
    [(0.99, 1, [1]), (1.0, 2, [1]), (14.99, 2, [1]), (15.0, 2, [1, 2])],
)
def test_an_interval_is_over_exactly_at_its_end(
    runner: SinkRunner,
    sink: RecordingSink,
    after_seconds: float,
    num_written: int,
    with_metrics: list[int],
) -> None:
    runner.on_step(record(1, 100.0))
    runner.on_step(record(2, 100.0 + after_seconds))

    assert len(sink.written) == num_written
    assert [number for number, values in sink.written.items() if METRIC in values] == with_metrics


def test_the_intervals_are_those_of_the_settings(sink: RecordingSink, clock: FakeClock) -> None:
    recorder = Recorder()
    recorder.set(STEPS, 9)
    settings = SinksSettings(interval_seconds=3, metrics_interval_seconds=7)
    run = SinkRun(run_id="r", folder=None)
    runner = SinkRunner(sink, lambda: run, recorder.snapshot, settings, now=clock)

    for number in range(13):
        runner.on_step(record(number, float(number)))

    assert list(sink.written) == [0, 3, 6, 9, 12]
    assert [number for number, values in sink.written.items() if METRIC in values] == [0, 9]


def test_a_sink_gets_the_time_at_which_the_step_ended_and_opens_once(clock: FakeClock) -> None:
    events: list[object] = []

    class Sink(RecordingSink):
        def write(self, values: Mapping[str, float], *, step: int, unix_seconds: float) -> None:
            events.append((step, unix_seconds))

    run = SinkRun(run_id="r", folder=None)
    runner = SinkRunner(
        Sink(),
        lambda: events.append("run") or run,  # type: ignore[func-returns-value]
        Recorder().snapshot,
        SinksSettings(),
        on_open=lambda: events.append("opened"),
        now=clock,
    )

    assert events == []
    runner.on_step(record(3, 100.5))
    runner.on_step(record(5, 102.5))

    assert events == ["run", "opened", (3, 100.5), (5, 102.5)]


def test_the_delay_after_errors_doubles_from_ten_seconds_to_five_minutes(
    runner: SinkRunner, sink: RecordingSink, clock: FakeClock
) -> None:
    sink.error = ConnectionError("no server")
    delays, tried_at = [], clock.seconds
    for second in range(1300):
        clock.seconds = 1000.0 + second
        num_calls = len(sink.calls)
        with suppress(ConnectionError):
            runner.on_step(record(second, 10.0 * second))
        if len(sink.calls) > num_calls:
            delays.append(clock.seconds - tried_at)
            tried_at = clock.seconds

    assert delays == [0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_sink_that_raised_in_a_write_is_not_opened_again_and_is_closed(
    runner: SinkRunner, sink: RecordingSink, clock: FakeClock
) -> None:
    runner.on_step(record(1, 1.0))
    sink.error = ConnectionError("no server")
    with pytest.raises(ConnectionError):
        runner.on_step(record(2, 5.0))
    runner.on_step(record(3, 9.0))  # within the delay
    with pytest.raises(ConnectionError):
        runner.close(failed=True)

    assert sink.calls == ["open r", "write 1", "write 2", "write 3", "close True"]


def test_a_step_that_was_written_with_metrics_is_not_written_again_at_the_end(
    runner: SinkRunner, sink: RecordingSink
) -> None:
    runner.on_step(record(1, 1.0))
    runner.close(failed=False)

    assert sink.calls == ["open r", "write 1", "close False"]


def test_after_the_clock_was_set_back_steps_are_written_at_the_intervals_again(
    runner: SinkRunner, sink: RecordingSink
) -> None:
    for number in range(1, 4):
        runner.on_step(record(number, 10_000 + 2.0 * number))
    for number in range(4, 13):
        runner.on_step(record(number, 6_400 + 2.0 * number))

    assert list(sink.written) == list(range(1, 13))
    with_metrics = [number for number, values in sink.written.items() if METRIC in values]
    assert with_metrics == [1, 4, 12]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_last_step_whose_write_failed_is_written_at_the_end_with_all_values(
    runner: SinkRunner, sink: RecordingSink, is_first: bool
) -> None:
    """With the first step the metrics are due, with the second one they are not."""
    if not is_first:
        runner.on_step(record(1, 1.0))
    sink.error = ConnectionError("no server")
    with pytest.raises(ConnectionError):
        runner.on_step(record(2, 5.0))
    sink.error = None

    runner.close(failed=False)

    assert sink.calls[-2:] == ["write 2", "close False"]
    assert sink.written[2].keys() > step_values(record(2, 5.0)).keys() > set()
    assert METRIC in sink.written[2]
