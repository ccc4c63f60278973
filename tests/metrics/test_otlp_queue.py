"""Tests of the OTLP queue with a collector that rejects exports: pauses, counts and logs.

Covers `otlp_batches.py`.
"""

from __future__ import annotations

import logging
import time

import pytest
from fakes.clock import FakeClock

from zerowatch.metrics.catalog import CATALOG
from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.catalog.training import LOSS, RUN_ACTIVE, RUN_END_INFO, STEPS
from zerowatch.metrics.exporters.otlp_options import (
    DEFAULT_METRICS_INTERVAL_SECONDS as INTERVAL_SECONDS,
)
from zerowatch.metrics.exporters.otlp_options import otlp_options
from zerowatch.metrics.exporters.otlp_queue import (
    FAILURES_ALLOWED,
    FIRST_PAUSE_SECONDS,
    MAX_LINES,
    MAX_TRACES,
    CircuitBreaker,
    OtlpQueue,
)
from zerowatch.metrics.exporters.telemetry_data import LogLine, Span, StepTrace
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import OtelSettings

TIMEOUT_SECONDS = 5.0
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
        self.redirects, self.rejections = {}, {}

    def describe(self, attributes):
        pass

    def send_traces(self, traces):
        self.tries += 1
        return self.takes

    send_lines = send_traces

    def send_metrics(self, families, start_ns, now_ns):
        return False


class Limited(Refusing):
    """Accepts the batches of metrics for which `takes` is true.

    Attributes:
        accepted: The names of the families of each accepted batch.
        refused: The same of each refused batch.
        intervals: The start and end of each accepted point of zerowatch_steps_total.
    """

    def __init__(self, takes):
        super().__init__()
        self.takes = takes
        self.accepted, self.refused, self.intervals = [], [], []

    def send_metrics(self, families, start_ns, now_ns):
        names = [family.name for family in families]
        is_taken = self.takes(names)
        (self.accepted if is_taken else self.refused).append(names)
        for family in families:
            if is_taken and family.name == STEPS.name:
                self.intervals.append((family.points[0].start_ns or start_ns, now_ns))
        return is_taken


@pytest.fixture
def sender():
    return Refusing()


@pytest.fixture
def make_outbox(sender):
    def make(
        recorder=None, *, rank=0, now=None, metrics=False, otlp=None, temporality="cumulative"
    ):
        variables = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": temporality}
        return OtlpQueue(
            recorder or Recorder(),
            otlp or sender,
            otlp_options(
                OtelSettings(
                    endpoint="http://collector:4318",
                    metrics=metrics,
                    logs=True,
                    timeout_seconds=TIMEOUT_SECONDS,
                ),
                variables,
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


class Slow(Refusing):
    """Accepts everything after a second, in which further traces are queued.

    Attributes:
        sent: The kind of each request.
        outbox: The queue.
        during: Called in each request, with the kind.
    """

    def __init__(self, clock):
        super().__init__()
        self.sent, self.clock, self.outbox, self.during = [], clock, None, lambda kind: None

    def request(self, kind):
        self.sent.append(kind)
        self.clock.seconds += 1
        for _ in range(10):
            self.outbox.add_trace(TRACE)
        self.during(kind)
        return True

    def send_traces(self, traces):
        return self.request("traces")

    def send_lines(self, lines):
        return self.request("logs")

    def send_metrics(self, families, start_ns, now_ns):
        return self.request("metrics")


@pytest.fixture
def slow(make_outbox):
    """A slow collector, whose queue holds a trace, a log line and one batch of metrics."""
    clock = FakeClock()
    slow, recorder = Slow(clock), Recorder()
    recorder.set(LOSS, 1.0)
    slow.outbox = make_outbox(recorder, now=clock, metrics=True, otlp=slow)
    slow.outbox.add_trace(TRACE)
    slow.outbox.add_line(LINE)
    return slow


def test_traces_that_are_queued_faster_than_sent_do_not_keep_back_other_data(slow):
    is_behind = slow.outbox.flush()

    assert slow.sent == ["logs", "traces", "traces", "metrics"]
    assert is_behind


def test_log_lines_that_are_queued_faster_than_sent_do_not_keep_back_other_data(slow):
    def add_lines(kind):
        for _ in range(MAX_LINES):
            slow.outbox.add_line(LINE)

    slow.during = add_lines

    slow.outbox.flush()

    assert slow.sent == ["logs", "logs", "traces", "traces", "metrics"]


def test_the_last_flush_begins_with_the_metrics_and_the_log_lines(slow):
    slow.during = lambda kind: kind == "traces" and slow.outbox.give_up()

    slow.outbox.flush(final=True)

    assert slow.sent == ["metrics", "logs", "traces"]


def test_a_flush_is_not_behind_if_everything_is_sent_or_exports_pause(make_outbox, sender):
    outbox = make_outbox()
    outbox.add_line(LINE)

    assert not outbox.flush()
    for _ in range(FAILURES_ALLOWED + 1):
        outbox.add_trace(TRACE)
    assert not outbox.flush()


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("logs", ["logs"]),
        ("traces", ["logs", "traces"]),
        ("metrics", ["logs", "traces", "traces", "metrics"]),
    ],
)
def test_a_flush_ends_with_the_running_request_if_the_last_one_is_due(slow, kind, sent):
    slow.outbox._recorder = recorder_of_many()
    slow.outbox.add_trace(TRACE)

    slow.outbox.flush(is_ending=lambda: kind in slow.sent)
    early = list(slow.sent)
    slow.during = lambda kind: kind == "logs" and slow.outbox.give_up()
    slow.outbox.add_line(LINE)
    slow.outbox.flush(final=True)

    assert early == sent
    assert slow.sent.count("metrics") > sent.count("metrics") + 1
    assert slow.sent[-1] == "logs"


def recorder_of_many():
    """Return a recorder whose metrics are sent in several batches."""
    recorder = Recorder()
    for spec in CATALOG:
        if spec.kind in ("gauge", "counter"):
            for name in "abcdefgh":
                labels = [label.values[0] if label.values else name for label in spec.labels]
                recorder.set(spec, 1.0, *labels)
    recorder.set(EXPORTER_FAILURES, 0, "otlp")
    recorder.set_info(RUN_END_INFO, "completed")
    return recorder


def every_batch(make_outbox):
    """Return the names of the families of each batch of `recorder_of_many`."""
    otlp = Limited(lambda names: True)
    make_outbox(recorder_of_many(), metrics=True, otlp=otlp).flush()
    return otlp.accepted


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_refused_batch_of_metrics_does_not_keep_back_the_others(make_outbox, caplog, place):
    batches, recorder = every_batch(make_outbox), recorder_of_many()
    refused = batches[place][1]
    otlp = Limited(lambda names: refused not in names)
    outbox = make_outbox(recorder, metrics=True, otlp=otlp)

    outbox.flush()
    accepted = list(otlp.accepted)
    for _ in range(FAILURES_ALLOWED - 1):
        logged_before = list(caplog.messages)
        outbox.flush(final=True)

    assert accepted == [names for names in batches if refused not in names]
    assert len(accepted) >= 2
    assert len(otlp.accepted) >= FAILURES_ALLOWED * len(accepted)
    assert recorder.value(EXPORTER_FAILURES, "otlp") == len(otlp.refused) == FAILURES_ALLOWED
    assert logged_before == []
    [line] = caplog.messages
    assert "does not accept part of the metrics of rank 0" in line


def test_a_limit_on_the_rate_of_requests_does_not_always_refuse_the_same_families(make_outbox):
    batches = every_batch(make_outbox)
    left = 0

    def is_within_limit(names):
        nonlocal left
        left -= 1
        return left >= 0

    clock, otlp = FakeClock(), Limited(is_within_limit)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    for _ in range(len(batches) + 1):
        left = 1
        outbox.flush()
        clock.seconds += INTERVAL_SECONDS

    assert {name for batch in otlp.accepted for name in batch} == {
        name for batch in batches for name in batch
    }


def test_a_collector_that_accepts_no_metrics_gets_few_requests(make_outbox, caplog):
    recorder, clock = recorder_of_many(), FakeClock()
    otlp = Limited(lambda names: False)
    outbox = make_outbox(recorder, metrics=True, otlp=otlp, now=clock)

    requests = []
    for _ in range(4):
        outbox.flush()
        requests.append(len(otlp.refused))
        clock.seconds += INTERVAL_SECONDS

    assert requests == [3, 4, 5, 5]  # then it pauses
    [line] = caplog.messages
    assert "does not accept the metrics of rank 0" in line


@pytest.mark.parametrize("number", [FAILURES_ALLOWED, FAILURES_ALLOWED + 1, 2 * FAILURES_ALLOWED])
def test_however_many_batches_in_a_row_are_refused_the_others_arrive_in_each_interval(
    make_outbox, number
):
    batches = every_batch(make_outbox)
    bad = {name for batch in batches[1 : 1 + number] for name in batch}
    good = {name for batch in batches for name in batch} - bad
    clock, otlp = FakeClock(), Limited(lambda names: bad.isdisjoint(names))
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    arrived = []
    for interval in range(6):
        otlp.accepted.clear()
        outbox.flush(final=interval == 5)
        arrived.append({name for batch in otlp.accepted for name in batch})
        clock.seconds += INTERVAL_SECONDS

    assert good >= set(batches[0]) | set(batches[-1])
    assert arrived == [good] * 6
    assert {name for batch in otlp.refused for name in batch} == bad


@pytest.mark.parametrize("number", [FAILURES_ALLOWED, FAILURES_ALLOWED + 2])
def test_if_the_first_batches_are_refused_the_others_arrive_from_a_later_interval_on(
    make_outbox, caplog, number
):
    batches = every_batch(make_outbox)
    bad = {name for batch in batches[:number] for name in batch}
    clock, otlp = FakeClock(), Limited(lambda names: bad.isdisjoint(names))
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    arrived = []
    for _ in range(6):
        otlp.accepted.clear()
        outbox.flush()
        arrived.append({name for batch in otlp.accepted for name in batch})
        clock.seconds += FIRST_PAUSE_SECONDS

    num_without = 1 + number - FAILURES_ALLOWED
    good = {name for batch in batches[number:] for name in batch}
    assert arrived == [set()] * num_without + [good] * (6 - num_without)
    assert "does not accept part of the metrics of rank 0" in caplog.messages[-1]
    assert len(caplog.messages) == (2 if num_without >= FAILURES_ALLOWED else 1)


def test_a_transient_failure_between_refused_batches_does_not_keep_back_the_others(make_outbox):
    batches = every_batch(make_outbox)
    everything = {name for batch in batches for name in batch}
    bad = {name for batch in batches[1:5] for name in batch}
    clock, otlp = FakeClock(), Limited(lambda names: True)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    num_accepted = []
    for bad_now in (bad, everything, bad):
        otlp.takes = bad_now.isdisjoint
        otlp.accepted.clear()
        outbox.flush()
        num_accepted.append(len(otlp.accepted))
        clock.seconds += INTERVAL_SECONDS

    assert num_accepted == [len(batches) - 4, 0, len(batches) - 4]


def test_a_collector_that_stops_to_answer_delays_an_interval_by_three_timeouts(make_outbox):
    clock = FakeClock()
    began = clock.seconds

    def is_answered(names):
        if otlp.accepted:
            clock.seconds += TIMEOUT_SECONDS
        return not otlp.accepted

    otlp = Limited(is_answered)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    outbox.flush()

    assert (len(otlp.accepted), len(otlp.refused)) == (1, FAILURES_ALLOWED)
    assert clock.seconds - began == FAILURES_ALLOWED * TIMEOUT_SECONDS


# What alerts on the end of a run read.
END = [RUN_ACTIVE.name, RUN_END_INFO.name, "process_start_time_seconds"]


def test_the_last_flush_does_not_begin_with_a_refused_batch(make_outbox):
    """It may take its timeout, and the process does not wait for long."""
    batches = every_batch(make_outbox)
    bad = next(name for name in batches[0] if name not in END)
    otlp = Limited(lambda names: bad not in names)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp)
    outbox.flush()

    otlp.accepted.clear(), otlp.refused.clear()
    otlp.takes = lambda names: not otlp.refused and bad not in names
    outbox.flush(final=True)

    expected = [name for batch in batches[1:] for name in batch if name not in END]
    assert sorted(otlp.accepted[0]) == sorted(END)
    assert [name for batch in otlp.accepted[1:] for name in batch] == expected


def test_the_last_flush_begins_with_the_end_of_the_run_though_its_batch_was_refused(make_outbox):
    batches = every_batch(make_outbox)
    [batch] = [batch for batch in batches if RUN_ACTIVE.name in batch]
    bad = next(name for name in batch if name not in END)
    otlp = Limited(lambda names: bad not in names)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp)
    outbox.flush()

    otlp.accepted.clear()
    outbox.flush(final=True)

    assert sorted(otlp.accepted[0]) == sorted(END)
    arrived = {name for batch in otlp.accepted for name in batch}
    assert arrived == {name for names in batches for name in names if bad not in names} | set(END)


def test_the_end_counts_as_sent_after_the_first_request_of_the_last_flush(slow):
    seen = []

    def note(kind):
        seen.append(slow.outbox.end_was_sent.is_set())
        if kind == "logs":
            slow.outbox.give_up()

    slow.during = note
    slow.outbox._recorder.set_info(RUN_END_INFO, "completed")

    slow.outbox.flush(final=True)

    assert seen == [False, True, True]  # the end, the other metrics, the log lines


@pytest.mark.parametrize("num_refused", [1, 2])
def test_the_end_of_the_run_is_sent_again_once_the_collector_accepts_other_metrics(
    make_outbox, num_refused
):
    otlp, known = Limited(lambda names: True), []
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp)
    outbox.flush()

    def takes(names):
        known.append(outbox.end_was_sent.is_set())
        return len(otlp.refused) >= num_refused

    otlp.accepted.clear()
    otlp.takes = takes
    outbox.flush(final=True)

    assert sorted(otlp.refused[0]) == sorted(END)
    assert sorted(otlp.accepted[1]) == sorted(END)
    assert [RUN_END_INFO.name in names for names in otlp.accepted].count(True) == 1
    num_until_end = num_refused + 2
    assert known == [False] * num_until_end + [True] * (len(known) - num_until_end)


def test_the_end_of_the_run_is_not_sent_a_third_time(make_outbox):
    otlp, known = Limited(lambda names: True), []
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp)
    outbox.flush()
    num_batches = len(otlp.accepted)

    otlp.accepted.clear()
    otlp.takes = lambda names: known.append(outbox.end_was_sent.is_set()) or END[0] not in names
    outbox.flush(final=True)

    assert [sorted(names) for names in otlp.refused] == [sorted(END)] * 2
    assert len(otlp.accepted) >= num_batches
    assert known[:4] == [False, False, False, True]


def test_a_repeated_last_flush_sends_the_end_with_the_values_and_the_time_of_the_first(make_outbox):
    recorder, otlp = recorder_of_many(), Limited(lambda names: True)
    outbox = make_outbox(recorder, metrics=True, otlp=otlp)
    outbox.flush()
    otlp.takes = lambda names: False
    outbox.flush(final=True)
    ended_ns, sent = time.time_ns(), dict[str, float]()
    recorder.add(STEPS, 100)

    def keep(families, start_ns, now_ns):
        sent.update((each.name, each.points[0].value) for each in families)
        assert now_ns < ended_ns  # a later run with the same id may have sent newer values
        return True

    otlp.send_metrics = keep
    outbox.flush(final=True)

    assert sent.keys() >= {*END, STEPS.name}
    assert sent[STEPS.name] < 100


@pytest.mark.parametrize("has_come_back", [False, True])
def test_the_last_flush_tries_to_send_the_end_though_exports_pause(make_outbox, has_come_back):
    clock, otlp = FakeClock(), Limited(lambda names: False)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)
    for _ in range(FAILURES_ALLOWED):
        outbox.flush()
        clock.seconds += INTERVAL_SECONDS
    otlp.refused.clear()
    outbox.flush()
    num_in_pause = len(otlp.refused)

    otlp.takes = lambda names: has_come_back
    outbox.flush(final=True)

    assert num_in_pause == 0
    assert outbox.end_was_sent.is_set()
    assert sorted((otlp.accepted or otlp.refused)[0]) == sorted(END)
    assert len(otlp.refused) == (0 if has_come_back else 1)
    assert (len(otlp.accepted) > 1) is has_come_back  # the other metrics follow


def test_a_collector_is_known_to_answer_before_all_metrics_of_the_first_interval_are_sent(
    make_outbox,
):
    otlp, answered = Limited(lambda names: answered.append(outbox.is_answered) or True), []
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp)

    outbox.flush()

    assert answered[:2] == [False, True]


def test_a_collector_is_known_to_answer_while_it_accepts_metrics(make_outbox):
    clock, otlp = FakeClock(), Limited(lambda names: False)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)

    answered = [outbox.is_answered]
    for otlp.takes in (lambda _: False, lambda _: True, lambda _: False):
        outbox.flush()
        answered.append(outbox.is_answered)
        clock.seconds += INTERVAL_SECONDS

    assert answered == [False, False, True, False]


def test_after_the_end_of_the_run_requests_are_sent_for_three_timeouts_without_log_lines(
    make_outbox, caplog
):
    clock = FakeClock()

    def refuse(names):
        clock.seconds += 0.9 * TIMEOUT_SECONDS
        return len(otlp.accepted) < 2 and not otlp.refused

    otlp = Limited(refuse)
    outbox = make_outbox(recorder_of_many(), metrics=True, otlp=otlp, now=clock)
    for _ in range(3):
        outbox.add_trace(TRACE)

    outbox.finish_quietly()
    outbox.flush(final=True)
    num_requests = len(otlp.accepted) + len(otlp.refused)
    outbox.give_up()
    outbox.give_up()

    assert num_requests == 4  # the fourth began before three timeouts were over
    assert (otlp.tries, outbox.dropped) == (0, 3)
    assert caplog.records == []


def test_refusals_after_the_end_of_the_run_are_not_logged(make_outbox, sender, caplog):
    outbox = make_outbox()
    for _ in range(FAILURES_ALLOWED):
        outbox.add_trace(TRACE)

    outbox.finish_quietly()
    outbox.flush()

    assert sender.tries == FAILURES_ALLOWED
    assert caplog.records == []


def test_intervals_of_increases_do_not_overlap_if_another_batch_is_refused(make_outbox):
    recorder = recorder_of_many()
    refused = every_batch(make_outbox)[-1][-1]
    otlp = Limited(lambda names: refused not in names)
    outbox = make_outbox(recorder, metrics=True, otlp=otlp, temporality="delta")

    for _ in range(3):
        recorder.add(STEPS, 1)
        outbox.flush(final=True)

    first, second, third = otlp.intervals
    assert (second[0], third[0]) == (first[1], second[1])
    assert otlp.refused
