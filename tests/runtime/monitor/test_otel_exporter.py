"""Tests of `OtelExporter`: which steps are traced, their parents and their exemplars."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter_ns
from types import SimpleNamespace

import pytest
from fakes.otlp_collector import Collector, attributes_of
from fakes.scraper import eventually
from fakes.steps import step as record_of

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.metrics.catalog.training import RUN_ACTIVE, RUN_END_INFO, STEP_DURATION
from zerowatch.metrics.exporters.telemetry_data import Span
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import OtelSettings
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import FORWARD, PhaseTimer
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.common.step_errors import StepErrors
from zerowatch.runtime.monitor import otel_exporter
from zerowatch.runtime.monitor.otel_exporter import MAX_HELD_STEPS, OtelExporter
from zerowatch.runtime.monitor.otel_spans import span_id_of, trace_id_of
from zerowatch.runtime.monitor.step_metrics import FinishedStep

RUN, NEVER = "night-7", 10**9
OWN_LOGGER = logging.getLogger("zerowatch")
STATUS_ERROR = 2


class Rank:
    """One rank's telemetry, whose steps the tests construct."""

    def __init__(
        self,
        collector,
        *,
        rank=0,
        world_size=2,
        local_rank=None,
        attempt=0,
        find_gpu=dict,
        start="0-a",
        **otel,
    ):
        self.collector = collector
        self.run_id = otel.pop("run_id", RUN)
        self.recorder = Recorder()
        self.engine = SimpleNamespace(global_steps=0)
        identity = ProcessInfo(
            rank=rank,
            local_rank=rank if local_rank is None else local_rank,
            world_size=world_size,
            host="a",
            attempt=attempt,
        )
        given = {"endpoint": collector.endpoint, "every_steps": 1, **otel}
        context = SimpleNamespace(
            engine=lambda: self.engine,
            identity=identity,
            watch_index=0,
            settings=SimpleNamespace(
                otel=OtelSettings(**given), serve=SimpleNamespace(detail="full")
            ),
            phase_timer=PhaseTimer(),
            run_id=lambda: self.run_id,
            recorder=self.recorder,
            fail_open=FailOpen(),
            step_errors=StepErrors(),
        )
        self.context = context
        self.telemetry = OtelExporter(context, find_gpu, lambda: start)

    def trace(self, number, seconds=1.0, user_trace=None, kept_seconds=None, calls=()):
        """Publish a step and let it leave a trace."""
        now = perf_counter_ns()
        closed = SimpleNamespace(
            intervals=[(FORWARD, now - int((kept_seconds or seconds) * 1e9), now)],
            batch=CallBatch([]),
            trace=user_trace,
        )
        self.recorder.observe(STEP_DURATION, seconds, exemplar=user_trace)
        record = replace(record_of(number, seconds=seconds), ended_at_unix_seconds=time.time())
        self.telemetry.trace([FinishedStep(record, closed, calls)])

    def roots(self):
        """Close, and return the roots that the collector got."""
        self.telemetry.close()
        return [span for _, span in self.collector.spans() if span.name == "train.step"]


@pytest.fixture
def make_rank(monkeypatch):
    monkeypatch.setattr(otel_exporter, "CLOSE_SECONDS", 60.0)  # a busy machine sends late
    made = []
    with Collector() as collector:

        def make(**given):
            made.append(Rank(collector, **given))
            return made[-1]

        yield make
        for rank in made:
            rank.telemetry.close()


def numbers(roots):
    return [attributes_of(root)["zerowatch.step"] for root in roots]


def test_without_an_endpoint_nothing_is_sent(make_rank, monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)

    rank = make_rank(endpoint=None)

    assert not rank.telemetry.is_on
    assert not rank.telemetry.makes_traces
    rank.telemetry.close()


def test_if_its_thread_cannot_be_started_nothing_is_sent_and_training_goes_on(
    make_rank, monkeypatch, caplog
):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "zerowatch-otlp":
            raise RuntimeError("can't start new thread")
        start(thread)

    handlers = list(OWN_LOGGER.handlers)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        rank = make_rank(logs=True)

    assert not rank.telemetry.is_on
    assert not rank.telemetry.makes_traces
    assert handlers == OWN_LOGGER.handlers
    assert "can't start new thread" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sampled_step_is_a_child_of_rank_0s(make_rank, rank):
    one = make_rank(rank=rank)

    one.trace(4)

    [root] = one.roots()
    above = span_id_of(RUN, 4, 0, attempt="0-a.0").to_bytes(8, "big")
    assert root.parent_span_id == (above if rank else b"")
    assert rank or root.span_id == above


@pytest.mark.parametrize("starts", [("0-a", "0-b"), (None, None)])
def test_a_restart_that_the_launcher_does_not_count_has_spans_of_its_own(make_rank, starts):
    before, after = (make_rank(start=start) for start in starts)

    for rank in (before, after):
        rank.trace(4)
        rank.telemetry.close()

    ids = [root.span_id for root in after.roots()]
    assert len(ids) == len(set(ids)) == 2


def test_a_slow_step_is_traced_without_a_parent(make_rank):
    one = make_rank(rank=1, every_steps=NEVER)

    for number in range(20):
        one.trace(number, 1.0)
    one.trace(20, 2.5)

    [root] = one.roots()
    assert attributes_of(root)["zerowatch.sampled_by"] == "slow"
    assert numbers([root]) == [20]
    assert root.trace_id == trace_id_of(RUN, 20).to_bytes(16, "big")
    assert root.parent_span_id == b""


def test_a_slow_step_links_to_the_last_sampled_one(make_rank, monkeypatch):
    one = make_rank(rank=1, every_steps=NEVER)
    for number in range(20):
        one.trace(number, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(otel_exporter, "is_sampled", lambda *_: True)
        one.trace(20, 1.0)
    one.trace(21, 2.5)

    sampled, slow = one.roots()
    [link] = slow.links
    assert (link.trace_id, link.span_id) == (sampled.trace_id, sampled.span_id)
    assert not sampled.links


def test_a_step_with_an_error_is_traced_with_its_exceptions(make_rank):
    one = make_rank(rank=1, every_steps=NEVER)
    errors = one.context.step_errors
    one.trace(1)
    errors.add_exception("out_of_memory", MemoryError("no room"))
    errors.add("window_discarded", "zerowatch.WindowDiscarded", "discarded")
    one.trace(2)
    one.trace(3, seconds=1e-9)

    [root] = one.roots()
    assert numbers([root]) == [2]
    assert attributes_of(root)["zerowatch.sampled_by"] == "error"
    assert (root.status.code, root.status.message) == (STATUS_ERROR, "no room")
    assert [event.name for event in root.events] == ["exception", "exception"]
    first, second = map(attributes_of, root.events)
    assert (first["exception.type"], first["exception.message"]) == ("MemoryError", "no room")
    assert first["zerowatch.error"] == "out_of_memory"
    assert second["exception.type"] == "zerowatch.WindowDiscarded"
    assert root.start_time_unix_nano <= root.events[0].time_unix_nano <= root.end_time_unix_nano


def test_a_sampled_step_with_an_error_keeps_its_parent(make_rank):
    one = make_rank(rank=1)
    one.context.step_errors.add("window_discarded", "a", "b")

    one.trace(4)

    [root] = one.roots()
    assert root.parent_span_id
    assert root.status.code == STATUS_ERROR
    assert attributes_of(root)["zerowatch.sampled_by"] == "chance"


def test_a_step_without_an_error_has_no_status(make_rank):
    one = make_rank()

    one.trace(4)

    [root] = one.roots()
    assert (root.status.code, list(root.events)) == (0, [])


def test_a_hang_is_sent_at_once_and_its_step_later(make_rank, monkeypatch):
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.05)
    one = make_rank(every_steps=NEVER)
    one.engine.global_steps = 3
    one.context.step_errors.add("hang", "zerowatch.Hang", "silent for 30 s")
    waited = eventually(lambda: one.collector.spans() != [])
    one.trace(4, seconds=3600)

    [root] = one.roots()
    [hang] = [span for _, span in one.collector.spans() if span.name == "hang"]
    assert waited
    assert hang.trace_id == root.trace_id == trace_id_of(RUN, 4).to_bytes(16, "big")
    assert hang.parent_span_id == root.span_id
    assert hang.status.message == root.status.message == "silent for 30 s"
    assert attributes_of(hang.events[0])["exception.type"] == "zerowatch.Hang"


def test_the_step_that_an_error_ends_is_traced(make_rank):
    one = make_rank(every_steps=NEVER)
    one.engine.global_steps = 3
    one.context.phase_timer.enter(FORWARD)
    one.context.step_errors.add_exception("out_of_memory", MemoryError("no room"))
    one.context.phase_timer.leave()

    one.telemetry.trace_run_error(MemoryError("no room"))

    [root] = one.roots()
    assert numbers([root]) == [4]
    assert (root.status.code, root.status.message) == (STATUS_ERROR, "no room")
    [event] = root.events
    assert attributes_of(event)["exception.type"] == "MemoryError"
    assert "forward" in [span.name for _, span in one.collector.spans()]


def test_the_end_of_a_run_without_traces_is_not_traced(make_rank):
    one = make_rank(traces=False)

    one.telemetry.trace_run_error(MemoryError("no room"))

    assert one.roots() == []


def test_remarks_on_variables_are_logged_by_rank_0_only(make_rank, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "odd")

    for rank in (0, 1):
        make_rank(rank=rank, every_steps=None)

    assert [record.message.split("=")[0] for record in caplog.records] == ["OTEL_TRACES_SAMPLER"]


def test_a_step_trained_again_after_a_restart_has_spans_of_its_own(make_rank):
    starts = enumerate(("0-a", "1-b"))
    ranks = (make_rank(attempt=attempt, start=start) for attempt, start in starts)
    roots = [root for rank in ranks for root in traced_once(rank)]

    assert len({root.trace_id for root in roots}) == 1
    assert len({root.span_id for root in roots}) == 2
    assert {attributes_of(root)["zerowatch.attempt"] for root in roots} == {0, 1}


def traced_once(rank):
    rank.trace(4)
    return rank.roots()


def test_a_root_is_as_long_as_its_step_if_the_earliest_intervals_were_dropped(make_rank):
    one = make_rank()

    one.trace(4, seconds=0.5, kept_seconds=0.2)

    [root] = one.roots()
    assert root.end_time_unix_nano - root.start_time_unix_nano == 500_000_000


def test_calls_on_an_unknown_device_clock_are_left_out(make_rank):
    one, calls = make_rank(), []
    for event in (None, object()):
        call = CollectiveCall(0, SimpleNamespace(role="dp"), 8, None, 0)
        call.start_ns, call.end_ns, call.start_event = 1, 2, event
        call.exposed_ns = 0
        calls.append(call)

    one.trace(4, calls=calls)

    one.roots()
    assert [span.name for _, span in one.collector.spans()].count(f"comm {OPS[0]}") == 1


def test_traces_are_sent_if_the_gpu_has_no_id(make_rank):
    def find_gpu():
        raise AttributeError("uuid")

    one = make_rank(find_gpu=find_gpu)
    one.trace(4)

    assert numbers(one.roots()) == [4]


def test_a_trace_that_fails_at_the_end_does_not_raise(make_rank, monkeypatch):
    one = make_rank(run_id=None)
    one.trace(1)
    one.run_id = RUN
    monkeypatch.setattr("zerowatch.runtime.monitor.otel_exporter.trace_id_of", None)

    assert one.roots() == []


def test_of_very_many_ranks_only_the_first_of_a_node_traces_sampled_steps(make_rank):
    first = make_rank(rank=64, local_rank=0, world_size=128)
    second = make_rank(rank=65, local_rank=1, world_size=128)

    first.trace(4)
    second.trace(4)
    second.roots()

    assert len(first.roots()) == 1


def test_steps_before_the_run_has_an_id_are_traced_later(make_rank):
    one = make_rank(run_id=None)

    one.trace(1)
    one.trace(2)
    one.run_id = RUN
    one.trace(3)

    assert numbers(one.roots()) == [1, 2, 3]
    assert one.telemetry.dropped == 0


def test_steps_of_a_run_without_an_id_are_counted_as_lost(make_rank):
    one = make_rank(run_id=None)

    for number in range(MAX_HELD_STEPS + 3):
        one.trace(number)

    assert one.telemetry.dropped == 3
    assert one.roots() == []
    assert one.telemetry.dropped == MAX_HELD_STEPS + 3


@pytest.mark.parametrize("user_trace", [None, {"trace_id": "7" * 32}])
def test_the_scripts_own_span_stays_the_exemplar_of_its_step(make_rank, user_trace):
    one = make_rank()

    one.trace(4, user_trace=user_trace)
    one.roots()

    [exemplar] = filter(None, one.recorder.snapshot().distribution(STEP_DURATION).exemplars)
    ours = f"{trace_id_of(RUN, 4):032x}"
    assert exemplar.labels["trace_id"] == (user_trace or {"trace_id": ours})["trace_id"]


def test_a_span_outside_of_steps_has_its_own_trace(make_rank):
    rank = make_rank()
    rank.trace(1)

    rank.telemetry.send(Span(name="tuner.decision", start_ns=1, end_ns=3, attributes={"knob": "k"}))

    (step,) = rank.roots()
    (sent,) = [span for _, span in rank.collector.spans() if span.name == "tuner.decision"]
    assert sent.trace_id != step.trace_id
    assert (sent.parent_span_id, sent.end_time_unix_nano) == (b"", 3)
    assert attributes_of(sent) == {"knob": "k"}


def test_without_traces_no_span_is_sent(make_rank):
    rank = make_rank(traces=False)

    rank.telemetry.send(Span(name="tuner.decision", start_ns=1, end_ns=3))

    assert rank.roots() == rank.collector.spans() == []


def test_a_log_line_has_the_ids_of_the_current_step_if_that_is_sampled(make_rank):
    one = make_rank(logs=True)

    one.engine.global_steps = 8
    OWN_LOGGER.warning("in the ninth step")
    one.roots()

    [line] = one.collector.lines()
    assert line.trace_id == trace_id_of(RUN, 9).to_bytes(16, "big")
    assert line.span_id == span_id_of(RUN, 9, 0, attempt="0-a.0").to_bytes(8, "big")


def test_a_log_line_else_has_the_ids_of_the_last_traced_step(make_rank):
    one = make_rank(logs=True, every_steps=NEVER)

    OWN_LOGGER.warning("before any")
    for number in range(20):
        one.trace(number)
    one.trace(20, 9.0)
    OWN_LOGGER.warning("after a slow one")
    one.roots()

    assert [line.trace_id for line in one.collector.lines()] == [
        b"",
        trace_id_of(RUN, 20).to_bytes(16, "big"),
    ]


def test_a_log_line_that_cannot_be_formatted_does_not_raise(make_rank):
    one = make_rank(logs=True)
    OWN_LOGGER.propagate = False  # pytest's own handler would raise

    try:
        OWN_LOGGER.warning("%d", "no number")
    finally:
        OWN_LOGGER.propagate = True

    one.trace(1)
    assert len(one.roots()) == 1
    assert not any("no number" in line.body.string_value for line in one.collector.lines())


@pytest.mark.parametrize("end", ["close", "close_after_fork"])
def test_no_log_lines_are_taken_after_the_end(make_rank, end):
    one = make_rank(logs=True)
    others = [handler for handler in OWN_LOGGER.handlers if "LogCapture" in repr(handler)]

    getattr(one.telemetry, end)()

    assert len(others) == 1
    assert others[0] not in OWN_LOGGER.handlers
    one.telemetry.close()


def test_the_end_of_a_run_sends_metrics_before_the_traces_that_are_left(make_rank, monkeypatch):
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.01)
    rank, sent = make_rank(metrics=True), []
    is_sending, may_go_on = threading.Event(), threading.Event()
    closing = threading.Thread(target=rank.telemetry.close)

    def send_traces(traces):
        sent.append("traces")
        is_sending.set()
        return may_go_on.wait()

    def send_metrics(*_):
        sent.append("metrics")
        return True

    otlp = rank.telemetry._outbox._otlp
    monkeypatch.setattr(otlp, "send_traces", send_traces)
    monkeypatch.setattr(otlp, "send_metrics", send_metrics)
    for number in range(3):
        rank.trace(number)
    is_sending.wait()
    sent.clear()

    closing.start()
    assert eventually(rank.telemetry._stop.is_set)
    may_go_on.set()
    closing.join()

    assert sent == ["metrics", "traces", "traces"]


class BlockedMetrics:
    """Lets requests of metrics block until `release` is set, after `num_accepted` of them."""

    def __init__(self, rank, monkeypatch, num_accepted=0):
        self.sent, self.num_accepted = [], num_accepted
        self.entered, self.release = threading.Event(), threading.Event()
        monkeypatch.setattr(rank.telemetry._outbox._otlp, "send_metrics", self.send)

    def send(self, families, *_):
        if self.num_accepted > 0:
            self.num_accepted -= 1
            return True
        self.entered.set()
        assert self.release.wait(60)
        self.sent.append([family.name for family in families])
        return True


@pytest.fixture
def slow_rank(make_rank, monkeypatch):
    """A rank whose thread exports metrics all the time, and whose `close` does not wait."""
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(otel_exporter, "CLOSE_SECONDS", 0.01)
    rank = make_rank(metrics=True, metrics_interval_seconds=1)
    rank.recorder.set(RUN_ACTIVE, 1)
    return rank


def test_the_end_of_a_run_is_sent_to_a_slow_collector_while_the_process_goes_on(
    slow_rank, monkeypatch
):
    collector = BlockedMetrics(slow_rank, monkeypatch)
    assert collector.entered.wait(60)
    slow_rank.recorder.set_info(RUN_END_INFO, "completed")

    slow_rank.telemetry.close()
    early = list(collector.sent)
    collector.release.set()

    assert early == []
    assert eventually(lambda: any(RUN_END_INFO.name in names for names in collector.sent))
    [end] = [names for names in collector.sent if RUN_END_INFO.name in names]
    assert sorted(end) == sorted([RUN_ACTIVE.name, RUN_END_INFO.name, "process_start_time_seconds"])


def test_a_process_that_ends_waits_until_the_end_was_sent_to_a_collector_that_answers(
    slow_rank, monkeypatch
):
    monkeypatch.setattr(otel_exporter, "EXIT_SECONDS", 300.0)
    collector = BlockedMetrics(slow_rank, monkeypatch, num_accepted=1)
    slow_rank.recorder.set_info(RUN_END_INFO, "completed")
    assert eventually(lambda: slow_rank.telemetry._outbox.is_answered)
    slow_rank.telemetry.close()
    waiting = threading.Thread(target=slow_rank.telemetry.wait_for_end)
    waiting.start()

    waiting.join(0.05)
    was_waiting = waiting.is_alive()
    collector.release.set()
    waiting.join(60)

    assert was_waiting
    assert not waiting.is_alive()
    assert any(RUN_END_INFO.name in names for names in collector.sent)


class RefusedEnd:
    """Refuses `num_refused` requests from the first one with the end of the run on."""

    def __init__(self, rank, monkeypatch, num_refused):
        self.num_refused, self.tries, self.accepted = num_refused, 0, []
        monkeypatch.setattr(rank.telemetry._outbox._otlp, "send_metrics", self.send)

    def send(self, families, *_):
        names = [family.name for family in families]
        self.tries += RUN_END_INFO.name in names or self.tries > 0
        if 0 < self.tries <= self.num_refused:
            return False
        self.accepted += names
        return True


def test_the_end_of_a_run_is_sent_to_a_collector_that_comes_back_while_the_process_goes_on(
    slow_rank, monkeypatch
):
    collector = RefusedEnd(slow_rank, monkeypatch, num_refused=5)
    assert eventually(lambda: slow_rank.telemetry._outbox.is_answered)
    slow_rank.recorder.set_info(RUN_END_INFO, "completed")

    slow_rank.telemetry.close()

    assert eventually(lambda: RUN_END_INFO.name in collector.accepted)
    assert eventually(lambda: not slow_rank.telemetry._thread.is_alive())


def test_a_process_that_ends_waits_for_a_collector_that_refuses_the_end_of_the_run_at_first(
    make_rank, monkeypatch
):
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(otel_exporter, "EXIT_SECONDS", 300.0)
    rank = make_rank(metrics=True, metrics_interval_seconds=3600)
    collector = RefusedEnd(rank, monkeypatch, num_refused=5)
    assert eventually(lambda: rank.telemetry._outbox.is_answered)
    monkeypatch.setattr(otel_exporter, "CLOSE_SECONDS", 0.0)
    rank.recorder.set_info(RUN_END_INFO, "completed")
    rank.telemetry.close()

    rank.telemetry.wait_for_end()

    assert RUN_END_INFO.name in collector.accepted


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_end_of_a_run_is_not_sent_for_ever(make_rank, monkeypatch, is_interrupted):
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.01)
    rank = make_rank(metrics=True, metrics_interval_seconds=1, timeout_seconds=0.02)
    collector = RefusedEnd(rank, monkeypatch, num_refused=math.inf)
    assert eventually(lambda: rank.telemetry._outbox.is_answered)
    rank.recorder.set_info(RUN_END_INFO, "completed")

    def join(timeout_seconds):
        assert eventually(lambda: collector.tries > 0)
        if is_interrupted:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patched:
        patched.setattr(rank.telemetry._thread, "join", join)
        with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
            rank.telemetry.close()

    assert eventually(lambda: not rank.telemetry._thread.is_alive())
    assert collector.tries > 0
    assert RUN_END_INFO.name not in collector.accepted


def test_a_failure_of_the_last_export_ends_the_thread(make_rank, monkeypatch):
    monkeypatch.setattr(otel_exporter, "FLUSH_SECONDS", 0.01)
    rank = make_rank(metrics=True, timeout_seconds=3600)
    assert eventually(lambda: rank.telemetry._outbox.is_answered)

    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr(rank.telemetry._outbox._otlp, "send_metrics", fail)
    monkeypatch.setattr(otel_exporter, "CLOSE_SECONDS", 0.0)
    rank.recorder.set_info(RUN_END_INFO, "completed")
    rank.telemetry.close()

    assert eventually(lambda: not rank.telemetry._thread.is_alive())
    assert rank.telemetry._outbox.end_was_sent.is_set()


@pytest.mark.parametrize("end", ["accepts nothing", "the time is up", "gave up"])
def test_a_process_that_ends_does_not_wait_for_ever(slow_rank, monkeypatch, end):
    monkeypatch.setattr(otel_exporter, "EXIT_SECONDS", 0.0 if end == "the time is up" else 10.0**6)
    collector = BlockedMetrics(slow_rank, monkeypatch, num_accepted=end != "accepts nothing")
    assert end == "accepts nothing" or eventually(lambda: slow_rank.telemetry._outbox.is_answered)
    slow_rank.telemetry.close()
    if end == "gave up":
        slow_rank.telemetry.give_up()

    slow_rank.telemetry.wait_for_end()

    was_in_request = slow_rank.telemetry._thread.is_alive()
    collector.release.set()
    assert was_in_request


def test_a_close_after_ctrl_c_waits_again_for_the_last_export(make_rank, monkeypatch):
    rank = make_rank(logs=True)
    OWN_LOGGER.warning("the last line")

    def interrupted(timeout_seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rank.telemetry._thread, "join", interrupted)
        rank.telemetry.close()
    rank.telemetry.close()

    assert [line.body.string_value for line in rank.collector.lines()] == ["the last line"]
    assert not rank.telemetry._thread.is_alive()
    assert rank.telemetry.dropped == 0
