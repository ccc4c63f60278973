"""Runs pytest, names the running test as coverage's context, and stores what became of each test.

python pytest_with_contexts.py OUTPUT.json PYTEST_ARGUMENTS...

With pytest-xdist each worker switches the context of its own process, and a report carries the
markers of its test to the process that collects them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage

_MARKERS = ("jobs", "slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    """Switch the context at the start of a test; its fixtures belong to it."""
    if current := Coverage.current():
        current.switch_context(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the markers of the test to its report."""
    report = yield
    report.markers = [name for name in _MARKERS if item.get_closest_marker(name)]
    return report


class Outcomes:
    """Collects duration, markers and outcome of each test, and writes them at the end."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = {"seconds": 0.0, "is_job": False, "is_slow": False, "passed": False}
        test = self._tests.setdefault(report.nodeid, new)
        test["seconds"] += report.duration
        test["is_job"], test["is_slow"] = (name in report.markers for name in _MARKERS)
        if report.when == "call" or not report.passed:
            test["passed"] = report.passed

    def pytest_sessionfinish(self) -> None:
        self._output.write_text(json.dumps(self._tests))


if __name__ == "__main__":
    output, *arguments = sys.argv[1:]
    # Workers import this module by its file's name; tests find their own modules first.
    sys.path.append(sys.path.pop(0))
    plugin = Path(__file__).stem
    pytest.main([*arguments, "-p", plugin], plugins=[Outcomes(Path(output))])
