"""Finds which limit of the host a reading was computed from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...common.cgroups import cgroup_folders
from ...common.units import format_bytes

ROOT = Path("/")
# Readings are taken at slightly different times; limits of different kinds are further apart.
_TOLERANCE_BYTES = 2**20
_CGROUP_FILES = ("memory.max", "memory.limit_in_bytes")  # version 2 and 1
_UNNAMED = "an unknown limit"


def host_limit_name(states: Mapping[str, float], root: Path = ROOT) -> str:
    """Return the name of the limit in a reading of the host.

    Args:
        states: Bytes by state: allocated, reserved and limit.
        root: Root of the file system, for tests.
    """
    limit = states.get("limit", math.inf)
    found = [(abs(size - limit), name) for name, size in _candidates(states, root)]
    distance, name = min(found, default=(math.inf, _UNNAMED))
    return name if distance <= _TOLERANCE_BYTES else _UNNAMED


def _candidates(states: Mapping[str, float], root: Path) -> Iterator[tuple[str, float]]:
    """Yield each limit as the RSS at which it is reached, computed as in `host_limit.py`."""
    resident, virtual = states.get("allocated", 0.0), states.get("reserved", 0.0)
    limits = _limits(root / "proc/self/limits")
    data = _kilobytes(root / "proc/self/status", "VmData:")
    for name, kind, used in (
        ("Max address space", "RLIMIT_AS (ulimit -v) of {} of addresses", virtual),
        ("Max data size", "RLIMIT_DATA (ulimit -d) of {}", data),
    ):
        allowed = limits.get(name)
        if allowed is not None:
            yield kind.format(format_bytes(allowed)), resident + allowed - used
    yield "this machine's memory", _kilobytes(root / "proc/meminfo", "MemTotal:")
    for folder in cgroup_folders("memory", root):
        for name in _CGROUP_FILES:
            yield f"the memory cgroup {folder}", _number(folder / name)


def _limits(path: Path) -> Mapping[str, float]:
    """Read soft limits by name; proc_pid_limits(5) has columns of 26 and 21 characters."""
    lines = _text(path).splitlines()
    soft = {line[:26].strip(): line[26:47].strip() for line in lines}
    return {name: float(size) for name, size in soft.items() if size.isdigit()}


def _kilobytes(path: Path, field: str) -> float:
    found = (line.split() for line in _text(path).splitlines() if line.startswith(field))
    return next((float(words[1]) * 1024 for words in found), math.inf)


def _number(path: Path) -> float:
    text = _text(path).strip()
    return float(text) if text.isdigit() else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
