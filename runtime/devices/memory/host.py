"""Host memory of this process on Linux: RSS, its peak since the last reading, and its limit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from .host_limit import HostLimit
from .kernel_file import KernelFile

logger = logging.getLogger(__name__)

_RSS, _PEAK_RSS, _VIRTUAL, _DATA = b"\nVmRSS:", b"\nVmHWM:", b"\nVmSize:", b"\nVmData:"
_RESET_PEAK_MARK = b"5"  # proc_pid_clear_refs(5): sets VmHWM back to the RSS of this moment


class HostMemory:
    """Reads /proc/self; a reading takes tens of microseconds.

    With `reset_peak` the kernel's peak mark VmHWM is set back after each reading, so that a peak
    belongs to one step. The mark is the process's only one: `getrusage().ru_maxrss`, read by the
    training script for itself, then also tells the peak since the last reading. A peak in the
    microseconds between a reading and its reset is lost.
    """

    device = "cpu"

    def __init__(self, *, reset_peak: bool, root: Path = Path("/")) -> None:
        self._status = KernelFile(root / "proc/self/status")
        self._limit = HostLimit(root)
        self._peak_mark = _open_peak_mark(root) if reset_peak else None
        self._reset_peak()

    @property
    def own_peaks(self) -> bool:
        """Whether the peak mark is set back at each reading."""
        return self._peak_mark is not None

    def read(self) -> Mapping[str, float]:
        """Return allocated, peak_allocated, reserved and limit in bytes."""
        status = self._status.read()
        self._reset_peak()
        resident = _bytes(status, _RSS)
        peak, virtual, data = (_bytes(status, name) for name in (_PEAK_RSS, _VIRTUAL, _DATA))
        limit = self._limit.resident_bytes(resident=resident, virtual=virtual, data=data)
        readings = {"allocated": resident, "reserved": virtual, "limit": limit}
        # gVisor, for one, has a /proc without the peak.
        return {**readings, "peak_allocated": peak} if peak else readings

    def close(self) -> None:
        """Do nothing: the files close when nobody holds them any more."""

    def _reset_peak(self) -> None:
        if self._peak_mark is None:
            return
        try:
            self._peak_mark.write(_RESET_PEAK_MARK)
        except OSError as error:
            self._peak_mark = None
            _log_monotone_peak(error)


def _bytes(status: bytes, name: bytes) -> float:
    """Return one size of /proc/self/status, 0 if it is not there. No regex: that costs double."""
    start = status.find(name)
    if start < 0:
        return 0.0
    return int(status[start + len(name) : status.index(b"kB", start)]) * 1024.0


def _open_peak_mark(root: Path) -> KernelFile | None:
    try:
        return KernelFile(root / "proc/self/clear_refs", os.O_WRONLY)
    except OSError as error:
        _log_monotone_peak(error)
        return None


def _log_monotone_peak(error: OSError) -> None:
    logger.info("peak RSS is that of the whole process, not of each step: %s", error)
