"""Writes what Kubernetes reads of the rules and dashboards: PrometheusRules and a kustomization.

kustomize takes files only from below the folder of a kustomization, but folders from anywhere. So
this one is at the top of rendered/, where the dashboards are, and docker/kubernetes refers to
rendered/ as a folder. Nothing has to be there twice.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from .prometheus_files import NOTE


def kubernetes_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files' texts by path, relative to rendered/.

    Args:
        files: The other generated files by path: Prometheus' rules, and the dashboards.
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
    """Wrap a rule file: below `spec` the operator takes the very groups that Prometheus takes."""
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
