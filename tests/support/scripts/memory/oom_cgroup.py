"""A temporary memory cgroup for a test; root only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerowatch.runtime.common.cgroups import cgroup_folders


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Create a memory cgroup, or skip the test if that is impossible."""
    parents = [folder for folder in cgroup_folders("memory") if folder.is_dir()]
    limit_files = ("memory.limit_in_bytes", "memory.max")
    for parent in parents:
        folder = parent / f"zerowatch-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
        files = [folder / name for name in limit_files if (folder / name).exists()]
        if files:
            break
        with contextlib.suppress(OSError):
            folder.rmdir()
    else:
        pytest.skip("needs to be root where memory cgroups can be made")
    try:
        files[0].write_text(str(limit_bytes))
        yield folder
    finally:
        folder.rmdir()
