"""Tests of the Kubernetes objects: complete, valid, with the same rules and dashboards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from package_tree import ROOT
from require import program

from zerowatch.dashboards.build import dashboard_files
from zerowatch.dashboards.kubernetes_files import kubernetes_files
from zerowatch.dashboards.prometheus_files import rule_files

KUBERNETES = ROOT / "docker" / "kubernetes"
RENDERED = ROOT / "dashboards" / "rendered"
CONFIG_MAP_BYTES = 2**20  # Kubernetes refuses more
OPERATORS = "monitoring.coreos.com/v1"


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return {**rule_files(), **dashboard_files()}


@pytest.fixture(scope="module")
def manifests(generated: dict[str, str]) -> dict[str, str]:
    return kubernetes_files(generated)


def kustomized(folder: Path) -> Iterator[Path]:
    """Yield every file that a kustomization lists, including those of listed folders."""
    for resource in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        path = (folder / resource).resolve()
        if path == RENDERED:  # generated, and tested as such
            continue
        if path.is_dir():
            yield from kustomized(path)
        else:
            yield path


def written_objects() -> list[dict[str, Any]]:
    return [
        thing for file in kustomized(KUBERNETES) for thing in yaml.safe_load_all(file.read_text())
    ]


def test_the_kustomizations_list_exactly_the_existing_files() -> None:
    taken = set(kustomized(KUBERNETES))

    there = {file for file in KUBERNETES.rglob("*.yaml") if file.name != "kustomization.yaml"}

    assert taken == there


def test_listed_files_are_below_the_folder_of_their_kustomization() -> None:
    for file in KUBERNETES.rglob("kustomization.yaml"):
        for resource in yaml.safe_load(file.read_text())["resources"]:
            path = (file.parent / resource).resolve()
            assert path.is_dir() or path.is_relative_to(file.parent)


def test_no_object_has_a_fixed_namespace() -> None:
    assert all("namespace" not in thing["metadata"] for thing in written_objects())


def test_objects_of_kubernetes_kinds_are_valid() -> None:
    own = [thing for thing in written_objects() if thing["apiVersion"] != OPERATORS]

    for thing in own:
        kubernetes_validate.validate(thing, "1.31", strict=True)

    assert {thing["kind"] for thing in own} == {"Service", "Job"}


def test_the_pod_monitor_selects_the_pods_and_the_port_of_the_job() -> None:
    by_kind = {thing["kind"]: thing for thing in written_objects()}
    pod = by_kind["Job"]["spec"]["template"]
    monitor = by_kind["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]

    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}

    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"][monitor["jobLabel"]] == "zerowatch"
    assert endpoint["port"] in ports
    assert endpoint["honorLabels"] is True
    ended, *labels = endpoint["relabelings"]
    assert (ended["action"], ended["regex"]) == ("drop", "Succeeded")
    assert {rule["targetLabel"] for rule in labels} == {"run", "__param_run", "node", "rank"}


def test_the_pods_of_the_job_reach_their_master_through_the_service() -> None:
    by_kind = {thing["kind"]: thing for thing in written_objects()}
    job, service = by_kind["Job"], by_kind["Service"]
    name, domain = job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]

    arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]

    assert domain == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert f"--master-addr={name}-0.{domain}" in arguments


@pytest.mark.parametrize("file", ["alerts", "recording"])
def test_a_prometheus_rule_has_the_same_groups_as_the_rule_file(
    file: str, generated: dict[str, str], manifests: dict[str, str]
) -> None:
    thing = yaml.safe_load(manifests[f"kubernetes/{file}.yaml"])

    assert (thing["apiVersion"], thing["kind"]) == (OPERATORS, "PrometheusRule")
    assert thing["metadata"]["name"] == f"zerowatch-{file}"
    assert thing["spec"] == yaml.safe_load(generated[f"prometheus/{file}.yaml"])


@pytest.mark.parametrize("file", ["alerts", "recording"])
def test_promtool_accepts_the_groups_of_a_prometheus_rule(
    file: str, manifests: dict[str, str], tmp_path: Path
) -> None:
    promtool = program("promtool", apt="prometheus")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(yaml.safe_load(manifests[f"kubernetes/{file}.yaml"])["spec"]))

    done = subprocess.run([promtool, "check", "rules", str(rules)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def test_each_dashboard_becomes_a_config_map_with_the_label_of_grafanas_sidecar(
    generated: dict[str, str], manifests: dict[str, str]
) -> None:
    kustomization = yaml.safe_load(manifests["kustomization.yaml"])
    dashboards = sorted(path for path in generated if path.startswith("grafana/"))

    assert [one["files"] for one in kustomization["configMapGenerator"]] == [
        [path] for path in dashboards
    ]
    for one in kustomization["configMapGenerator"]:
        (path,) = one["files"]
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": one["name"], "labels": one["options"]["labels"]},
            "data": {Path(path).name: generated[path]},
        }
        kubernetes_validate.validate(config_map, "1.31", strict=True)
        assert one["options"]["labels"] == {"grafana_dashboard": "1"}
        assert len(json.dumps(config_map).encode()) < CONFIG_MAP_BYTES


def test_the_rendered_kustomization_names_the_generated_rules(manifests: dict[str, str]) -> None:
    kustomization = yaml.safe_load(manifests["kustomization.yaml"])

    assert set(kustomization["resources"]) == manifests.keys() - {"kustomization.yaml"}
