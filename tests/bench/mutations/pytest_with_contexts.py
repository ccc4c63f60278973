"""Runs pytest, names the running test as coverage's context, and stores duration and outcome.

python pytest_with_contexts.py OUTPUT.json PYTEST_ARGUMENTS...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from coverage import Coverage


class ContextPlugin:
    """Switches the context at the start of each test; its fixtures belong to it."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._tests: dict[str, dict[str, object]] = {}

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            is_job = item.get_closest_marker("jobs") is not None
            self._tests[item.nodeid] = {"seconds": 0.0, "is_job": is_job, "passed": False}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if current := Coverage.current():
            current.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        test["seconds"] = float(str(test["seconds"])) + report.duration
        if report.when == "call" or not report.passed:
            test["passed"] = report.passed

    def pytest_sessionfinish(self) -> None:
        self._output.write_text(json.dumps(self._tests))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, in which no test looks for modules
    pytest.main(sys.argv[2:], plugins=[ContextPlugin(Path(sys.argv[1]))])
