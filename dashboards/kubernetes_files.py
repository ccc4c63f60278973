"""Generates objects of the Prometheus operator and a kustomization, for Kubernetes.

A kustomization may name files only below its own folder, but folders anywhere. This one is
therefore at the top of rendered/, above the dashboards, and docker/kubernetes refers to rendered/
as a folder. In this way no dashboard has to be copied. It uses only fields that the kustomize of
kubectl 1.20 knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from .prometheus_files import NOTE, yaml_text

ALERTMANAGER_FILE = "alertmanager/alertmanager.yml"
# Run ids are NAMESPACE.JOB in Kubernetes (docker/kubernetes/demo/job.yaml). By default, the
# operator sends the alerts of a namespace to the AlertmanagerConfig objects of that namespace only.
NAMESPACE_LABEL = '{{ reReplaceAll "[.].*" "" $labels.run }}'
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"(.*)"')


def kubernetes_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the files, by their path relative to rendered/.

    Args:
        files: The other generated files by path: the rules of Prometheus, the configuration of
            Alertmanager and the dashboards.
    """
    rules = [path for path in sorted(files) if path.startswith("prometheus/")]
    dashboards = [path for path in sorted(files) if path.startswith("grafana/")]
    objects = {
        f"kubernetes/{PurePosixPath(path).name}": _prometheus_rule(
            f"zerowatch-{PurePosixPath(path).stem}", yaml.safe_load(files[path])
        )
        for path in rules
    }
    routes = yaml.safe_load(files[ALERTMANAGER_FILE])
    objects["kubernetes/alertmanagerconfig.yaml"] = _alertmanager_config(routes)
    manifests = {path: yaml_text(content) for path, content in sorted(objects.items())}
    return {**manifests, "kustomization.yaml": _kustomization(manifests, dashboards)}


def _prometheus_rule(name: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Return a PrometheusRule object with the content of a rule file.

    Each alert on a run has its namespace as a label.
    """
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["labels"] = {**rule["labels"], "namespace": NAMESPACE_LABEL}
    return _object("monitoring.coreos.com/v1", "PrometheusRule", name, rules)


def _alertmanager_config(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return an AlertmanagerConfig object with the routes and inhibitions of a configuration.

    Its receivers notify nobody until an overlay adds where to.
    """
    route = configuration["route"]
    spec = {
        "route": {
            **_renamed(route),
            "routes": [
                {**_renamed(child), "matchers": _matchers(child["matchers"])}
                for child in route["routes"]
            ],
        },
        "inhibitRules": [
            {
                "sourceMatch": _matchers(rule["source_matchers"]),
                "targetMatch": _matchers(rule["target_matchers"]),
                "equal": rule["equal"],
            }
            for rule in configuration["inhibit_rules"]
        ],
        "receivers": [{"name": receiver["name"]} for receiver in configuration["receivers"]],
    }
    return _object("monitoring.coreos.com/v1alpha1", "AlertmanagerConfig", "zerowatch", spec)


def _renamed(route: Mapping[str, Any]) -> dict[str, Any]:
    """Return a route without its children and matchers, with the names of the operator."""
    return {
        re.sub("_(.)", lambda found: found[1].upper(), name): value
        for name, value in route.items()
        if name not in ("routes", "matchers")
    }


def _matchers(texts: Iterable[str]) -> list[dict[str, str]]:
    found = [_MATCHER.fullmatch(text) for text in texts]
    return [
        {"name": match[1], "matchType": match[2], "value": match[3]} for match in found if match
    ]


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": {"app.kubernetes.io/part-of": "zerowatch"}},
        "spec": spec,
    }


def _kustomization(objects: Iterable[str], dashboards: Iterable[str]) -> str:
    resources = "".join(f"  - {path}\n" for path in objects)
    maps = "".join(
        f"  - name: {PurePosixPath(path).stem}\n    files: [{path}]\n" for path in dashboards
    )
    return f"""\
{NOTE}apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
{resources}generatorOptions:
  disableNameSuffixHash: true  # Grafana's sidecar follows a map by its name
  labels: {{grafana_dashboard: "1"}}
  annotations: {{grafana_folder: zerowatch}}
configMapGenerator:
{maps}"""
