"""Reserves a folder of checkpoints for one run, so that no other run overwrites its checkpoints.

`FOLDER/.zerowatch-owner` names the run, and is locked while a process of the run may save. The
kernel releases the lock when the process ends, also after a kill. On a network file system, the
lock of a host that was lost stays until the server releases it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ....errors import CheckpointError
from ...common.host_group import HostCollectives
from ...common.liveness_file import boot_id
from ...common.process_info import launcher_identity, launcher_start
from .folder import CheckpointFolder

logger = logging.getLogger(__name__)

OWNER = ".zerowatch-owner"
# A process that was just killed keeps the lock until the kernel has freed its memory.
WAIT_SECONDS = 5.0
# NFSv4 releases the lock of a lost host when its lease ends, by default of Linux after 90 s.
RESTART_WAIT_SECONDS = 120.0
_POLL_SECONDS, _MAX_POLL_SECONDS = 0.1, 1.0
_MAX_BYTES = 2**20
_IS_LOCKED = (errno.EAGAIN, errno.EACCES)
# Distinguishes this process from all others. Process ids repeat, also on another host.
_PROCESS = token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The run that owns a folder: the content of the folder's owner file.

    Attributes:
        run_id: Id of the run. Several runs may have the same id, one after the other.
        instance: Unique for each `FolderOwner`.
        attempt: The same on all ranks, and in all trainings that the same worker of a launcher
            starts. A launcher that restarts its workers changes it.
        launchers: Identities of the launchers of the run's nodes; see `launcher_identity`.
        host: Name of the host of the process.
        pid: Id of the process on its host.
        boot_id: The boot of the host; empty if it is not known.
    """

    run_id: str | None = None
    instance: str | None = None
    attempt: str | None = None
    launchers: tuple[str, ...] = ()
    host: str | None = None
    pid: int | None = None
    boot_id: str = ""

    __pydantic_config__ = ConfigDict(extra="ignore")

    def __str__(self) -> str:
        """Name the run in a message."""
        run = "a run without an id" if self.run_id is None else f"run {self.run_id[:80]!r}"
        return run if self.pid is None else f"{run} (process {self.pid} on {self.host})"


class FolderOwner:
    """Reserves folders for a run, on each rank that manages a folder.

    A folder that already has checkpoints is reserved only if one of these holds:

    - This run has loaded from the folder, and no other run has saved into it since.
    - The folder belongs to an earlier attempt of this run, which had a launcher of this run.

    Args:
        run_id: Id of the run, for messages.
        launchers: Identities of the launchers of all ranks, empty for a rank without one.
        attempt: Text that differs in each start of workers by their launchers.
        wait_seconds: How long to wait for the lock of another run, which may be ending.
        restart_wait_seconds: How long to wait for the lock of an earlier attempt of this run on
            another host.
    """

    def __init__(
        self,
        run_id: str,
        launchers: Iterable[str] = (),
        attempt: str = _PROCESS,
        *,
        wait_seconds: float = WAIT_SECONDS,
        restart_wait_seconds: float = RESTART_WAIT_SECONDS,
    ) -> None:
        self._own = Owner(
            run_id=run_id,
            instance=token_hex(8),
            attempt=attempt,
            launchers=tuple(sorted({*launchers} - {""})),
            host=socket.gethostname(),
            pid=os.getpid(),
            boot_id=_boot_id(),
        )
        self._wait_seconds, self._restart_wait_seconds = wait_seconds, restart_wait_seconds
        self._loaded_from: dict[Path, str | None] = {}  # instance of the owner
        self._locks: dict[Path, _LockedFile] = {}

    @contextmanager
    def loading(self, folder: Path) -> Iterator[None]:
        """Record a folder as loaded if the body chooses a checkpoint in it and loads that.

        After an error in the body nothing is recorded. The owner is read before the body, so that a
        run that saves into the folder during the load is noticed.
        """
        instance = _read(folder / OWNER).instance
        yield
        if folder not in self._locks:
            self._loaded_from[folder] = instance

    def claim(self, checkpoints: CheckpointFolder) -> None:
        """Reserve a folder for this run before a save; nothing is written if that is refused.

        Raises:
            CheckpointError: Another process is saving into the folder, the folder has checkpoints
                of a run that this run has not loaded, another run has reserved it since the last
                save, or this user may not write the owner file.
            OSError: The folder cannot be created, read or written.
        """
        folder = checkpoints.path
        held = self._locks.get(folder)
        if held is not None and held.is_in(folder):
            self._keep(held, folder)
            return
        if held is not None:  # the folder was deleted, or moved away
            self._locks.pop(folder).close()
        if not (folder / OWNER).exists():
            self._check(checkpoints)  # before the file is created
        folder.mkdir(parents=True, exist_ok=True)
        lock = _LockedFile(folder / OWNER)
        try:
            self._wait_for(lock, folder)
            self._check(checkpoints)  # the run that held the lock may have saved
            lock.write(json.dumps(asdict(self._own)))
        except BaseException:
            lock.close()
            raise
        self._locks[folder] = lock

    @property
    def attempt(self) -> dict[str, Any]:
        """This attempt of the run, as plain data, for `is_earlier_attempt` of a later one."""
        return {"attempt": self._own.attempt, "launchers": self._own.launchers}

    def is_earlier_attempt(self, attempt: Mapping[str, Any] | None) -> bool:
        """Return whether this run was restarted by a launcher since `attempt` was read from it."""
        try:
            return self._is_other_attempt(_OWNER.validate_python(attempt or {}))
        except ValidationError:  # of another version
            return False

    def close(self) -> None:
        """Release all folders. Safe to call twice."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _keep(self, held: _LockedFile, folder: Path) -> None:
        """Check that this run still owns a folder; if its owner file was deleted, make it again."""
        path = folder / OWNER
        lock = held if held.is_file(path) else _LockedFile(path)
        try:
            if not lock.acquire() and lock is not held:
                raise CheckpointError(self._in_use(folder, _read(path)))
            owner = _read(path)
            if owner == Owner():
                logger.warning("%s was deleted or damaged, and is written again", path)
                lock.write(json.dumps(asdict(self._own)))
            elif owner.instance != self._own.instance:
                raise CheckpointError(self._reserved_since(folder, owner))
        except BaseException:
            if lock is not held:
                lock.close()
            raise
        if lock is not held:
            held.close()
            self._locks[folder] = lock

    def _check(self, checkpoints: CheckpointFolder) -> None:
        owner = _read(checkpoints.path / OWNER)
        loaded = self._loaded_from
        is_loaded = checkpoints.path in loaded and owner.instance == loaded[checkpoints.path]
        is_own = owner.instance == self._own.instance  # the folder was moved to another disk
        if is_own or is_loaded or self._is_other_attempt(owner):
            return
        if checkpoints.names():
            since = " since it was loaded" if checkpoints.path in loaded else ""
            raise CheckpointError(
                f"{checkpoints.path} has checkpoints of {owner}{since}, which this run "
                f"({self._own.run_id}) would delete. To continue from them, call `load` with this "
                "folder before the first batch; otherwise save to another folder"
            )

    def _is_other_attempt(self, owner: Owner) -> bool:
        """Return whether the owner is this run before or after a restart by one of its launchers.

        The owner in the same attempt is another TrainingRun of these processes, another rank, or
        another training that the same worker of the launcher has started.
        """
        has_launcher = not set(owner.launchers).isdisjoint(self._own.launchers)
        return has_launcher and owner.attempt != self._own.attempt

    def _wait_for(self, lock: _LockedFile, folder: Path) -> None:
        """Wait for the lock; after a restart, go on without the lock of a host that was lost.

        A restart on the same host need not wait longer than another run: the launcher has seen the
        end of the process, and the kernel releases its lock.

        Raises:
            CheckpointError: Another process has the lock.
        """
        began, delay, is_logged = time.monotonic(), _POLL_SECONDS, False
        while not lock.acquire():
            owner = _read(folder / OWNER)
            may_be_lost = self._is_other_attempt(owner) and self._is_on_another_host(owner)
            waited = time.monotonic() - began
            if waited > (self._restart_wait_seconds if may_be_lost else self._wait_seconds):
                if may_be_lost:
                    logger.warning(
                        "%s is still locked by %s, an earlier attempt of this run. This run saves "
                        "without the lock, because the other host was lost; if it was not, end "
                        "that process",
                        folder,
                        owner,
                    )
                    return
                raise CheckpointError(self._in_use(folder, owner))
            if waited > self._wait_seconds and not is_logged:
                is_logged = True
                logger.info("waiting until the lock of %s, %s, is released", folder, owner)
            time.sleep(delay)
            delay = min(2 * delay, _MAX_POLL_SECONDS)

    def _reserved_since(self, folder: Path, owner: Owner) -> str:
        message = f"{folder} is in use by {owner}, which has reserved it since the last save. "
        if self._is_other_attempt(owner):
            return f"{message}That is a restart of this run: end the processes of this attempt"
        return (
            f"{message}Save to another folder, or end that run and restart this one from its last "
            "checkpoint"
        )

    def _in_use(self, folder: Path, owner: Owner) -> str:
        message = (
            f"{folder} is in use by {owner}, which has not ended. Save to another folder, or end "
            "that run, in Python by its `close`"
        )
        if not self._is_on_another_host(owner):
            return message
        return (
            f"{message}. If the host {owner.host} was lost, the file server releases its lock "
            f"later: start again then, or delete {folder / OWNER} and start again"
        )

    def _is_on_another_host(self, owner: Owner) -> bool:
        return "" not in (owner.boot_id, self._own.boot_id) and owner.boot_id != self._own.boot_id


def folder_owner(run_id: str, host_group: HostCollectives) -> FolderOwner:
    """Return the owner of this run's folders; all ranks must call it.

    Args:
        run_id: Id of the run; that of rank 0 counts.
        host_group: Group of all ranks.
    """
    attempt = launcher_start() or _PROCESS
    run_id, attempt = json.loads(host_group.broadcast_text(json.dumps([run_id, attempt])))
    launchers = host_group.all_gather_text(launcher_identity() or "")
    return FolderOwner(run_id, launchers, attempt)


class _LockedFile:
    """An open file with a lock that ends with the process, whatever ends it.

    Attributes:
        is_locked: Whether this process has the lock.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # As the other files of the folder: the group may write it if the umask allows that.
            self._path, self._descriptor = path, os.open(path, flags, 0o666)
        except PermissionError as error:
            raise CheckpointError(_not_writable(path)) from error
        self.is_locked, self._can_lock = False, True
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.close.atexit = False  # a save may still be written then, and the kernel releases it
        self._folder = path.parent.stat()
        # A forked child, such as a worker of a DataLoader, would keep the lock of a killed run.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(self)))

    def acquire(self) -> bool:
        """Lock the file; return whether no other process has the lock."""
        if self.is_locked or not self._can_lock:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_locked = True
        except OSError as error:
            if error.errno in _IS_LOCKED:
                return False
            self._can_lock = False
            logger.warning(
                "%s cannot be locked (%s): two runs that save into this folder at the same time "
                "are noticed only at a save after the first one of the other run",
                self._path,
                error,
            )
        return True

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder that the file was opened in is still the one at a path."""
        try:
            return os.path.samestat(self._folder, folder.stat())
        except OSError:
            return False

    def is_file(self, path: Path) -> bool:
        """Return whether this file is still the one at a path."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError:
            return False

    def write(self, text: str) -> None:
        """Replace the content in place, because a renamed file would lose the lock."""
        data = text.encode()
        if os.pwrite(self._descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, "the disk is full", str(self._path))
        os.ftruncate(self._descriptor, len(data))
        os.fsync(self._descriptor)


def _close(reference: Callable[[], _LockedFile | None]) -> None:
    lock = reference()
    if lock is not None:
        lock.close()


def _not_writable(path: Path) -> str:
    if not path.exists():
        return f"{path.parent} cannot be written by this user; save to another folder"
    return (
        f"{path} names the run that saves here, and this user cannot write it. Let its owner, "
        f"{_user_name(path)}, run `chmod g+w {path}`, or delete the file if no run saves here, and "
        "start again; or save to another folder"
    )


def _user_name(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return "another user"


def _read(path: Path) -> Owner:
    """Return the owner of a folder; an owner without fields if there is no readable file."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode()
        # After a kill within `write`, the end of a longer text may follow.
        content, _ = json.JSONDecoder().raw_decode(text)
        return _OWNER.validate_python(content)
    except (OSError, ValueError, ValidationError, RecursionError):
        return Owner()


_OWNER = TypeAdapter(Owner)


def _boot_id() -> str:
    try:
        return boot_id()
    except OSError:
        return ""
