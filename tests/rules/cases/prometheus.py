"""Test cases of the alerts on Prometheus and Alertmanager."""

from __future__ import annotations

from rules.history import GONE, Series, Stretch, counter, gauge, training, training_rank
from rules.promtool import Case, annotations_of

SERVER = {"job": "prometheus", "instance": "localhost:9090"}
SENDER = {"job": "alertmanager", "instance": "alertmanager:9093"}
GROUP = "/etc/prometheus/rules/alerts.yaml;zerowatch-training-alerts"
PREFIX = "prometheus_"
ACCEPTED = "alertmanager_config_last_reload_successful"


def alert(name: str, labels: dict[str, str], severity: str = "warning") -> dict[str, str]:
    return {
        "alertname": f"Zerowatch{name}",
        "component": "prometheus",
        "severity": severity,
        **labels,
    }


def of_server(metric: str, values: str, **labels: str) -> Series:
    """Return a series of Prometheus, or of Alertmanager by the name of the metric."""
    known = {**(SERVER if metric.startswith(PREFIX) else SENDER), **labels}
    matchers = ", ".join(f'{name}="{value}"' for name, value in known.items())
    return {f"{metric}{{{matchers}}}": values}


def failing(*stretches: Stretch, config: str) -> Series:
    """Return the failures of reading targets by HTTP."""
    return of_server(
        "prometheus_sd_refresh_failures_total",
        counter(*stretches),
        mechanism="http",
        config=config,
    )


def errors_of(alertmanager: str, *stretches: Stretch) -> Series:
    """Return the alerts that Prometheus could not send to one of several Alertmanagers."""
    return of_server(
        "prometheus_notifications_errors_total",
        counter(*stretches),
        alertmanager=f"http://{alertmanager}:9093/api/v2/alerts",
    )


def dropped(*stretches: Stretch, **labels: str) -> Series:
    """Return the alerts that Prometheus dropped."""
    return of_server("prometheus_notifications_dropped_total", counter(*stretches), **labels)


def sends_to(alertmanager: str, minutes: float, **labels: str) -> Series:
    """Return the alerts that Prometheus sent to an Alertmanager."""
    return of_server(
        "prometheus_notifications_sent_total",
        counter((minutes, 0.1)),
        alertmanager=f"http://{alertmanager}/api/v2/alerts",
        **labels,
    )


def alertmanagers(minutes: float, *instances: str) -> Series:
    """Return these Alertmanagers, of which each has accepted its configuration."""
    series: Series = {}
    for instance in instances:
        accepted = gauge((minutes, 1))
        series |= of_server(ACCEPTED, accepted, instance=instance)
    return series


def evaluates(minutes: float, group: str = GROUP, **labels: str) -> Series:
    """Return the number of rules in a group that Prometheus evaluates."""
    return of_server("prometheus_rule_group_rules", gauge((minutes, 9)), rule_group=group, **labels)


def scrapes(minutes: float, job: str = "zerowatch", **labels: str) -> Series:
    """Return the number of targets that Prometheus has of a scrape configuration."""
    targets = gauge((minutes, 8))
    return of_server("prometheus_target_scrape_pool_targets", targets, scrape_job=job, **labels)


def ended(after: float, minutes: float) -> Series:
    """Return the series of two healthy ranks whose run ends after so many of the minutes."""
    stretches = ((after, 1), (0.25, 0), (minutes - after - 0.25, GONE))
    return training_rank(0, *stretches) | training_rank(1, *stretches)


# Four failures, from 3 to 18 minutes.
EACH_FIVE_MINUTES = gauge((3, 0), (5, 1), (5, 2), (5, 3), (22, 4))

CASES = (
    Case(
        title="Fires if the targets of a training run cannot be read",
        series=training(40) | failing((3, 0), (15, 0.2), (22, 0), config="zerowatch"),
        alert=alert(
            "PrometheusDiscoveryFailing", {**SERVER, "mechanism": "http", "config": "zerowatch"}
        ),
        fires_at="8m15s",
        recovers_at="33m45s",
        words_at="15m",
        annotations=annotations_of(
            "ZerowatchPrometheusDiscoveryFailing",
            dashboard="zerowatch-overhead",
            about_run=False,
            summary="Prometheus localhost:9090 cannot read its list of ranks",
            description="Reading the targets of a scrape configuration failed 132 times in eleven "
            "minutes. Prometheus keeps the ranks that it knows, but finds no new run. The log of "
            "Prometheus names the address or file.",
        ),
    ),
    Case(
        title="Fires if a file of targets, read each five minutes, cannot be read",
        series=training(40)
        | scrapes(40)
        | of_server("prometheus_sd_file_read_errors_total", EACH_FIVE_MINUTES),
        alert=alert("PrometheusDiscoveryFailing", SERVER),
        fires_at="13m15s",
        recovers_at="29m",
    ),
    *(
        Case(
            title=f"Fires if the list of all runs cannot be read while no run trains: {config}",
            series=failing((10, 0), (15, 0.2), (22, 0), config=config),
            alert=alert(
                "PrometheusDiscoveryFailing", {**SERVER, "mechanism": "http", "config": config}
            ),
            fires_at="15m15s",
            recovers_at="40m45s",
        )
        for config in ("zerowatch-targets", "scrapeConfig/training/zerowatch-targets")
    ),
    Case(
        title="Fires on after the end of a run if the list of all runs cannot be read",
        series=ended(12, 40) | failing((3, 0), (15, 0.2), (22, 0), config="zerowatch-targets"),
        alert=alert(
            "PrometheusDiscoveryFailing",
            {**SERVER, "mechanism": "http", "config": "zerowatch-targets"},
        ),
        fires_at="8m15s",
        recovers_at="33m45s",
    ),
    Case(
        title="Fires if a file of targets cannot be read while no run trains",
        series=of_server("prometheus_sd_file_read_errors_total", EACH_FIVE_MINUTES) | evaluates(40),
        alert=alert("PrometheusDiscoveryFailing", SERVER),
        fires_at="13m15s",
        recovers_at="29m",
    ),
    Case(
        title="Does not fire if nothing answers while no run is in training",
        near="ZerowatchPrometheusDiscoveryFailing",
        series=failing((20, 0.2), config="zerowatch"),
        until="20m",
    ),
    Case(
        title="Does not fire if nothing answers where a run is optional",
        near="ZerowatchPrometheusDiscoveryFailing",
        series=training(20) | failing((20, 0.03), config="zerowatch-optional"),
        until="20m",
    ),
    *(
        Case(
            title=f"Does not fire if targets of other programs cannot be read: {config}",
            near="ZerowatchPrometheusDiscoveryFailing",
            series=training(20) | failing((20, 0.2), config=config),
            until="20m",
        )
        for config in ("netbox-switches", "scrapeConfig/zerowatch-team/netbox")
    ),
    *(
        Case(
            title=f"Fires if the targets of a run cannot be read: {config or 'no name'}",
            series=training(40) | failing((3, 0), (15, 0.2), (22, 0), config=config),
            alert=alert(
                "PrometheusDiscoveryFailing",
                {**SERVER, "mechanism": "http", **({"config": config} if config else {})},
            ),
            fires_at="8m15s",
            recovers_at="33m45s",
        )
        for config in ("", "zerowatch-night", "scrapeConfig/training/zerowatch-night")
    ),
    Case(
        title="Fires if rules of zerowatch fail",
        series=of_server(
            "prometheus_rule_evaluation_failures_total",
            counter((3, 0), (15, 0.1), (22, 0)),
            rule_group=GROUP,
        ),
        alert=alert("PrometheusRulesFailing", {**SERVER, "rule_group": GROUP}),
        fires_at="8m15s",
        recovers_at="28m",
    ),
    Case(
        title="Does not fire if rules of others fail",
        near="ZerowatchPrometheusRulesFailing",
        series=of_server(
            "prometheus_rule_evaluation_failures_total",
            counter((20, 0.1)),
            rule_group="/etc/prometheus/rules/node.yaml;node",
        ),
        until="20m",
    ),
    Case(
        title="Fires if a target exports more series than the limit",
        series=of_server(
            "prometheus_target_scrapes_exceeded_sample_limit_total",
            counter((3, 0), (15, 0.2), (22, 0)),
        )
        | scrapes(40, "scrapeConfig/training/zerowatch-night"),
        alert=alert("PrometheusLimitExceeded", {**SERVER, "limit": "sample_limit"}),
        fires_at="4m15s",
        recovers_at="28m",
    ),
    Case(
        title="Fires if Prometheus has no Alertmanager",
        series=of_server(
            "prometheus_notifications_alertmanagers_discovered", gauge((3, 1), (15, 0), (10, 1))
        )
        | evaluates(28),
        alert=alert("PrometheusNotificationsFailing", SERVER, "critical"),
        fires_at="8m15s",
        recovers_at="23m15s",
    ),
    Case(
        title="Does not fire on agents and other servers, which have no Alertmanager",
        near="ZerowatchPrometheusNotificationsFailing",
        series=evaluates(20)
        | of_server("prometheus_notifications_alertmanagers_discovered", gauge((20, 1)))
        | of_server(
            "prometheus_notifications_alertmanagers_discovered", gauge((20, 0)), cluster="eu"
        )
        | of_server(
            "prometheus_notifications_alertmanagers_discovered", gauge((20, 0)), instance="b:9090"
        )
        | evaluates(20, "/etc/prometheus/rules/node.yaml;node", instance="b:9090"),
        until="20m",
    ),
    Case(
        title="Fires if the server of one of two clusters drops alerts, at the same address",
        series=dropped((3, 0), (15, 0.1), (22, 0), cluster="eu")
        | dropped((40, 0), cluster="us")
        | evaluates(40, cluster="eu")
        | evaluates(40, cluster="us"),
        alert=alert("PrometheusNotificationsFailing", {**SERVER, "cluster": "eu"}, "critical"),
        fires_at="8m15s",
        recovers_at="28m",
    ),
    Case(
        title="Does not fire if one notification is lost",
        near="ZerowatchPrometheusNotificationsFailing",
        series=of_server(
            "prometheus_notifications_errors_total",
            gauge((3, 0), (17, 1)),
            alertmanager="http://alertmanager:9093/api/v2/alerts",
        )
        | evaluates(20),
        until="20m",
    ),
    Case(
        title="Does not fire if one of two Alertmanagers is down",
        near="ZerowatchPrometheusNotificationsFailing",
        series=errors_of("a", (20, 0.1)) | errors_of("b", (20, 0)) | evaluates(20),
        until="20m",
    ),
    Case(
        title="Fires if two of two Alertmanagers are down",
        series=errors_of("a", (3, 0), (15, 0.1), (22, 0))
        | errors_of("b", (40, 0.1))
        | evaluates(40),
        alert=alert("PrometheusNotificationsFailing", SERVER, "critical"),
        fires_at="8m15s",
        recovers_at="28m",
    ),
    Case(
        title="Fires if Alertmanager cannot reach the pager, and tries each five minutes",
        series=of_server(
            "alertmanager_notifications_failed_total",
            EACH_FIVE_MINUTES,
            integration="pagerduty",
        ),
        alert=alert(
            "AlertmanagerNotificationsFailing", {**SENDER, "integration": "pagerduty"}, "critical"
        ),
        fires_at="13m15s",
        recovers_at="29m",
    ),
    Case(
        title="Does not fire if one notification cannot be delivered",
        near="ZerowatchAlertmanagerNotificationsFailing",
        series=of_server(
            "alertmanager_notifications_failed_total",
            gauge((3, 0), (17, 1)),
            integration="pagerduty",
        ),
        until="20m",
    ),
    Case(
        title="Fires if Alertmanager rejects its changed configuration",
        series=of_server(
            "alertmanager_config_last_reload_successful", gauge((3, 1), (15, 0), (5, 1))
        )
        | of_server("prometheus_config_last_reload_successful", gauge((23, 1))),
        alert=alert("PrometheusConfigRejected", SENDER),
        fires_at="8m15s",
        recovers_at="18m15s",
    ),
    *(
        Case(
            title=f"Fires on an Alertmanager {title}",
            series=of_server(ACCEPTED, gauge((3, 1), (15, 0), (5, 1))) | servers,
            alert=alert("PrometheusConfigRejected", SENDER),
            fires_at="8m15s",
            recovers_at="18m15s",
        )
        for title, servers in (
            (
                "to which one of two servers sends",
                sends_to("alertmanager:9093", 23)
                | sends_to("alertmanager:9093", 23, instance="b:9090")
                | sends_to("theirs:9093", 23, instance="c:9090")
                | evaluates(23)
                | evaluates(23, instance="b:9090")
                | evaluates(23, "/etc/prometheus/rules/node.yaml;node", instance="c:9090")
                | alertmanagers(23, "theirs:9093"),
            ),
            (
                "that is scraped at another address than that to which alerts are sent",
                sends_to("alerts.example.org", 23) | evaluates(23),
            ),
        )
    ),
    *(
        Case(
            title=f"Does not fire on an Alertmanager of others: {near}",
            near=f"Zerowatch{near}",
            series=failing
            | alertmanagers(20, "ours:9093")
            | sends_to("ours:9093", 20)
            | evaluates(20)
            | sends_to("alertmanager:9093", 20, instance="b:9090")
            | evaluates(20, "/etc/prometheus/rules/node.yaml;node", instance="b:9090"),
            until="20m",
        )
        for near, failing in (
            ("PrometheusConfigRejected", of_server(ACCEPTED, gauge((20, 0)))),
            (
                "AlertmanagerNotificationsFailing",
                of_server(ACCEPTED, gauge((20, 1)))
                | of_server(
                    "alertmanager_notifications_failed_total",
                    EACH_FIVE_MINUTES,
                    integration="slack",
                ),
            ),
        )
    ),
    *(
        Case(
            title=f"Fires if Prometheus rejects its changed configuration: {title}",
            series=of_server(
                "prometheus_config_last_reload_successful", gauge((3, 1), (15, 0), (5, 1))
            )
            | ours,
            alert=alert("PrometheusConfigRejected", SERVER),
            fires_at="8m15s",
            recovers_at="18m15s",
        )
        for title, ours in (
            ("a server that evaluates rules", evaluates(23)),
            ("an agent that scrapes ranks", scrapes(23)),
            ("an agent of optional runs", scrapes(23, "scrapeConfig/training/train-optional")),
        )
    ),
    *(
        Case(
            title=f"Does not fire on servers of others: {near}",
            near=f"ZerowatchPrometheus{near}",
            series=failing
            | evaluates(20, "/etc/prometheus/rules/node.yaml;node")
            | scrapes(20, "node")
            | evaluates(20, instance="ours:9090")
            | scrapes(20, instance="ours:9090"),
            until="20m",
        )
        for near, failing in (
            ("NotificationsFailing", errors_of("theirs", (20, 0.1))),
            ("NotificationsFailing", dropped((20, 0.1))),
            (
                "ConfigRejected",
                of_server("prometheus_config_last_reload_successful", gauge((20, 0))),
            ),
            (
                "LimitExceeded",
                of_server(
                    "prometheus_target_scrapes_exceeded_sample_limit_total", counter((20, 0.2))
                ),
            ),
            (
                "DiscoveryFailing",
                of_server("prometheus_sd_file_read_errors_total", counter((20, 0.2))),
            ),
        )
    ),
)
