"""Test cases for promtool: which alert fires on given series, from when and until when."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from require import program
from rules.history import SCRAPE_SECONDS, Series

from zerowatch.dashboards import recording_rules

EVALUATION_SECONDS = 15
WATCHDOG = "ZerowatchWatchdog"  # always fires
THRESHOLDS = recording_rules.ALERT_THRESHOLD.name
FIRING = f'ALERTS{{alertstate="firing", alertname!="{WATCHDOG}"}}'
EXTERNAL_LABELS = {
    "zerowatch_runbook": "http://127.0.0.1:9099/runbook",
    "zerowatch_grafana": "http://127.0.0.1:3000",
}
RECORDING, ALERTS, DCGM = RULE_FILES = (
    "prometheus/recording.yaml",
    "prometheus/alerts.yaml",
    "prometheus/dcgm.yaml",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One history, and the only alert that fires on it, if any.

    Args:
        title: A sentence.
        series: The history.
        alert: The alert's labels, "alertname" included; none if nothing fires.
        near: If nothing fires, the alert that comes close; none if the case is about several.
        fires_at: The evaluation at which it fires first, such as "13m15s".
        recovers_at: The first at which it does so no longer.
        annotations: What it annotations_of, as it fires first.
        words_at: When that is looked at instead.
        since: The first evaluation that is looked at.
        until: How far to look, if nothing fires, at each evaluation.
        every: Seconds between two scrapes of the history.
    """

    title: str
    series: Series
    alert: Mapping[str, str] = field(default_factory=dict)
    near: str = ""
    fires_at: str = ""
    recovers_at: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    words_at: str = ""
    since: str = ""
    until: str = ""
    every: float = SCRAPE_SECONDS

    @property
    def about(self) -> str:
        """The name of the only alert that the case is about; empty if it is about several."""
        return self.alert.get("alertname", self.near)

    def test(self) -> dict[str, Any]:
        """Return the case in the format of promtool."""
        return {
            "name": self.title,
            "interval": f"{self.every:g}s",
            "external_labels": EXTERNAL_LABELS,
            "input_series": [
                {"series": series, "values": values} for series, values in self.series.items()
            ],
            "promql_expr_test": [self._look(moment, fires) for moment, fires in self._moments()],
            "alert_rule_test": self._words(),
        }

    def _moments(self) -> Iterable[tuple[int, bool]]:
        fires, recovers = seconds(self.fires_at), seconds(self.recovers_at)
        silent = evaluations(fires - EVALUATION_SECONDS if fires else seconds(self.until))
        looks = [(moment, False) for moment in silent if moment >= seconds(self.since)]
        if not fires:
            return looks
        return [
            *looks,
            *((fires + late, True) for late in range(0, recovers - fires, EVALUATION_SECONDS)),
            (recovers, False),
        ]

    def _look(self, moment: int, fires: bool) -> dict[str, Any]:
        alert = {**self.alert, "alertstate": "firing"}
        labels = ", ".join(f'{name}="{value}"' for name, value in alert.items())
        expected = [{"labels": f"ALERTS{{{labels}}}", "value": 1}]
        return {
            "expr": FIRING,
            "eval_time": f"{moment}s",
            "exp_samples": expected if fires else [],
        }

    def _words(self) -> list[dict[str, Any]]:
        if not self.annotations:
            return []
        labels = {name: value for name, value in self.alert.items() if name != "alertname"}
        return [
            {
                "eval_time": self.words_at or self.fires_at,
                "alertname": self.alert["alertname"],
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": dict(self.annotations)}],
            }
        ]


def annotations_of(
    alert: str, *, dashboard: str, summary: str, description: str, about_run: bool = True
) -> dict[str, str]:
    """Return all annotations of an alert of the run night-7, or of no run."""
    variables = "?var-job=zerowatch&var-run=night-7" if about_run else ""
    return {
        "summary": summary,
        "description": description,
        "runbook_url": f"{EXTERNAL_LABELS['zerowatch_runbook']}#{alert.lower()}",
        "dashboard_url": f"{EXTERNAL_LABELS['zerowatch_grafana']}/d/{dashboard}{variables}",
    }


def evaluations(until_seconds: int) -> range:
    """Return the times in seconds at which rules are evaluated."""
    return range(0, until_seconds + 1, EVALUATION_SECONDS)


def seconds(duration: str) -> int:
    """Return the seconds of a duration such as "13m15s"."""
    sizes = {"h": 3600, "m": 60, "s": 1}
    return sum(int(n) * sizes[unit] for n, unit in re.findall(r"(\d+)([hms])", duration))


def written(files: Mapping[str, str], folder: Path) -> Path:
    """Write files into a folder by their paths, and return the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def needed_rules(files: Mapping[str, str], *components: str, only: str = "") -> dict[str, str]:
    """Return the rule files without recording rules on which no alert depends.

    Args:
        files: The rule files.
        components: The components of the alerts that are kept; all if there is none.
        only: The one alert or recording rule that is kept, with the rules that it depends on.
    """
    kept = {f"zerowatch-{component}-alerts" for component in components}
    alerts = [each for each in groups_of(files[ALERTS]) if not kept or each["name"] in kept]
    chosen = {
        file: _with_rules(groups, lambda rule: only in ("", rule.get("alert", only)))
        for file, groups in ((ALERTS, alerts), (DCGM, groups_of(files[DCGM])))
    }
    recording = groups_of(files[RECORDING])
    rules = [rule for group in recording for rule in group["rules"]]
    needed, texts = set[str](), [only, *chosen.values()]
    while texts:
        text = texts.pop()
        found = {rule["record"] for rule in rules if rule["record"] in text} - needed
        needed |= found
        texts += [rule["expr"] for rule in rules if rule["record"] in found]
    chosen[RECORDING] = _with_rules(recording, lambda rule: rule["record"] in needed)
    if only != THRESHOLDS:
        chosen[RECORDING] = _with_thresholds_of(chosen[ALERTS] + chosen[DCGM], chosen[RECORDING])
    return {**files, **chosen}


def _with_thresholds_of(alerts: str, recording: str) -> str:
    """Return the recording rules without the defaults of thresholds that no other rule names.

    promtool spends most of its time on those.
    """
    groups = json.loads(recording)["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    others = alerts + "".join(rule["expr"] for rule in rules if rule["record"] != THRESHOLDS)
    for rule in rules:
        if rule["record"] == THRESHOLDS:
            own, *defaults = rule["expr"].split("\nor ")
            named = (line for line in defaults if line.split('"')[3] in others)
            rule["expr"] = "\nor ".join([own, *named])
    return json.dumps({"groups": groups})


def _with_rules(groups: list[dict[str, Any]], keeps: Callable[[dict[str, Any]], bool]) -> str:
    """Return the text of a rule file with some rules of these groups."""
    chosen = [{**group, "rules": list(filter(keeps, group["rules"]))} for group in groups]
    return json.dumps({"groups": [group for group in chosen if group["rules"]]})


@cache
def groups_of(text: str) -> list[dict[str, Any]]:
    """Return the groups of a rule file."""
    return list(yaml.safe_load(text)["groups"])


def failures(rules: Path, tests: Iterable[Mapping[str, Any]], folder: Path) -> str:
    """Run test cases on the rule files in `rules`; return promtool's report of failures."""
    file = folder / "tests.yaml"
    content = {
        "rule_files": [str(rules / name) for name in RULE_FILES],
        "evaluation_interval": f"{EVALUATION_SECONDS}s",
        "group_eval_order": _groups(rules),  # else promtool takes them in any order
        "tests": list(tests),
    }
    file.write_text(json.dumps(content))  # which is YAML too, and faster
    command = [program("promtool", apt="prometheus"), "test", "rules", str(file)]
    # Collecting garbage often, and on several threads, takes a third of promtool's CPU time.
    environment = {**os.environ, "GOGC": "800", "GOMAXPROCS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def _groups(rules: Path) -> list[str]:
    """Return the names of all groups; recording rules first, because alerts depend on them."""
    texts = [(rules / name).read_text() for name in RULE_FILES]
    return [group["name"] for text in texts for group in groups_of(text)]
