"""Verdicts made known: as metrics, and as log lines of who is slow and who went astray."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...metrics.catalog import communication
from ...metrics.catalog.labels import COMPARED_PHASES
from ...metrics.recorder import Recorder
from ..collectives.groups import RankSet
from .call_report import StepTimes
from .compare_result import CompareResult

logger = logging.getLogger(__name__)

# Of one rank in one phase a line stands no more often; what has changed meanwhile is told then.
SECONDS_BETWEEN_LINES = 600.0


class CompareReporter:
    """Publishes verdicts. Only a rank set's first rank logs, so that each line stands once.

    Attributes:
        divergence: Who left the common sequence of collectives, in words; None while nobody did.
    """

    def __init__(
        self, recorder: Recorder, rank: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.divergence: str | None = None
        self._recorder = recorder
        self._rank = rank
        recorder.set(communication.COLLECTIVE_MISMATCHES, 0)
        self._now = now
        self._named: set[tuple[int, str]] = set()  # as far as it was told
        self._told_at: dict[tuple[int, str], float] = {}

    def announce(
        self, rank_set: RankSet, verdict: CompareResult, own_pace: StepTimes | None
    ) -> None:
        """Publish one verdict; `own_pace` is what this rank told last."""
        if verdict.divergence is not None:
            self._recorder.add(communication.COLLECTIVE_MISMATCHES, 1)
            self.divergence = verdict.divergence.sentence(rank_set.role)
            if self._speaks_for(rank_set):
                logger.error("%s", self.divergence)
        if verdict.reference is not None:
            if own_pace is not None:
                scores = verdict.reference.scores(own_pace)
                for phase, score in zip(COMPARED_PHASES, scores, strict=True):
                    self._recorder.set(communication.STRAGGLER_SCORE, score, phase)
            if self._speaks_for(rank_set):
                self._tell_stragglers(verdict)

    def _speaks_for(self, rank_set: RankSet) -> bool:
        return self._rank == rank_set.members[0]

    def _tell_stragglers(self, verdict: CompareResult) -> None:
        """Log who has become slow, and who is no longer."""
        slow = {(one.rank, one.phase): one for one in verdict.stragglers}
        for key in sorted(self._named ^ slow.keys()):
            if self._now() - self._told_at.get(key, -SECONDS_BETWEEN_LINES) < SECONDS_BETWEEN_LINES:
                continue
            self._told_at[key] = self._now()
            if key in slow:
                logger.warning("%s", slow[key].sentence())
            else:
                logger.warning("rank %d is no longer slow in %s", *key)
            self._named ^= {key}
