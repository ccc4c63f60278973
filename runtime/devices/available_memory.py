"""Reads how much host memory this process can still allocate: machine, cgroups and rlimits."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from ..common.cgroups import cgroup_folders
from ..common.gloo_interface import local_place

# Files of a memory cgroup of version 2 and 1: limit and usage. The fields of memory.stat that hold
# the part of the usage that the kernel can reclaim, as it does in MemAvailable: pages of files.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "(?:in)?active_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file"),
)
_NONE = float("inf")


def available_host_bytes(root: Path = Path("/")) -> float:
    """Return the bytes that can be allocated before the first limit is reached; inf if unknown.

    Other processes of the machine or the cgroup may allocate the same bytes.

    Args:
        root: The root of the file system. Tests set another root.
    """
    meminfo, status = _text(root / "proc/meminfo"), _text(root / "proc/self/status")
    return min(
        _kilobytes(meminfo, "MemAvailable"),
        _below_rlimit(resource.RLIMIT_AS, _kilobytes(status, "VmSize")),
        _below_rlimit(resource.RLIMIT_DATA, _kilobytes(status, "VmData")),
        *(_below_cgroup_limit(folder) for folder in cgroup_folders("memory", root)),
    )


def available_rank_bytes() -> float:
    """Return this rank's share of the memory that is available on its node; inf if unknown."""
    return available_host_bytes() / local_place(os.environ).num_ranks


def _below_rlimit(kind: int, used: float) -> float:
    allowed, _ = resource.getrlimit(kind)
    return _NONE if allowed == resource.RLIM_INFINITY else max(0.0, allowed - used)


def _below_cgroup_limit(folder: Path) -> float:
    for limit_name, usage_name, fields in _CGROUP_FILES:
        limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            sizes = re.findall(rf"^{fields} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return max(0.0, float(int(limit) - int(usage) + sum(map(int, sizes))))
    return _NONE


def _kilobytes(text: str, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return float(found[1]) * 1024 if found else _NONE


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not Linux, or the cgroup was removed
        return ""
