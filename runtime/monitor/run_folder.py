"""The run folder: its name is settled among the ranks, then this rank's log and rank 0's files."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common.process_info import ProcessInfo, new_run_id
from ..common.rank_store import RankStore, TargetDiscovery, share_run_id
from ..common.report_files import write_or_warn
from .step_log import StepLog, keeps_every_step, write_settings

logger = logging.getLogger(__name__)

NAME_PATIENCE_SECONDS = 30.0
MAX_HELD_RECORDS = 1000


class RunFolder:
    """Holds records back until the run has a name, then writes them. Used on the watch thread."""

    def __init__(
        self,
        settings: Settings,
        identity: ProcessInfo,
        store: RankStore,
        targets: TargetDiscovery,
    ) -> None:
        self._settings = settings
        self._runs = settings.run_log.folder.absolute()  # a script may change its folder later
        self._identity = identity
        self._store = store
        self._targets = targets
        self._log: StepLog | None = None
        self._held: list[StepRecord] = []
        self._lost = 0
        self._asked_since = time.monotonic()
        self.run_id = share_run_id(store, identity, settings.run_id)
        if self.run_id is not None:
            self._open(self.run_id)

    @property
    def path(self) -> Path | None:
        """The folder, once it has a name; None where no run log is written."""
        if self.run_id is None or not self._settings.run_log.enabled:
            return None
        return self._runs / self.run_id

    @property
    def dropped(self) -> int:
        """Records that were lost."""
        return self._lost + (self._log.dropped if self._log else 0)

    def look_around(self) -> None:
        """Look for the run's name and, on rank 0, for where the other ranks serve."""
        if self.run_id is None:
            self.run_id = self._learn_name()
            if self.run_id is not None:
                self._open(self.run_id)
        if self._identity.rank != 0:
            self._store.poll()
        if self._identity.rank != 0 or not self._settings.serve.enabled:
            return
        if self._targets.poll() and self.path is not None:
            write_or_warn(self.path / "targets.json", json.dumps(self.targets(), indent=2) + "\n")

    def targets(self) -> list[dict[str, object]]:
        """Describe where the run's ranks serve, for Prometheus."""
        return [] if self.run_id is None else self._targets.targets(self.run_id)

    def append(self, record: StepRecord) -> None:
        """Write a step, or hold it until the run has a name."""
        if not self._settings.run_log.enabled:
            return
        if self._log is not None:
            self._log.append(record)
        elif len(self._held) < MAX_HELD_RECORDS:
            self._held.append(record)
        else:
            self._lost += 1

    def close(self) -> None:
        """Close this rank's log."""
        if self._log is None and self._held:
            self.run_id = self.run_id or self._own_name()
            self._open(self.run_id)
        if self._log is not None:
            self._log.close()

    def _learn_name(self) -> str | None:
        name = self._store.get("run_id")
        if name is None and time.monotonic() - self._asked_since > NAME_PATIENCE_SECONDS:
            return self._own_name()
        return name

    def _own_name(self) -> str:
        name = f"{new_run_id()}-rank{self._identity.rank}"
        logger.warning(
            "rank 0 has not told the run's name: it may not be watched. Rank %d writes to %s; set "
            "ZEROWATCH_RUN_ID to the same name on all ranks to keep them together.",
            self._identity.rank,
            name,
        )
        return name

    def _open(self, run_id: str) -> None:
        folder = self.path
        if folder is None:
            return
        identity = {"run_id": run_id, **asdict(self._identity)}
        every_step = keeps_every_step(self._identity.world_size, self._identity.local_rank)
        log = StepLog(folder, identity, self._settings.run_log, every_step=every_step)
        if self._identity.rank == 0:
            write_settings(folder, self._settings)
        for record in self._held:
            log.append(record)
        self._held.clear()
        self._log = log
