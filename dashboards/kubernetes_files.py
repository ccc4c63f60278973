"""Generates PrometheusRule objects and a kustomization, for rules and dashboards in Kubernetes.

A kustomization may name files only below its own folder, but folders anywhere. This one is
therefore at the top of rendered/, above the dashboards, and docker/kubernetes refers to rendered/
as a folder. In this way no dashboard has to be copied.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from .prometheus_files import NOTE


def kubernetes_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the files, by their path relative to rendered/.

    Args:
        files: The other generated files by path: the rules of Prometheus and the dashboards.
    """
    rules = [path for path in sorted(files) if path.startswith("prometheus/")]
    dashboards = [path for path in sorted(files) if path.startswith("grafana/")]
    manifests = {
        f"kubernetes/{PurePosixPath(path).name}": _prometheus_rule(
            f"zerowatch-{PurePosixPath(path).stem}", files[path]
        )
        for path in rules
    }
    return {**manifests, "kustomization.yaml": _kustomization(manifests, dashboards)}


def _prometheus_rule(name: str, rules: str) -> str:
    """Return a PrometheusRule object, whose `spec` has the same content as the rule file."""
    groups = rules.removeprefix(NOTE)
    head = f"""\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {name}
  labels:
    app.kubernetes.io/part-of: zerowatch
spec:
"""
    return NOTE + head + textwrap.indent(groups, "  ")


def _kustomization(rule_files: Iterable[str], dashboards: Iterable[str]) -> str:
    resources = "".join(f"  - {path}\n" for path in rule_files)
    maps = "".join(
        f"""\
  - name: {PurePosixPath(path).stem}
    files: [{path}]
    options:
      labels: {{grafana_dashboard: "1"}}
"""
        for path in dashboards
    )
    return f"""\
{NOTE}apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
{resources}generatorOptions:
  disableNameSuffixHash: true  # Grafana's sidecar follows a map by its name
configMapGenerator:
{maps}"""
