"""Writes the configuration of Prometheus in the native stack.

It is like docker/prometheus/prometheus.yml with other addresses; a test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

JOB = "zerowatch"
SCRAPE_INTERVAL = "5s"
SERVER_INTERVAL = "15s"
# The labels of a target that its list of targets, which a job writes, may set.
LABELS_OF_LIST = ("run", "rank", "node")
_CONSTANT_LABELS = {
    "job": JOB,
    "__scheme__": "http",
    "__metrics_path__": "/metrics",
    "__scrape_interval__": SCRAPE_INTERVAL,
    "__scrape_timeout__": SCRAPE_INTERVAL,
}
# What a job sends and lists is not trusted: limits, and only its own names and labels.
GUARDS: dict[str, Any] = {
    "sample_limit": 20000,
    "target_limit": 8192,
    "label_limit": 40,
    "label_name_length_limit": 100,
    "label_value_length_limit": 500,
    "body_size_limit": "20MB",
    "relabel_configs": [
        *(
            {"target_label": label, "replacement": value}
            for label, value in _CONSTANT_LABELS.items()
        ),
        {
            "regex": "__(address|scheme|metrics_path|scrape_interval|scrape_timeout)__|"
            + "|".join(("job", *LABELS_OF_LIST)),
            "action": "labelkeep",
        },
        {"source_labels": ["run"], "target_label": "__param_run"},
    ],
    "metric_relabel_configs": [
        {
            "source_labels": ["__name__"],
            "regex": "(zerowatch|process|python)_.+",
            "action": "keep",
        },
        {"regex": "exported_.+", "action": "labeldrop"},
    ],
}


def prometheus_configuration(
    *, rules: Path, targets: Path, prometheus: str, alertmanager: str, runbook: str
) -> dict[str, Any]:
    """Return the content of prometheus.yml.

    Args:
        rules: The folder of rule files.
        targets: The file_sd file with the ranks to scrape.
        prometheus: The address of Prometheus itself, "host:port".
        alertmanager: The address of Alertmanager, "host:port".
        runbook: The URL of the runbook, to which alerts link.
    """
    return {
        "global": {
            "scrape_interval": SCRAPE_INTERVAL,
            "evaluation_interval": "15s",
            "external_labels": {"cluster": "local", "zerowatch_runbook": runbook},
        },
        "rule_files": [str(rules / "*.yaml")],
        "alerting": {
            "alert_relabel_configs": [{"regex": "zerowatch_.+", "action": "labeldrop"}],
            "alertmanagers": [_static(alertmanager)],
        },
        "scrape_configs": [
            {
                "job_name": JOB,
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}],
                **GUARDS,
            },
            {"job_name": "prometheus", "scrape_interval": SERVER_INTERVAL, **_static(prometheus)},
            {
                "job_name": "alertmanager",
                "scrape_interval": SERVER_INTERVAL,
                **_static(alertmanager),
            },
        ],
    }


def _static(address: str) -> dict[str, Any]:
    return {"static_configs": [{"targets": [address]}]}
