"""Tests of the OTLP queue with a collector that rejects exports: pauses, counts and logs."""

from __future__ import annotations

import logging

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.catalog.training import LOSS
from zerowatch.metrics.exporters.otlp_options import otlp_options
from zerowatch.metrics.exporters.otlp_queue import (
    MAX_LINES,
    MAX_TRACES,
    CircuitBreaker,
    OtlpQueue,
)
from zerowatch.metrics.exporters.telemetry_data import LogLine, Span, StepTrace
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import OtelSettings

TRACE = StepTrace(
    trace_id=1,
    span_id=2,
    parent_id=None,
    root=Span(name="train.step", start_ns=1, end_ns=2),
    children=(),
)
LINE = LogLine(logger="zerowatch", unix_ns=1, level=20, text="a", attributes={})


class Refusing:
    """Accepts nothing until `takes` is set."""

    def __init__(self) -> None:
        self.takes = False
        self.tries = 0
        self.redirects = {}

    def describe(self, attributes):
        pass

    def send_traces(self, traces):
        self.tries += 1
        return self.takes

    send_lines = send_traces

    def send_metrics(self, families, start_ns, now_ns):
        return False


@pytest.fixture
def sender():
    return Refusing()


@pytest.fixture
def make_outbox(sender):
    def make(recorder=None, *, rank=0, now=None, metrics=False):
        return OtlpQueue(
            recorder or Recorder(),
            sender,
            otlp_options(
                OtelSettings(endpoint="http://collector:4318", metrics=metrics, logs=True), {}
            ),
            identity=lambda: {"run": "night-7", "node": "a", "rank": str(rank)},
            rank=rank,
            hardware_ids={},
            describe=dict,
            now=now or FakeClock(),
        )

    return make


def test_from_the_third_failure_on_the_pauses_double():
    clock = FakeClock()
    circuit = CircuitBreaker(clock)

    pauses = []
    for _ in range(7):
        circuit.failed()
        before = clock.seconds
        while not circuit.is_closed:
            clock.seconds += 1
        pauses.append(clock.seconds - before)

    assert pauses == [0, 0, 30, 60, 120, 240, 300]


def test_a_success_resets_the_failure_count():
    circuit = CircuitBreaker(FakeClock())

    circuit.failed()
    circuit.failed()
    circuit.succeeded()
    circuit.failed()

    assert circuit.is_closed


def test_failed_exports_are_counted_and_their_traces_dropped(make_outbox, sender):
    recorder = Recorder()
    outbox = make_outbox(recorder)
    for _ in range(5):
        outbox.add_trace(TRACE)

    outbox.flush()

    assert sender.tries == 3
    assert recorder.snapshot().value(EXPORTER_FAILURES, "otlp") == 3
    assert outbox.dropped == 3


def test_a_failing_collector_is_logged_once(make_outbox, caplog):
    clock = FakeClock()
    outbox = make_outbox(now=clock)

    for _ in range(8):
        outbox.add_trace(TRACE)
        outbox.flush()
        clock.seconds += 400

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "http://collector:4318" in record.message
    assert EXPORTER_FAILURES.name in record.message


def test_a_collector_that_takes_traces_only_is_logged_and_still_gets_traces(
    make_outbox, sender, caplog
):
    recorder, clock = Recorder(), FakeClock()
    recorder.set(LOSS, 1.0)
    sender.takes = True
    outbox = make_outbox(recorder, now=clock, metrics=True)

    for _ in range(4):
        outbox.add_trace(TRACE)
        outbox.flush()
        clock.seconds += 16

    assert sender.tries == 4
    assert recorder.snapshot().value(EXPORTER_FAILURES, "otlp") == 3
    assert ["otel.metrics=false" in record.message for record in caplog.records] == [True]


def test_ranks_other_than_zero_log_at_info_level(make_outbox, caplog):
    caplog.set_level(logging.INFO)
    outbox = make_outbox(rank=5)

    for _ in range(3):
        outbox.add_trace(TRACE)
    outbox.flush()

    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_exports_are_retried_after_the_pause(make_outbox, sender):
    clock = FakeClock()
    outbox = make_outbox(now=clock)
    for _ in range(5):
        outbox.add_trace(TRACE)
    outbox.flush()

    sender.takes = True
    outbox.flush()
    tries_in_the_pause = sender.tries
    clock.seconds += 31
    outbox.flush()

    assert tries_in_the_pause == 3
    assert sender.tries == 5
    assert outbox.dropped == 3


def test_the_last_flush_does_not_retry_during_a_pause(make_outbox, sender):
    outbox = make_outbox()
    for _ in range(5):
        outbox.add_trace(TRACE)
    outbox.flush()

    outbox.flush(final=True)
    outbox.give_up()

    assert sender.tries == 3
    assert outbox.dropped == 5


def test_after_give_up_nothing_is_sent_or_logged(make_outbox, sender, caplog):
    outbox = make_outbox()
    outbox.add_trace(TRACE)

    outbox.give_up()
    outbox.flush()

    assert sender.tries == 0
    assert outbox.dropped == 1
    assert caplog.records == []


def test_records_beyond_the_queue_size_are_dropped_and_counted(make_outbox):
    outbox = make_outbox()

    for _ in range(MAX_TRACES + 2):
        outbox.add_trace(TRACE)
    for _ in range(MAX_LINES + 3):
        outbox.add_line(LINE)

    assert outbox.dropped == 5


def test_log_lines_are_sent_in_batches(make_outbox, sender):
    sender.takes = True
    outbox = make_outbox()
    for _ in range(65):
        outbox.add_line(LINE)

    outbox.flush()

    assert sender.tries == 2
