"""Reads OpenTelemetry's environment variables, and describes this process as a resource."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import version

# Environment variables that Kubernetes manifests commonly set with the downward API.
_KUBERNETES = {
    "POD_NAME": "k8s.pod.name",
    "POD_UID": "k8s.pod.uid",
    "POD_NAMESPACE": "k8s.namespace.name",
    "NODE_NAME": "k8s.node.name",
    "JOB_NAME": "k8s.job.name",
}


def is_standard_endpoint(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's own environment variables request OTLP over HTTP."""
    asked = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf").strip().lower()
    return (
        bool(environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip())
        and asked == "http/protobuf"
        and environment.get("OTEL_SDK_DISABLED", "").strip().lower() != "true"
    )


def resource_attributes(
    environment: Mapping[str, str], *, run_id: str, rank: int, host: str
) -> dict[str, str | int]:
    """Return attributes of this process, without its command line, which may contain secrets.

    The SDK adds OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which take precedence.
    """
    attributes: dict[str, str | int] = {
        "service.name": "zerowatch",
        "service.version": version("zerowatch"),
        "service.instance.id": f"{run_id}/{rank}",
        "host.name": host,
        "host.arch": _architecture(platform.machine()),
        "process.pid": os.getpid(),
        "process.runtime.name": platform.python_implementation().lower(),
        "process.runtime.version": platform.python_version(),
        "zerowatch.run": run_id,
        "zerowatch.rank": rank,
    }
    if "KUBERNETES_SERVICE_HOST" in environment and "HOSTNAME" in environment:
        attributes["k8s.pod.name"] = environment["HOSTNAME"]
        for variable, attribute in _KUBERNETES.items():
            if environment.get(variable):
                attributes[attribute] = environment[variable]
    return attributes


def _architecture(machine: str) -> str:
    """Return the spelling of a machine type that OpenTelemetry's conventions use."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
