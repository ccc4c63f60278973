"""Writes the run folder: this rank's step log, and on rank 0 the settings and targets files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...metrics.atomic_file import atomic_write, open_to_append
from ...metrics.backoff import Backoff
from ...metrics.file_lock import LOCK_FILE
from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common.launcher_link import send_run_folder
from ..common.own_files import is_foreign_folder, read_own_file
from ..common.process_info import (
    ProcessInfo,
    launcher_identity,
    launcher_run_id,
    launcher_start,
    new_run_id,
    numbered_run_id,
)
from ..common.rank_store import (
    FIRST_POLL_SECONDS,
    MAX_POLL_SECONDS,
    RankStore,
    TargetDiscovery,
)
from ..common.report_files import write_or_warn
from ..common.retried_files import RetriedFiles
from ..common.run_lock import lock, unlock
from .log_file import RETRY_SECONDS
from .step_log import StepLog, keeps_every_step, write_settings
from .step_ring import StepRing, recover

logger = logging.getLogger(__name__)

# Longest wait for the run id from rank 0.
RUN_ID_TIMEOUT_SECONDS = 30.0
# Time between two looks for the run id because of a step. It doubles up to FIRST_POLL_SECONDS.
FIRST_LOOK_SECONDS = 0.05
# Maximum number of live runs with the same id. Each run has a folder of its own.
MAX_LIVE_RUNS = 100
# Maximum number of records that are kept until the run has an id.
MAX_HELD_RECORDS = 1000
TARGETS_FILE = "targets.json"
# Contains one file for each torchrun agent of the job. There is one agent per node. The file names
# the agent's last start of workers in this run, and is empty if that is not known.
LAUNCHERS_FOLDER = "launchers"


class RunFolder:
    """Keeps records until the run has an id, then writes them. Used on the watch thread.

    Attributes:
        run_id: The id of the run. None until rank 0 has shared the id.
        files: Small files of the folder. `poll` writes those that could not be written before.
        ring: The last steps in shared memory. None if there is no room, or no run log is written.
    """

    def __init__(
        self,
        settings: Settings,
        process: ProcessInfo,
        store: RankStore,
        targets: TargetDiscovery,
        now: Callable[[], float] = time.monotonic,
        *,
        has_ring: bool = True,
    ) -> None:
        self._settings = settings
        self._runs = settings.run_log.folder.absolute()  # a script may change its working folder
        self._process = process
        self._launcher = launcher_identity()
        self._launcher_start = launcher_start()
        self._store = store
        self._targets = targets
        self._log: StepLog | None = None
        self._held: list[StepRecord] = []
        self._lost = 0
        self._since = time.monotonic()
        self._late_id: str | None = None  # rank 0's id, if it arrived after this rank chose its own
        self._late_id_backoff: Backoff | None = None
        self._targets_text: str | None = None
        self._lock: int | None = None
        self._is_signed = False
        self.files = RetriedFiles()
        self.ring = StepRing.create() if self.is_logged and has_ring else None
        self._missing_backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS, now)
        self._look_backoff = Backoff(FIRST_LOOK_SECONDS, FIRST_POLL_SECONDS, now)
        self.run_id = store.get("run_id")
        if process.rank == 0:
            self.run_id = self._claim(settings.run_id or launcher_run_id() or new_run_id())
            store.put("run_id", self.run_id)
        if self.run_id is not None:
            self._open(self.run_id)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._process.rank

    @property
    def path(self) -> Path | None:
        """The folder. None until the run has an id, or if no run log is written."""
        if self.run_id is None or not self.is_logged:
            return None
        return self._runs / self.run_id

    @property
    def is_logged(self) -> bool:
        """Whether a run log is written."""
        return self._settings.run_log.enabled

    def run(self) -> tuple[str, Path] | None:
        """Return the run id and the folder, or None where `path` is None."""
        if self.run_id is None or self.path is None:
            return None
        return self.run_id, self.path

    def identity(self, run_id: str) -> dict[str, str | int]:
        """Return the fields that each line of the step log contains."""
        return {"run_id": run_id, **asdict(self._process)}

    @property
    def dropped(self) -> int:
        """Number of records lost so far."""
        return self._lost + (self._log.dropped if self._log else 0)

    def poll(self) -> None:
        """Read the run id from the store. On rank 0, also read the targets of the other ranks."""
        if self.run_id is None:
            self._look_for_run_id()
        elif self._late_id_backoff is not None and self._late_id_backoff.is_due:
            self._late_id_backoff.start_delay()
            self._late_id = self._store.get("run_id") or self._late_id
        self._write_missing()
        self._store.poll()
        if self._process.rank != 0 or not self._settings.serve.enabled:
            return
        if self._targets.poll():
            self._targets_text = json.dumps(self.targets(), indent=2) + "\n"
            self._write_targets()

    def withdraw_targets(self) -> None:
        """Empty the targets file on rank 0, after a normal end of the run. Safe to call twice.

        After a failure, the file keeps its targets, and Prometheus reports the ranks as down.
        """
        text, self._targets_text = self._targets_text, None
        if text is None or self.path is None:
            return
        file = self.path / TARGETS_FILE
        self.files.discard(file)
        # Leave a file that a later watch of the same run id has written, and do not create one.
        if file.is_file() and file.read_text("utf-8") == text:
            write_or_warn(file, "[]\n")

    def serves_run(self, run: str) -> bool:
        """Whether this rank belongs to `run`. May be called on any thread."""
        return run in (self.run_id, self._late_id)

    def targets(self) -> list[dict[str, object]]:
        """Return the addresses of the ranks' metrics in Prometheus' http_sd form."""
        return [] if self.run_id is None else self._targets.targets(self.run_id)

    def append(self, records: Sequence[StepRecord]) -> None:
        """Write the records of steps. Keep them if the run has no id yet.

        Steps that are kept here would be lost if the process were killed. Once the ranks have
        trained a step together, rank 0 has an id, so this looks for it and does not wait for
        `poll`.
        """
        if not self.is_logged:
            return
        if self.run_id is None and self._look_backoff.is_due:
            self._look_backoff.start_delay()
            self._look_for_run_id()
        if self._log is not None:
            self._log.append(*records)
            return
        num_kept = min(len(records), MAX_HELD_RECORDS - len(self._held))
        self._held.extend(records[:num_kept])
        self._lost += len(records) - num_kept

    def close(self, *, is_complete: bool = True) -> None:
        """Close this rank's log, and release the run id for other runs.

        Args:
            is_complete: Whether all steps were appended. If not, the ring remains, and the next
                start on this host, or `zerowatch report`, appends its steps.
        """
        if self._log is None and self._held:
            self.run_id = self.run_id or self._own_run_id()
            self._open(self.run_id)
        if self._log is not None:
            self._log.close()
        if self.ring is not None:
            self.ring.close(deletes_file=is_complete)
        self._unlock()
        self._store.close()

    def _look_for_run_id(self) -> None:
        """Open the log if the store has the id by now, or if the wait for it is over."""
        self.run_id = self._store.get("run_id")
        if self.run_id is None and time.monotonic() - self._since > RUN_ID_TIMEOUT_SECONDS:
            self.run_id = self._own_run_id()
        if self.run_id is not None:
            self._open(self.run_id)

    def _own_run_id(self) -> str:
        self._late_id_backoff = Backoff(FIRST_POLL_SECONDS, MAX_POLL_SECONDS)
        if self._settings.run_id is not None:
            return next(self._own_ids(self._settings.run_id), self._settings.run_id)
        run_id = f"{new_run_id()}-rank{self._process.rank}"
        logger.warning(
            "no run id from rank 0, which may not be monitored. Rank %d writes to %s; set "
            "ZEROWATCH_RUN_ID to the same value on all ranks to keep them together.",
            self._process.rank,
            run_id,
        )
        return run_id

    def _open(self, run_id: str) -> None:
        folder = self.path
        if folder is None:
            return
        identity = self.identity(run_id)
        every_step = keeps_every_step(self._process.world_size, self._process.local_rank)
        recover(self._runs)  # before the lines of this process
        log = StepLog(
            folder,
            identity,
            self._settings.run_log,
            every_step=every_step,
            on_deleted=self._restore_files,
        )
        self._sign(folder)
        if self._process.local_rank == 0:
            send_run_folder(folder, rank=self._process.rank)
        if self._process.rank == 0:
            write_settings(folder, self._settings, self.files)
        log.append(*self._held)
        self._held.clear()
        self._log = log
        if self.ring is not None:
            self.ring.set_log(log.path, identity, every_step=every_step)

    def _write_targets(self) -> None:
        if self.path is not None and self._targets_text is not None:
            self.files.write(self.path / TARGETS_FILE, self._targets_text)

    def _write_missing(self) -> None:
        """Write the files, and take the lock, for which the disk had no space before.

        The lock may also be lost later: a script that copies the folder reads the locked file.
        """
        if self.path is None or not self._missing_backoff.is_due:
            return
        self._missing_backoff.start_delay()
        self.files.retry()
        if not self._is_signed:
            self._sign(self.path)
        if self._process.rank == 0 and self._lock is None:
            self._lock_folder(self.path)
        elif self._lock is not None:
            lock(self._lock)

    def _restore_files(self) -> None:
        """Write the files again that may have been deleted together with the log."""
        if self.path is None:
            return
        self._sign(self.path)
        if self._process.rank == 0:
            self._unlock()
            self._lock_folder(self.path)
            write_settings(self.path, self._settings, self.files)
            self._write_targets()

    def _claim(self, run_id: str) -> str:
        """Return the run id. If its folder belongs to another run, append a number to the id.

        A restart uses the folder of its own job again, even if the host of the last attempt is gone
        and a network file system has not yet released its lock. A restart never uses another
        existing folder, because another job may restart there.

        torchrun does not count the restart after a node was lost or joined. A folder that the
        launcher has signed in another start shows such a restart.
        """
        if not self.is_logged:
            return run_id
        is_restart = self._process.attempt > 0 and self._launcher is not None
        for own in self._own_ids(run_id):
            folder = self._runs / own
            if self._lock_folder(folder) or is_restart or self._is_of_another_start(folder):
                return own
        for candidate in _numbered(run_id):
            folder = self._runs / candidate
            if (is_restart and folder.exists()) or not self._lock_folder(folder):
                continue
            if candidate != run_id:
                logger.warning(
                    "run id %s is in use by another run, which writes to %s. This run is %s; "
                    "give each run an id of its own (ZEROWATCH_RUN_ID), or none.",
                    run_id,
                    self._runs / run_id,
                    candidate,
                )
            return candidate
        logger.warning(
            "run id %s: none of %d folders of this id is free, so other runs may write to %s too; "
            "give each run an id of its own (ZEROWATCH_RUN_ID).",
            run_id,
            MAX_LIVE_RUNS,
            self._runs / run_id,
        )
        return run_id

    def _own_ids(self, run_id: str) -> Iterator[str]:
        """Yield the ids that this launcher's job has claimed: `run_id` and numbered variants."""
        if self._launcher is None:
            return
        for candidate in _numbered(run_id):
            folder = self._runs / candidate
            # Unlike a method of Path, this returns False if the folder cannot be read.
            is_signed = os.path.exists(folder / LAUNCHERS_FOLDER / self._launcher)
            if is_signed and not is_foreign_folder(folder):
                yield candidate

    def _is_of_another_start(self, folder: Path) -> bool:
        """Whether this launcher signed the folder when it had started other workers."""
        if self._launcher is None or self._launcher_start is None:
            return False
        try:
            start = read_own_file(folder / LAUNCHERS_FOLDER / self._launcher)
        except OSError:
            return False
        return start not in (b"", self._launcher_start.encode())

    def _sign(self, folder: Path) -> None:
        """Write the name of this node's launcher into the folder, so a restart finds the folder."""
        if self._launcher is not None and self._process.local_rank == 0:
            self._is_signed = False
            with contextlib.suppress(OSError):
                (folder / LAUNCHERS_FOLDER).mkdir(parents=True, exist_ok=True)
                signature = folder / LAUNCHERS_FOLDER / self._launcher
                signature.touch()  # needs no space on a full disk
                atomic_write(signature, self._launcher_start or "")
                self._is_signed = True

    def _lock_folder(self, folder: Path) -> bool:
        """Lock the folder if possible. Return False if a live run or another user has it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_to_append(folder / LOCK_FILE)
        except PermissionError:
            return not is_foreign_folder(folder)
        except OSError:  # the log will report the error
            return True
        if not lock(descriptor):
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def _unlock(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            unlock(descriptor)


def _numbered(run_id: str) -> Iterator[str]:
    """Yield the run id itself, then the run id with 2, 3 and so on appended."""
    return (numbered_run_id(run_id, number) for number in range(1, MAX_LIVE_RUNS))
