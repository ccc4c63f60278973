"""Sends OTLP over HTTP with OpenTelemetry's SDK.

This file alone imports opentelemetry, and is imported only if there is data to send. It uses the
data classes and exporters of the SDK, some from modules whose names begin with an underscore, so
`pyproject.toml` limits the version. It does not use providers, so it never changes the providers of
the script. It does not use processors, because their force_flush took 3 to 9 s at exit if the
collector was dead (docs/decisions.md).
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry import context
from opentelemetry._logs import LogRecord
from opentelemetry._logs.severity import SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.sdk.version import __version__ as sdk_version
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.status import Status, StatusCode

from ..exponential_buckets import SCALE
from ..recorder import Distribution
from ..recorder import Exemplar as SeenExemplar
from .otlp_options import OtlpOptions, Signal
from .telemetry_data import AttributeValue, Family, LogLine, Point, Rejection, Span, StepTrace

# The version of the semantic conventions that the names of attributes and of hw.* metrics follow.
SCHEMA_URL = Schemas.V1_44_0.value
SCOPE = "zerowatch"

# These loggers report a failed export. One line of zerowatch replaces their lines.
_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
    "urllib3.connectionpool",
)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
# The answer to an export, and the items that it may reject.
_ANSWERS: dict[Signal, tuple[Any, str]] = {
    "traces": (ExportTraceServiceResponse, "spans"),
    "metrics": (ExportMetricsServiceResponse, "data points"),
    "logs": (ExportLogsServiceResponse, "log records"),
}
MAX_MESSAGE_CHARACTERS = 200


class Otlp:
    """The OTLP exporters of one process. All methods are called on the sender's thread.

    Args:
        options: The URL and the timeout of each signal that is sent. Headers, certificates and
            compression come from OpenTelemetry's own environment variables.

    Attributes:
        redirects: Where exports were redirected to, by signal.
        rejections: What the collector rejected of the last export that it accepted, by signal. The
            caller removes the entry.
    """

    def __init__(self, options: OtlpOptions) -> None:
        quiet = NoOpMeterProvider()
        urls, timeouts = options.endpoints, options.timeouts
        self._spans = OTLPSpanExporter(
            endpoint=urls.get("traces"), timeout=timeouts.get("traces"), meter_provider=quiet
        )
        self._metrics = OTLPMetricExporter(
            endpoint=urls.get("metrics"), timeout=timeouts.get("metrics"), meter_provider=quiet
        )
        self._logs = OTLPLogExporter(
            endpoint=urls.get("logs"), timeout=timeouts.get("logs"), meter_provider=quiet
        )
        self.redirects: dict[Signal, str] = {}
        self.rejections: dict[Signal, Rejection] = {}
        self._random = random.Random()  # the script may have seeded the global generator
        exporters: dict[Signal, Any] = {
            "traces": self._spans,
            "metrics": self._metrics,
            "logs": self._logs,
        }
        for signal, exporter in exporters.items():
            with contextlib.suppress(AttributeError, KeyError):  # private names of the SDK
                exporter._client._compute_backoff = self._backoff_seconds
                responses = exporter._client._transport._session.hooks["response"]
                responses.append(partial(self._refuse_redirect, signal))
                responses.append(partial(self._note_rejection, signal))
        self._temporality = (
            AggregationTemporality.DELTA
            if options.sends_increases
            else AggregationTemporality.CUMULATIVE
        )
        self._resource = Resource({})
        self._version = ""
        self._sender = 0

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Set the resource attributes. Attributes from the environment take precedence."""
        sdk = {
            "telemetry.sdk.language": "python",
            "telemetry.sdk.name": "opentelemetry",
            "telemetry.sdk.version": sdk_version,
        }
        ours = Resource({**sdk, **attributes}, SCHEMA_URL)
        self._resource = ours.merge(OTELResourceDetector().detect())
        self._version = version("zerowatch")

    def own_this_thread(self) -> None:
        """Keep requests that this thread sends out of the script's own traces and logs."""
        self._sender = threading.get_ident()
        # Instrumented HTTP clients check this key.
        context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._is_not_ours)

    def send_traces(self, traces: Iterable[StepTrace]) -> bool:
        """Send traces. Return whether the collector accepted them."""
        spans = [span for trace in traces for span in self._sdk_spans(trace)]
        return self._spans.export(spans) is SpanExportResult.SUCCESS

    def send_metrics(self, families: Iterable[Family], start_ns: int, now_ns: int) -> bool:
        """Send values. Return whether the collector accepted them.

        Args:
            families: The values.
            start_ns: Since when points are counted that have no start of their own.
            now_ns: When the values were read.
        """
        metrics = [_metric(family, start_ns, now_ns, self._temporality) for family in families]
        scope = ScopeMetrics(scope=self._scope(), metrics=metrics, schema_url=SCHEMA_URL)
        resource = ResourceMetrics(
            resource=self._resource, scope_metrics=[scope], schema_url=SCHEMA_URL
        )
        data = MetricsData(resource_metrics=[resource])
        return self._metrics.export(data) is MetricExportResult.SUCCESS

    def send_lines(self, lines: Iterable[LogLine]) -> bool:
        """Send log lines. Return whether the collector accepted them."""
        records = [
            ReadableLogRecord(_log_record(line), self._resource, self._scope(line.logger))
            for line in lines
        ]
        return self._logs.export(records) is LogRecordExportResult.SUCCESS

    def close(self) -> None:
        """Stop retries, and close the connections."""
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._is_not_ours)
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._metrics.shutdown()
        self._logs.shutdown()  # type: ignore[no-untyped-call]

    def _scope(self, name: str = SCOPE) -> InstrumentationScope:
        return InstrumentationScope(name, self._version, SCHEMA_URL)

    def _refuse_redirect(self, signal: Signal, response: Any, **_: object) -> None:
        """Fail an export that was redirected. The SDK does not follow, and reports a success."""
        if 300 <= response.status_code < 400:
            self.redirects[signal] = response.headers.get("Location", "nowhere")
            response.close()
            raise ValueError("redirected")  # the queue logs where to

    def _note_rejection(self, signal: Signal, response: Any, **_: object) -> None:
        """Note a partial success, which the SDK reports as a success. Ignore other answers."""
        if response.status_code != 200 or "protobuf" not in response.headers.get(
            "Content-Type", ""
        ):
            return
        answer_type, items = _ANSWERS[signal]
        try:
            partial_success = answer_type.FromString(response.content).partial_success
        except DecodeError:
            return
        num_rejected = getattr(partial_success, f"rejected_{items.replace(' ', '_')}")
        if num_rejected > 0:
            why = " ".join(partial_success.error_message.split())[:MAX_MESSAGE_CHARACTERS]
            self.rejections[signal] = Rejection(
                num_items=num_rejected, items=items, message=why or "no reason is given"
            )

    def _backoff_seconds(self, retry: int) -> float:
        """Return the delay before a retry, as the SDK does, but by a generator of our own."""
        return 2.0**retry * self._random.uniform(0.8, 1.2)

    def _is_not_ours(self, record: logging.LogRecord) -> bool:
        return record.thread != self._sender

    def _sdk_spans(self, trace: StepTrace) -> Iterator[ReadableSpan]:
        root = _context(trace.trace_id, trace.span_id)
        above = None
        if trace.parent_id is not None:
            above = _context(trace.trace_id, trace.parent_id, is_remote=True)
        links = [Link(_context(*trace.linked))] if trace.linked else []
        yield self._sdk_span(trace.root, root, above, links)
        for number, child in enumerate(trace.children, 1):
            own_id = (trace.span_id + number) % 2**64 or 1
            yield self._sdk_span(child, _context(trace.trace_id, own_id), root)

    def _sdk_span(
        self,
        span: Span,
        own: SpanContext,
        parent: SpanContext | None,
        links: Sequence[Link] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                Event(event.name, event.attributes, timestamp=event.unix_ns)
                for event in span.events
            ],
            links=links,
            status=(
                Status(StatusCode.UNSET)
                if span.error is None
                else Status(StatusCode.ERROR, span.error)
            ),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope(),
        )


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, _SAMPLED)


def _log_record(line: LogLine) -> LogRecord:
    span = NonRecordingSpan(_context(line.trace_id, line.span_id))
    return LogRecord(
        timestamp=line.unix_ns,
        observed_timestamp=line.unix_ns,
        context=set_span_in_context(span) if line.trace_id else None,
        severity_text=logging.getLevelName(line.level).replace("WARNING", "WARN"),
        severity_number=_severity(line.level),
        body=line.text,
        attributes=line.attributes,
    )


def _severity(level: int) -> SeverityNumber:
    """Map a logging level to a severity number. Ten levels correspond to four numbers."""
    return SeverityNumber(min(24, max(1, 4 * (level // 10) + 1)))


def _metric(
    family: Family, start_ns: int, now_ns: int, temporality: AggregationTemporality
) -> Metric:
    numbers = [
        NumberDataPoint(point.attributes, point.start_ns or start_ns, now_ns, float(point.value))
        for point in family.points
        if not isinstance(point.value, Distribution)
    ]
    data: Gauge | Histogram | ExponentialHistogram | Sum
    if family.kind == "gauge":
        data = Gauge(data_points=numbers)
    elif family.kind == "histogram":
        data = _histograms(family, start_ns, now_ns, temporality)
    else:
        is_counter = family.kind == "counter"
        data = Sum(
            data_points=numbers,
            aggregation_temporality=(
                temporality if is_counter else AggregationTemporality.CUMULATIVE
            ),
            is_monotonic=is_counter,
        )
    return Metric(name=family.name, description=family.help, unit=family.unit, data=data)


def _histograms(
    family: Family, start_ns: int, now_ns: int, temporality: AggregationTemporality
) -> Histogram | ExponentialHistogram:
    seen = [
        (point, point.value) for point in family.points if isinstance(point.value, Distribution)
    ]
    if all(one.exponential is not None for _, one in seen):
        return ExponentialHistogram(
            data_points=[_exponential(point, one, start_ns, now_ns) for point, one in seen],
            aggregation_temporality=temporality,
        )
    return Histogram(
        data_points=[
            _histogram(point, one, family.bounds, start_ns, now_ns) for point, one in seen
        ],
        aggregation_temporality=temporality,
    )


def _exponential(
    point: Point, seen: Distribution, start_ns: int, now_ns: int
) -> ExponentialHistogramDataPoint:
    counts = seen.exponential or {}
    first, last = min(counts, default=0), max(counts, default=-1)
    return ExponentialHistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=point.start_ns or start_ns,
        time_unix_nano=now_ns,
        count=seen.count,
        sum=seen.sum,
        scale=SCALE,
        zero_count=seen.count - sum(counts.values()),
        positive=Buckets(
            offset=first, bucket_counts=[counts.get(index, 0) for index in range(first, last + 1)]
        ),
        negative=Buckets(offset=0, bucket_counts=[]),
        flags=0,
        min=None,  # type: ignore[arg-type]  # unknown, and optional in OTLP
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(found) for found in seen.exemplars if found is not None],
    )


def _histogram(
    point: Point, seen: Distribution, bounds: Sequence[float], start_ns: int, now_ns: int
) -> HistogramDataPoint:
    return HistogramDataPoint(
        attributes=point.attributes,
        start_time_unix_nano=point.start_ns or start_ns,
        time_unix_nano=now_ns,
        count=seen.count,
        sum=seen.sum,
        bucket_counts=seen.counts,
        explicit_bounds=bounds,
        min=None,  # type: ignore[arg-type]  # unknown, and optional in OTLP
        max=None,  # type: ignore[arg-type]
        exemplars=[_exemplar(found) for found in seen.exemplars if found is not None],
    )


def _exemplar(found: SeenExemplar) -> Exemplar:
    """Convert an exemplar. A trace id without a span id remains an attribute."""
    labels = dict(found.labels)
    has_ids = {"trace_id", "span_id"} <= labels.keys()
    return Exemplar(
        value=found.value,
        time_unix_nano=int(found.unix_seconds * 1e9),
        trace_id=int(labels.pop("trace_id"), 16) if has_ids else None,
        span_id=int(labels.pop("span_id"), 16) if has_ids else None,
        filtered_attributes=labels,
    )
