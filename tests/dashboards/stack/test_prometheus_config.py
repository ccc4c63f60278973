"""What the Prometheus of the native stack scrapes, how often, and what it does not trust."""

from __future__ import annotations

from pathlib import Path

from zerowatch.dashboards.stack.prometheus_config import prometheus_configuration


def configuration() -> dict[str, object]:
    return prometheus_configuration(
        rules=Path("/rules"),
        targets=Path("/run/targets.json"),
        prometheus="127.0.0.1:9091",
        alertmanager="127.0.0.1:9094",
        runbook="https://runbook",
    )


def test_ranks_are_scraped_more_often_than_the_servers() -> None:
    found = configuration()

    ranks, *servers = found["scrape_configs"]  # type: ignore[misc]
    assert found["global"] == {
        "scrape_interval": "5s",
        "evaluation_interval": "15s",
        "external_labels": {"cluster": "local", "zerowatch_runbook": "https://runbook"},
    }
    assert found["rule_files"] == ["/rules/*.yaml"]
    assert found["alerting"] == {
        "alert_relabel_configs": [{"regex": "zerowatch_.+", "action": "labeldrop"}],
        "alertmanagers": [{"static_configs": [{"targets": ["127.0.0.1:9094"]}]}],
    }
    assert ranks["job_name"] == "zerowatch"
    assert ranks["file_sd_configs"] == [{"files": ["/run/targets.json"], "refresh_interval": "5s"}]
    assert servers == [
        {
            "job_name": name,
            "scrape_interval": "15s",
            "static_configs": [{"targets": [address]}],
        }
        for name, address in (("prometheus", "127.0.0.1:9091"), ("alertmanager", "127.0.0.1:9094"))
    ]


def test_a_job_can_set_neither_the_address_path_nor_interval_of_a_scrape() -> None:
    ranks = configuration()["scrape_configs"][0]  # type: ignore[index]

    limits = {key: value for key, value in ranks.items() if "limit" in key}
    assert limits == {
        "sample_limit": 20_000,
        "target_limit": 8192,
        "label_limit": 40,
        "label_name_length_limit": 100,
        "label_value_length_limit": 500,
        "body_size_limit": "20MB",
    }
    assert ranks["relabel_configs"] == [
        {"target_label": "job", "replacement": "zerowatch"},
        {"target_label": "__scheme__", "replacement": "http"},
        {"target_label": "__metrics_path__", "replacement": "/metrics"},
        {"target_label": "__scrape_interval__", "replacement": "5s"},
        {"target_label": "__scrape_timeout__", "replacement": "5s"},
        {
            "regex": "__(address|scheme|metrics_path|scrape_interval|scrape_timeout)__"
            "|job|run|rank|node",
            "action": "labelkeep",
        },
        {"source_labels": ["run"], "target_label": "__param_run"},
    ]
    assert ranks["metric_relabel_configs"] == [
        {
            "source_labels": ["__name__"],
            "regex": "(zerowatch|process|python)_.+",
            "action": "keep",
        },
        {"regex": "exported_.+", "action": "labeldrop"},
    ]
