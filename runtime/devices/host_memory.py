"""Reads the host memory of this process on Linux: memory in use, its peak, and its limit.

Memory in use is RSS without the pages of mapped files: anonymous and shared memory. The kernel can
drop the pages of files, such as memory-mapped datasets, and the processes of a node share them.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from ..common.cgroups import cgroup_folders

logger = logging.getLogger(__name__)

# Fields of /proc/self/status: RSS, its part of mapped files (Linux 4.5), the peak of RSS, address
# space, and data segment with heap.
_RSS = b"\nVmRSS:"
_FILE_RSS = b"\nRssFile:"
_PEAK_RSS = b"\nVmHWM:"
_VIRTUAL = b"\nVmSize:"
_DATA = b"\nVmData:"
_RESET_PEAK_MARK = b"5"  # proc_pid_clear_refs(5): sets VmHWM back to the RSS of this moment
_RENEWAL_SECONDS = 10.0  # limits rarely change, and reading them costs more than the rest
_NONE = float("inf")
# /proc/self/status is about 2 KiB, but has a line that grows with the user's groups.
_READ_BYTES = 16384


class HostMemory:
    """Reads the memory of this process from /proc/self, in tens of microseconds.

    With `reset_peak`, the kernel's peak mark VmHWM is reset after each reading, so a peak belongs
    to one step. The process has only one such mark. The script's own `getrusage().ru_maxrss` is
    therefore also the peak since the last reading. A peak in the microseconds between a reading and
    its reset is lost.

    VmHWM includes the pages of mapped files, whose number at the peak is unknown. The larger of
    their numbers at this reading and at the last one is subtracted. The peak is therefore exact if
    the pages were mapped before the peak or dropped after it. It is too low, by at most these
    pages, if they were mapped after the peak or dropped before it. It is too high if files were
    both mapped and unmapped since the last reading.
    """

    device = "cpu"

    def __init__(self, *, reset_peak: bool, root: Path = Path("/")) -> None:
        self._status = _KernelFile(root / "proc/self/status")
        self._limit = HostLimit(root)
        self._peak_mark = _open_peak_mark(root) if reset_peak else None
        self._file_bytes = _bytes(self._status.read(), _FILE_RSS)
        self._reset_peak()

    @property
    def own_peaks(self) -> bool:
        """Whether each reading resets the peak mark, so that a peak belongs to one step."""
        return self._peak_mark is not None

    def read(self) -> Mapping[str, float]:
        """Return allocated, peak_allocated, reserved and limit in bytes, or {} once closed."""
        status = self._status.read()
        if not status:
            return {}
        self._reset_peak()
        resident, file = _bytes(status, _RSS), _bytes(status, _FILE_RSS)
        peak, virtual, data = (_bytes(status, name) for name in (_PEAK_RSS, _VIRTUAL, _DATA))
        in_use = resident - file
        limit = self._limit.in_use_bytes(in_use=in_use, virtual=virtual, data=data)
        readings = {"allocated": in_use, "reserved": virtual, "limit": limit}
        file_at_peak, self._file_bytes = max(file, self._file_bytes), file
        if peak:  # gVisor has a /proc without it
            readings["peak_allocated"] = max(peak - file_at_peak, in_use)
        return readings

    def close(self) -> None:
        """Close the files. Safe to call twice, and while another thread reads."""
        self._status.close()
        if self._peak_mark is not None:
            self._peak_mark.close()

    def _reset_peak(self) -> None:
        if self._peak_mark is None:
            return
        try:
            self._peak_mark.write(_RESET_PEAK_MARK)
        except OSError as error:
            self._peak_mark = None
            _log_monotone_peak(error)


class HostLimit:
    """Computes the memory in use at which this process reaches the first of its limits.

    Cgroup limits and physical memory are compared with memory in use directly, because the kernel
    drops the pages of files before it reports a lack of memory. Memory that other processes use is
    not subtracted. RLIMIT_AS bounds VmSize, and RLIMIT_DATA bounds VmData. The process reaches such
    a limit at its memory in use plus the bytes that remain below the limit. This value is exact if
    every new page is both mapped and touched, as the pages of tensors are.
    """

    def __init__(self, root: Path = Path("/"), now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._physical_bytes = _physical_bytes(root)
        self._cgroup_paths = _cgroup_limit_paths(root)
        self._renew()

    def in_use_bytes(self, *, in_use: float, virtual: float, data: float) -> float:
        """Return the limit of memory in use in bytes, given the process's sizes now, in bytes."""
        if self._now() >= self._renewal_due:
            self._renew()
        return min(
            self._memory_limit,
            in_use + self._virtual_limit - virtual,
            in_use + self._data_limit - data,
        )

    def _renew(self) -> None:
        """Read the limits again: a container can be resized, and a script can set its own."""
        self._renewal_due = self._now() + _RENEWAL_SECONDS
        cgroups = (_cgroup_bytes(path) for path in self._cgroup_paths)
        self._memory_limit = min([self._physical_bytes, *cgroups])
        self._virtual_limit = _soft_limit(resource.RLIMIT_AS)
        self._data_limit = _soft_limit(resource.RLIMIT_DATA)


class _KernelFile:
    """Keeps a file of /proc open, so that reading it is one system call.

    The lock protects late readers and writers on other threads. Without the lock, they could use a
    descriptor that already belongs to another file.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self._descriptor = os.open(path, flags)
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False  # a daemon thread may still be reading then

    def read(self) -> bytes:
        """Return the current contents, or nothing once closed."""
        with self._lock:
            return os.pread(self._descriptor, _READ_BYTES, 0) if self._close.alive else b""

    def write(self, command: bytes) -> None:
        """Send the kernel a command. Do nothing once closed."""
        with self._lock:
            if self._close.alive:
                os.pwrite(self._descriptor, command, 0)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._close()


def _bytes(status: bytes, name: bytes) -> float:
    """Return one size of /proc/self/status in bytes, or 0 if absent. A regex is twice as slow."""
    start = status.find(name)
    if start < 0:
        return 0.0
    return int(status[start + len(name) : status.index(b"kB", start)]) * 1024.0


def _open_peak_mark(root: Path) -> _KernelFile | None:
    try:
        return _KernelFile(root / "proc/self/clear_refs", os.O_WRONLY)
    except OSError as error:
        _log_monotone_peak(error)
        return None


def _log_monotone_peak(error: OSError) -> None:
    logger.info("peak RSS is that of the whole process, not of each step: %s", error)


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
