"""Writes the step log: one line of JSON per step. A disk error never raises an exception."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...metrics.settings import RunLogSettings, Settings
from ...metrics.step_record import LineWriter, StepRecord
from ..common.gil_pauses import let_training_run
from ..common.retried_files import RetriedFiles
from .log_file import LogFile

# Number of ranks up to which each rank writes every step.
FULL_LOG_WORLD_SIZE = 64
# In larger jobs, one rank per node writes every step. The other ranks write only the steps whose
# number is a multiple of this value.
THINNED_EVERY = 10


class StepLog:
    """Appends step records to `rank-<r>.jsonl`.

    In a job of more than FULL_LOG_WORLD_SIZE ranks, only one rank per node writes every step.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str | int],
        settings: RunLogSettings,
        *,
        every_step: bool = True,
        on_deleted: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the log. The first record opens the file.

        Args:
            folder: The run folder.
            identity: The fields that every record contains. The field `rank` is also in the name of
                the file.
            settings: The size and number of segments.
            every_step: Whether to write every step. If not, every tenth step is written.
            on_deleted: Called after somebody has deleted the file. The folder may be gone as well.
            now: A monotonic clock, in seconds.
        """
        self.path = folder / f"rank-{identity['rank']}.jsonl"
        self._file = LogFile(self.path, settings, on_deleted=on_deleted, now=now)
        self._writer = LineWriter(identity)
        self._every_step = every_step

    @property
    def dropped(self) -> int:
        """Number of records that could not be written, or whose file was deleted."""
        return self._file.dropped

    def append(self, *records: StepRecord) -> None:
        """Write records. If writing fails, count those that are not written as dropped."""
        lines: list[bytes] = []
        for record in records:
            if is_logged(record.step, every_step=self._every_step):
                lines.append(self._writer.line(record))
                let_training_run()
        if lines:
            self._file.append_all(lines)

    def close(self) -> None:
        """Close the file. A later record would open it again."""
        self._file.close()


def is_logged(step: int, *, every_step: bool) -> bool:
    """Whether a step is logged by a rank that logs every step, or else every tenth step."""
    return every_step or step % THINNED_EVERY == 0


def keeps_every_step(world_size: int, local_rank: int) -> bool:
    """Whether a rank logs every step. If not, the rank logs every tenth step."""
    return world_size <= FULL_LOG_WORLD_SIZE or local_rank == 0


def write_settings(folder: Path, settings: Settings, files: RetriedFiles) -> None:
    """Write the settings to the run folder, readable by the owner only."""
    text = json.dumps(settings.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    files.write(folder / "settings.json", text, mode=0o600)
