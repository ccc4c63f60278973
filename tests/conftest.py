"""Tests of jobs come first, and fail at once if they would wait for the lock of a killed job."""

from __future__ import annotations

import pytest
from extension_locks import complaint, extensions_root, stale_locks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files of jobs to the front, so that no worker ends with a long one alone."""
    job_files = {item.path for item in items if item.get_closest_marker("jobs")}
    items.sort(key=lambda item: item.path not in job_files)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test of a job, before it starts one, if a job would hang."""
    if item.get_closest_marker("jobs") and (locks := stale_locks(extensions_root())):
        pytest.fail(complaint(locks), pytrace=False)
