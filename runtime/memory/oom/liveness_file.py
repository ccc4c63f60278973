"""The life file of a rank: written once at its start, removed at a clean end, and else telling.

A process that the kernel kills can say nothing any more. What it left of itself at its start, and
the kernel's counters of then and now, tell the next start what happened.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ...common.cgroups import cgroup_folders

logger = logging.getLogger(__name__)

ROOT = Path("/")
SUFFIX = ".alive.json"
# Version 1 and 2; both have a line "oom_kill <count>" (mm/memcontrol.c, from Linux 4.13 on).
_COUNTER_FILES = ("memory.oom_control", "memory.events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """How many processes the kernel's OOM killer has ended, as its counters say.

    Attributes:
        host: Since the machine started; None where it is not counted.
        cgroup_file: Whose counter of the innermost memory cgroup.
        cgroup_inode: Tells that cgroup from a later one of the same name.
        cgroup: In that cgroup since it was made; None where it is not counted.
    """

    host: int | None = None
    cgroup_file: str | None = None
    cgroup_inode: int | None = None
    cgroup: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMarker:
    """One process of a run.

    `start_ticks` and `boot_id` tell it from a later process with the same id; `pid_namespace` says
    where that id means something.
    """

    rank: int
    host: str
    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    started_at_unix_seconds: float
    kills: Kills


class LivenessFile:
    """`rank-<r>.alive.json` of this process. Never raises for a disk's sake."""

    def __init__(self, folder: Path, rank: int, host: str, root: Path = ROOT) -> None:
        self._path = folder / f"rank-{rank}{SUFFIX}"
        self._rank, self._host, self._root = rank, host, root
        self._descriptor: int | None = None
        self._pid = os.getpid()

    def open(self) -> None:
        """Write it; does nothing where there is no /proc."""
        life = this_life(self._rank, self._host, self._root)
        if life is None or self._descriptor is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._descriptor = os.open(self._path, flags, 0o600)
            # Held until the process is gone: it tells those who cannot see its id.
            with contextlib.suppress(OSError):  # some network file systems refuse
                _lock(self._descriptor)
            os.write(self._descriptor, json.dumps(asdict(life), indent=2).encode() + b"\n")
        except OSError as error:
            logger.info("the life file %s cannot be written: %s", self._path, error)

    def close(self) -> None:
        """Remove it, as the process ends in good order. Not in a forked child; safe twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            os.close(descriptor)


def this_life(rank: int, host: str, root: Path = ROOT) -> ProcessMarker | None:
    """Describe this process; None where the kernel does not tell."""
    try:
        return ProcessMarker(
            rank=rank,
            host=host,
            pid=os.getpid(),
            start_ticks=_state_and_start(root, os.getpid())[1],
            boot_id=boot_id(root),
            pid_namespace=pid_namespace(root),
            started_at_unix_seconds=time.time(),
            kills=count_kills(root),
        )
    except (OSError, ValueError, IndexError):
        return None


def read_life(path: Path) -> ProcessMarker | None:
    """Read a life file; None if it is gone, half written, or of another version."""
    try:
        fields = json.loads(path.read_bytes())
        return ProcessMarker(**{**fields, "kills": Kills(**fields["kills"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_over(life: ProcessMarker, path: Path, root: Path = ROOT) -> bool:
    """Whether a process of this host has ended. Its own id tells, or its lock in other namespaces.

    Raises:
        OSError: The kernel does not tell.
    """
    if life.boot_id != boot_id(root):
        return True
    if life.pid_namespace != pid_namespace(root):
        return _is_unlocked(path)
    try:
        state, start_ticks = _state_and_start(root, life.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    # Z and X: it was killed, and nobody has asked for its exit code yet.
    return state in "ZX" or start_ticks != life.start_ticks


def boot_id(root: Path = ROOT) -> str:
    """Return what tells this start of the machine from all others."""
    return (root / "proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace(root: Path = ROOT) -> str:
    """Return in which namespace this process's id means something."""
    return os.readlink(root / "proc/self/ns/pid")


def count_kills(root: Path = ROOT) -> Kills:
    """Ask the kernel's counters, those of the machine and of this process's memory cgroup."""
    folders = cgroup_folders("memory", root)
    files = [folder / name for folder in folders for name in _COUNTER_FILES]
    own = next((file for file in files if file.is_file()), None)
    return count_kills_in(None if own is None else str(own), root)


def count_kills_in(cgroup_file: str | None, root: Path = ROOT) -> Kills:
    """Ask the same of a given cgroup."""
    host = _counter(root / "proc/vmstat")
    if cgroup_file is None:
        return Kills(host=host)
    file = Path(cgroup_file)
    try:
        inode = file.parent.stat().st_ino
    except OSError:  # it was removed when its last process had gone
        return Kills(host=host, cgroup_file=cgroup_file)
    return Kills(host=host, cgroup_file=cgroup_file, cgroup_inode=inode, cgroup=_counter(file))


def _counter(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _state_and_start(root: Path, pid: int) -> tuple[str, int]:
    """Return fields 3 and 22 of proc_pid_stat(5); field 2 is a name that may hold anything."""
    after_name = (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return after_name[0], int(after_name[19])


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
    """Lock a file, without waiting, until it is closed here and in all forked children."""
    import fcntl  # Windows has not got it, and no /proc either

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
