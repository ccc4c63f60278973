"""Alerts on Prometheus and Alertmanager: if they fail, no other alert can be trusted.

Prometheus must scrape itself and Alertmanager. The metrics are those that both programs export.
"""

from __future__ import annotations

from ...metrics.catalog.training import RUN_ACTIVE
from ..promql import select
from ..timing import MINUTE, Timing
from .alert import Alert

DASHBOARD = "zerowatch-overhead"
WATCHDOG = "ZerowatchWatchdog"
INSTANCE = "{{ $labels.instance }}"
# The rule groups of the shipped files; the label is "<file>;<group>".
OUR_RULES = 'rule_group=~".+;zerowatch-.+"'
OUR_ALERTS = 'rule_group=~".+;zerowatch-.+-alerts"'
# Scrape configurations of ranks, by the name that the documents ask for, with that of the operator.
# Before 3.9, Prometheus exports no name. "-optional" marks hosts on which often nothing runs.
EXPECTED_DISCOVERY = (
    'mechanism=~"http|file", config=~"(.+/)?zerowatch[^/]*|", config!~".+-optional"'
)
# The servers that evaluate rules of zerowatch, or scrape ranks: an agent may have optional hosts
# only. Prometheus may scrape servers of others, too: their faults are none of ours.
OUR_SERVERS = (
    f"(prometheus_rule_group_rules{{{OUR_RULES}}}\n"
    'or prometheus_target_scrape_pool_targets{scrape_job=~"(.+/)?zerowatch[^/]*|.+-optional"})'
)
# The addresses of the Alertmanagers to which servers send the alerts of zerowatch.
OUR_ADDRESSES = (
    "label_replace(count by (alertmanager) (prometheus_notifications_sent_total\n"
    f"and ignoring (rule_group, alertmanager) prometheus_rule_group_rules{{{OUR_ALERTS}}} > 0),\n"
    '"instance", "$1", "alertmanager", "[a-z]+://([^/]+)/.*")'
)
# The service that lists the ranks of all runs, as the documents name its scrape configuration. The
# operator puts scrapeConfig/NAMESPACE/ before it.
TARGETS_SERVICE = 'config=~"(.+/)?zerowatch-targets"'
# The counters of exceeded limits of a scrape configuration, by the name of the limit.
LIMITS = {
    "target_limit": "prometheus_target_scrape_pool_exceeded_target_limit_total",
    "label_limit": "prometheus_target_scrape_pool_exceeded_label_limits_total",
    "sample_limit": "prometheus_target_scrapes_exceeded_sample_limit_total",
    "body_size_limit": "prometheus_target_scrapes_exceeded_body_size_limit_total",
}


def prometheus_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _watchdog(),
        _discovery_failing(timing),
        _rules_failing(timing),
        _limit_exceeded(timing),
        _notifications_failing(timing),
        _delivery_failing(timing),
        _configuration_rejected(),
    )


def _grows(metric: str, timing: Timing, matchers: str = "") -> str:
    """Return the series of a counter that grew within the last five minutes."""
    return f"increase({metric}{{{matchers}}}[{timing.short}]) > 0"


def _keeps_failing(metric: str, timing: Timing, matchers: str = "") -> str:
    """Return the series of a counter of failures that grew twice within eleven minutes.

    Between two attempts there may be five minutes: Alertmanager's group_interval, or the
    refresh_interval of a scrape configuration. In a range of five minutes, the growth would come
    and go.
    """
    return f"increase({metric}{{{matchers}}}[{timing.duration(11 * MINUTE)}]) >= 2"


def _on_our_servers(failing: str, *labels: str) -> str:
    """Return the series of `failing` of our servers; it has `labels` besides those of a target."""
    ignored = ", ".join(("rule_group", "scrape_job", *labels))
    return f"({failing})\nand ignoring ({ignored}) {OUR_SERVERS}"


def _on_our_alertmanagers(failing: str) -> str:
    """Return the series of `failing` without those of Alertmanagers of others.

    They may be scraped at another address than that to which alerts are sent. If none is scraped at
    such an address, every Alertmanager may be ours.
    """
    each = "alertmanager_config_last_reload_successful"
    ours = f"on (instance) {OUR_ADDRESSES}"
    theirs = f"{each}\nunless {ours}\nand on () ({each}\nand {ours})"
    return f"{failing}\nunless on (instance) ({theirs})"


def _watchdog() -> Alert:
    return Alert(
        name=WATCHDOG,
        component="prometheus",
        severity="none",
        expression="vector(1)",
        for_seconds=0,
        keep_firing_seconds=0,
        summary="The way from Prometheus to Alertmanager works",
        description="This alert always fires. Connect the receiver `watchdog` to a service that "
        "raises an alarm when messages stop: then Prometheus, Alertmanager or the network is down, "
        "and no other alert arrives.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _discovery_failing(timing: Timing) -> Alert:
    refreshes = "prometheus_sd_refresh_failures_total"
    failing = _keeps_failing(refreshes, timing, EXPECTED_DISCOVERY)
    of_all_runs = _keeps_failing(refreshes, timing, TARGETS_SERVICE)
    unread = _on_our_servers(_keeps_failing("prometheus_sd_file_read_errors_total", timing))
    # Between two runs, nothing answers at the address of rank 0. A list of all runs always exists.
    some_run = f"(count({select(RUN_ACTIVE)} == 1) > 0)"
    return Alert(
        name="ZerowatchPrometheusDiscoveryFailing",
        component="prometheus",
        severity="warning",
        expression=f"({failing}\nand on () {some_run})\nor {of_all_runs}\nor ({unread})",
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Prometheus {INSTANCE} cannot read its list of ranks",
        description="Reading the targets of a scrape configuration failed "
        '{{ $value | printf "%.0f" }} times in eleven minutes. Prometheus keeps the ranks that it '
        "knows, but finds no new run. The log of Prometheus names the address or file.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _rules_failing(timing: Timing) -> Alert:
    failing = _grows("prometheus_rule_evaluation_failures_total", timing, OUR_RULES)
    missed = _grows("prometheus_rule_group_iterations_missed_total", timing, OUR_RULES)
    return Alert(
        name="ZerowatchPrometheusRulesFailing",
        component="prometheus",
        severity="warning",
        expression=f"({failing} or {missed})",
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Prometheus {INSTANCE} does not evaluate all rules of zerowatch",
        description="Rules of the group {{ $labels.rule_group }} failed, or were skipped because "
        "an evaluation took too long. Alerts that depend on them do not fire. The page Rules of "
        "Prometheus shows the error.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _limit_exceeded(timing: Timing) -> Alert:
    exceeded = "\nor ".join(
        f'label_replace({_grows(metric, timing)}, "limit", "{name}", "", "")'
        for name, metric in LIMITS.items()
    )
    return Alert(
        name="ZerowatchPrometheusLimitExceeded",
        component="prometheus",
        severity="warning",
        expression=_on_our_servers(exceeded, "limit"),
        for_seconds=MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Prometheus {INSTANCE} drops scrapes that exceed a limit",
        description="The {{ $labels.limit }} of a scrape configuration is exceeded, and Prometheus "
        "stores nothing of those scrapes: ranks look as if they were down. Its page Targets names "
        "them. Raise the limit, or find out who exports so much.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _notifications_failing(timing: Timing) -> Alert:
    # Of several Alertmanagers, one that answers is enough: it notifies for all. A server that does
    # not evaluate the alerts, such as an agent, may have none, or one of others.
    alone = "prometheus_notifications_alertmanagers_discovered == 0"
    evaluates = f"prometheus_rule_group_rules{{{OUR_ALERTS}}} > 0"
    # All labels of the target are kept: servers of several clusters may have the same address.
    errors, dropped = (
        f"min without (alertmanager) (increase({metric}[{timing.short}])) > 0"
        for metric in (
            "prometheus_notifications_errors_total",
            "prometheus_notifications_dropped_total",
        )
    )
    return Alert(
        name="ZerowatchPrometheusNotificationsFailing",
        component="prometheus",
        severity="critical",
        expression=(
            f"(\n{errors}\nor {dropped}\nor {alone}\n)\nand ignoring (rule_group) {evaluates}"
        ),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Prometheus {INSTANCE} cannot send alerts to Alertmanager",
        description="Alerts reach no Alertmanager, so that nobody is notified. Check "
        "whether Alertmanager runs, and whether the section `alerting` of prometheus.yml has its "
        "address.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _delivery_failing(timing: Timing) -> Alert:
    return Alert(
        name="ZerowatchAlertmanagerNotificationsFailing",
        component="prometheus",
        severity="critical",
        expression=_on_our_alertmanagers(
            _keeps_failing("alertmanager_notifications_failed_total", timing)
        ),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Alertmanager {INSTANCE} cannot deliver notifications",
        description="Notifications by {{ $labels.integration }} failed "
        '{{ $value | printf "%.0f" }} times in eleven minutes. The log of Alertmanager has the '
        "reason, such as a wrong address or an expired secret.",
        dashboard=DASHBOARD,
        about_run=False,
    )


def _configuration_rejected() -> Alert:
    prometheus, alertmanager = (
        f"{program}_config_last_reload_successful == 0"
        for program in ("prometheus", "alertmanager")
    )
    return Alert(
        name="ZerowatchPrometheusConfigRejected",
        component="prometheus",
        severity="warning",
        expression=f"({_on_our_servers(prometheus)})\nor ({_on_our_alertmanagers(alertmanager)})",
        for_seconds=5 * MINUTE,
        keep_firing_seconds=0,
        summary=f"{INSTANCE} does not use its changed configuration",
        description="The last reload of the configuration failed, so the earlier one is still in "
        "use. `promtool check config` or `amtool check-config` shows the error.",
        dashboard=DASHBOARD,
        about_run=False,
    )
