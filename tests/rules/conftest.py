"""Fixtures: the rule files as they are shipped, in a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rules.promtool import needed_rules, written

from zerowatch.dashboards.prometheus_files import rule_files


@pytest.fixture(scope="session")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the rule files, generated from the current code."""
    return written(rule_files(), tmp_path_factory.mktemp("rules"))


@pytest.fixture(scope="session")
def some_rules(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that returns a folder with the rules that `needed_rules` keeps."""
    files = rule_files()
    return cache(
        lambda *components, only="": written(
            needed_rules(files, *components, only=only), tmp_path_factory.mktemp("some-rules")
        )
    )


@pytest.fixture(scope="session")
def alert_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the rules that alerts need, so that promtool is faster."""
    return written(needed_rules(rule_files()), tmp_path_factory.mktemp("alert-rules"))
