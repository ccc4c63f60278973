"""Keeps the last steps in shared memory, so that a process that is killed loses none of them.

The training thread writes each step into a ring, which costs a few microseconds and wakes no other
thread. The watch thread writes the step log from the queue once a second. If the process is killed
in between, `recover` appends the missing steps to its log, as far as the ring knows them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import orjson

from ...metrics.atomic_file import open_log
from ...metrics.catalog.labels import PHASES
from ...metrics.file_lock import LOCK_FILE
from ...metrics.step_record import LineWriter, StepRecord, seconds_by_phase
from ..common.hot_path import (
    CHECKSUM,
    HOST_TIMES,
    NO_VALUE,
    PHASE_FORMAT,
    SKIPPED,
    STEP_FORMAT,
    UNKNOWN_COUNT,
    StepSlots,
)
from ..common.log_tail import last_lines
from .log_file import write_whole
from .step_log import is_logged

if TYPE_CHECKING:
    from ..instrumentation.raw_step import RawStep  # it imports torch

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# Number of steps that a ring keeps. The watch thread is woken long before so many are not logged.
SLOTS = 1024
# What remains free for others, in bytes: a container often has 64 MB, which data loaders use.
MIN_FREE_BYTES = 16 * 2**20
# After this time the ring of a killed process is deleted even if its log cannot be written.
MAX_AGE_SECONDS = 24 * 3600.0
# Time between two looks whether the process that has claimed a ring has completed the log.
CLAIM_POLL_SECONDS = 0.05
# How much of the end of a segment is searched for the last step that was logged.
SEARCHED_BYTES = 16 * 2**20

_NAME = "zerowatch-steps-"
_MAGIC = b"zwsteps1"
_HEADER = struct.Struct("<8sII")  # magic, length and checksum of the description
_HEADER_BYTES = 4096
_STEP = struct.Struct(STEP_FORMAT + len(PHASES) * PHASE_FORMAT)
_SLOT_BYTES = _STEP.size + CHECKSUM.size
_FILE_BYTES = _HEADER_BYTES + SLOTS * _SLOT_BYTES

# The rings of this process. Opening one of them again and closing it would release its lock.
_own: set[Path] = set()
# Locks do not hold between two threads of a process, such as one that a disk has blocked for long.
_recovering = threading.Lock()


class StepRing:
    """A ring of steps in shared memory.

    The file is allocated beforehand: writing to a sparse file in a full file system would kill the
    process by SIGBUS. It gets its name when the log is known, so a file with a name is complete.

    Attributes:
        write: Writes a step in place of the oldest one, without values that are still on a device.
            Returns whether `recover` would find the step if the process were killed now. Only one
            thread may call it.

    Examples:
        >>> ring = StepRing.create()  # None if there is no room
        >>> ring.set_log(Path("runs/r1/rank-0.jsonl"), {"rank": 0}, every_step=True)
        >>> ring.write(raw_step)
        >>> ring.close()  # deletes the file
    """

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._descriptor: int | None = descriptor
        self._folder = folder
        self._map = mmap.mmap(descriptor, _FILE_BYTES)
        self._slots = StepSlots(self._map, _HEADER_BYTES, SLOTS, len(PHASES))
        self.write: Callable[[RawStep], bool] = self._slots.write
        self._path: Path | None = None
        self._pid = os.getpid()

    @classmethod
    def create(cls, folder: Path | None = None) -> StepRing | None:
        """Allocate a ring without a name. Return None if the folder has no room for it.

        Args:
            folder: A folder in memory; by default SHARED_MEMORY.
        """
        folder, descriptor = folder or SHARED_MEMORY, None
        try:
            space = os.statvfs(folder)
            if space.f_bavail * space.f_frsize < MIN_FREE_BYTES + _FILE_BYTES:
                return None
            descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)
            # Forked children do not inherit this lock. They may live longer than this process.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls(descriptor, folder)
        except (OSError, AttributeError):  # no such folder or no room; a system without O_TMPFILE
            if descriptor is not None:
                os.close(descriptor)
            return None

    @property
    def descriptor(self) -> int | None:
        """The descriptor of the file, for the process that makes a `RingClaim`. None if closed."""
        return self._descriptor

    def set_log(
        self, log: Path, identity: Mapping[str, str | int], *, every_step: bool = True
    ) -> None:
        """Describe the log to which steps are appended after a kill, and give the file a name.

        Args:
            log: The log of this rank.
            identity: The fields that each line of the log contains.
            every_step: Whether the log contains each step; else each tenth.
        """
        if self._descriptor is None or self._path is not None:
            return
        fields = {"log": str(log.resolve()), "identity": identity, "every_step": every_step}
        described = json.dumps(fields).encode()
        if len(described) > _HEADER_BYTES - _HEADER.size:
            return
        header = _HEADER.pack(_MAGIC, len(described), crc32(described)) + described
        self._map[: len(header)] = header
        path = self._folder / f"{_NAME}{os.getuid()}-{self._pid}-{secrets.token_hex(4)}"
        _own.add(path)
        try:
            # Only with a descriptor of the folder does Python follow the link to the unnamed file.
            links = os.open("/proc/self/fd", os.O_PATH)
            try:
                os.link(str(self._descriptor), path, src_dir_fd=links, follow_symlinks=True)
                self._path, self._slots.is_recoverable = path, True
            finally:
                os.close(links)
        except OSError as error:
            logger.info("the last steps are not kept in %s: %s", self._folder, error)

    def close(self, *, deletes_file: bool = True) -> None:
        """Release the ring. Safe to call twice, and in a forked child, which deletes nothing.

        Args:
            deletes_file: Whether all steps are in the log, so that there is nothing to recover.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        path, self._path, self._slots.is_recoverable = self._path, None, False
        if path is not None and os.getpid() == self._pid:
            if deletes_file:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            _own.discard(path)
        self._map.close()
        os.close(descriptor)


class RingClaim:
    """Reserves the ring of another process, whose steps this process also receives and logs.

    Until `release`, or until this process ends, `recover` leaves the ring alone: it would append
    steps that this process has received but not logged yet.

    Args:
        inherited: The descriptor of the ring, from its process. It is closed.
    """

    def __init__(self, inherited: int) -> None:
        self._descriptor: int | None = None
        # A lock by `flock` belongs to the open file, which the ring's process and its forks share
        # with the inherited descriptor. It is independent of that process's `lockf`.
        with contextlib.suppress(OSError):  # without /proc, the ring gets no name either
            path = f"/proc/self/fd/{inherited}"
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(inherited)

    def release(self) -> None:
        """Let `recover` append the steps of the ring. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def recover(logs: Path, folder: Path | None = None, *, wait_seconds: float = 0.0) -> int:
    """Append the steps of killed processes of this user to their logs, and delete their rings.

    The lines have neither collectives nor memory, which are in no ring. Errors are logged. The time
    of modification of a log becomes that of its last step. A ring whose log cannot be written now
    is tried again next time, for MAX_AGE_SECONDS. Steps of a run whose folder was deleted are not
    appended to the log of a later run with the same id. Steps of a rank that has gone on since, as
    after a restart on another host, are left out: readers take the last line of a log for its last
    step. While another thread of this process recovers steps, the call does nothing. A ring that
    another process has claimed is left to it.

    Args:
        logs: Only logs in this folder or below it are written. The file system of another log may
            not respond.
        folder: The folder of the rings; by default SHARED_MEMORY.
        wait_seconds: Longest wait for processes that have claimed a ring, and complete its log.

    Returns:
        The number of steps that were appended.

    Examples:
        >>> recover(Path("runs/r1"))  # after the ranks of a job on this host were killed
        3
    """
    if not _recovering.acquire(blocking=False):
        return 0
    total, deadline = 0, time.monotonic() + wait_seconds
    try:
        logs = logs.resolve()
        for path in sorted((folder or SHARED_MEMORY).glob(f"{_NAME}{os.getuid()}-*")):
            if path not in _own:
                total += _recover_file(path, logs, deadline)
    except OSError:  # there is no such folder, or it cannot be read
        pass
    finally:
        _recovering.release()
    return total


def _recover_file(path: Path, logs: Path, deadline: float) -> int:
    """Append the steps of one ring, unless its process lives. Return the number of steps."""
    try:
        with _locked(path, deadline) as descriptor:
            if descriptor is None:
                return 0
            header = _read_header(os.pread(descriptor, _HEADER_BYTES, 0))
            is_of_logs = header is not None and header.log.is_relative_to(logs)
            # The last step is no older than the file's time. Reading the steps takes 4 ms, and each
            # killed job of another folder may have left a ring here.
            is_young = time.time() - os.fstat(descriptor).st_mtime <= MAX_AGE_SECONDS
            if header is not None and not is_of_logs and is_young:
                return 0
            ring = None if header is None else _read(descriptor, header)
            num, is_done = 0, ring is None
            if ring is not None:
                if is_of_logs and ring.is_of_deleted_folder():
                    is_done = True
                elif is_of_logs:
                    num, is_done = ring.append_missing()
                is_done = is_done or ring.age_seconds() > MAX_AGE_SECONDS
            if is_done:
                path.unlink(missing_ok=True)
            return num
    except OSError as error:
        logger.info("%s, the last steps of a killed process, cannot be read: %s", path, error)
        return 0


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[int | None]:
    """Open and lock a ring. Yield None if it is no ring of this user, is in use, or was deleted.

    It is in use, too, if another process has claimed it and does not release it until `deadline`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            yield None
            return
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives, or another process recovers it
            yield None
            return
        if not _is_unclaimed(descriptor, deadline):
            yield None
            return
        yield descriptor if os.fstat(descriptor).st_nlink else None
    finally:
        os.close(descriptor)


def _is_unclaimed(descriptor: int, deadline: float) -> bool:
    """Wait until a ring is not claimed. Return whether it is not at the deadline."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(CLAIM_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class _Header:
    """The description of a ring."""

    log: Path
    identity: Mapping[str, str | int]
    every_step: bool


@dataclass(frozen=True, slots=True)
class _DeadRing:
    """The content of a ring whose process has ended: one step or more in order, oldest first."""

    log: Path
    identity: Mapping[str, str | int]
    records: list[StepRecord]

    def age_seconds(self) -> float:
        """Return the time since the last step. The file's own time may be that of its creation."""
        return time.time() - self.records[-1].ended_at_unix_seconds

    def is_of_deleted_folder(self) -> bool:
        """Return whether the folder was deleted, and a later run with the same id has begun it.

        The file is never written, so its time is that of its creation. Numbers of inodes are used
        again, so they would not tell two folders apart.
        """
        try:
            begun_at = (self.log.parent / LOCK_FILE).stat().st_mtime
        except OSError:
            return False
        return begun_at > self.records[-1].ended_at_unix_seconds

    def append_missing(self) -> tuple[int, bool]:
        """Append the steps after the last one that is in the log, unless the rank has gone on.

        Returns:
            The number of steps that were appended, and whether nothing remains to be done.
        """
        try:
            logged = _logged_ends(self.log)
            if self._is_before(logged):
                logger.info(
                    "the last steps of a killed process are not appended to %s: the rank has gone "
                    "on there since",
                    self.log,
                )
                return 0, True
            missing = self._missing(logged)
            if missing:
                self._append(missing)
                logger.info(
                    "%d step(s) of a killed process: appended to %s", len(missing), self.log
                )
            return len(missing), True
        except OSError as error:
            logger.info(
                "the last steps of a killed process cannot be appended to %s: %s. The next start "
                "on this host, or `zerowatch report`, tries again.",
                self.log,
                error,
            )
            return 0, False

    def _is_before(self, logged: Sequence[float]) -> bool:
        """Return whether the last step in the log is a later one, of another process."""
        ends = [record.ended_at_unix_seconds for record in self.records]
        return bool(logged) and logged[-1] > ends[-1] and logged[-1] not in ends

    def _missing(self, logged: Sequence[float]) -> list[StepRecord]:
        known = frozenset(logged)
        missing: list[StepRecord] = []
        for record in reversed(self.records):
            if record.ended_at_unix_seconds in known:
                break
            missing.append(record)
        return missing[::-1]

    def _append(self, records: Sequence[StepRecord]) -> None:
        writer = LineWriter(self.identity)
        descriptor = open_log(self.log)
        try:
            write_whole(descriptor, b"".join(map(writer.line, records)))
            # A run whose log is young counts as alive (dashboards/stack/run_targets.py).
            ended_at = records[-1].ended_at_unix_seconds
            with contextlib.suppress(OSError):
                os.utime(descriptor, (ended_at, ended_at))
        finally:
            os.close(descriptor)


def _read_header(content: bytes) -> _Header | None:
    """Return the description of a ring; None if the file is no ring of this version."""
    try:
        magic, length, checksum = _HEADER.unpack_from(content)
        described = content[_HEADER.size : _HEADER.size + length]
        if magic != _MAGIC or crc32(described) != checksum:
            return None
        fields = json.loads(described)
        return _Header(Path(fields["log"]), fields["identity"], fields["every_step"])
    except (struct.error, ValueError, KeyError, TypeError):
        return None


def _read(descriptor: int, header: _Header) -> _DeadRing | None:
    """Return the content of a ring; None if the file is too short, or has no step."""
    content = os.pread(descriptor, _FILE_BYTES, 0)
    if len(content) < _FILE_BYTES:
        return None
    steps: dict[int, StepRecord] = {}
    for start in range(_HEADER_BYTES, _FILE_BYTES, _SLOT_BYTES):
        body = content[start : start + _STEP.size]
        (checksum,) = CHECKSUM.unpack_from(content, start + _STEP.size)
        number = _STEP.unpack(body)[0]
        if number and crc32(body) == checksum:  # else the slot is empty, or was being written
            steps[number] = _record(body)
    in_order = (steps[number] for number in sorted(steps))
    records = [one for one in in_order if is_logged(one.step, every_step=header.every_step)]
    return _DeadRing(header.log, header.identity, records) if records else None


def _record(body: bytes) -> StepRecord:
    (
        _,
        step,
        ended_at,
        flags,
        micro_batches,
        samples,
        tokens,
        loss,
        norm,
        rate,
        scale,
        *phase_ns,
    ) = _STEP.unpack(body)
    return StepRecord(
        step=step,
        ended_at_unix_seconds=ended_at,
        seconds=sum(phase_ns) / 1e9,
        phase_seconds=seconds_by_phase(phase_ns),
        micro_batches=micro_batches,
        samples=None if samples == UNKNOWN_COUNT else samples,
        tokens=None if tokens == UNKNOWN_COUNT else tokens,
        loss=_known(loss),
        nonfinite_loss=loss != NO_VALUE and not math.isfinite(loss),
        gradient_norm=_known(norm),
        learning_rate=_known(rate),
        loss_scale=_known(scale),
        skipped=bool(flags & SKIPPED),
        collectives={},
        comm_seconds=None,
        comm_exposed_seconds=None,
        memory_bytes={},
        device_readings={},
        phases_are_host_times=bool(flags & HOST_TIMES),
    )


def _logged_ends(log: Path) -> list[float]:
    """Return when the last steps in a log ended, as Unix times in the order of the lines."""
    ends: list[float] = []
    for line in _last_lines(log):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a partial line
            ends.append(float(orjson.loads(line)["ended_at_unix_seconds"]))
    return ends


def _last_lines(log: Path) -> list[bytes]:
    """Return the lines at the end of a log; of its older segment, too, if it has just begun."""
    found: list[bytes] = []
    for path in (log, log.with_suffix(".1.jsonl")):
        with contextlib.suppress(FileNotFoundError):
            lines, is_whole = last_lines(path, SEARCHED_BYTES)
            found = lines + found
            if not is_whole:
                break
    return found


def _known(number: float) -> float | None:
    return None if number == NO_VALUE else number
