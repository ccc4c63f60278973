"""Reads from the kernel's log which processes its OOM killer has killed, and when."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ...common.liveness_file import ROOT

# The PID namespace of the machine, whose process ids the kernel logs: PROC_PID_INIT_INO in
# include/linux/proc_ns.h. Containers usually have another one.
MACHINE_PID_NAMESPACE = f"pid:[{0xEFFFFFFC}]"
# Documentation/ABI/testing/dev-kmsg: "priority,sequence,microseconds since boot,flags;text".
_RECORD = re.compile(r"^\d+,\d+,(\d+),[^;]*;(.*)$")
# mm/oom_kill.c: a summary with the cgroup, from Linux 4.19 on, and the line of the kill.
_CGROUP = re.compile(r"^oom-kill:.*\btask_memcg=([^,]+),.*\bpid=(\d+)")
_KILL = re.compile(r"(?:Out of memory|out of memory).*: Killed process (\d+) ")
_READ_BYTES = 8192  # a record is shorter
# Maximum error of the times below: the clock of the log and CLOCK_MONOTONIC_RAW start within a
# second of each other, and their drift from the time of day is not quite constant.
CLOCK_ERROR_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """One process that the kernel's OOM killer has killed.

    Attributes:
        pid: The process id in the PID namespace of the machine.
        at_unix_seconds: When the kernel logged it, to within `CLOCK_ERROR_SECONDS`.
        cgroup: The path of the process's memory cgroup, as the machine sees it; "" if not logged.
    """

    pid: int
    at_unix_seconds: float
    cgroup: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """The kills in the kernel's log, oldest first. The log holds nothing older than `since`."""

    kills: tuple[OomKill, ...]
    since_unix_seconds: float


def read_kernel_log(root: Path = ROOT) -> KernelLog | None:
    """Return the kills in the kernel's log, or None if this process may not read it.

    Args:
        root: The root of the file system. Tests set another root.
    """
    try:
        text = _records(root / "dev/kmsg")
    except OSError:
        return None
    # NTP corrects the first clock, but neither the second nor that of the log, which drift alike.
    corrected = time.clock_gettime(time.CLOCK_MONOTONIC)
    boot = time.time() - corrected
    rate = corrected / time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    records = [match for line in text.splitlines() if (match := _RECORD.match(line))]
    if not records:
        return None
    cgroups: dict[int, str] = {}
    kills = []
    for record in records:
        at, message = boot + rate * int(record[1]) / 1e6, record[2]
        if summary := _CGROUP.match(message):
            cgroups[int(summary[2])] = summary[1]
        elif kill := _KILL.search(message):
            pid = int(kill[1])
            kills.append(OomKill(pid=pid, at_unix_seconds=at, cgroup=cgroups.pop(pid, "")))
    return KernelLog(kills=tuple(kills), since_unix_seconds=boot + rate * int(records[0][1]) / 1e6)


def _records(path: Path) -> str:
    """Return all records. Each read of /dev/kmsg returns one, and would wait for the next."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    chunks: list[bytes] = []
    try:
        while True:
            try:
                chunk = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:  # a record was overwritten meanwhile
                    raise
                continue
            if not chunk:
                break
            chunks.append(chunk)
    finally:
        os.close(descriptor)
    return b"".join(chunks).decode(errors="replace")
