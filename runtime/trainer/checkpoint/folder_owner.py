"""Reserves a folder of checkpoints for one run, so that no other run overwrites its checkpoints.

`FOLDER/.zerowatch-owner` names the run, and is locked while a process of the run may save. The
kernel releases the lock when the process ends, also after a kill.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from .folder import CheckpointFolder

logger = logging.getLogger(__name__)

OWNER = ".zerowatch-owner"
# A process that was just killed keeps the lock until the kernel has freed its memory.
WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.1
_MAX_BYTES = 4096
_IS_LOCKED = (errno.EAGAIN, errno.EACCES)


class FolderOwner:
    """Reserves folders for a run, on each rank that manages a folder.

    A folder that already has checkpoints is reserved only if this run wrote the last of them, or
    has loaded from the folder since they were written.

    Args:
        run_id: Id of the run; a restarted run keeps it.
        wait_seconds: How long to wait for a process that is ending.
    """

    def __init__(self, run_id: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        self._run_id, self._wait_seconds = run_id, wait_seconds
        self._loaded_from: dict[Path, str | None] = {}
        self._locks: dict[Path, _LockedFile] = {}

    def note_load(self, folder: Path) -> None:
        """Record which run owns a folder; call this before a checkpoint in the folder is chosen."""
        if folder not in self._locks:
            self._loaded_from[folder] = _run_id(_read(folder / OWNER))

    def claim(self, checkpoints: CheckpointFolder) -> None:
        """Reserve a folder for this run before a save; nothing is written if that is refused.

        Raises:
            CheckpointError: Another process is saving into the folder, or the folder has
                checkpoints of a run that this run has not loaded.
            OSError: The folder cannot be created, read or written.
        """
        folder = checkpoints.path
        held = self._locks.get(folder)
        if held is not None and held.is_file(folder / OWNER):
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
            lock.write(json.dumps(self._content()))
        except BaseException:
            lock.close()
            raise
        self._locks[folder] = lock

    def close(self) -> None:
        """Release all folders. Safe to call twice."""
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def _check(self, checkpoints: CheckpointFolder) -> None:
        owner = _run_id(_read(checkpoints.path / OWNER))
        loaded = self._loaded_from
        is_known = owner == self._run_id or (
            checkpoints.path in loaded and owner == loaded[checkpoints.path]
        )
        if not is_known and checkpoints.names():
            since = " since it was loaded" if checkpoints.path in loaded else ""
            raise CheckpointError(
                f"{checkpoints.path} has checkpoints of {_shown(owner)}{since}, which this run "
                f"({self._run_id}) would delete. To continue from them, call `load` with this "
                "folder before the first batch; otherwise save to another folder"
            )

    def _wait_for(self, lock: _LockedFile, folder: Path) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while not lock.acquire():
            if time.monotonic() > deadline:
                other = _read(folder / OWNER)
                raise CheckpointError(
                    f"{folder} is in use by {_shown(_run_id(other))} (process {other.get('pid')} "
                    f"on {other.get('host')}), which has not ended. Save to another folder, or end "
                    "that run, in Python by its `close`"
                )
            time.sleep(_POLL_SECONDS)

    def _content(self) -> dict[str, Any]:
        return {"run_id": self._run_id, "host": socket.gethostname(), "pid": os.getpid()}


class _LockedFile:
    """An open file with a lock that ends with the process, whatever ends it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._path, self._descriptor = path, os.open(path, flags, 0o644)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.close.atexit = False  # a save may still be written then, and the kernel releases it
        # A forked child, such as a worker of a DataLoader, would keep the lock of a killed run.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(self)))

    def acquire(self) -> bool:
        """Lock the file; return whether no other process has the lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _IS_LOCKED:
                return False
            logger.warning(
                "%s cannot be locked (%s): two runs that save into this folder at the same time "
                "are not detected",
                self._path,
                error,
            )
        return True

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


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a folder's owner file; an empty dict without a readable file."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode()
        # After a kill within `write`, the end of a longer text may follow.
        content, _ = json.JSONDecoder().raw_decode(text)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _run_id(content: dict[str, Any]) -> str | None:
    run_id = content.get("run_id")
    return run_id if isinstance(run_id, str) else None


def _shown(run_id: str | None) -> str:
    return "a run without an id" if run_id is None else f"run {run_id[:80]!r}"
