"""Order of the tests: files of jobs come first, so that no worker ends with a long one alone."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move jobs to the front, else in the order of collection."""
    job_files = {item.path for item in items if item.get_closest_marker("jobs")}
    items.sort(key=lambda item: item.path not in job_files)
