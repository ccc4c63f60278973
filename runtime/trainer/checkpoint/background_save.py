"""Writes checkpoints on a thread while training goes on, one at a time."""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ....metrics.atomic_file import sync
from ...common.collective_attempt import raise_on_all_ranks
from ...common.host_group import HostCollectives
from ...common.peer_failures import FailureCapture, describe_error
from .engine_files import is_writer_rank, write_engine
from .folder import CheckpointFolder, FileInfo, Manifest, checkpoint_name, partial_name
from .folder_owner import FolderOwner
from .rank_exchange import RankExchange
from .run_state import RunState, rank_file, write_plain
from .save import (
    UNHARMED,
    agreed_numbers,
    checked,
    commit,
    files_of,
    manifest_without_files,
    prune,
    written_here,
)
from .snapshot import Snapshot

logger = logging.getLogger(__name__)

# How long to wait for other ranks, which may have been killed, after this rank has written its
# files: usually, and if an error ends this process.
PEER_SECONDS = 300.0
PEER_SECONDS_AFTER_ERROR = 30.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A checkpoint that is not complete yet. Its state was copied on all ranks.

    Attributes:
        checkpoints: Folder of all checkpoints.
        name: Name of this checkpoint.
        rank: Global rank.
        is_writer: Whether this rank manages the folder.
        manifest: Manifest, without the files.
        snapshot: Copies of this rank's states.
        keep: How many checkpoints to keep.
        superseded: Checkpoints to delete; see `save_checkpoint`.
    """

    checkpoints: CheckpointFolder
    name: str
    rank: int
    is_writer: bool
    manifest: Manifest
    snapshot: Snapshot
    keep: int
    superseded: set[Path]

    @property
    def path(self) -> Path:
        """Folder of the checkpoint once it is complete."""
        return self.checkpoints.path / self.name

    def write(self, exchange: RankExchange) -> None:
        """Write the copies, and complete the checkpoint together with the other ranks.

        Raises:
            CheckpointError: A rank failed; the incomplete checkpoint is removed.
            RuntimeError: The ranks cannot reach each other.
        """
        folder = self.checkpoints.path / partial_name(self.name)
        files: Mapping[str, FileInfo] = {}
        with FailureCapture() as capture:
            self.snapshot.write()
            for path in self.snapshot.paths:
                sync(path)
            files = checked(folder, self.snapshot.paths)
        own = _shown(capture.take())
        plain = {name: asdict(info) for name, info in files.items()}
        try:
            rows = [
                json.loads(text)
                for text in exchange.gather(json.dumps([self.is_writer, plain, own]))
            ]
            failures = [failure for _, _, failure in rows]
            if not any(failures):
                with FailureCapture() as capture:
                    if self.is_writer:
                        self._commit(folder, written_here(self.rank, [row[:2] for row in rows]))
                failures = exchange.gather(_shown(capture.take()))
        except RuntimeError:
            if not self.checkpoints.is_complete(self.name):
                raise
            return  # another rank has completed it, and ended
        if any(failures):
            if self.is_writer:
                shutil.rmtree(folder, ignore_errors=True)
            rank, failure = next((rank, text) for rank, text in enumerate(failures) if text)
            raise CheckpointError(
                f"cannot save step {self.manifest.steps} to {self.checkpoints.path}: rank {rank} "
                f"failed with {failure}. {UNHARMED}"
            )
        if self.is_writer:
            prune(self.checkpoints, self.keep, self.superseded)

    def _commit(self, folder: Path, written: Mapping[str, FileInfo]) -> None:
        for path in files_of(folder):
            if str(path.relative_to(folder)) not in written:
                sync(path)
        commit(self.checkpoints, folder, self.name, self.manifest, written)


def copy_checkpoint(
    folder: str | Path,
    engine: Any,
    host_group: HostCollectives,
    state: RunState,
    available_bytes: Callable[[], float],
    keep: int = 2,
    superseded: set[Path] | None = None,
    owner: FolderOwner | None = None,
) -> PendingSave:
    """Copy the state of all ranks between two windows, to be written later; all must call it.

    Args:
        folder: See `save_checkpoint`.
        engine: See `save_checkpoint`.
        host_group: See `save_checkpoint`.
        state: See `save_checkpoint`.
        available_bytes: Returns the host memory that this rank may use now, in bytes.
        keep: See `save_checkpoint`.
        superseded: See `save_checkpoint`.
        owner: See `save_checkpoint`.

    Raises:
        CheckpointError: As `save_checkpoint`.
    """
    checkpoints = CheckpointFolder(Path(folder).absolute())
    what = f"save step {state.steps} to {checkpoints.path}"
    is_writer = is_writer_rank(engine)
    owner = owner if is_writer else None
    numbers = agreed_numbers(checkpoints, host_group, state.steps, what, owner, is_writer=is_writer)
    name = checkpoint_name(state.steps, numbers.repeat)
    unfinished = checkpoints.path / partial_name(name)
    snapshot = Snapshot(available_bytes)
    manifest = manifest_without_files(engine, numbers, state)
    try:
        with raise_on_all_ranks(host_group, what, UNHARMED):
            unfinished.mkdir(parents=True, exist_ok=True)
            snapshot.add(write_plain, state.to_plain(), rank_file(unfinished, host_group.rank))
            manifest.to_json()  # raises an error if the ds config is not plain
        with raise_on_all_ranks(host_group, what, UNHARMED):
            write_engine(engine, checkpoints.path, unfinished.name, snapshot.add)
    except CheckpointError:
        if is_writer:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return PendingSave(
        checkpoints=checkpoints,
        name=name,
        rank=host_group.rank,
        is_writer=is_writer,
        manifest=manifest,
        snapshot=snapshot,
        keep=keep,
        superseded=set() if superseded is None else superseded,
    )


class BackgroundSaver:
    """Writes one checkpoint at a time on a thread; all ranks make the same calls in order.

    Args:
        exchange: Exchange of the ranks' threads.
        peer_seconds: How long to wait for other ranks after this rank has written its files.
        peer_seconds_after_error: The same if an error ends this process.
    """

    def __init__(
        self,
        exchange: RankExchange,
        *,
        peer_seconds: float = PEER_SECONDS,
        peer_seconds_after_error: float = PEER_SECONDS_AFTER_ERROR,
    ) -> None:
        self._exchange, self._peer_seconds = exchange, peer_seconds
        self._peer_seconds_after_error = peer_seconds_after_error
        self._thread: threading.Thread | None = None
        self._pending: PendingSave | None = None
        self._failure: CheckpointError | None = None
        self._has_written_own = threading.Event()

    def start(self, pending: PendingSave, on_end: Callable[[bool, float], None]) -> None:
        """Write a checkpoint on a thread; the previous one must have ended.

        Args:
            pending: The checkpoint.
            on_end: Called on the thread with whether it was completed and the seconds of writing.
        """
        self._pending = pending
        self._has_written_own.clear()
        run = partial(self._run, pending, on_end)
        thread = threading.Thread(target=run, name="zerowatch-save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("no thread can be started (%s): the checkpoint is written now", error)
            run()
            return
        self._thread = thread
        atexit.register(self.wait)

    def wait_for_own_files(self) -> None:
        """Wait until this rank has written its files. This needs no other rank."""
        thread, pending = self._thread, self._pending
        if thread is not None and thread.is_alive() and pending is not None:
            logger.info("waiting until %s is written", pending.path)
            self._has_written_own.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written, for other ranks only for a limited time."""
        thread = self._thread
        if thread is None:
            return
        deadline = None
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            if deadline is None and self._has_written_own.is_set():
                after_error = self._peer_seconds_after_error
                seconds = after_error if _is_ended_by_error() else self._peer_seconds
                deadline = time.monotonic() + seconds
            if deadline is not None and time.monotonic() > deadline:
                self._exchange.stop()
        atexit.unregister(self.wait)
        self._thread = self._pending = None

    def take_failure(self) -> CheckpointError | None:
        """Return and forget why the last checkpoint was not completed; None if it was."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait until the last checkpoint is written. Safe to call twice.

        Raises:
            CheckpointError: The last checkpoint was not completed.
        """
        self.wait()
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def _run(self, pending: PendingSave, on_end: Callable[[bool, float], None]) -> None:
        began = time.perf_counter()
        with FailureCapture() as capture:
            pending.write(_Marked(self._exchange, self._has_written_own))
        self._has_written_own.set()
        failure = capture.take()
        if failure is not None:
            if not isinstance(failure, CheckpointError):
                failure = CheckpointError(
                    f"cannot save step {pending.manifest.steps} to {pending.checkpoints.path}: "
                    f"{_shown(failure)}. {UNHARMED}"
                )
            self._failure = failure
            logger.error("%s", failure)
        on_end(failure is None, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class _Marked:
    """An exchange that sets an event at its first use, when this rank has written its files."""

    exchange: RankExchange
    used: threading.Event

    def gather(self, text: str) -> list[str]:
        self.used.set()
        return self.exchange.gather(text)

    def stop(self) -> None:
        self.exchange.stop()


def _is_ended_by_error() -> bool:
    """Return whether an error is being handled, such as in a `finally`, or has ended the script."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None


def _shown(error: Exception | None) -> str:
    return "" if error is None else ": ".join(filter(None, describe_error(error)))
