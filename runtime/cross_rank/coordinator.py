"""Merges the reports of a rank set on one rank, which sends the result to all members.

Above 64 members the first of each block of 64 puts its block together, and the first of the rank
set the blocks, so that none reads a thousand reports. It knows nothing of the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ..collectives.groups import RankSet
from .call_report import NO_SECONDS, NOTHING_NEW, RankReport, StepTimes
from .compare_result import CompareResult
from .divergence import Divergence
from .report_merger import ReportMerger
from .stragglers import StepTimeReference, Straggler, StragglerWatch, reference_of

BLOCK_SIZE = 64
# A rank whose pace did not come while another's came so often takes no part at the moment.
PACES_TO_MISS = 4


def rank_blocks(members: Sequence[int]) -> dict[int, Sequence[int]]:
    """Return the blocks by their first ranks; one block per member for a small rank set."""
    size = BLOCK_SIZE if len(members) > BLOCK_SIZE else 1
    return {members[at]: members[at : at + size] for at in range(0, len(members), size)}


class Coordinator:
    """Puts the reports of some ranks on one rank set together.

    Args:
        rank_set: The rank set.
        children: The ranks whose reports come here, each with those that it reports for: itself,
            or its block.
    """

    def __init__(self, rank_set: RankSet, children: Mapping[int, Sequence[int]]) -> None:
        self._rank_set = rank_set
        self._children = children
        self._ranks = frozenset(rank for ranks in children.values() for rank in ranks)
        self._meeting = ReportMerger(children)
        self._paces: dict[
            int, StepTimes
        ] = {}  # that came since they were last compared or passed on
        self._times_came: Counter[int] = Counter()
        self._absent: set[int] = set()  # of whom no pace is expected
        self._straggler_watch = StragglerWatch()
        self._divergence_told = False

    def add(self, child: int, report: RankReport) -> None:
        """Take what a child reports."""
        key, meeting = self._rank_set.key, self._meeting
        if key not in report.sections:
            return
        meeting.add(child, report.sections[key], report.names)
        meeting.divergence = meeting.divergence or report.divergences.get(key)
        paces = {rank: pace for rank, pace in report.paces.items() if rank in self._ranks}
        self._paces.update(paces)
        self._times_came.update(paces.keys())
        self._absent -= paces.keys()

    def leave_out(self, child: int) -> None:
        """Go on without a child until it reports again."""
        self._meeting.leave_out(child)
        self._absent.update(self._children[child])
        for rank in self._children[child]:
            self._paces.pop(rank, None)

    def take_report(self) -> RankReport | None:
        """As the first of a block: return what all of the block have reported, or None."""
        key, meeting = self._rank_set.key, self._meeting
        section, divergence = meeting.take(), self._new_divergence()
        if section is None and divergence is None and not self._all_paces_came():
            return None
        section = section or NOTHING_NEW
        names, paces = meeting.names, self._paces
        self._paces = {}
        self._times_came.clear()
        return RankReport(
            sections={key: section},
            names={one: names[one] for one in set(section.signatures.tolist()) if one in names},
            paces=paces,
            divergences={} if divergence is None else {key: divergence},
        )

    def take_verdict(self, *, compares_pace: bool) -> CompareResult | None:
        """As the first of the rank set: return what came of it, or None if nothing is new.

        Args:
            compares_pace: Whether this is the rank set over which stragglers are looked for.
        """
        section, divergence = self._meeting.take(), self._new_divergence()
        reference, stragglers = self._compare_pace() if compares_pace else (None, ())
        first, least = 0, NO_SECONDS
        if section is not None:
            first, least = section.first_timed, section.durations
        if not len(least) and divergence is None and reference is None:
            return None
        if self._meeting.num_ranks == 1:
            least = np.full_like(least, np.nan)  # one rank's durations are no comparison
        return CompareResult(
            first=first,
            least=least,
            reference=reference,
            stragglers=stragglers,
            divergence=divergence,
        )

    def _new_divergence(self) -> Divergence | None:
        if self._divergence_told or self._meeting.divergence is None:
            return None
        self._divergence_told = True
        return self._meeting.divergence

    def _all_paces_came(self) -> bool:
        return 0 < len(self._paces) >= len(self._ranks) - len(self._absent)

    def _compare_pace(self) -> tuple[StepTimeReference | None, tuple[Straggler, ...]]:
        """Compare once every rank that takes part has told its pace anew."""
        if max(self._times_came.values(), default=0) > PACES_TO_MISS:
            self._absent.update(self._ranks - self._paces.keys())
        if len(self._paces) < 2 or not self._all_paces_came():
            return None, ()
        paces, self._paces = self._paces, {}
        self._times_came.clear()
        reference = reference_of(list(paces.values()))
        if reference is None:
            return None, ()
        return reference, tuple(self._straggler_watch.look(paces, reference))
