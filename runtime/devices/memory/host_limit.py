"""How large this process may grow on the host: resource limits, cgroups and physical memory."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

from ...common.cgroups import cgroup_folders

_RENEWAL_SECONDS = 10.0  # limits rarely change, and asking for them takes longer than the rest
_NONE = float("inf")


class HostLimit:
    """Finds the RSS at which this process meets the first of its limits.

    Cgroup limits and physical memory are compared with RSS as they are, so what others use of them
    is not taken off. RLIMIT_AS bounds VmSize and RLIMIT_DATA bounds VmData; what is left under
    each is room to grow, so RSS plus that room is the RSS at which it is met. It is exact if every
    further page is both mapped and touched, as tensors are.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._physical_bytes = _physical_bytes(root)
        self._cgroup_paths = _cgroup_limit_paths(root)
        self._renew()

    def resident_bytes(self, *, resident: float, virtual: float, data: float) -> float:
        """Return the limit for RSS in bytes, given the process's sizes now, in bytes."""
        if self._clock() >= self._renewal_due:
            self._renew()
        return min(
            self._resident_limit,
            resident + _soft_limit(resource.RLIMIT_AS) - virtual,
            resident + _soft_limit(resource.RLIMIT_DATA) - data,
        )

    def _renew(self) -> None:
        """Ask again, as a container can be resized."""
        self._renewal_due = self._clock() + _RENEWAL_SECONDS
        cgroups = (_cgroup_bytes(path) for path in self._cgroup_paths)
        self._resident_limit = min([self._physical_bytes, *cgroups])


def _soft_limit(kind: int) -> float:
    allowed, _ = resource.getrlimit(kind)
    return _NONE if allowed == resource.RLIM_INFINITY else float(allowed)


def _cgroup_bytes(path: Path) -> float:
    try:
        text = path.read_text().strip()
    except OSError:  # the cgroup was removed after the process was moved out of it
        return _NONE
    # Version 1 writes 9223372036854771712 for none, which is never the smallest.
    return _NONE if text == "max" else float(text)


def _physical_bytes(root: Path) -> float:
    total = re.search(rb"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_bytes())
    return float(total[1]) * 1024 if total else _NONE


def _cgroup_limit_paths(root: Path) -> list[Path]:
    """List the limit files of this process's memory cgroup and of all its parents."""
    names = ("memory.max", "memory.limit_in_bytes")  # version 2 and 1
    files = [folder / name for folder in cgroup_folders("memory", root) for name in names]
    return [file for file in files if file.is_file()]
