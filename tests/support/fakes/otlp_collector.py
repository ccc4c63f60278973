"""Fake OTLP collector: decodes requests; can also fail, or not answer."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

REQUESTS = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}

_PARTS = {
    "traces": ("resource_spans", "scope_spans"),
    "metrics": ("resource_metrics", "scope_metrics"),
    "logs": ("resource_logs", "scope_logs"),
}


class Collector(ThreadingHTTPServer):
    """Serves on loopback from `with` on.

    Attributes:
        requests: Decoded requests, by path.
        headers: Headers of each request, in order.
        status: HTTP status of the answer; with 0 no request is answered until the end.
        location: Where the answer redirects to. Empty if it does not.
        answers: The content of the answers, by path. Empty for other paths.
        content_type: The type of the answers.
    """

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self.headers: list[dict[str, str]] = []
        self.status = status
        self.location = ""
        self.answers: dict[str, bytes] = {}
        self.content_type = "application/x-protobuf"
        self.released = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def scopes(self, signal: str) -> list[tuple[Any, Any]]:
        """Each received scope of a signal, with the part that has its data and its schema."""
        return [
            (part.scope, part)
            for resource in self._resources(signal)
            for part in getattr(resource, _PARTS[signal][1])
        ]

    def resource_schemas(self, signal: str) -> set[str]:
        """The schema URLs of the received resources of a signal."""
        return {resource.schema_url for resource in self._resources(signal)}

    def _resources(self, signal: str) -> list[Any]:
        return [
            resource
            for request in self.requests[f"/v1/{signal}"]
            for resource in getattr(request, _PARTS[signal][0])
        ]

    def spans(self) -> list[Any]:
        """All received spans, each with the attributes of its resource."""
        return [
            (attributes_of(part.resource), span)
            for request in self.requests["/v1/traces"]
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    def lines(self) -> list[Any]:
        """All received log records."""
        return [
            line
            for request in self.requests["/v1/logs"]
            for part in request.resource_logs
            for scope in part.scope_logs
            for line in scope.log_records
        ]

    def metrics(self) -> list[Any]:
        """All received metrics; one export arrives in several requests."""
        return [
            metric
            for request in self.requests["/v1/metrics"]
            for part in request.resource_metrics
            for scope in part.scope_metrics
            for metric in scope.metrics
        ]


def attributes_of(owner: Any) -> dict[str, Any]:
    """Return attributes as a plain dict."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes
    }


class _Handler(BaseHTTPRequestHandler):
    server: Collector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.headers.append(dict(self.headers))
        if not self.server.status:
            self.server.released.wait()
            return
        self.server.requests[self.path].append(REQUESTS[self.path].FromString(body))
        self.send_response(self.server.status)
        answer = self.server.answers.get(self.path, b"")
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(answer)))
        if self.server.location:
            self.send_header("Location", self.server.location + self.path)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass
