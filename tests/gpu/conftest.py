"""Writes a line of JSON for each test of a check, for `tests/gpu/verify.py`.

A test adds figures to its line by pytest's fixture `record_property`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import pytest
from gpu.check_process import LINES_VARIABLE

_MESSAGE_CHARACTERS = 1500


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write which test begins, so that a test that hangs can be named."""
    _write({"started": _short(nodeid)})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test, or of its setup if that has failed or was skipped."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        entry: dict[str, Any] = {
            "test": _short(report.nodeid),
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
        }
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            entry["message"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.outcome != "passed":
            entry["message"] = report.longreprtext[-_MESSAGE_CHARACTERS:]
        if report.user_properties:
            entry["figures"] = dict(report.user_properties)
        _write(entry)


def _short(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _write(entry: Mapping[str, Any]) -> None:
    path = os.environ.get(LINES_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(entry, default=str) + "\n")
