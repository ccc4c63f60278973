"""Tests of OTLP export: metrics, traces, log lines, resource attributes, otlp_increases.py."""

from __future__ import annotations

import importlib
import logging
import math
import os
import pkgutil
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
from fakes.clock import FakeClock
from fakes.otlp_collector import Collector, attributes_of
from opentelemetry import context
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.semconv._incubating import attributes as conventional_attributes
from opentelemetry.semconv._incubating.metrics import hw_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from zerowatch.metrics.catalog import CATALOG, devices, memory, training
from zerowatch.metrics.catalog.overhead import EXPORTER_FAILURES
from zerowatch.metrics.catalog.training import LOSS, STEP_DURATION, STEPS
from zerowatch.metrics.exporters.log_capture import LogCapture, log_line
from zerowatch.metrics.exporters.otel_resource import resource_attributes, service_name
from zerowatch.metrics.exporters.otlp import SCHEMA_URL, Otlp
from zerowatch.metrics.exporters.otlp_families import families
from zerowatch.metrics.exporters.otlp_options import otlp_options
from zerowatch.metrics.exporters.otlp_queue import FAILURES_ALLOWED, OtlpQueue
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.exporters.telemetry_data import Example, Span, SpanEvent, StepTrace
from zerowatch.metrics.recorder import Exemplar, Recorder
from zerowatch.metrics.settings import OtelSettings

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID = 0xB7AD6B7169203331
MS = 1_000_000
IDENTITY = {"run": "night-7", "node": "a", "rank": "3"}
OWN_LOGGER = "zerowatch.runtime.monitor.watch"


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture
def environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def make_outbox(collector, environment):
    opened = []

    def make(
        recorder,
        *,
        rank=3,
        hardware_ids=None,
        identity=IDENTITY,
        variables=None,
        now=time.monotonic,
        **settings,
    ):
        given = {"endpoint": collector.endpoint, "metrics": True, "logs": True, **settings}
        options = otlp_options(OtelSettings(**given), variables or {})
        otlp = Otlp(options)
        opened.append(otlp)
        recorder.counts_exponentially = options.has_exponential_histograms
        return OtlpQueue(
            recorder,
            otlp,
            options,
            identity=lambda: identity,
            rank=rank,
            hardware_ids=hardware_ids or {},
            describe=lambda: resource_attributes(
                {}, script="/llm/train.py", run_id="night-7", rank=rank, host="a"
            ),
            now=now,
        )

    yield make
    for otlp in opened:
        otlp.close()


def recorder_of_everything() -> Recorder:
    recorder = Recorder()
    for spec in CATALOG:
        for device in ("cuda:0", "cpu"):
            labels = [label.values[-1] if label.values else device for label in spec.labels]
            if spec.kind == "histogram":
                recorder.observe(spec, 0.02, *labels)
                recorder.observe(spec, 700.0, *labels)
            elif spec.kind == "info":
                recorder.set_info(spec, *labels)
            else:
                recorder.set(spec, 2.5, *labels)
    return recorder


def scraped(recorder):
    """Return the values of /metrics of rank 3, by name and labels, with those of the target."""
    text = exposition(recorder.snapshot(), 3, "")[1].decode()
    return {
        (sample.name, *sorted({**IDENTITY, **sample.labels}.items())): sample.value
        for family in parse_classic(text)
        for sample in family.samples
    }


def received(collector):
    """Return the value of every series sent to a collector, by its Prometheus name and labels."""
    found = {}
    for metric in collector.metrics():
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = sorted(attributes_of(point).items())
            if kind != "histogram":
                found[metric.name, *labels] = point.as_double
                continue
            found[f"{metric.name}_count", *labels] = point.count
            found[f"{metric.name}_sum", *labels] = point.sum
            total = 0
            bounds = (*map(str, point.explicit_bounds), "+Inf")
            for bound, count in zip(bounds, point.bucket_counts, strict=True):
                total += count
                bucket = sorted([*labels, ("le", bound)])
                found[f"{metric.name}_bucket", *bucket] = total
    return found


def of_recorder(collector):
    """Return the metrics sent to a collector without the start time of the process."""
    return [each for each in collector.metrics() if each.name != "process_start_time_seconds"]


def step_trace(**changes):
    root = Span(name="train.step", start_ns=5 * MS, end_ns=9 * MS, attributes={"zerowatch.step": 4})
    forward = Span(name="forward", start_ns=6 * MS, end_ns=7 * MS)
    given = {"trace_id": TRACE_ID, "span_id": SPAN_ID, "parent_id": None, "root": root}
    return StepTrace(**{**given, "children": [forward], **changes})


def test_exported_series_equal_those_of_a_scrape(collector, make_outbox):
    recorder = recorder_of_everything()

    make_outbox(recorder).flush()

    assert len(received(collector)) > len(CATALOG)
    assert received(collector) == scraped(recorder)


def test_counters_are_cumulative_since_monitoring_started(collector, make_outbox):
    recorder = Recorder()
    recorder.add(STEPS, 4)
    recorder.observe(STEP_DURATION, 0.3)

    make_outbox(recorder).flush()

    steps, seconds = of_recorder(collector)
    [point] = steps.sum.data_points
    cumulative = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert steps.sum.is_monotonic
    assert steps.sum.aggregation_temporality == cumulative
    assert 0 < point.start_time_unix_nano < point.time_unix_nano
    assert seconds.histogram.aggregation_temporality == cumulative
    assert not seconds.histogram.data_points[0].HasField("min")


def test_a_diverged_loss_is_still_exported(collector, make_outbox):
    recorder = Recorder()
    recorder.set(LOSS, math.nan)

    make_outbox(recorder).flush()

    assert math.isnan(collector.metrics()[0].gauge.data_points[0].as_double)


def test_units_are_those_of_ucum_and_only_at_the_end_of_a_name(collector, make_outbox):
    make_outbox(recorder_of_everything()).flush()

    units = {metric.name: metric.unit for metric in collector.metrics()}
    assert units[STEP_DURATION.name] == units[training.LAST_CHECKPOINT_TIMESTAMP.name] == "s"
    assert units[devices.DEVICE_THROTTLED_SECONDS.name] == "s"
    assert units[devices.DEVICE_TEMPERATURE_LIMIT.name] == "Cel"
    assert units[memory.MEMORY_LIMIT.name] == "By"
    for spec in (training.PEAK_FLOPS, STEPS, devices.DEVICE_INFO, devices.DEVICE_LOST):
        assert units[spec.name] == ""


def test_every_point_names_its_run_node_and_rank(collector, make_outbox):
    recorder = recorder_of_everything()

    make_outbox(recorder, hardware_ids={"cuda:0": "GPU-1"}).flush()

    metrics = collector.metrics()
    identities = [
        {name: value for name, value in attributes_of(point).items() if name in IDENTITY}
        for metric in metrics
        for point in getattr(metric, metric.WhichOneof("data")).data_points
    ]
    assert any(metric.name.startswith("hw.") for metric in metrics)
    assert identities == [IDENTITY] * len(identities)


def test_a_gpu_is_also_exported_by_the_hardware_conventions(collector, make_outbox):
    recorder = Recorder()
    for device in ("cuda:0", "cpu"):
        recorder.set(devices.DEVICE_UTILIZATION, 0.75, device)
        recorder.set(devices.DEVICE_POWER, 300, device)
        for state, size in (("allocated", 5), ("reserved", 7)):
            recorder.set(memory.MEMORY_BYTES, size, device, state)
        recorder.set(memory.MEMORY_LIMIT, 9, device)
    recorder.set(devices.DEVICE_LINK_BYTES, 11, "cuda:0", "nvlink", "sent")
    recorder.set(devices.DEVICE_LINK_BYTES, 13, "cuda:0", "nvlink", "received")
    recorder.set(devices.DEVICE_TEMPERATURE_LIMIT, 90, "cuda:0")
    recorder.set(devices.DEVICE_ECC_ERRORS, 2, "cuda:0", "uncorrected")

    make_outbox(recorder, hardware_ids={"cuda:0": "GPU-1"}).flush()

    gpu = {"hw.id": "GPU-1", "hw.type": "gpu", "hw.name": "cuda:0", **IDENTITY}
    link = {**gpu, "zerowatch.link": "nvlink"}
    found = {
        (metric.name, metric.unit, metric.WhichOneof("data")): [
            (attributes_of(point), point.as_double)
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        ]
        for metric in collector.metrics()
        if metric.name.startswith("hw.")
    }
    assert found == {
        ("hw.gpu.utilization", "1", "gauge"): [(gpu, 0.75)],
        ("hw.gpu.memory.usage", "By", "sum"): [(gpu, 7)],
        ("hw.gpu.memory.limit", "By", "sum"): [(gpu, 9)],
        ("hw.gpu.io", "By", "sum"): [
            ({**link, "network.io.direction": "transmit"}, 11),
            ({**link, "network.io.direction": "receive"}, 13),
        ],
        ("hw.power", "W", "gauge"): [(gpu, 300)],
        ("hw.temperature.limit", "Cel", "gauge"): [({**gpu, "hw.limit_type": "throttled"}, 90)],
        ("hw.errors", "{error}", "sum"): [({**gpu, "error.type": "uncorrected"}, 2)],
    }
    conventions = {value for name, value in vars(hw_metrics).items() if name.startswith("HW_")}
    assert {name for name, _, _ in found} <= conventions


def test_metrics_are_sent_at_their_interval_and_at_the_end(collector, make_outbox):
    recorder = Recorder()
    recorder.add(STEPS, 4)
    outbox = make_outbox(recorder, metrics_interval_seconds=60)

    for final in (False, False, True):
        outbox.flush(final=final)

    assert len(collector.requests["/v1/metrics"]) == 2


def test_a_trace_is_sent_with_its_ids_times_and_parents(collector, make_outbox):
    outbox = make_outbox(Recorder())

    outbox.add_trace(step_trace())
    outbox.add_trace(step_trace(span_id=SPAN_ID - 9, parent_id=SPAN_ID))
    outbox.flush()

    (_, root), (_, forward), (_, other_root), (_, other_forward) = collector.spans()
    assert {span.trace_id.hex() for _, span in collector.spans()} == {f"{TRACE_ID:032x}"}
    assert (root.name, root.span_id.hex(), root.parent_span_id) == (
        "train.step",
        f"{SPAN_ID:016x}",
        b"",
    )
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (5 * MS, 9 * MS)
    assert attributes_of(root) == {"zerowatch.step": 4}
    assert (forward.name, forward.parent_span_id) == ("forward", root.span_id)
    assert (forward.start_time_unix_nano, forward.end_time_unix_nano) == (6 * MS, 7 * MS)
    assert other_root.parent_span_id == root.span_id
    assert other_forward.parent_span_id == other_root.span_id
    assert len({span.span_id for _, span in collector.spans()}) == 4


def exemplars(recorder):
    return recorder.snapshot().distribution(STEP_DURATION).exemplars


def example_trace():
    return step_trace(examples=[Example(spec=STEP_DURATION, labels=(), value=0.3)])


def test_an_exemplar_is_added_once_its_trace_was_sent(collector, make_outbox):
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.3)
    outbox = make_outbox(recorder)

    outbox.add_trace(example_trace())
    before = exemplars(recorder)
    outbox.flush()

    assert not any(before)
    [found] = filter(None, exemplars(recorder))
    ids = {"trace_id": f"{TRACE_ID:032x}", "span_id": f"{SPAN_ID:016x}"}
    assert (found.value, found.labels) == (0.3, ids)
    assert found.unix_seconds == 9 * MS / 1e9  # when the step ended, not when its trace was sent
    [metric] = of_recorder(collector)
    [exemplar] = metric.histogram.data_points[0].exemplars
    assert (exemplar.trace_id.hex(), exemplar.span_id.hex()) == tuple(ids.values())


@pytest.mark.parametrize("status", [400, 503])
def test_no_exemplar_is_added_if_the_collector_rejects_the_trace(collector, make_outbox, status):
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.3)
    outbox = make_outbox(recorder, timeout_seconds=0.5)
    collector.status = status

    outbox.add_trace(example_trace())
    outbox.flush()

    assert not any(exemplars(recorder))


def test_a_redirected_export_fails_and_the_warning_names_the_place(collector, make_outbox, caplog):
    recorder = Recorder()
    recorder.add(STEPS, 4)
    outbox = make_outbox(recorder, rank=0)
    collector.status, collector.location = 308, "https://user:secret@collector.example"

    for number in range(FAILURES_ALLOWED):
        outbox.add_trace(step_trace(span_id=SPAN_ID + number))
        outbox.add_line(log_line(own_record(), 0, None))
        outbox.flush(final=True)

    assert outbox.dropped == 2 * FAILURES_ALLOWED
    assert recorder.value(EXPORTER_FAILURES, "otlp") == 3 * FAILURES_ALLOWED
    ours = [text for text in caplog.messages if "does not accept" in text]
    for signal in ("traces", "metrics", "logs"):
        [text] = [text for text in ours if f"the {signal} of rank 0" in text]
        assert f"but redirects to https://***@collector.example/v1/{signal};" in text


@pytest.mark.parametrize("status", [200, 503])
def test_an_export_does_not_draw_from_the_scripts_random_numbers(collector, make_outbox, status):
    outbox = make_outbox(Recorder(), timeout_seconds=0.5)
    collector.status = status
    before = random.getstate()

    outbox.add_trace(step_trace())
    outbox.add_line(log_line(own_record(), 3, None))
    outbox.flush()

    assert random.getstate() == before
    assert len(collector.requests) == 3


def partial_successes():
    traces, metrics, logs = (
        ExportTraceServiceResponse(),
        ExportMetricsServiceResponse(),
        ExportLogsServiceResponse(),
    )
    traces.partial_success.rejected_spans = 2
    metrics.partial_success.rejected_data_points = 7
    logs.partial_success.rejected_log_records = 1
    for answer in (traces, metrics, logs):
        answer.partial_success.error_message = "limit of\nthe tenant"
    return {
        "/v1/traces": traces.SerializeToString(),
        "/v1/metrics": metrics.SerializeToString(),
        "/v1/logs": logs.SerializeToString(),
    }


def test_what_a_collector_rejects_of_an_accepted_export_is_counted_and_logged_once(
    collector, make_outbox, caplog
):
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.3)
    outbox = make_outbox(recorder, rank=0)
    collector.answers = partial_successes()

    for _ in range(2):
        outbox.add_trace(example_trace())
        for _ in range(3):
            outbox.add_line(log_line(own_record(), 0, None))
        outbox.flush(final=True)

    assert not any(exemplars(recorder))
    assert recorder.value(EXPORTER_FAILURES, "otlp") == 2 * 3
    assert outbox.dropped == 2 * (1 + 1)  # each time the trace, and one of the three lines
    assert [len(requests) for requests in collector.requests.values()] == [2, 2, 2]
    for part in ("spans of rank 0, 2 ", "data points of rank 0, 7 ", "log records of rank 0, 1 "):
        assert sum(part in text and "limit of the tenant" in text for text in caplog.messages) == 1


@pytest.mark.parametrize(
    ("content_type", "answer"),
    [
        ("application/x-protobuf", b"<html>"),
        ("application/json", partial_successes()["/v1/traces"]),
        ("application/x-protobuf", ExportTraceServiceResponse().SerializeToString()),
    ],
)
def test_another_answer_of_a_collector_is_a_success(
    collector, make_outbox, caplog, content_type, answer
):
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.3)
    outbox = make_outbox(recorder)
    collector.content_type, collector.answers = content_type, {"/v1/traces": answer}

    outbox.add_trace(example_trace())
    outbox.flush()

    assert any(exemplars(recorder))
    assert outbox.dropped == 0
    assert caplog.messages == []


def test_an_exemplar_for_an_empty_bucket_is_ignored():
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.03)

    exemplar = Exemplar(labels={"trace_id": "1"}, value=0.3, unix_seconds=1.0)
    recorder.add_exemplar(STEP_DURATION, exemplar=exemplar)

    assert not any(exemplars(recorder))


def test_an_exemplar_without_a_span_id_has_its_trace_id_as_an_attribute(collector, make_outbox):
    recorder = Recorder()
    recorder.observe(STEP_DURATION, 0.3, exemplar={"trace_id": f"{TRACE_ID:032x}"})

    make_outbox(recorder).flush()

    [exemplar] = collector.metrics()[0].histogram.data_points[0].exemplars
    [attribute] = exemplar.filtered_attributes
    assert (attribute.key, attribute.value.string_value) == ("trace_id", f"{TRACE_ID:032x}")


def test_only_own_log_lines_are_sent_with_the_current_trace(collector, make_outbox):
    outbox = make_outbox(Recorder())
    ids = (TRACE_ID, SPAN_ID)
    lines = LogCapture(lambda record: outbox.add_line(log_line(record, 3, ids)))
    lines.open()

    logging.getLogger(OWN_LOGGER).warning("took %d s", 7)
    logging.getLogger("train").warning("somebody else's")
    lines.close()
    logging.getLogger("zerowatch").warning("after the end")
    outbox.flush()

    [line] = collector.lines()
    assert (line.body.string_value, line.severity_text, line.severity_number) == (
        "took 7 s",
        "WARN",
        13,
    )
    assert (line.trace_id.hex(), line.span_id.hex()) == (f"{TRACE_ID:032x}", f"{SPAN_ID:016x}")
    assert [scope.name for scope, _ in collector.scopes("logs")] == [OWN_LOGGER]


@pytest.mark.parametrize(
    ("level", "number"),
    [(0, 1), (10, 5), (20, 9), (39, 13), (40, 17), (50, 21), (60, 24), (99, 24)],
)
def test_each_logging_level_has_a_severity_number(collector, make_outbox, level, number):
    outbox = make_outbox(Recorder())

    outbox.add_line(log_line(logging.makeLogRecord({"levelno": level, "msg": "text"}), 0, None))
    outbox.flush()

    assert collector.lines()[0].severity_number == number


def test_a_log_line_outside_a_trace_has_no_ids_and_keeps_its_exception(collector, make_outbox):
    outbox = make_outbox(Recorder())
    lines = LogCapture(lambda record: outbox.add_line(log_line(record, 0, None)))
    lines.open()

    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("zerowatch").warning("failed", exc_info=True)
    lines.close()
    outbox.flush()

    [line] = collector.lines()
    assert (line.trace_id, line.span_id) == (b"", b"")
    assert attributes_of(line)["exception.type"] == "ValueError"
    assert "no such thing" in attributes_of(line)["exception.stacktrace"]


def test_nothing_is_sent_until_the_run_has_a_name(collector, make_outbox):
    outbox = make_outbox(Recorder(), identity=None)

    outbox.add_trace(step_trace())
    outbox.flush()
    outbox.flush(final=True)
    outbox.give_up()

    assert collector.requests == {}
    assert outbox.dropped == 1


def test_the_resource_names_the_sender_by_the_conventions(collector, make_outbox):
    outbox = make_outbox(Recorder())

    outbox.add_trace(step_trace())
    outbox.flush()

    [resource, _] = [resource for resource, _ in collector.spans()]
    assert resource["service.name"] == "train"
    assert resource["service.instance.id"] == "night-7/3"
    assert {"host.name", "host.arch", "process.pid"} <= resource.keys()
    assert {"process.runtime.name", "process.runtime.version"} <= resource.keys()
    assert resource["telemetry.sdk.language"] == "python"


def test_resource_attributes_of_the_environment_take_precedence(
    collector, make_outbox, environment
):
    environment.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=night,host.name=b")
    environment.setenv("OTEL_SERVICE_NAME", "llm-7b")
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k7")
    outbox = make_outbox(Recorder())

    outbox.add_trace(step_trace())
    outbox.flush()

    resource, _ = collector.spans()[0]
    assert resource["service.name"] == "llm-7b"
    assert (resource["deployment.environment.name"], resource["host.name"]) == ("night", "b")
    assert collector.headers[0]["api-key"] == "k7"


def test_pod_attributes_are_read_from_the_environment():
    environment = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "train-0",
        "POD_NAMESPACE": "ml",
        "POD_UID": "",
    }

    found = resource_attributes(environment, script="", run_id="night-7", rank=0, host="a")

    assert {name: value for name, value in found.items() if name.startswith("k8s")} == {
        "k8s.pod.name": "train-0",
        "k8s.namespace.name": "ml",
    }


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("/work/llm/train.py", "train"),
        ("/venv/bin/finetune", "finetune"),
        ("/work/llm/__main__.py", "llm"),
        ("-c", "unknown_service:python"),
        ("", "unknown_service:python"),
    ],
)
def test_the_service_is_named_after_the_script(script, name):
    assert service_name(script) == name


def test_scope_and_schema_are_stated_with_every_signal(collector, make_outbox):
    recorder = Recorder()
    recorder.add(STEPS, 4)
    outbox = make_outbox(recorder)

    outbox.add_trace(step_trace())
    outbox.add_line(log_line(own_record(), 3, None))
    outbox.flush()

    names = {}
    for signal in ("traces", "metrics", "logs"):
        [(scope, part)] = collector.scopes(signal)
        names[signal] = scope.name
        assert scope.version == version("zerowatch")
        assert part.schema_url == SCHEMA_URL
        assert collector.resource_schemas(signal) == {SCHEMA_URL}
    assert names == {"traces": "zerowatch", "metrics": "zerowatch", "logs": OWN_LOGGER}


def own_record():
    return logging.LogRecord(OWN_LOGGER, logging.INFO, "watch.py", 1, "a", (), None)


def test_names_of_standard_attributes_are_those_of_the_conventions():
    environment = {"KUBERNETES_SERVICE_HOST": "a", "HOSTNAME": "b", "POD_UID": "c", "JOB_NAME": "d"}
    sent = {
        *resource_attributes(environment, script="a.py", run_id="r", rank=0, host="a"),
        *("hw.id", "hw.type", "hw.name", "hw.limit_type", "network.io.direction", "error.type"),
        *("exception.type", "exception.message", "exception.stacktrace", "thread.name"),
    }
    package = conventional_attributes.__name__
    known = {
        value
        for module in pkgutil.iter_modules(conventional_attributes.__path__)
        for value in vars(importlib.import_module(f"{package}.{module.name}")).values()
        if isinstance(value, str)
    }

    assert {name for name in sent if not name.startswith("zerowatch.")} <= known


def test_a_failed_step_has_the_status_error_and_an_exception_event(collector, make_outbox):
    event = SpanEvent(name="exception", unix_ns=6 * MS, attributes={"exception.type": "E"})
    root = Span(name="train.step", start_ns=5 * MS, end_ns=9 * MS, events=[event], error="no room")
    outbox = make_outbox(Recorder())

    outbox.add_trace(step_trace(root=root))
    outbox.flush()

    (_, failed), (_, child) = collector.spans()
    assert (failed.status.code, failed.status.message) == (2, "no room")
    [found] = failed.events
    assert (found.name, found.time_unix_nano) == ("exception", 6 * MS)
    assert attributes_of(found) == {"exception.type": "E"}
    assert child.status.code == 0


def test_a_trace_links_to_another_step(collector, make_outbox):
    outbox = make_outbox(Recorder())

    outbox.add_trace(step_trace(linked=(7, 8)))
    outbox.flush()

    (_, root), (_, child) = collector.spans()
    [link] = root.links
    assert (link.trace_id, link.span_id) == ((7).to_bytes(16, "big"), (8).to_bytes(8, "big"))
    assert not child.links


def test_increases_are_sent_if_asked_and_what_was_refused_is_sent_later(collector, make_outbox):
    variables = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
    recorder = Recorder()
    clock = FakeClock()
    outbox = make_outbox(recorder, variables=variables, timeout_seconds=0.5, now=clock)
    for steps, status in ((4, 200), (3, 400), (2, 200)):
        collector.status = status
        recorder.add(STEPS, steps)
        recorder.observe(STEP_DURATION, 0.3)
        recorder.set(LOSS, 2.5)
        outbox.flush()
        clock.seconds += 3600

    first, _, last = map(metrics_by_name, collector.requests["/v1/metrics"])
    delta = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
    for found, steps, durations in ((first, 4, 1), (last, 5, 2)):
        assert found[STEPS.name].sum.aggregation_temporality == delta
        assert found[STEPS.name].sum.data_points[0].as_double == steps
        assert found[STEP_DURATION.name].histogram.aggregation_temporality == delta
        assert found[STEP_DURATION.name].histogram.data_points[0].count == durations
        assert found[LOSS.name].gauge.data_points[0].as_double == 2.5
    [before], [after] = (found[STEPS.name].sum.data_points for found in (first, last))
    assert before.time_unix_nano == after.start_time_unix_nano


def metrics_by_name(request):
    metrics = request.resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: metric for metric in metrics}


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_exponential_histograms_are_sent_if_asked(collector, make_outbox, temporality):
    variables = {
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": (
            "base2_exponential_bucket_histogram"
        ),
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": temporality,
    }
    recorder, observed = Recorder(), (0.5, 5.2, 5.2, 45.0)
    outbox = make_outbox(recorder, variables=variables)
    for seconds in observed:
        recorder.observe(STEP_DURATION, seconds)

    outbox.flush()
    recorder.observe(STEP_DURATION, 5.2)
    outbox.flush(final=True)

    first, second = (
        metric.exponential_histogram.data_points[0] for metric in of_recorder(collector)
    )
    assert (first.count, first.sum, first.zero_count) == (4, sum(observed), 0)
    assert list(bounds_and_counts(first).values()) == [1, 2, 1]
    for bound, seconds in zip(bounds_and_counts(first), sorted(set(observed)), strict=True):
        assert bound / 1.1 <= seconds <= bound * (1 + 1e-9)
    later = [1] if temporality == "delta" else [1, 3, 1]
    assert list(bounds_and_counts(second).values()) == later


def bounds_and_counts(point):
    """Return the counts of an exponential histogram by the upper bounds of their buckets."""
    base = 2**2**-point.scale
    return {
        base ** (point.positive.offset + place + 1): count
        for place, count in enumerate(point.positive.bucket_counts)
        if count
    }


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_each_signal_is_sent_to_an_endpoint_of_its_own(collector, environment, signal):
    name = f"OTEL_EXPORTER_OTLP_{signal.upper()}"
    environment.setenv(f"{name}_HEADERS", "api-key=k7")
    environment.setenv(f"{name}_COMPRESSION", "gzip")
    environment.setenv(f"{name}_ENDPOINT", f"{collector.endpoint}/v1/{signal}")
    options = otlp_options(OtelSettings(), os.environ)
    otlp = Otlp(options)
    otlp.describe({})

    if signal == "traces":
        sent = otlp.send_traces([step_trace()])
    elif signal == "logs":
        sent = otlp.send_lines([log_line(own_record(), 3, None)])
    else:
        recorder = Recorder()
        recorder.add(STEPS, 4)
        sent = otlp.send_metrics(families(recorder.snapshot(), IDENTITY), 1, 2)
    otlp.close()

    assert sent
    assert list(options.endpoints) == [signal]
    assert len(collector.requests[f"/v1/{signal}"]) == 1
    headers = {key.lower(): value for key, value in collector.headers[0].items()}
    assert (headers["api-key"], headers["content-encoding"]) == ("k7", "gzip")


def dead_otlp():
    return Otlp(otlp_options(OtelSettings(endpoint="http://127.0.0.1:1", timeout_seconds=0.2), {}))


def test_only_sdk_log_lines_of_the_sending_thread_are_suppressed(environment, caplog):
    otlp = dead_otlp()
    theirs = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    on_our_thread(otlp, lambda: otlp.send_traces([step_trace()]))

    theirs.warning("the script's own exporter failed")
    otlp.close()

    assert [record.message for record in caplog.records] == ["the script's own exporter failed"]


def test_instrumentation_is_suppressed_on_the_sending_thread_only(environment):
    otlp = dead_otlp()

    ours = on_our_thread(otlp, is_suppressed)
    otlp.close()

    assert (ours, is_suppressed()) == (True, None)


def is_suppressed():
    """Return the value that is_instrumentation_enabled of opentelemetry checks."""
    return context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY)


def on_our_thread(otlp, act):
    with ThreadPoolExecutor(1, initializer=otlp.own_this_thread) as thread:
        return thread.submit(act).result()


def test_the_global_providers_are_not_set():
    code = """
from opentelemetry import metrics, trace, _logs
from zerowatch.metrics.exporters.otlp import Otlp
from zerowatch.metrics.exporters.otlp_options import otlp_options
from zerowatch.metrics.settings import OtelSettings
Otlp(otlp_options(OtelSettings(endpoint="http://127.0.0.1:1"), {})).describe({})
print(trace._TRACER_PROVIDER, metrics._internal._METER_PROVIDER, _logs._internal._LOGGER_PROVIDER)
"""

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)

    assert run.stdout == "None None None\n", run.stderr
