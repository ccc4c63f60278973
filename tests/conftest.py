"""Order of the tests, locks of killed jobs, and the seed of tests that draw their data.

Tests of jobs come first, and fail at once if they would wait for the lock of a killed job.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from extension_locks import complaint, extensions_root, stale_locks


# Not a variable ZEROWATCH_...: one that is no setting is an error.
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of tests that draw their data")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Return what a test seeds its generators with; a test that fails prints it."""
    return pytestconfig.getoption("seed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the seed of a failed test, and the command that runs the test again."""
    report = yield
    if report.failed and "seed" in getattr(item, "fixturenames", ()):
        seed = item.config.getoption("seed")
        command = f".venv/bin/python -m pytest --seed {seed} '{item.nodeid}'"
        report.sections.append(("seed", f"seed {seed}; rerun: {command}"))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files of jobs to the front, so that no worker ends with a long one alone."""
    job_files = {item.path for item in items if item.get_closest_marker("jobs")}
    items.sort(key=lambda item: item.path not in job_files)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test of a job, before it starts one, if a job would hang."""
    if item.get_closest_marker("jobs") and (locks := stale_locks(extensions_root())):
        pytest.fail(complaint(locks), pytrace=False)
