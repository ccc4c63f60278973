"""Fixtures: the rule files as they are shipped, in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from rules.promtool import ALERTS, RECORDING, needed_rules, written

from zerowatch.dashboards.prometheus_files import rule_files


@pytest.fixture(scope="session")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rule files, generated from the current code."""
    return written(rule_files(), tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="session")
def hardware_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the alerts on hardware: cases of an hour would take long."""
    files = rule_files()
    for name, groups in ((RECORDING, "thresholds"), (ALERTS, "devices-alerts")):
        content = yaml.safe_load(files[name])
        content["groups"] = [each for each in content["groups"] if groups in each["name"]]
        files[name] = yaml.safe_dump(content)
    return written(files, tmp_path_factory.mktemp("hardware-rules"))


@pytest.fixture(scope="session")
def component_rules(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns a folder with only the rules of some components."""
    return cache(
        lambda *components: written(
            needed_rules(rule_files(), *components), tmp_path_factory.mktemp("component-rules")
        )
    )


@pytest.fixture(scope="session")
def alert_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the rules that alerts need, so that promtool is faster."""
    return written(needed_rules(rule_files()), tmp_path_factory.mktemp("alert-rules"))
