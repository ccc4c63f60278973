"""The resource that describes this process to OpenTelemetry."""

from __future__ import annotations

import os
import platform

import pytest

from zerowatch.metrics.exporters.otel_resource import resource_attributes, service_name

POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "train-0",
    "POD_UID": "4711",
    "POD_NAMESPACE": "team",
    "NODE_NAME": "node-a",
    "JOB_NAME": "train",
}


def attributes(environment):
    return resource_attributes(
        environment, script="/work/llm/train.py", run_id="night-7", rank=3, host="here"
    )


def test_a_process_is_named_after_its_script_run_and_rank(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    assert attributes({}) == {
        "service.name": "train",
        "service.instance.id": "night-7/3",
        "host.name": "here",
        "host.arch": "amd64",
        "process.pid": os.getpid(),
        "process.runtime.name": "cpython",
        "process.runtime.version": platform.python_version(),
        "zerowatch.run": "night-7",
        "zerowatch.rank": 3,
    }


@pytest.mark.parametrize(
    ("machine", "spelling"), [("x86_64", "amd64"), ("aarch64", "arm64"), ("riscv64", "riscv64")]
)
def test_the_type_of_the_machine_has_the_spelling_of_the_conventions(
    machine, spelling, monkeypatch
):
    monkeypatch.setattr(platform, "machine", lambda: machine)

    assert attributes({})["host.arch"] == spelling


def of_kubernetes(environment):
    found = attributes(environment)
    return {name: value for name, value in found.items() if name.startswith("k8s.")}


def test_a_pod_has_the_names_that_its_manifest_passes_on():
    assert of_kubernetes(POD) == {
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": "4711",
        "k8s.namespace.name": "team",
        "k8s.node.name": "node-a",
        "k8s.job.name": "train",
    }
    assert of_kubernetes({**POD, "POD_NAME": "other"})["k8s.pod.name"] == "other"


@pytest.mark.parametrize("missing", ["KUBERNETES_SERVICE_HOST", "HOSTNAME"])
def test_outside_of_a_pod_there_are_no_names_of_kubernetes(missing):
    assert of_kubernetes({name: text for name, text in POD.items() if name != missing}) == {}


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/work/llm/train.py", "train"),
        ("/work/llm/__main__.py", "llm"),
        ("-c", "unknown_service:python"),
        ("", "unknown_service:python"),
    ],
)
def test_a_service_is_named_after_its_script_or_package(script, name):
    assert service_name(script) == name
