"""Describes this process as an OpenTelemetry resource."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

# Environment variables that Kubernetes manifests commonly set with the downward API.
_KUBERNETES = {
    "POD_NAME": "k8s.pod.name",
    "POD_UID": "k8s.pod.uid",
    "POD_NAMESPACE": "k8s.namespace.name",
    "NODE_NAME": "k8s.node.name",
    "JOB_NAME": "k8s.job.name",
}


def resource_attributes(
    environment: Mapping[str, str], *, script: str, run_id: str, rank: int, host: str
) -> dict[str, str | int]:
    """Return attributes of this process, without its command line, which may contain secrets.

    The SDK adds OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, which take precedence.

    Args:
        environment: The environment variables.
        script: The path of the training script, after which the service is named.
        run_id: The id of the run.
        rank: The global rank.
        host: The name of the node.
    """
    attributes: dict[str, str | int] = {
        "service.name": service_name(script),
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


def service_name(script: str) -> str:
    """Return the name of a script without its ending; of a package, the name of the package.

    Examples:
        >>> service_name("/work/llm/train.py"), service_name("/work/llm/__main__.py")
        ('train', 'llm')
    """
    path = Path(script)
    name = path.parent.name if path.stem == "__main__" else path.stem
    is_name = bool(name) and not name.startswith("-")  # "-c" is a command, "" a terminal
    return name if is_name else "unknown_service:python"


def _architecture(machine: str) -> str:
    """Return the spelling of a machine type that OpenTelemetry's conventions use."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
