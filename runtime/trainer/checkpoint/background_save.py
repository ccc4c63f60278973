"""Writes checkpoints on a thread while training goes on, one at a time."""

from __future__ import annotations

import atexit
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ....errors import CheckpointError
from ....metrics.atomic_file import sync
from ...common.collective_attempt import raise_on_all_ranks
from ...common.host_group import HostCollectives
from ...common.outer_error import OuterError
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

# How long to wait at the end for other ranks, which may have been killed: usually, and if an error
# ends this process.
PEER_SECONDS = 300.0
PEER_SECONDS_AFTER_ERROR = 30.0
# How long to wait for the store while no rank uses its disk: a busy store responds within seconds.
STORE_SECONDS = 60.0
LEAVE_SECONDS = 15.0  # more than the timeout of the store's calls
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.05, 1.0
_NOTICE_SECONDS = 300.0

UNCERTAIN = (
    "It may be or become complete nevertheless, and earlier checkpoints are deleted only then. "
    "Training may go on"
)


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

    Waiting ends when this rank's thread ends. If the thread only waits for other ranks or for the
    store and exceeds a limit, it is stopped. A thread that a call of the store blocks is left: it
    can neither complete nor delete a checkpoint afterwards, and it does not keep the process alive.
    A thread that uses the disk is never left, because a commit cannot be taken back.

    Args:
        peer_seconds: How long `wait` waits for other ranks.
        peer_seconds_after_error: The same if an error ends this process.
        store_seconds: How long `wait_together` waits while all threads wait for the store.
        leave_seconds: How long to wait for a thread that was stopped.
    """

    def __init__(
        self,
        *,
        peer_seconds: float = PEER_SECONDS,
        peer_seconds_after_error: float = PEER_SECONDS_AFTER_ERROR,
        store_seconds: float = STORE_SECONDS,
        leave_seconds: float = LEAVE_SECONDS,
    ) -> None:
        self._peer_seconds, self._peer_seconds_after_error = peer_seconds, peer_seconds_after_error
        self._store_seconds, self._leave_seconds = store_seconds, leave_seconds
        self._reserved: SimpleQueue[_SaveJob | None] | None = None
        self._job: _SaveJob | None = None
        self._failure: CheckpointError | None = None
        self._outer_error = OuterError()

    def reserve_thread(self) -> bool:
        """Start the thread of the next save, and return whether that was possible."""
        try:
            self._reserved = self._reserved or _started_thread()
        except RuntimeError as error:
            logger.warning("no thread can be started (%s): training waits for the save", error)
            return False
        return True

    def start(
        self, pending: PendingSave, exchange: RankExchange, on_end: Callable[[bool, float], None]
    ) -> None:
        """Write a checkpoint on a thread; the previous one must have ended.

        Args:
            pending: The checkpoint.
            exchange: Exchange of the ranks' threads, of this save only.
            on_end: Called with whether the checkpoint was completed and the seconds of writing, on
                the thread, or by the method that leaves the thread.

        Raises:
            RuntimeError: No thread can be started, and none was reserved.
        """
        queue, self._reserved = self._reserved or _started_thread(), None
        self._job = _SaveJob(pending, exchange, on_end)
        self._outer_error = OuterError()
        queue.put(self._job)
        atexit.register(self.wait)

    def wait_together(self, host_group: HostCollectives) -> None:
        """Wait until no rank writes a checkpoint; all ranks must call it.

        As long as a rank uses its disk, all wait, as in a save without a thread.

        Args:
            host_group: Group of all ranks. Its collectives fail if a rank was killed.
        """
        job, poll_seconds, idle_seconds, total_seconds = self._job, _FIRST_POLL_SECONDS, 0.0, 0.0
        noted_seconds = 0.0
        while True:
            is_running = job is not None and not job.has_ended
            is_idle = job is not None and job.is_exchanging
            rows = host_group.all_gather([is_running, is_running and not is_idle])
            running, busy = ([rank for rank, flag in enumerate(row) if flag] for row in rows.T)
            if not running:
                break
            # All ranks have the same rows, so they have the same sums.
            idle_seconds = 0.0 if busy else idle_seconds + poll_seconds
            total_seconds += poll_seconds
            if job is not None:
                if total_seconds >= noted_seconds:
                    noted_seconds += _NOTICE_SECONDS
                    logger.info("waiting until %s is written by rank %s", job.path, busy or running)
                self._limit(job, idle_seconds, self._store_seconds)
                job.wait(poll_seconds)
            poll_seconds = min(2 * poll_seconds, _POLL_SECONDS)
        self._take(job)

    def wait(self) -> None:
        """Wait until this rank writes no checkpoint, for other ranks only for a limited time."""
        job, exchanging_seconds = self._job, 0.0
        after_error = self._peer_seconds_after_error
        seconds = after_error if self._is_ended_by_error() else self._peer_seconds
        while job is not None and not job.wait(_POLL_SECONDS):
            if job.is_exchanging:
                exchanging_seconds += _POLL_SECONDS
                self._limit(job, exchanging_seconds, seconds)
        self._take(job)

    def _is_ended_by_error(self) -> bool:
        """Return whether an error is being handled, such as in a `finally`, or ended the script.

        An error from before the save ends nothing.
        """
        errors = self._outer_error.newer(), self._outer_error.newer_uncaught()
        return any(error is not None for error in errors)

    def take_failure(self) -> CheckpointError | None:
        """Return and forget why the last checkpoint was not completed; None if it was."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Wait until the last checkpoint is written. Safe to call twice.

        Raises:
            CheckpointError: The last checkpoint was not completed.
        """
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.put(None)
        self.wait()
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def _limit(self, job: _SaveJob, waited_seconds: float, limit_seconds: float) -> None:
        if waited_seconds > limit_seconds:
            job.stop()
        if waited_seconds > limit_seconds + self._leave_seconds:
            job.leave()

    def _take(self, job: _SaveJob | None) -> None:
        if job is not None:
            atexit.unregister(self.wait)
            self._job, self._failure = None, job.failure


class _SaveJob:
    """A save on a thread, and the exchange that its thread uses.

    Attributes:
        path: Folder of the checkpoint once it is complete.
        failure: Why the save failed, once it has ended.
    """

    def __init__(
        self, pending: PendingSave, exchange: RankExchange, on_end: Callable[[bool, float], None]
    ) -> None:
        self.path = pending.path
        self.failure: CheckpointError | None = None
        self._pending, self._exchange, self._on_end = pending, exchange, on_end
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._is_exchanging = self._is_left = False
        self._ended = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has ended or was left."""
        return self._ended.is_set()

    @property
    def is_exchanging(self) -> bool:
        """Return whether the thread waits for other ranks or for the store."""
        return self._is_exchanging

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether the thread has ended or was left."""
        return self._ended.wait(seconds)

    def run(self) -> None:
        """Save; called on the thread."""
        with FailureCapture() as capture:
            self._pending.write(self)
        failure = capture.take()
        if not self._is_left:
            self._end(failure)

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, by rank; called on the thread.

        Raises:
            RuntimeError: The exchange failed, or the thread was left.
        """
        with self._lock:
            self._is_exchanging = True
        try:
            return self._exchange.gather(text)
        finally:
            with self._lock:
                self._is_exchanging = False
                if self._is_left:
                    raise RuntimeError("the save was given up")

    def stop(self) -> None:
        """End a wait for other ranks with an error."""
        self._exchange.stop()

    def leave(self) -> None:
        """Report a failure and let the thread do nothing more, if a call of the store blocks it."""
        with self._lock:
            if not self._is_exchanging or self._is_left:
                return
            self._is_left = True
        self._end(RuntimeError("the store of torch.distributed does not respond"))

    def _end(self, error: Exception | None) -> None:
        if error is not None:
            if isinstance(error, CheckpointError):
                self.failure = error
            else:
                self.failure = CheckpointError(
                    f"cannot save step {self._pending.manifest.steps} to "
                    f"{self._pending.checkpoints.path}: {_shown(error)}. {UNCERTAIN}"
                )
            logger.error("%s", self.failure)
        try:
            self._on_end(error is None, time.perf_counter() - self._began)
        finally:
            self._ended.set()


def _started_thread() -> SimpleQueue[_SaveJob | None]:
    """Start a thread that runs one job, and return the queue that it takes the job from."""
    queue: SimpleQueue[_SaveJob | None] = SimpleQueue()
    threading.Thread(target=_run_next, args=(queue,), name="zerowatch-save", daemon=True).start()
    return queue


def _run_next(queue: SimpleQueue[_SaveJob | None]) -> None:
    job = queue.get()
    if job is not None:
        job.run()


def _shown(error: Exception | None) -> str:
    return "" if error is None else ": ".join(filter(None, describe_error(error)))
