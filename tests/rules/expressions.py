"""Checks that a PromQL expression selects only existing metrics and labels."""

from __future__ import annotations

from dataclasses import dataclass

import promql_parser
from promql_parts import TARGET_LABELS, known_series, nodes

_SERVER = {"job", "instance"}
# What Prometheus and Alertmanager export about themselves, as far as rules use it.
OF_SERVERS = {
    "prometheus_sd_refresh_failures_total": {*_SERVER, "mechanism", "config"},
    "prometheus_sd_file_read_errors_total": _SERVER,
    "prometheus_rule_evaluation_failures_total": {*_SERVER, "rule_group"},
    "prometheus_rule_group_iterations_missed_total": {*_SERVER, "rule_group"},
    "prometheus_rule_group_rules": {*_SERVER, "rule_group"},
    "prometheus_notifications_errors_total": {*_SERVER, "alertmanager"},
    "prometheus_notifications_dropped_total": _SERVER,
    "prometheus_notifications_sent_total": {*_SERVER, "alertmanager"},
    "prometheus_notifications_alertmanagers_discovered": _SERVER,
    "prometheus_target_scrape_pool_targets": {*_SERVER, "scrape_job"},
    "prometheus_target_scrape_pool_exceeded_target_limit_total": _SERVER,
    "prometheus_target_scrape_pool_exceeded_label_limits_total": _SERVER,
    "prometheus_target_scrapes_exceeded_sample_limit_total": _SERVER,
    "prometheus_target_scrapes_exceeded_body_size_limit_total": _SERVER,
    "prometheus_config_last_reload_successful": _SERVER,
    "alertmanager_config_last_reload_successful": _SERVER,
    "alertmanager_notifications_failed_total": {*_SERVER, "integration"},
}
KNOWN = {"up": TARGET_LABELS, "ALERTS": {"alertname"}, **OF_SERVERS, **known_series()}


@dataclass(frozen=True)
class Selector:
    name: str
    labels: frozenset[str]


def selectors(expression: str) -> set[Selector]:
    """Return the selectors of a PromQL expression."""
    return {
        Selector(node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers))
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    }


def unknown(expression: str) -> list[str]:
    """Return the metrics and labels that an expression selects but that do not exist."""
    return [
        f"{one.name}: {', '.join(sorted(one.labels - KNOWN.get(one.name, set()))) or 'no metric'}"
        for one in selectors(expression)
        if one.name not in KNOWN or not one.labels <= KNOWN[one.name]
    ]
