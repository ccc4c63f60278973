"""Number of CPU cores that this process may use: affinity and the cgroup's quota."""

from __future__ import annotations

import os
from pathlib import Path

from ..common.cgroups import cgroup_folders


def usable_cores(root: Path = Path("/")) -> float:
    """Return the number of cores; a fraction under a cgroup quota."""
    quotas = map(_quota, cgroup_folders("cpu", root))
    return min([float(_affine_cores()), *(quota for quota in quotas if quota is not None)])


def _affine_cores() -> int:
    """Count the cores of all threads: OpenMP may have bound the main thread to one of them."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        try:
            cores |= os.sched_getaffinity(int(thread))
        except ProcessLookupError:  # the thread has ended
            continue
    return len(cores)


def _quota(folder: Path) -> float | None:
    """Read one cgroup's quota: version 2's cpu.max, or version 1's pair of files."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        quota, period = words
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None
