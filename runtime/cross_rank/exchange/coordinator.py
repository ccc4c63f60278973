"""Merges and compares the reports of a rank set, on its first rank.

If a rank set has more than 64 members, it is divided into blocks of 64. The first rank of each
block merges the reports of its block, and the first rank of the rank set merges the blocks. No rank
then has to read a thousand reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...collectives.groups import RankSet
from ...common.gil_pauses import let_training_run
from ..divergence import Divergence
from ..stragglers import (
    StepTimeReference,
    StepTimes,
    Straggler,
    StragglerDetector,
    step_time_reference,
)
from .rank_messages import (
    EMPTY_CALL_REPORT,
    NO_DURATIONS,
    UNKNOWN,
    CompareResult,
    Durations,
    RankReport,
)
from .report_merger import ReportMerger

# Number of ranks in a block. The first rank of the block merges their reports.
BLOCK_SIZE = 64
# If a rank has sent step times more often than this since the last comparison, ranks that have sent
# none are left out.
MAX_MISSED_STEP_TIMES = 4


def rank_blocks(members: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return the blocks by their first rank. Up to BLOCK_SIZE members, each is its own block."""
    size = BLOCK_SIZE if len(members) > BLOCK_SIZE else 1
    return {members[at]: members[at : at + size] for at in range(0, len(members), size)}


class Coordinator:
    """Merges the reports of some ranks on one rank set.

    Args:
        rank_set: The rank set.
        children: The ranks that send reports to this rank. The value contains the ranks that the
            report covers: the child itself, or its block.
    """

    def __init__(self, rank_set: RankSet, children: Mapping[int, Sequence[int]]) -> None:
        self._rank_set = rank_set
        self._children = children
        self._ranks = frozenset(rank for ranks in children.values() for rank in ranks)
        self._merger = ReportMerger(children)
        self._step_times: dict[int, StepTimes] = {}  # not yet compared or forwarded
        self._num_step_times: Counter[int] = Counter()  # by rank, since the last comparison
        self._without_step_times: set[int] = set()  # ranks that are not expected to send any
        self._detector = StragglerDetector()
        self._divergence_reported = False

    def add(self, child: int, report: RankReport) -> None:
        """Add a child's report."""
        key, merger = self._rank_set.key, self._merger
        if key not in report.calls:
            return
        merger.add(child, report.calls[key], report.names)
        merger.divergence = merger.divergence or report.divergences.get(key)
        step_times = {
            rank: times for rank, times in report.step_times.items() if rank in self._ranks
        }
        self._step_times.update(step_times)
        self._num_step_times.update(step_times.keys())
        self._without_step_times -= step_times.keys()

    def exclude(self, child: int) -> None:
        """Leave a child out until it reports again."""
        self._merger.exclude(child)
        self._without_step_times.update(self._children[child])
        for rank in self._children[child]:
            self._step_times.pop(rank, None)

    def drain_report(self) -> RankReport | None:
        """Return the merged report of this rank's block, or None if there is nothing new."""
        key, merger = self._rank_set.key, self._merger
        calls, divergence = merger.drain(), self._new_divergence()
        if calls is None and divergence is None and not self._has_all_step_times():
            return None
        calls = calls or EMPTY_CALL_REPORT
        calls = replace(calls, durations=self._if_complete(calls.durations))
        names, step_times = merger.names, self._step_times
        self._step_times = {}
        self._num_step_times.clear()
        return RankReport(
            calls={key: calls},
            names={one: names[one] for one in set(calls.signatures.tolist()) if one in names},
            step_times=step_times,
            divergences={} if divergence is None else {key: divergence},
        )

    def drain_result(self, *, compare_step_times: bool) -> CompareResult | None:
        """Return the new result for the rank set, or None if there is nothing new.

        Args:
            compare_step_times: Whether stragglers are detected over this rank set.
        """
        calls, divergence = self._merger.drain(), self._new_divergence()
        let_training_run()
        reference, stragglers = self._compare_step_times() if compare_step_times else (None, ())
        first_call, min_durations = 0, NO_DURATIONS
        if calls is not None:
            first_call, min_durations = calls.first_timed, self._if_complete(calls.durations)
        if not len(min_durations) and divergence is None and reference is None:
            return None
        return CompareResult(
            first_call=first_call,
            min_durations=min_durations,
            reference=reference,
            stragglers=stragglers,
            divergence=divergence,
        )

    def _if_complete(self, durations: Durations) -> Durations:
        """Return the shortest durations over the ranks. They are UNKNOWN if a rank is left out.

        The rank may be the one for which the others wait: its duration would be the shortest.
        """
        is_complete = self._merger.num_ranks == len(self._ranks)
        return durations if is_complete else np.full_like(durations, UNKNOWN)

    def _new_divergence(self) -> Divergence | None:
        if self._divergence_reported or self._merger.divergence is None:
            return None
        self._divergence_reported = True
        return self._merger.divergence

    def _has_all_step_times(self) -> bool:
        return 0 < len(self._step_times) >= len(self._ranks) - len(self._without_step_times)

    def _compare_step_times(self) -> tuple[StepTimeReference | None, tuple[Straggler, ...]]:
        """Compare the step times, if every rank that takes part has sent new ones."""
        if max(self._num_step_times.values(), default=0) > MAX_MISSED_STEP_TIMES:
            self._without_step_times.update(self._ranks - self._step_times.keys())
        if len(self._step_times) < 2 or not self._has_all_step_times():
            return None, ()
        step_times, self._step_times = self._step_times, {}
        self._num_step_times.clear()
        reference = step_time_reference(list(step_times.values()))
        let_training_run()
        if reference is None:
            return None, ()
        return reference, tuple(self._detector.update(step_times, reference))
