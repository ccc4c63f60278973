"""Writes the liveness file of a rank at its start, and removes it at a clean exit.

A process that the kernel kills leaves its file behind. The next run uses this file to find out what
happened. It compares the kernel's OOM kill counters in the file with the current counters.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...metrics.process_stat import state_and_start
from .cgroups import cgroup_folders
from .own_files import read_own_file

logger = logging.getLogger(__name__)

ROOT = Path("/")
SUFFIX = ".alive.json"
# Version 1 and 2; both have a line "oom_kill <count>" (mm/memcontrol.c, from Linux 4.13 on).
_COUNTER_FILES = ("memory.oom_control", "memory.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKillCounts:
    """The kernel's counters of processes killed by its OOM killer.

    Attributes:
        host: Kills since the machine booted. None if not counted.
        cgroup_file: File with the counter of the innermost memory cgroup.
        cgroup_inode: Identifies the innermost cgroup, as a later cgroup may have the same name.
        cgroup: Kills in the innermost cgroup since it was created. None if not counted.
    """

    host: int | None = None
    cgroup_file: str | None = None
    cgroup_inode: int | None = None
    cgroup: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMarker:
    """The identity of one process of a run: the content of its liveness file.

    A process id is valid in `pid_namespace` only. `start_ticks` and `boot_id` distinguish the
    process from a later process with the same id.
    """

    rank: int
    host: str
    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    started_at_unix_seconds: float
    kills: OomKillCounts


class LivenessFile:
    """Writes the file `rank-<r>.alive.json` of this process. Disk errors are logged, not raised.

    Attributes:
        is_missing: Whether the last `open` could not write the file, as on a full disk. Another
            `open` tries again.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        host: str,
        root: Path = ROOT,
        *,
        began_unix_seconds: float | None = None,
    ) -> None:
        """Describe the file.

        Args:
            folder: The run folder.
            rank: The rank of this process.
            host: The name of this machine.
            root: The root of the file system.
            began_unix_seconds: When the process began to train; by default now, when the file is
                written. On a busy machine that may be many steps later.
        """
        self._path = folder / f"rank-{rank}{SUFFIX}"
        self._rank, self._host, self._root = rank, host, root
        self._began = began_unix_seconds
        self._descriptor: int | None = None
        self._pid = os.getpid()
        self.is_missing = False

    def open(self) -> None:
        """Write the file. Do nothing if there is no /proc, or if it is open.

        A file that a process of another host has left is renamed: only that host can report it.
        """
        marker = current_process(self._rank, self._host, self._root)
        if marker is None or self._descriptor is not None:
            return
        if self._began is not None:
            marker = replace(marker, started_at_unix_seconds=self._began)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._put_earlier_file_aside()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._descriptor = os.open(self._path, flags, 0o600)
            # The lock is held until the process has exited. Other PID namespaces test it.
            with contextlib.suppress(OSError):  # some network file systems lack locks
                _lock(self._descriptor)
            text = json.dumps(asdict(marker), indent=2).encode() + b"\n"
            if os.write(self._descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, "the disk is full", str(self._path))
            self.is_missing = False
        except OSError as error:
            self.close()
            if not self.is_missing:
                self.is_missing = True
                logger.warning(
                    "liveness file %s cannot be written: %s. Until it is, the next run does not "
                    "report it if this process is killed",
                    self._path,
                    error,
                )

    def _put_earlier_file_aside(self) -> None:
        earlier = read_marker(self._path)
        if earlier is None or earlier.host == self._host:
            self._path.unlink(missing_ok=True)
            return
        digest = hashlib.sha256(earlier.host.encode()).hexdigest()[:8]
        self._path.replace(self._path.with_name(f"rank-{self._rank}-{digest}{SUFFIX}"))

    def close(self) -> None:
        """Remove the file at a clean exit. Does nothing in a forked child. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


def current_process(rank: int, host: str, root: Path = ROOT) -> ProcessMarker | None:
    """Return the marker of this process, or None if /proc does not provide the data."""
    try:
        return ProcessMarker(
            rank=rank,
            host=host,
            pid=os.getpid(),
            start_ticks=int(state_and_start(os.getpid(), root)[1]),
            boot_id=boot_id(root),
            pid_namespace=pid_namespace(root),
            started_at_unix_seconds=time.time(),
            kills=count_oom_kills(root),
        )
    except (OSError, ValueError, IndexError):
        return None


def read_marker(path: Path) -> ProcessMarker | None:
    """Read a liveness file.

    Return None if it is gone, incomplete, of another version, or of another user.
    """
    try:
        fields = json.loads(read_own_file(path))
        return ProcessMarker(**{**fields, "kills": OomKillCounts(**fields["kills"])})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def has_exited(marker: ProcessMarker, path: Path, root: Path = ROOT) -> bool:
    """Return whether a process of this host has exited.

    The process id decides within this PID namespace. In other PID namespaces, the lock on the
    liveness file decides. It decides too after another boot: a reboot frees the lock, but a process
    of another machine with this host name, such as a container's, may hold it.

    Raises:
        OSError: The state of the process cannot be read.
    """
    if marker.boot_id != boot_id(root):
        try:
            return _is_unlocked(path)
        except OSError:  # some network file systems lack locks
            return True
    if marker.pid_namespace != pid_namespace(root):
        return _is_unlocked(path)
    try:
        state, start_ticks = state_and_start(marker.pid, root)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or int(start_ticks) != marker.start_ticks


def boot_id(root: Path = ROOT) -> str:
    """Return the id of the machine's current boot."""
    return (root / "proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace(root: Path = ROOT) -> str:
    """Return the PID namespace of this process."""
    return os.readlink(root / "proc/self/ns/pid")


def count_oom_kills(root: Path = ROOT) -> OomKillCounts:
    """Read the counters of the machine and of this process's memory cgroup."""
    folders = cgroup_folders("memory", root)
    files = [folder / name for folder in folders for name in _COUNTER_FILES]
    own = next((file for file in files if file.is_file()), None)
    return count_oom_kills_in(None if own is None else str(own), root)


def count_oom_kills_in(cgroup_file: str | None, root: Path = ROOT) -> OomKillCounts:
    """Read the counters of the machine and of a given cgroup."""
    host = _read_counter(root / "proc/vmstat")
    if cgroup_file is None:
        return OomKillCounts(host=host)
    file = Path(cgroup_file)
    try:
        inode = file.parent.stat().st_ino
    except OSError:  # the cgroup was removed after its last process exited
        return OomKillCounts(host=host, cgroup_file=cgroup_file)
    return OomKillCounts(
        host=host, cgroup_file=cgroup_file, cgroup_inode=inode, cgroup=_read_counter(file)
    )


def _read_counter(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _is_unlocked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        _lock(descriptor)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int) -> None:
    """Lock a file without blocking, until it is closed here and in all forked children."""
    import fcntl  # not available on Windows, nor is /proc

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
