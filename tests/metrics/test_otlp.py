"""Tests of OTLP export: metrics, traces, log lines and resource attributes."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.otlp_collector import Collector, attributes_of
from opentelemetry import context
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from zerowatch.metrics.catalog import CATALOG, devices, memory
from zerowatch.metrics.catalog.training import LOSS, STEP_DURATION, STEPS
from zerowatch.metrics.exporters.log_capture import LogCapture, log_line
from zerowatch.metrics.exporters.otel_resource import is_standard_endpoint, resource_attributes
from zerowatch.metrics.exporters.otlp import Otlp
from zerowatch.metrics.exporters.otlp_families import unit_of
from zerowatch.metrics.exporters.otlp_queue import OtlpQueue
from zerowatch.metrics.exporters.prometheus import exposition
from zerowatch.metrics.exporters.telemetry_data import Example, Span, StepTrace
from zerowatch.metrics.recorder import Exemplar, Recorder
from zerowatch.metrics.settings import OtelSettings

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID = 0xB7AD6B7169203331
MS = 1_000_000


@pytest.fixture
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture
def environment(monkeypatch):
    for name in ("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def make_outbox(collector, environment):
    opened = []

    def make(recorder, *, rank=0, hardware_ids=None, run_id="night-7", **settings):
        settings = OtelSettings(endpoint=collector.endpoint, metrics=True, **settings)
        otlp = Otlp(settings.endpoint, settings.timeout_seconds)
        opened.append(otlp)
        return OtlpQueue(
            recorder,
            otlp,
            settings,
            rank=rank,
            hardware_ids=hardware_ids or {},
            describe=lambda: run_id and resource_attributes({}, run_id=run_id, rank=rank, host="a"),
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


def scraped(recorder, rank):
    """Return the value of every series of /metrics, by name and labels."""
    text = exposition(recorder.snapshot(), rank, "")[1].decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
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


def step_trace(**changes):
    root = Span(name="train.step", start_ns=5 * MS, end_ns=9 * MS, attributes={"zerowatch.step": 4})
    forward = Span(name="forward", start_ns=6 * MS, end_ns=7 * MS)
    given = {"trace_id": TRACE_ID, "span_id": SPAN_ID, "parent_id": None, "root": root}
    return StepTrace(**{**given, "children": [forward], **changes})


def test_exported_series_equal_those_of_a_scrape(collector, make_outbox):
    recorder = recorder_of_everything()

    make_outbox(recorder, rank=3).flush()

    assert len(received(collector)) > len(CATALOG)
    assert received(collector) == scraped(recorder, 3)


def test_counters_are_cumulative_since_monitoring_started(collector, make_outbox):
    recorder = Recorder()
    recorder.add(STEPS, 4)
    recorder.observe(STEP_DURATION, 0.3)

    make_outbox(recorder).flush()

    steps, seconds = collector.metrics()
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


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("a_seconds", "s"),
        ("a_seconds_total", "s"),
        ("a_bytes_total", "By"),
        ("a_ratio", "1"),
        ("a_bytes_per_second", ""),
        ("a_steps", ""),
    ],
)
def test_units_are_derived_from_metric_names(name, unit):
    assert unit_of(name) == unit


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

    make_outbox(recorder, hardware_ids={"cuda:0": "GPU-1"}).flush()

    gpu = {"hw.id": "GPU-1", "hw.type": "gpu", "hw.name": "cuda:0"}
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
    }


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
    [metric] = collector.metrics()
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

    logging.getLogger("zerowatch.runtime.monitor.watch").warning("took %d s", 7)
    logging.getLogger("train").warning("somebody else's")
    lines.close()
    logging.getLogger("zerowatch").warning("after the end")
    outbox.flush()

    [line] = collector.lines()
    assert (line.body.string_value, line.severity_text, line.severity_number) == (
        "took 7 s",
        "WARNING",
        13,
    )
    assert (line.trace_id.hex(), line.span_id.hex()) == (f"{TRACE_ID:032x}", f"{SPAN_ID:016x}")
    assert attributes_of(line)["zerowatch.logger"] == "zerowatch.runtime.monitor.watch"


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
    outbox = make_outbox(Recorder(), run_id=None)

    outbox.add_trace(step_trace())
    outbox.flush()
    outbox.flush(final=True)
    outbox.give_up()

    assert collector.requests == {}
    assert outbox.dropped == 1


def test_the_resource_names_the_sender_by_the_conventions(collector, make_outbox):
    outbox = make_outbox(Recorder(), rank=3)

    outbox.add_trace(step_trace())
    outbox.flush()

    [resource, _] = [resource for resource, _ in collector.spans()]
    assert resource["service.name"] == "zerowatch"
    assert resource["service.instance.id"] == "night-7/3"
    assert {"service.version", "host.name", "host.arch", "process.pid"} <= resource.keys()
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

    found = resource_attributes(environment, run_id="night-7", rank=0, host="a")

    assert {name: value for name, value in found.items() if name.startswith("k8s")} == {
        "k8s.pod.name": "train-0",
        "k8s.namespace.name": "ml",
    }


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}, True),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            False,
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_endpoint_variables_are_recognized(environment, asked):
    assert is_standard_endpoint(environment) is asked


def test_traces_are_sent_to_the_standard_endpoint(collector, environment):
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    otlp = Otlp(None, 5.0)

    sent = otlp.send_traces([step_trace()])
    otlp.close()

    assert sent
    assert len(collector.spans()) == 2


def test_only_sdk_log_lines_of_the_sending_thread_are_suppressed(environment, caplog):
    otlp = Otlp("http://127.0.0.1:1", 0.2)
    theirs = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    on_our_thread(otlp, lambda: otlp.send_traces([step_trace()]))

    theirs.warning("the script's own exporter failed")
    otlp.close()

    assert [record.message for record in caplog.records] == ["the script's own exporter failed"]


def test_instrumentation_is_suppressed_on_the_sending_thread_only(environment):
    otlp = Otlp("http://127.0.0.1:1", 0.2)

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
Otlp("http://127.0.0.1:1", 1.0).describe({})
print(trace._TRACER_PROVIDER, metrics._internal._METER_PROVIDER, _logs._internal._LOGGER_PROVIDER)
"""

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)

    assert run.stdout == "None None None\n", run.stderr
